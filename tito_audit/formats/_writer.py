"""Writes calls back: what a repair changed, at every place in the row that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row, SourcesOf
from tito_audit.formats._calls import updated_call
from tito_audit.formats._sources import at, path_text
from tito_audit.formats._turn_change import Change, Read, changes_of, check_written, recounted, rollouts_before
from tito_audit.formats._update import at_most_one_each
from tito_audit.formats._values import as_logged, literal, rescored
from tito_audit.record.arrays import Logprobs
from tito_audit.record.edits import Edit, Path, with_edits
from tito_audit.record.json_text import rewritten_string
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Rollout, TrainingRow, Turn
from tito_audit.record.sources import CallSource, Counter, Sources

Totals = Callable[[Row, Sequence[Rollout], Sequence[Rollout]], Iterator[Edit]]
"""Counts over several calls, from the rollouts before and after."""


def calls_written(
    read: Read, sources: SourcesOf, **how: Any
) -> Callable[[Row, Sequence[RepairedRollout]], Sequence[Row]]:
    """The `update` of a format whose rows hold calls; `how` are further arguments of `rewritten_calls`."""

    def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        return (rewritten_calls(row, repaired, read, sources, **how),)

    return update


def rewritten_calls(
    row: Row,
    repaired: Sequence[RepairedRollout],
    read: Read,
    sources: SourcesOf,
    *,
    gone: Any = None,
    only_numbers: bool = False,
    totals: Totals | None = None,
    stays: str = "a call can neither be left out of this format's row nor moved in it",
    row_stays: Callable[[TrainingRow | None, TrainingRow | None], None] | None = None,
) -> Row:
    """The row with its repaired calls; the same object if nothing changed.

    `gone` replaces a dropped column: null, or ABSENT if the format omits nulls. With `only_numbers` the
    format allows no null among logprobs, so unknown ones are refused. `stays` is the error if a call is left
    out; `row_stays` raises if the training row may not change like this.
    """
    before = rollouts_before(row, repaired, read)
    chosen = at_most_one_each(before, repaired)
    edits: dict[Path, Any] = {}
    changed = False
    where: Sequence[Sources] = ()
    for item, (rollout, one) in enumerate(zip(before, chosen, strict=True)):
        if len(one.turns_from) != len(rollout.turns):
            raise RecordError(stays)
        (row_stays or _refuse_row)(rollout.training_row, one.rollout.training_row)
        changes = changes_of(rollout, one)
        changed = changed or bool(changes)
        where = where or (sources(row, before) if changes else ())
        for number, change in changes.items():
            if only_numbers:
                _refuse_unknown(change)
            for edit in _call_edits(row, where[item].calls[number], change, gone):
                _add(edits, edit)
    if not changed:
        return row
    after = [one.rollout for one in chosen]
    for edit in totals(row, before, after) if totals is not None else ():
        edits[edit.path] = edit.value
    new: Row = with_edits(row, [Edit(path, value) for path, value in edits.items()])
    for rollout, one, was in zip(read(new, before[0].place), chosen, before, strict=True):
        check_written(rollout, one, was)
    return new


def lengths_of(turns: Sequence[Turn]) -> tuple[int, int]:
    """The number of tokens in all prompts and in all completions."""
    prompts = sum(len(turn.prompt_ids) for turn in turns if turn.prompt_ids is not None)
    return prompts, sum(len(turn.completion_ids) for turn in turns if turn.completion_ids is not None)


def _add(edits: dict[Path, Any], edit: Edit) -> None:
    """Add an edit; RecordError if another call needs a different value at its path."""
    if edit.path in edits and not _same_value(edits[edit.path], edit.value):
        raise RecordError(f"{path_text(edit.path)} belongs to several choices, which would need different values")
    edits[edit.path] = edit.value


def _call_edits(row: Row, source: CallSource, change: Change, gone: Any) -> Iterator[Edit]:
    if source.entry is not None:
        yield Edit(source.entry, updated_call(at(row, source.entry), change.before, change.after))
    if change.prompt_ids is not None:
        yield from _prompt_edits(row, source, change, gone)
    if source.entry is None:
        if change.logprobs is not None:
            yield from _logprob_edits(row, source, change, change.logprobs)
        yield from _column_edits(row, source, change, gone)


def _prompt_edits(row: Row, source: CallSource, change: Change, gone: Any) -> Iterator[Edit]:
    """Edits to every copy of the prompt, and to everything computed from the old one."""
    if source.scored:
        raise RecordError("the server scored the old prompt, and there are no scores for the new one")
    for copy in source.prompts:
        yield from _edits(row, copy.path, partial(as_logged, change.prompt_ids))
    for path in source.blank:
        if np.asarray(at(row, path)).any():
            raise RecordError(f"{path[-1]} trains tokens of a prompt that would change")
        yield Edit(path, as_logged(np.zeros(lengths_of([change.after])[0], np.int64), at(row, path)))
    for path in source.routing:
        if at(row, path) is not None:
            yield Edit(path, gone)
    for counter in source.counters:
        yield from _count_edits(row, counter, change)
    for turn, earlier in source.retries:
        again = replace(turn, prompt_ids=change.prompt_ids)
        yield from _call_edits(row, earlier, Change(turn, again, change.prompt_ids, None, {}), gone)


def _count_edits(row: Row, counter: Counter, change: Change) -> Iterator[Edit]:
    prefix, held = counter.prefix, at(row, counter.path)
    counts = {name[len(prefix) :]: value for name, value in held.items() if str(name).startswith(prefix)}
    for name, value in recounted(counts, [lengths_of([change.before])], [lengths_of([change.after])]).items():
        yield Edit((*counter.path, prefix + name), value)


def _logprob_edits(row: Row, source: CallSource, change: Change, new: Logprobs) -> Iterator[Edit]:
    """Edits to every copy of the logprobs, each in its own form."""
    old, ids = change.recorded_logprobs, change.before.completion_ids
    assert old is not None
    if not source.logprobs:
        raise RecordError("the log has these logprobs in a form that cannot be written")
    if any(copy.part is not None for copy in source.logprobs) and len(new) != len(old):
        raise RecordError(source.whole)
    for copy in source.logprobs:
        own = slice(*copy.part) if copy.part is not None else slice(None)
        yield from _edits(
            row, copy.path, partial(rescored, layout=copy.layout, old=old[own], new=new[own], ids=ids)
        )


def _column_edits(row: Row, source: CallSource, change: Change, gone: Any) -> Iterator[Edit]:
    for name, values in change.columns.items():
        if name not in source.columns:
            raise RecordError(source.whole.format(name=name))
        for copy in source.columns[name]:
            if values is None:
                yield Edit(copy.path, gone)
            else:
                yield from _edits(row, copy.path, partial(as_logged, values))


def _edits(row: Row, path: Path, written: Callable[[Any], Any]) -> Iterator[Edit]:
    """An edit at a path if its value changes; a list stored as a JSON string is rewritten inside the string."""
    value = at(row, path)
    was = literal(value)
    new = written(was)
    if new is not was:
        yield Edit(path, rewritten_string(value, was, new) if isinstance(value, str) else new)


def _refuse_row(before: TrainingRow | None, after: TrainingRow | None) -> None:
    if before is not after:
        raise RecordError("this format's rows hold calls and no training row")


def _refuse_unknown(change: Change) -> None:
    if change.logprobs is None or not np.isnan(change.logprobs).any():
        return
    was = change.recorded_logprobs
    if was is None or not np.isnan(was).any():
        raise RecordError("logprobs of this format can only be numbers, so an unknown one cannot be written")


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, list | np.ndarray) and isinstance(right, list | np.ndarray):
        return len(left) == len(right) and all(a is b or a == b for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)
