"""Helpers with which formats say where a row stores its rollouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.formats._columns import filled, is_list, is_numbers
from tito_audit.record.arrays import as_floats
from tito_audit.record.edits import Path
from tito_audit.record.sources import CallSource, Source, Sources


def of_calls(calls: Iterable[Iterable[CallSource]]) -> list[Sources]:
    """The sources of rollouts that hold calls and no training row."""
    return [Sources(calls=tuple(own)) for own in calls]


def at(row: Any, path: Path) -> Any:
    """The value at a path."""
    for step in path:
        row = row[step]
    return row


def path_text(path: Path) -> str:
    """A path as errors name it: `steps[0].metrics`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def object_at(row: Any, *path: str | int) -> Mapping[str, Any]:
    """The object at a path of keys and positions; {} if there is none."""
    for key in path:
        if isinstance(row, dict | Mapping):
            row = row.get(key)
        else:
            row = row[key] if isinstance(key, int) and is_list(row) and key < len(row) else None
    return row if isinstance(row, dict | Mapping) else {}


def plain_sources(paths: Iterable[Path]) -> tuple[Source, ...]:
    """Sources with one entry per token, one for each path."""
    return tuple(map(Source, paths))


def copies_of(
    value: Any, names: Collection[str], wanted: Any, path: Path = (), skip: Collection[str] = ()
) -> Iterator[Path]:
    """The path of every list of numbers that equals `wanted` and has one of these names, at any depth outside the
    keys in `skip`."""
    if isinstance(value, dict | Mapping):
        for key, inner in value.items():
            if key in skip:
                continue
            if key in names and filled(inner) and same_as(inner, wanted):
                yield (*path, key)
            else:
                yield from copies_of(inner, names, wanted, (*path, key), skip)
    elif isinstance(value, list | tuple) and not is_numbers(value):
        for number, inner in enumerate(value):
            yield from copies_of(inner, names, wanted, (*path, number), skip)


def same_as(value: Any, wanted: NDArray[Any] | Sequence[Any] | None) -> bool:
    """Whether a value is a list equal to these numbers."""
    if wanted is None or not is_list(value) or len(value) != len(wanted) or not is_numbers(value):
        return False
    try:
        return bool(np.array_equal(as_floats(value, ""), np.asarray(wanted, np.float64), equal_nan=True))
    except RecordError:
        return False
