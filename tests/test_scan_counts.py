"""What a scan costs, counted in work and not in seconds: renderings, texts encoded, characters encoded.

These counts are the same on every machine, so a scan that starts to do its work twice is noticed at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import toy
from tito_audit.record.message import as_messages
from tito_audit.render.fast.render import FastTemplate
from tito_audit.render.template import Template
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.tokens.encoders import FastEncoder, ReferenceEncoder

pytest.importorskip("fastokens")
ROWS, TURNS = 60, 6


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often templates are rendered, and how many texts and characters encoders get."""
    counts: Counter[str] = Counter()

    def counted(owner: type, method: str, what: str) -> Any:
        original: Callable[..., Any] = getattr(owner, method)

        def call(self: Any, first: Any) -> Any:
            counts[what] += 1
            if isinstance(first, list | tuple):
                counts[f"{what} characters"] += sum(map(len, first))
            return original(self, first)

        return patch.object(owner, method, call)

    with (
        counted(FastTemplate, "run", "renderings"),
        counted(Template, "run", "slow renderings"),
        counted(FastEncoder, "encode_batch", "encodings"),
        counted(ReferenceEncoder, "encode_batch", "proofs"),
    ):
        yield counts


def conversation(number: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": (f"Question {turn} of row {number}, please. " * 8).strip()})
        messages.append(
            {"role": "assistant", "content": (f"Answer {turn * 31 + number} and a bit more. " * 8).strip()}
        )
    return messages


def scanned(path: Path, rows: list[dict[str, Any]]) -> tuple[Counter[str], list[Any]]:
    """The counts of a scan after its first row, and its findings."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(tokenizer=str(toy.TOKENIZERS / "toy_bpe"), encoder="fastokens", jobs=1)
    with counting() as counts:
        results = iter(Scan([str(path)], settings))
        findings = list(next(results).findings)
        counts.clear()
        for result in results:
            findings += result.findings
    return counts, findings


def test_a_clean_row_is_rendered_once_and_encoded_once(tmp_path: Path) -> None:
    tokenizer, renderer = toy.toy_tokenizer(), toy.toy_renderer()
    rows, characters = [], 0
    for number in range(ROWS):
        said = as_messages(conversation(number), "messages")
        text = renderer.render(said, add_generation_prompt=False)
        characters += len(text)
        rows.append({"messages": conversation(number), "token_ids": tokenizer.encode(text).tolist()})
    counts, findings = scanned(tmp_path / "rows.jsonl", rows)
    assert findings == []
    assert counts["renderings"] == ROWS - 1
    assert counts["encodings"] < ROWS
    assert counts["encodings characters"] <= characters
    assert counts["slow renderings"] == 0
    assert counts["proofs characters"] < characters / 4, "the reference checks a sample"


def test_calls_of_a_conversation_encode_its_text_about_once(tmp_path: Path) -> None:
    tokenizer, renderer = toy.toy_tokenizer(), toy.toy_renderer()
    rows, characters = [], 0
    for number in range(ROWS):
        messages = conversation(number)
        calls = []
        for turn in range(TURNS):
            said = as_messages(messages[: 2 * turn + 1], "messages")
            prompt = renderer.render(said, add_generation_prompt=True)
            answer = messages[2 * turn + 1]["content"] + "<|im_end|>"
            ids = [tokenizer.encode(text).tolist() for text in (prompt, answer)]
            calls.append(dict(zip(("prompt_token_ids", "generation_token_ids"), ids, strict=True)))
        characters += len(prompt) + len(answer)
        rows.append({"messages": messages, "calls": calls})
    counts, findings = scanned(tmp_path / "calls.jsonl", rows)
    assert findings == []
    assert counts["renderings"] <= (TURNS + 1) * ROWS
    assert counts["encodings characters"] < 1.5 * characters, "not once for every prompt that repeats it"
    assert counts["slow renderings"] == 0
