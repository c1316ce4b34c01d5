"""Calls that stand deep inside a row: what a repair changed in them, written at every place that holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import is_list, is_numbers
from tito_audit.formats._responses_write import entry_edits
from tito_audit.formats._turn_change import Change, Read, changes_of, recounted, rollouts_before, says_this
from tito_audit.formats._update import as_logged, at_most_one_each
from tito_audit.record.arrays import as_floats
from tito_audit.record.edits import Edit, Path, with_edits
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Rollout, Turn

__all__ = ["CallPlace", "Totals", "at", "copies_of", "lengths_of", "object_at", "updated_calls"]


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a row holds one call; every path leads to a value that is there."""

    prompts: tuple[Path, ...] = ()
    """Every copy of the prompt's ids."""
    logprobs: tuple[Path, ...] = ()
    """Every copy of the logprobs: a list, or an object with a `content` list of tokens."""
    columns: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Every copy of each other column, by the name of the column."""
    routing: tuple[Path, ...] = ()
    """What was computed over the prompt as it was and cannot be rebuilt."""
    counters: tuple[Path, ...] = ()
    """Objects that count the tokens of this call."""


Places = Callable[[Row], Sequence[Sequence[CallPlace]]]
"""For each rollout of a row, in the order in which they are read, the places of its turns."""
Totals = Callable[[Row, Sequence[Rollout], Sequence[Rollout]], Iterator[Edit]]
"""Counts over several calls, from the rollouts before and after."""


def updated_calls(
    row: Row,
    mended: Sequence[RepairedRollout],
    read: Read,
    places: Places,
    *,
    gone: Any = None,
    only_numbers: bool = False,
    totals: Totals | None = None,
) -> Sequence[Row]:
    """The row with what its calls say from now on; itself when they say nothing new.

    `gone` is put where a column is dropped: null, or ABSENT where the format leaves nulls out. With
    `only_numbers` the format takes no null among logprobs, so an unknown one is refused.
    """
    before = rollouts_before(row, mended, read)
    chosen = at_most_one_each(before, mended)
    edits: dict[Path, Any] = {}
    where: Sequence[Sequence[CallPlace]] = ()
    for number, (rollout, one) in enumerate(zip(before, chosen, strict=True)):
        if len(one.turns_from) != len(rollout.turns):
            raise RecordError("a call can neither be left out of this format's row nor be moved in it")
        if one.rollout.training_row is not rollout.training_row:
            raise RecordError("this format's rows hold calls and no training row")
        changes = changes_of(rollout, one)
        where = where or (places(row) if changes else ())
        for call, change in changes.items():
            if only_numbers:
                _refuse_unknown(change)
            edits.update((edit.path, edit.value) for edit in _call_edits(row, where[number][call], change, gone))
    if not edits:
        return (row,)
    after = [one.rollout for one in chosen]
    if totals is not None:
        edits.update((edit.path, edit.value) for edit in totals(row, before, after))
    new: Row = with_edits(row, [Edit(path, value) for path, value in edits.items()])
    for rollout, one, was in zip(read(new, before[0].place), chosen, before, strict=True):
        says_this(rollout, one, was)
    return (new,)


def copies_of(value: Any, path: Path, names: Collection[str], wanted: Any) -> Iterator[Path]:
    """The place of every list of numbers under one of these names that equals `wanted`, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in names and _equals(inner, wanted):
                yield (*path, key)
            elif isinstance(inner, Mapping | list | tuple):
                yield from copies_of(inner, (*path, key), names, wanted)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            yield from copies_of(inner, (*path, number), names, wanted)


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


def lengths_of(turns: Sequence[Turn]) -> tuple[int, int]:
    """The tokens of all prompts and of all completions."""
    prompts = sum(len(turn.prompt_ids) for turn in turns if turn.prompt_ids is not None)
    return prompts, sum(len(turn.completion_ids) for turn in turns if turn.completion_ids is not None)


def _call_edits(row: Row, place: CallPlace, change: Change, gone: Any) -> Iterator[Edit]:
    if change.prompt_ids is not None:
        for path in place.prompts:
            yield Edit(path, as_logged(change.prompt_ids, at(row, path)))
        for path in place.routing:
            if at(row, path) is not None:
                yield Edit(path, gone)
        for path in place.counters:
            counts = [lengths_of([change.before])], [lengths_of([change.after])]
            for name, value in recounted(at(row, path), *counts).items():
                yield Edit((*path, name), value)
    if change.logprobs is not None:
        for path in place.logprobs:
            yield from _logprob_edits(at(row, path), path, change)
    for name, values in change.columns.items():
        for path in place.columns.get(name, ()):
            yield Edit(path, gone if values is None else as_logged(values, at(row, path)))


def _logprob_edits(value: Any, path: Path, change: Change) -> Iterator[Edit]:
    assert change.logprobs is not None
    if not isinstance(value, Mapping):
        yield Edit(path, as_logged(change.logprobs, value))
        return
    old = change.recorded_logprobs
    assert old is not None
    yield from entry_edits(value["content"], (*path, "content"), old, change.logprobs)


def _refuse_unknown(change: Change) -> None:
    if change.logprobs is None or not np.isnan(change.logprobs).any():
        return
    was = change.recorded_logprobs
    if was is None or not np.isnan(was).any():
        raise RecordError("logprobs of this format are numbers only, so an unknown one cannot be written")


def _equals(value: Any, wanted: Any) -> bool:
    if not is_list(value) or len(value) != len(wanted) or not is_numbers(value):
        return False
    try:
        return bool(np.array_equal(as_floats(value, ""), np.asarray(wanted, np.float64), equal_nan=True))
    except RecordError:
        return False
