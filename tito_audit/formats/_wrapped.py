"""Finds rows inside a row that no format recognizes, for the error message about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tito_audit.format import Format, Row

_DEPTH = 3
_MOST_KEYS = 64
_MOST_OBJECTS = 64
"""How many objects are tried."""


def wrapped_at(row: Row, formats: Sequence[Format]) -> tuple[str, str] | None:
    """The `--rows-at` path of rows inside this one and their format's name; None if nothing looks like a row."""
    for (path, inner), _ in zip(_inside(row), range(_MOST_OBJECTS), strict=False):
        # A message may hold ids, but then the row is the object around it.
        if "role" in inner:
            continue
        found = next((form.name for form in formats if form.matches(inner)), None)
        if found is not None:
            return path, found
    return None


def _inside(row: Row) -> Iterator[tuple[str, Row]]:
    """The objects in a row with their paths, outer ones first; only the first entry of each list."""
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            for key in list(value)[:_MOST_KEYS]:
                inner = value[key]
                while isinstance(inner, list | tuple) and inner:
                    inner = inner[0]
                if isinstance(inner, dict) and isinstance(key, str) and key and "." not in key:
                    below.append((f"{path}.{key}" if path else key, inner))
        yield from below
        level = below
