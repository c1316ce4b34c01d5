"""Edits: the values that differ between a row as read and the row to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Path = tuple[str | int, ...]
"""Keys and positions that lead to a value, outermost first."""


class _Absent:
    """No value: the key is removed."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"  # unpickles as the module's own object, so that `is ABSENT` holds in every process


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True)
class Edit:
    """One value replaced by another."""

    path: Path
    value: Any
    """A plain JSON value or a numpy array; ABSENT removes the key."""


def edits_between(old: Any, new: Any, path: Path = ()) -> Iterator[Edit]:
    """The smallest edits that turn `old` into `new`; parts that are the same object are skipped.

    Objects are compared key by key. Lists of equal length that hold objects or lists are compared entry by entry;
    any other list counts as one value.
    """
    if old is new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in old:
            yield from edits_between(old[key], new.get(key, ABSENT), (*path, key))
        for key in new:
            if key not in old:
                yield Edit((*path, key), new[key])
    elif _holds_containers(old) and _holds_containers(new) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from edits_between(a, b, (*path, index))
    elif not _same_value(old, new):
        yield Edit(path, new)


def apply_edits(value: Any, edits: Sequence[Edit]) -> Any:
    """The value with edits applied; it shares all untouched parts with the original."""
    for edit in edits:
        value = _apply_edit(value, edit.path, edit.value)
    return value


def _apply_edit(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        copy = dict(value)
        if new is ABSENT and not rest:
            copy.pop(head, None)
        else:
            copy[head] = _apply_edit(value.get(head), rest, new)
        return copy
    entries = list(value)
    entries[int(head)] = _apply_edit(entries[int(head)], rest, new)
    return entries


def _holds_containers(value: Any) -> bool:
    """Whether a value is a list whose entries are objects, lists or arrays."""
    return isinstance(value, list | tuple) and any(
        isinstance(entry, Mapping | list | tuple | np.ndarray) for entry in value
    )


def _same_value(old: Any, new: Any) -> bool:
    """Whether two values have the same type and are equal: 1, 1.0 and True differ, as do a list and an array."""
    if type(old) is not type(new):
        return False
    if isinstance(old, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(_same_value(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new) or (isinstance(old, float) and old != old and new != new)
