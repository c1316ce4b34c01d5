"""Where rows lie inside a row that is none itself, for what is said of rows that no format takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tito_audit.format import Format, Row

_DEPTH = 3
_KEYS = 64
_LOOKED_AT = 64
"""Objects that are tried."""


def wrapped_at(row: Row, formats: Sequence[Format]) -> tuple[str, str] | None:
    """The path at which the row holds rows of a format, as `--rows-at` takes it, and the name of that format; None
    where nothing in it looks like a row."""
    for (path, inner), _ in zip(_inside(row), range(_LOOKED_AT), strict=False):
        # A message of a row that is not known may well hold ids; what is around it is the row then.
        if "role" in inner:
            continue
        found = next((form.name for form in formats if form.matches(inner)), None)
        if found is not None:
            return path, found
    return None


def _inside(row: Row) -> Iterator[tuple[str, Row]]:
    """The objects in a row, the outer ones first, with the first one of each list."""
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            for key in list(value)[:_KEYS]:
                inner = value[key]
                while isinstance(inner, list | tuple) and inner:
                    inner = inner[0]
                if isinstance(inner, dict) and isinstance(key, str) and key and "." not in key:
                    below.append((f"{path}.{key}" if path else key, inner))
        yield from below
        level = below
