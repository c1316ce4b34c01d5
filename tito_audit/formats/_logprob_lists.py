"""Logprobs stored together with other data: one object per token, triples, parallel lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.formats._columns import is_list
from tito_audit.formats._turn_change import same_floats
from tito_audit.formats._values import as_logged
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.sources import Layout


def rescored(value: Any, *, layout: Layout, old: Logprobs, new: Logprobs, ids: Ids | None) -> Any:
    """A value of this layout with `new` logprobs in place of `old`; the same object if they are equal.

    If there are fewer, whole entries are dropped; RecordError if it is unclear which ones. `ids` are the
    completion's.
    """
    if layout is Layout.PLAIN:
        return as_logged(new, value)
    if layout is Layout.ENTRIES:
        return _entries(value, old, new)
    if layout is Layout.TRIPLES:
        return _triples(value, old, new, ids)
    return _parallel(value, old, new)


def _entries(entries: Sequence[Any], old: Logprobs, new: Logprobs) -> Any:
    """The list of objects with a `logprob` each, rescored."""
    if len(new) != len(old):
        start = _kept_from(old, new, [])
        return list(entries[start : start + len(new)])
    was = [entry.get("logprob") for entry in entries]
    values = as_logged(new, was)
    if values is was:
        return entries
    return [
        entry if value is before or _both_unknown(value, before) else {**entry, "logprob": value}
        for entry, value, before in zip(entries, _kept_objects(values, was), was, strict=True)
    ]


def _triples(entries: Sequence[Any], old: Logprobs, new: Logprobs, completion: Ids | None) -> Any:
    """The `[logprob, id, text]` entries, rescored; each keeps its id and text."""
    if len(new) != len(old):
        ids = [int(entry[1]) for entry in entries]
        start = _kept_from(old, new, [] if completion is None else [(ids, completion.tolist())])
        return list(entries[start : start + len(new)])
    was = [entry[0] for entry in entries]
    values = _kept_objects(as_logged(new, was), was)
    return [_scored(entry, value) for entry, value in zip(entries, values, strict=True)]


def _scored(entry: Any, value: Any) -> Any:
    """One triple with another logprob, still a list or an array."""
    if value is entry[0] or _both_unknown(value, entry[0]):
        return entry
    if isinstance(entry, np.ndarray) and entry.dtype.kind == "f":
        return np.array([np.nan if value is None else value, *entry[1:].tolist()], entry.dtype)
    rest = entry[1:].tolist() if isinstance(entry, np.ndarray) else entry[1:]
    return [value, *rest]


def _parallel(logged: Mapping[str, Any], old: Logprobs, new: Logprobs) -> Mapping[str, Any]:
    """The parallel lists of a completion's logprobs, rescored."""
    if len(new) == len(old):
        return {**logged, "token_logprobs": as_logged(new, logged["token_logprobs"])}
    start = _kept_from(old, new, [])
    cut = {
        name: values[start : start + len(new)]
        for name, values in logged.items()
        if is_list(values) and len(values) == len(old)
    }
    return {**logged, **cut}


def _kept_from(old: Logprobs, new: Logprobs, also: Sequence[tuple[list[int], list[int]]]) -> int:
    """The index of the first entry kept; kept entries are contiguous, and the pairs in `also` must match too."""
    size = len(new)
    starts = [
        start
        for start in range(len(old) - size + 1)
        if same_floats(old[start : start + size], new)
        and all(have[start : start + size] == want for have, want in also)
    ]
    if len(starts) != 1:
        raise RecordError(
            f"{len(old)} logprobs should become {size}, and it is unclear which of the log's entries to drop"
        )
    return starts[0]


def _kept_objects(values: Sequence[Any], was: Sequence[Any]) -> list[Any]:
    """The new values, with the old object wherever the values are equal."""
    return [before if value == before else value for value, before in zip(values, was, strict=True)]


def _both_unknown(left: object, right: object) -> bool:
    return all(value is None or (isinstance(value, float) and value != value) for value in (left, right))
