"""What a scan costs, counted in work and not in seconds: renderings, encodings, alignments, calls, copied values.

These counts are the same on every machine, so a scan that starts to do its work twice is noticed at once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests import toy
from tests.command import written
from tito_audit.align.alignment import align
from tito_audit.evidence import prompts
from tito_audit.record.message import as_messages
from tito_audit.render.fast.render import FastTemplate
from tito_audit.render.spans import FastRendering, render_spans
from tito_audit.render.template import Template
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.tokens.encoders import FastEncoder, ReferenceEncoder

pytest.importorskip("fastokens")
ROWS, TURNS = 60, 6
CALLS_OF_A_ROW, COPIES_OF_A_TOKEN = 600, 9.2
"""More than a clean row of so many turns takes today: 550 calls, each value copied 9.0 times, 2.0 to compare."""


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


ALIGNMENTS, SPANS = "alignments", "renderings with spans"
FULL_EVIDENCE = {
    align.__code__: ALIGNMENTS,
    render_spans.__code__: SPANS,
    FastRendering.find_spans.__code__: SPANS,
}
"""What only a row with a difference needs: its tokens paired with today's, and the role of every byte."""
COPIES = ("astype", "copy", "repeat", "tobytes")


@contextmanager
def watching() -> Iterator[Counter[str]]:
    """Calls of Python functions, those that gather full evidence, and values of arrays made lists or copied."""
    counts: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            counts["calls"] += 1
            if frame.f_code in FULL_EVIDENCE:
                counts[FULL_EVIDENCE[frame.f_code]] += 1
        elif event == "c_call":
            array, name = getattr(arg, "__self__", None), arg.__name__
            if isinstance(array, np.ndarray) and name == "tolist":
                counts["listed"] += array.size
            elif isinstance(array, np.ndarray) and name in COPIES:
                counts["copied"] += array.size

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def conversation(number: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": (f"Question {turn} of row {number}, please. " * 8).strip()})
        messages.append(
            {"role": "assistant", "content": (f"Answer {turn * 31 + number} and a bit more. " * 8).strip()}
        )
    return messages


def scanned(
    path: Path, rows: list[dict[str, Any]], counting: Callable[[], Any] = counting
) -> tuple[Counter[str], list[Any]]:
    """The counts of a scan after its first row, and its findings."""
    written(path, rows)
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
        messages = as_messages(conversation(number), "messages")
        text = renderer.render(messages, add_generation_prompt=False)
        characters += len(text)
        rows.append({"messages": conversation(number), "token_ids": tokenizer.encode(text).tolist()})
    counts, findings = scanned(tmp_path / "rows.jsonl", rows)
    assert findings == []
    assert counts["renderings"] <= 5, "for the scaffold, and to find the turns; the first row is not counted"
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
            history = as_messages(messages[: 2 * turn + 1], "messages")
            prompt = renderer.render(history, add_generation_prompt=True)
            answer = messages[2 * turn + 1]["content"] + "<|im_end|>"
            ids = [tokenizer.encode(text).tolist() for text in (prompt, answer)]
            calls.append(dict(zip(("prompt_token_ids", "generation_token_ids"), ids, strict=True)))
        characters += len(prompt) + len(answer)
        rows.append({"messages": messages, "calls": calls})
    with patch.object(prompts, "_WORTH_KNOWING", 0):  # as of conversations of thousands of tokens
        counts, findings = scanned(tmp_path / "calls.jsonl", rows)
    assert findings == []
    assert counts["renderings"] <= 2 * TURNS + 4, "the first of each size, and for scaffolds"
    assert counts["encodings"] < 2.5 * ROWS
    assert counts["encodings characters"] < 1.1 * characters, "not once for every prompt that repeats it"
    assert counts["proofs characters"] < characters / 4, "the reference checks a sample"
    assert counts["slow renderings"] == 0


def training_rows(faulty: frozenset[int] = frozenset()) -> tuple[list[dict[str, Any]], int]:
    """Training rows, in those of these numbers one token spelled as two, and how many tokens all have."""
    tokenizer, renderer = toy.toy_tokenizer(), toy.toy_renderer()
    word, halves = (
        tokenizer.encode("Answer").tolist(),
        [tokenizer.encode(half).tolist() for half in ("Ans", "wer")],
    )
    rows, tokens = [], 0
    for number in range(ROWS):
        messages = as_messages(conversation(number), "messages")
        ids = tokenizer.encode(renderer.render(messages, add_generation_prompt=False)).tolist()
        header = tokenizer.encode("assistant\n").tolist()
        mask = sampled(ids, header, tokenizer.encode("<|im_end|>").tolist()[0])
        if number in faulty:
            at = next(at for at, trained in enumerate(mask) if trained and ids[at : at + len(word)] == word)
            ids[at : at + len(word)] = [*halves[0], *halves[1]]
            mask[at : at + len(word)] = [1] * len([*halves[0], *halves[1]])
        values = [-0.5 - (at % 97) / 100 if trained else 0.0 for at, trained in enumerate(mask)]
        tokens += len(ids)
        row = {"messages": conversation(number), "token_ids": ids, "loss_mask": mask, "logprobs": values}
        rows.append(row)
    return rows, tokens


def sampled(ids: list[int], header: list[int], end: int) -> list[int]:
    """A mask of what follows each header, up to and with the token that ends it."""
    mask, inside = [0] * len(ids), False
    for at in range(len(ids)):
        mask[at] = int(inside)
        if inside and ids[at] == end:
            inside = False
        elif ids[max(0, at + 1 - len(header)) : at + 1] == header:
            inside = True
    return mask


def test_full_evidence_is_gathered_for_faulty_rows_only(tmp_path: Path) -> None:
    faulty = frozenset(range(9, ROWS, 10))
    rows, _ = training_rows(faulty)
    counts, findings = scanned(tmp_path / "rows.jsonl", rows, watching)
    assert {finding.place.row for finding in findings} == faulty
    assert 0 < counts[ALIGNMENTS] <= len(faulty)
    assert counts[SPANS] <= len(faulty)
    clean, findings = scanned(tmp_path / "clean.jsonl", training_rows()[0], watching)
    assert findings == []
    assert clean[ALIGNMENTS] == clean[SPANS] == 0


def test_a_clean_row_takes_few_calls_and_few_copies(tmp_path: Path) -> None:
    rows, tokens = training_rows()
    scanned(tmp_path / "rows.jsonl", rows)  # modules that are imported meanwhile would count
    counts, findings = scanned(tmp_path / "rows.jsonl", rows, watching)
    assert findings == []
    assert counts["calls"] / (ROWS - 1) < CALLS_OF_A_ROW
    assert counts["copied"] / tokens < COPIES_OF_A_TOKEN
    assert counts["listed"] / tokens < 0.1
