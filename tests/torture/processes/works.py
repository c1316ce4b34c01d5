"""The commands that are attacked: their logs, what they write, and how to start them again."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tables import stored

__all__ = ["PRINTING", "WORKS", "Work", "make_logs", "same"]

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
FORMATS = ROOT / "fixtures" / "formats"
_LARGE, _SMALL = 30, 10
"""Rows of a log that several processes read, and of one that is read by one."""
_PAD = 84_000


@dataclass(frozen=True)
class Work:
    """A command that reads logs and writes files, all in one folder."""

    name: str
    logs: tuple[str, ...]
    """Its logs, below the folder."""
    words: tuple[str, ...]
    outputs: tuple[str, ...]
    """What it writes."""
    again: tuple[str, ...] = ()
    """What is added to start it once more after it was stopped."""
    journals: tuple[str, ...] = ()
    """Files that stay for the next run and may be there in any state, as a journal."""
    jobs: bool = False

    def command(self, *more: str) -> list[str]:
        """The words of a run."""
        return [*self.words, "-q", *more, *(["-j", "2"] if self.jobs else [])]


def _work(name: str, words: str, **more: Any) -> Work:
    """A work out of texts with blanks between their words; `-t` stands for the tokenizer too."""
    texts = {field: tuple(text.split()) if isinstance(text, str) else text for field, text in more.items()}
    named = [part for word in words.split() for part in (["-t", TOKENIZER] if word == "-t" else [word])]
    return Work(name, words=tuple(named), **{"outputs": (), **texts})


WORKS: tuple[Work, ...] = tuple(_work(**work) for work in stored("processes", "WORKS"))
PRINTING: tuple[Work, ...] = (
    *(
        _work(f"scan -f {shape}", f"scan small.jsonl -t -f {shape}", logs="small.jsonl")
        for shape in ("text", "json", "jsonl", "concise", "html")
    ),
    _work("repair --diff", "repair small.jsonl -t --dry-run --diff", logs="small.jsonl"),
)
"""Commands that print; the words `-q` are not theirs."""


def make_logs(folder: Path) -> None:
    """Every log that the works name, below a folder; the same bytes each time."""
    noise = random.Random(5)
    lines = (FORMATS / "nemo_gym.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:10]]

    def padded(count: int) -> list[dict[str, Any]]:
        pads = (base64.b64encode(noise.randbytes(_PAD)).decode() for _ in range(count))
        return [{**rows[number % len(rows)], "note": pad} for number, pad in enumerate(pads)]

    small, large = padded(_SMALL), padded(_LARGE)
    (folder / "logs").mkdir(parents=True)
    for name, text in (("small.jsonl", _text(small)), ("large.jsonl", _text(large))):
        (folder / name).write_bytes(text)
        (folder / f"{name}.gz").write_bytes(gzip.compress(text, 1, mtime=0))
    _table(folder / "large.parquet", large)
    (folder / "logs" / "a.jsonl").write_bytes(_text(rows))
    (folder / "logs" / "b.jsonl.gz").write_bytes((folder / "small.jsonl.gz").read_bytes())
    _table(folder / "logs" / "c.parquet", small)


def _text(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    pq.write_table(table, path, row_group_size=5, compression="snappy")


def same(name: str, output: bytes, other: bytes) -> bool:
    """Whether two outputs of a name are the same, but for the seconds that a run took."""
    if output == other or not name.endswith(".json"):
        return output == other
    try:
        return _timeless(output) == _timeless(other)
    except ValueError:
        return False


def _timeless(data: bytes) -> Any:
    value = json.loads(data)
    if isinstance(value, dict) and isinstance(value.get("summary"), dict):
        value["summary"].pop("seconds", None)
    return value
