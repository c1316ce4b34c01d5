"""Where a row holds what was read: the place of each array, every copy of it, and how it is written there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import is_list, is_numbers
from tito_audit.record.arrays import Ids, as_floats
from tito_audit.record.edits import Path
from tito_audit.record.rollout import Rollout, Turn

__all__ = [
    "CallSource",
    "Counter",
    "Layout",
    "Source",
    "SourcesOf",
    "at",
    "copies_of",
    "object_at",
    "plain_sources",
    "same_as",
]


class Layout(StrEnum):
    """How the values of an array lie in the list at its place."""

    PLAIN = "plain"  # one entry a token
    ENTRIES = "entries"  # objects with a `logprob`
    PARALLEL = "parallel"  # an object of lists, of which `token_logprobs` is this one
    TRIPLES = "triples"  # `[logprob, id, text]`


@dataclass(frozen=True, slots=True)
class Source:
    """One place of an array; a list in a string is written into the string."""

    path: Path
    layout: Layout = Layout.PLAIN
    part: tuple[int, int] | None = None
    """Which of the entries are here, where the array is spread over several places; None: all."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An object that counts the tokens of a call."""

    path: Path
    prefix: str = ""
    """In front of the names of its counts."""


@dataclass(frozen=True, slots=True)
class CallSource:
    """Where a row holds one call; every path leads to a value that is there."""

    prompts: tuple[Source, ...] = ()
    """Every copy of the prompt's ids."""
    logprobs: tuple[Source, ...] = ()
    """Every copy of the logprobs."""
    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every copy of each other column, by the name of the column."""
    routing: tuple[Path, ...] = ()
    """What was computed over the prompt as it was and cannot be rebuilt."""
    counters: tuple[Counter, ...] = ()
    entry: Path | None = None
    """The object that is the call, all its columns under names in use."""
    scored: bool = False
    """The server scored the prompt as it was, so there can be no other."""
    whole: str = "{name} holds the tokens too, so it cannot be left out"
    """Why a column without a place cannot go, and logprobs that are spread over several places cannot be fewer."""
    retries: tuple[tuple[Turn, CallSource], ...] = ()
    """Calls that asked the same before and are no turns: their prompts change with this one's."""


SourcesOf = Callable[[Row, Sequence[Rollout]], Sequence[Sequence[CallSource]]]
"""For each rollout of a row, in the order in which they are read, the sources of its turns."""


def at(row: Any, path: Path) -> Any:
    """The value at a path."""
    for step in path:
        row = row[step]
    return row


def object_at(row: Any, *path: str) -> Mapping[str, Any]:
    """The object at a path of keys; an empty one where there is none."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row if isinstance(row, Mapping) else {}


def plain_sources(paths: Iterator[Path] | Sequence[Path]) -> tuple[Source, ...]:
    """Places with one entry a token."""
    return tuple(map(Source, paths))


def copies_of(value: Any, path: Path, names: Collection[str], wanted: Any) -> Iterator[Path]:
    """The place of every list of numbers under one of these names that equals `wanted`, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in names and same_as(inner, wanted):
                yield (*path, key)
            elif isinstance(inner, Mapping | list | tuple):
                yield from copies_of(inner, (*path, key), names, wanted)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            yield from copies_of(inner, (*path, number), names, wanted)


def same_as(value: Any, wanted: Ids | Sequence[Any] | None) -> bool:
    """Whether a value is a list of these numbers."""
    if wanted is None or not is_list(value) or len(value) != len(wanted) or not is_numbers(value):
        return False
    try:
        return bool(np.array_equal(as_floats(value, ""), np.asarray(wanted, np.float64), equal_nan=True))
    except RecordError:
        return False
