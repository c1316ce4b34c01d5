"""What test files share that needs nothing of the package: where things are, two plain rows, and files of rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = [
    "BROKEN",
    "CLEAN",
    "FORMATS",
    "ROOT",
    "TOKENIZERS",
    "TOY",
    "fixture_row",
    "json_lines",
    "lines_of",
    "zstd",
]

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ROOT / "fixtures" / "formats"
TOKENIZERS = ROOT / "fixtures" / "tokenizers"
TOY = TOKENIZERS / "toy_bpe"
CLEAN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25],
}
BROKEN: dict[str, Any] = {**CLEAN, "logprobs": [0.0, 0.0, 0.5, -0.25]}
"""A trained token has a logprob above zero; the repair `mask` takes it out of the loss."""


def fixture_row(name: str, label: str) -> dict[str, Any]:
    """The row of a JSONL fixture that has this id."""
    for line in (FORMATS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if label in (row.get("id"), row.get("example_id")):
            return row
    raise KeyError(label)


def json_lines(rows: Iterable[object]) -> bytes:
    """The rows as the bytes of a JSONL file."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, packed or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def zstd(data: bytes) -> bytes:
    """The bytes, packed."""
    return bytes(pa.compress(data, codec="zstd", asbytes=True))
