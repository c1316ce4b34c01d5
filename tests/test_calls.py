"""Calls of Python functions as a budget: what each further row of a log may cost, however fast the machine is.

`python -m tests.test_calls` prints the calls of each kind of row by room and by function. The rows that need a
template with reasoning are of a real tokenizer (`TITO_AUDIT_TOKENIZERS`), and are skipped where it is not there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests import toy
from tito_audit.record.finding import Finding
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.tokens.encoders import FastEncoder
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

REAL = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
"""The folder of real tokenizers; it need not exist."""
END = "<|im_end|>"
NUMBER, WARM = 16, 6
"""Rows of a log, and how many of them are not counted: the first ones fill caches."""
WORDS = 4

pytest.importorskip("fastokens")

Row = dict[str, Any]


class World:
    """A tokenizer with its template, and the rows that its sampler would log."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.tokenizer: Tokenizer = load_tokenizer(self.folder)
        self.renderer: Renderer = make_renderer(self.tokenizer)

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids

    def prompt(self, messages: list[Row], prompt: bool = True) -> str:
        """What the template writes."""
        return self.renderer.render(as_messages(messages, "messages"), add_generation_prompt=prompt)

    def training_row(self, messages: list[Row]) -> Row:
        """Ids, mask and logprobs as they should be."""
        ids = self.ids(self.prompt(messages, prompt=False))
        header, (end,) = self.ids("assistant\n"), self.ids(END)
        mask, inside = [0] * len(ids), False
        for at in range(len(ids)):
            mask[at] = int(inside)
            if inside and ids[at] == end:
                inside = False
            elif ids[max(0, at + 1 - len(header)) : at + 1] == header:
                inside = True
        values = [-0.5 - (at % 97) / 100 if trained else 0.0 for at, trained in enumerate(mask)]
        return {"messages": messages, "token_ids": ids, "loss_mask": mask, "logprobs": values}

    def calls(self, messages: list[Row]) -> Row:
        """Each answer as a call whose prompt the template writes."""
        calls = [
            {
                "prompt_token_ids": self.ids(self.prompt(messages[:number])),
                "generation_token_ids": self.ids(message["content"] + END),
            }
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return {"messages": messages, "calls": calls}

    def sampled(self, messages: list[Row], spelled: Callable[[str], list[int]] | None = None) -> Row:
        """Each answer as a call whose prompt repeats all tokens before it.

        With `spelled`, answers were sampled in these tokens, and later prompts hold their text encoded again.
        """
        calls, seen = [], ""
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = message["content"] + END
                sampled = self.ids(answer) if spelled is None else spelled(answer)
                calls.append({"prompt_token_ids": self.ids(seen), "generation_token_ids": sampled})
                seen += answer
            else:
                whole = self.prompt([message])
                seen += ("\n" if number else "") + whole
        return {"messages": messages, "calls": calls}


def conversation(number: int, turns: int, words: int = 8, reasoning: bool = False) -> list[Row]:
    """Questions and answers that no other row has."""
    messages = []
    for turn in range(turns):
        messages.append(
            {"role": "user", "content": (f"Question {turn} of row {number}, please. " * words).strip()}
        )
        answer = (f"Answer {turn * 31 + number} and a bit more. " * words).strip()
        thought = f"<think>\nThey ask for {turn} in {number}.\n</think>\n\n" if reasoning else ""
        messages.append({"role": "assistant", "content": thought + answer})
    return messages


def halved(world: World) -> Callable[[str], list[int]]:
    """A sampler that writes `Answer` as two tokens where it comes first."""
    word = world.ids("Answer")
    halves = [*world.ids("Ans"), *world.ids("wer")]

    def spelled(text: str) -> list[int]:
        ids = world.ids(text)
        at = next(at for at in range(len(ids)) if ids[at : at + len(word)] == word)
        return [*ids[:at], *halves, *ids[at + len(word) :]]

    return spelled


def without_messages(row: Row) -> Row:
    """A row whose conversation was not logged."""
    return {name: value for name, value in row.items() if name != "messages"}


KINDS: dict[str, Callable[[World, int, int], Row]] = {
    "bare": lambda world, number, words: without_messages(world.training_row(conversation(number, 6, words))),
    "training": lambda world, number, words: world.training_row(conversation(number, 6, words)),
    "ten calls": lambda world, number, words: world.calls(conversation(number, 10, words)),
    "kept reasoning": lambda world, number, words: world.sampled(conversation(number, 3, words, reasoning=True)),
    "drifted": lambda world, number, words: world.sampled(conversation(number, 3, words), halved(world)),
}


def counted(
    path: Path, world: World, kind: str, by: Callable[[CodeType], object] = lambda _code: "calls"
) -> tuple[Counter[object], list[Finding]]:
    """Calls of Python functions in all rows that are counted, and the findings of all rows."""
    rows = [KINDS[kind](world, number, WORDS) for number in range(NUMBER)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(tokenizer=world.folder, encoder="fastokens", jobs=1)
    list(Scan([str(path)], settings))  # modules that are imported meanwhile would count
    counts: Counter[object] = Counter()

    def watch(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            counts[by(frame.f_code)] += 1

    results = iter(Scan([str(path)], settings))
    findings = [finding for _ in range(WARM) for finding in next(results).findings]
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        for result in results:
            findings += result.findings
    finally:
        sys.setprofile(before)
    return counts, findings


BUDGETS: dict[tuple[str, str], tuple[int, set[str]]] = {
    ("toy_bpe", "training"): (285, set()),
    ("toy_bpe", "bare"): (380, set()),
    ("toy_bpe", "ten calls"): (410, set()),
    ("toy_bpe", "drifted"): (900, {"SEQ301", "TOK101"}),
    ("qwen3", "ten calls"): (705, {"TPL205", "TPL213"}),
    ("qwen3", "kept reasoning"): (770, {"TPL204", "TPL213"}),
}
"""What a further row of each kind may cost, and the codes of its findings. A budget may only shrink."""


def world_of(tokenizer: str) -> World | None:
    """The tokenizer, if it is there."""
    folder = next((place for place in (toy.TOKENIZERS / tokenizer, REAL / tokenizer) if place.is_dir()), None)
    return None if folder is None else World(folder)


@pytest.fixture(scope="module", autouse=True)
def built_once(loaded_once: None) -> Iterator[None]:
    """The fast encoder of a tokenizer is built once for all scans: that takes longer than they do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tito_audit.tokens.tokenizer.FastEncoder", cache(FastEncoder))
        yield


@pytest.mark.parametrize(("tokenizer", "kind"), BUDGETS)
def test_a_further_row_stays_within_its_calls(tokenizer: str, kind: str, tmp_path: Path) -> None:
    world = world_of(tokenizer)
    if world is None:
        pytest.skip(f"no {tokenizer} in {REAL}")
    counts, findings = counted(tmp_path / "rows.jsonl", world, kind)
    most, codes = BUDGETS[tokenizer, kind]
    assert {finding.code for finding in findings} == codes
    assert counts.total() / (NUMBER - WARM) < most


def report() -> None:
    """Print where the calls of each kind of row are."""
    for tokenizer, kind in BUDGETS:
        world = world_of(tokenizer)
        if world is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            counts, _ = counted(Path(folder, "rows.jsonl"), world, kind, lambda code: code)
        rooms: Counter[str] = Counter()
        for code, calls in counts.items():
            assert isinstance(code, CodeType)
            _, inside, place = code.co_filename.partition("tito_audit/")
            rooms[place.split("/")[0] if inside else "elsewhere"] += calls
        each = NUMBER - WARM
        print(f"{tokenizer}, {kind}: {counts.total() / each:,.0f} calls a row")
        print("  " + ", ".join(f"{room} {calls / each:,.0f}" for room, calls in rooms.most_common()))
        for code, calls in counts.most_common(40):
            assert isinstance(code, CodeType)
            print(f"  {calls / each:8,.1f} {code.co_filename}:{code.co_firstlineno} {code.co_name}")


if __name__ == "__main__":
    report()
