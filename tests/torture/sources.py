"""What is mutated: the example logs of this repository, and the real rollouts where they are beside it."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["ROOT", "TOY", "Source", "documents", "fixtures", "real", "source_of"]

ROOT = Path(__file__).resolve().parents[2]
TOY = "{root}/fixtures/tokenizers/toy_bpe"
SHARED = Path(os.environ.get("TITO_AUDIT_SHARED") or ROOT.parent / "shared")
_LARGEST_ROW = 60_000
"""Longer rows of real rollouts are left out: they would take the time of a hundred others."""


@dataclass(frozen=True)
class Source:
    """A log to mutate: its name, its suffix, its bytes, and the tokenizer to read it with."""

    name: str
    suffix: str
    data: bytes
    tokenizer: str
    ours: bool = True

    def lines(self, dice: Random) -> list[bytes]:
        """A few consecutive rows, most often one or two."""
        lines = self.data.splitlines(keepends=True)
        if self.suffix != ".jsonl" or not lines:
            return [self.data]
        many = min(len(lines), dice.choice((1, 1, 1, 2, 2, 3, 5)))
        start = dice.randrange(len(lines) - many + 1)
        return lines[start : start + many]

    def rows(self, dice: Random) -> list[Any]:
        """A few rows, parsed; they are for the caller to change."""
        if self.suffix == ".parquet":
            return _table_rows(self.data, dice)
        return documents(b"".join(self.lines(dice)).decode())


def documents(text: str) -> list[Any]:
    """Every JSON value of a text."""
    values, at, decoder = [], 0, json.JSONDecoder()
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        values.append(value)
    return values


def _table_rows(data: bytes, dice: Random) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(data))
    return list(table.slice(dice.randrange(max(1, table.num_rows)), dice.choice((1, 2, 3))).to_pylist())


@cache
def fixtures() -> tuple[Source, ...]:
    """Every example log of the repository."""
    folders = ("formats", "docs", "tutorials")
    paths = [path for folder in folders for path in sorted((ROOT / "fixtures" / folder).iterdir())]
    logs = [path for path in paths if path.suffix in (".jsonl", ".json", ".parquet")]
    return tuple(Source(path.stem, path.suffix, path.read_bytes(), TOY) for path in logs)


@cache
def real() -> tuple[Source, ...]:
    """The real rollouts beside the checkout; none where there are none."""
    sources = []
    for path in sorted(SHARED.glob("rollouts/*/*.jsonl.gz")):
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        short = [line for line in lines if len(line) <= _LARGEST_ROW]
        folder = SHARED / "tokenizers" / path.parent.name
        small = path.parent.name == "smollm2"
        tokenizer = str(folder) if small and folder.is_dir() else TOY
        sources.append(Source(f"real_{path.parent.name}", ".jsonl", b"".join(short), tokenizer, ours=False))
    return tuple(sources)


def source_of(dice: Random, *, with_real: bool) -> Source:
    """A log, drawn; the draws are the same with and without real rollouts."""
    wanted = dice.random() < 0.08
    ours, theirs = dice.choice(fixtures()), dice.random()
    if wanted and with_real and real():
        return real()[int(theirs * len(real()))]
    return ours
