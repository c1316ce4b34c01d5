"""The formats that rows with given keys may have, matched on the keys alone and cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tito_audit.format import Format


class _ValueNeeded(Exception):
    """The keys alone do not decide."""


class _KeysOnly(Mapping[str, Any]):
    """A row without its values; `_ValueNeeded` if one is asked for."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = dict.fromkeys(keys)

    def __getitem__(self, key: str) -> Any:
        if key in self._keys:
            raise _ValueNeeded
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def possible_formats(keys: Sequence[str], formats: Sequence[Format]) -> tuple[tuple[Format, bool], ...]:
    """The formats that a row with these keys may match, in order, and whether values are irrelevant.

    A format that matches whatever the values are is the last.
    """
    row, found = _KeysOnly(keys), []
    for format in formats:
        try:
            certain = format.matches(row)
        except _ValueNeeded:
            found.append((format, False))
            continue
        if certain:
            found.append((format, True))
            break
    return tuple(found)
