"""Measured times, as guides state them."""

from __future__ import annotations

from pathlib import Path

from pages.words import table

__all__ = ["batch_speed"]

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "BATCH.md"


def batch_speed() -> str:
    """CPU milliseconds of `audit_batch` a row, as `make bench-batch` measured them, in whole batches."""
    lines = [line for line in MEASURED.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head[:6] == ["turns", "tokens", "as", "", "batch: median", "99 %"], head
    shown = ((row[0], row[1], ", ".join(filter(None, row[2:4])), *row[4:6]) for row in rows)
    return table(("turns", "tokens", "as", "median, ms", "99 %, ms"), list(shown))
