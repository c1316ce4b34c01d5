"""Logs of single calls from many interleaved conversations, of any size, from a seed."""

from __future__ import annotations

import gzip
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import TOY

__all__ = ["CallLog", "Shape", "call_log"]

OPEN = 2_000
"""Conversations open at the same time: this many rows lie between a call and the next."""
SAMPLES = 4
"""Conversations that begin with the same prompt."""
DRIFTED = 0.05
"""The share of answers that come back in other tokens."""
POOL = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """How long conversations are."""

    turns: int
    words: int
    """Approximate number per message."""


@dataclass(frozen=True, slots=True)
class CallLog:
    """A log of calls."""

    path: Path
    kind: str
    keyed: bool
    """Whether its rows name their conversation."""
    rows: int
    ids: int
    """Of all prompts and completions."""


def call_log(shape: Shape, rows: int, kind: str, folder: Path, *, keyed: bool) -> CallLog:
    """The log, written on first use."""
    name = f"calls-{shape.turns}-{shape.words}-{rows}{'-keyed' * keyed}"
    path, counted = folder / f"{name}.{kind}", folder / f"{name}.ids"
    plain = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not plain.exists():
        counted.write_text(str(_write(plain, shape, rows, keyed)), encoding="utf-8")
    if not path.exists():
        (_to_gzip if kind == "jsonl.gz" else _to_parquet)(plain, path)
    return CallLog(path, kind, keyed, rows, int(counted.read_text(encoding="utf-8")))


def _write(path: Path, shape: Shape, rows: int, keyed: bool) -> int:
    """Write rows as JSON lines; returns the number of ids."""
    total = 0
    waiting = path.with_suffix(".part")
    with waiting.open("w", encoding="utf-8") as file:
        for number, prompt, completion, ids in _calls(shape, rows):
            key = f'"session_id":"s-{number}",' if keyed else ""
            file.write(
                f'{{{key}"prompt_ids":[{prompt}],"completion_ids":[{completion}],"finish_reason":"stop"}}\n'
            )
            total += ids
    waiting.rename(path)
    return total


class _Words:
    """Ids of messages, as in JSON, and their number."""

    def __init__(self, words: int, rng: random.Random) -> None:
        from tokenizers import Tokenizer

        self._encode = Tokenizer.from_file(str(TOY / "tokenizer.json")).encode
        self._rng = rng
        self._numbers = [self.ids(f" {number:03}") for number in range(1000)]
        self.opening = self.ids("<|im_start|>user\n")
        self.answering = self.ids("<|im_end|>\n<|im_start|>assistant\n")
        self.end = self.ids("<|im_end|>")
        self.line = self.ids("\n")
        texts = [" ".join(self._word() for _ in range(words)) for _ in range(POOL)]
        self.pool = [self.ids(" " + text) for text in texts]
        self.drifted = [self._split(text) for text in texts]

    def ids(self, text: str) -> tuple[str, int]:
        """The ids of a text."""
        found = self._encode(text, add_special_tokens=False).ids
        return ",".join(map(str, found)), len(found)

    def number(self, number: int) -> tuple[str, int]:
        """Ids that are unique to this number."""
        return joined(
            *(self._numbers[part] for part in (number // 1_000_000, number // 1000 % 1000, number % 1000))
        )

    def _split(self, text: str) -> tuple[str, int]:
        """The same text with its first word in other tokens."""
        return joined(self.ids(" "), self.ids(text[:1]), self.ids(text[1:]))

    def _word(self) -> str:
        return "".join(self._rng.choice("abcdefghiklmnoprstuvw") for _ in range(self._rng.randrange(2, 7)))


def joined(*parts: tuple[str, int]) -> tuple[str, int]:
    """Several runs of ids as one."""
    return ",".join(text for text, _ in parts), sum(count for _, count in parts)


def _calls(shape: Shape, rows: int) -> Iterator[tuple[int, str, str, int]]:
    """Calls in the order in which they end: conversation, prompt, completion and number of ids."""
    rng = random.Random(shape.turns * 1000 + shape.words)
    words = _Words(shape.words, rng)
    going = [_conversation(number, shape.turns, words, rng) for number in range(min(OPEN, rows))]
    begun = len(going)
    for _ in range(rows):
        at = rng.randrange(len(going))
        call = next(going[at], None)
        if call is None:
            going[at] = _conversation(begun, shape.turns, words, rng)
            begun += 1
            call = next(going[at])
        yield call


def _conversation(
    number: int, turns: int, words: _Words, rng: random.Random
) -> Iterator[tuple[int, str, str, int]]:
    """The calls of one conversation, one after another."""
    before: list[tuple[str, int]] = []
    group = number // SAMPLES
    for turn in range(turns):
        asked = (words.number(group), words.pool[(group * 7 + turn) % POOL])
        prompt = joined(*before, words.opening, *asked, words.answering)
        place = rng.randrange(POOL)
        known = words.number(number)
        text = words.drifted[place] if rng.random() < DRIFTED else words.pool[place]
        completion = joined(text, known, words.end)
        yield number, prompt[0], completion[0], prompt[1] + completion[1]
        before = [prompt, words.pool[place], known, words.end, words.line]


def _to_gzip(plain: Path, path: Path) -> None:
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _to_parquet(plain: Path, path: Path) -> None:
    from pyarrow import json, parquet

    with plain.open("rb") as source:
        table = json.read_json(source, json.ReadOptions(block_size=1 << 24))
    parquet.write_table(table, path, row_group_size=10_000)
