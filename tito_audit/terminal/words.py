"""Numbers and lists in words."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "many"]


def many(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; empty without words."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
