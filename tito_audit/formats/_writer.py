"""Repaired calls written into a row: what changed in each, the edits at its sources, the check of the new row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row, SourcesOf
from tito_audit.formats._calls import seen_by_template, updated_call
from tito_audit.formats._columns import as_logged, parse_literal, same_floats, same_ids, same_value, with_logprobs
from tito_audit.formats._update import changed_columns, one_repair_each, path_text, same_trained, value_at
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.column import Column, ColumnRole, MovePolicy
from tito_audit.record.edits import Edit, Path, apply_edits
from tito_audit.record.json_text import rewrite_json_string
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import IdsFrom, Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources

Read = Callable[[Row, Place], Sequence[Rollout]]


class RowFunctions(TypedDict):
    """The functions of a Format that read and write rows."""

    read: Read
    sources: SourcesOf
    update: Callable[[Row, Sequence[RepairedRollout]], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class CallChange:
    """What a repair changed in one call."""

    before: Turn
    after: Turn
    prompt_ids: Ids | None
    """The new ones; None if unchanged."""
    logprobs: Logprobs | None
    """The new ones; None if unchanged."""
    columns: Mapping[str, NDArray[Any] | None]
    """The new values of every other column that changed, by name; None for a dropped column."""

    @property
    def recorded_logprobs(self) -> Logprobs | None:
        """The logprobs as the log has them, even if they do not fit the completion."""
        recovered = self.after.ids_from is IdsFrom.RECOVERED
        return logged_logprobs(self.before if recovered else replace(self.before, token_texts=None))


def read_before(row: Row, repaired: Sequence[RepairedRollout], read: Read) -> Sequence[Rollout]:
    """The rollouts of the row as it is logged; RecordError if none of them is left to write."""
    if not repaired:
        raise RecordError("no rollout of the row is left, so no row can be written")
    return read(row, replace(repaired[0].rollout.place, item=0))


def find_call_changes(before: Rollout, after: RepairedRollout) -> dict[int, CallChange]:
    """What changed in each call, by its number before the repair; RecordError for changes that no log can hold."""
    numbers = after.turns_from
    if len(numbers) != len(after.rollout.turns) or any(not 0 <= n < len(before.turns) for n in numbers):
        raise RecordError("the turns of the repaired rollout are not those of the row")
    if list(numbers) != sorted(set(numbers)):
        raise RecordError("the repaired rollout has its turns in another order than the row, or one of them twice")
    changes: dict[int, CallChange] = {}
    for number, turn in zip(numbers, after.rollout.turns, strict=True):
        was, prompt = before.turns[number], None
        recovered = was.completion_ids is None and turn.ids_from is IdsFrom.RECOVERED
        if not recovered and not same_ids(was.completion_ids, turn.completion_ids):
            raise RecordError(
                f"the completion of call {number} would change, and no repair may change what was sampled"
            )
        if not same_ids(was.prompt_ids, turn.prompt_ids):
            if was.prompt_ids is None or turn.prompt_ids is None:
                raise RecordError(f"call {number} would gain or lose its prompt; a prompt can only be rewritten")
            prompt = turn.prompt_ids
        policies = {column.name: column.policy for column in was.columns}
        added = next((column.name for column in turn.columns if column.name not in policies), None)
        if added is not None:
            raise RecordError(f"call {number} has no column {added!r} in the log, and none can be added")
        columns = {
            name: values
            for name, values in changed_columns(was, turn).items()
            if values is None or policies[name] is not MovePolicy.DROP
        }
        column, logprobs = _logprob_column(was), turn.completion_logprobs
        moved = None if column is None else columns.get(column.name)
        if column is not None and moved is not None:
            if logprobs is not None and not _logprobs_agree(moved, logprobs):
                raise RecordError(
                    f"call {number} has one set of logprobs in its column and another one in the turn"
                )
            del columns[column.name]
            logprobs = np.asarray(moved, np.float64)
        elif column is not None and column.name in columns:
            logprobs = None  # the column was dropped
        elif logprobs is None:
            if was.completion_logprobs is not None and column is not None:
                columns[column.name] = None
        else:
            recorded = CallChange(was, turn, None, None, {}).recorded_logprobs
            if recorded is None:
                raise RecordError(f"call {number} has no logprobs in the log, and none can be added")
            logprobs = None if same_floats(recorded, logprobs) else logprobs
        if prompt is not None or logprobs is not None or columns:
            changes[number] = CallChange(was, turn, prompt, logprobs, columns)
    return changes


def check_written(rollout: Rollout, wanted: RepairedRollout, was: Rollout) -> None:
    """Raise RecordError unless `rollout`, read from the written row, is the repaired one that was wanted."""
    if len(rollout.turns) != len(wanted.rollout.turns):
        raise RecordError(
            f"the row would read as {len(rollout.turns)} calls, but the repair leaves {len(wanted.turns_from)}"
        )
    for number, turn, want in zip(wanted.turns_from, rollout.turns, wanted.rollout.turns, strict=True):
        recovered = turn.completion_ids is None and want.ids_from is IdsFrom.RECOVERED
        if not same_ids(turn.prompt_ids, want.prompt_ids):
            raise RecordError(f"the row has no separate place for the new prompt of call {number}")
        if not recovered and not same_ids(turn.completion_ids, want.completion_ids):
            raise RecordError(f"the row would read with another completion of call {number}")
        written_logprobs, logprobs = turn.completion_logprobs, want.completion_logprobs
        if (
            written_logprobs is not None
            and logprobs is not None
            and not _logprobs_agree(written_logprobs, logprobs)
        ):
            raise RecordError(f"the row would read with other logprobs of call {number}")
        sent = _sent_messages(was, was.turns[number])
        if sent is not None and _sent_messages(rollout, turn) != sent:
            raise RecordError(f"the row would read with other messages around call {number}")


def updated_counts(
    holder: Mapping[str, Any], before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """The new values of stored token counts that were right before, by name.

    `before` and `after` list the ways to count, each as (prompt tokens, completion tokens). The first way that
    matches a stored count is the one that it follows.
    """
    prompt_name, completion_name = (
        next((key for key in keys if type(holder.get(key)) is int), None)
        for keys in (
            ("input_tokens", "prompt_tokens", "num_prompt_tokens"),
            ("output_tokens", "completion_tokens"),
        )
    )
    for old, new in zip(before, after, strict=True):
        counts: dict[str, int] = {}
        if prompt_name is not None and holder[prompt_name] == old[0]:
            counts[prompt_name] = new[0]
        if completion_name is not None and holder[completion_name] == old[1]:
            counts[completion_name] = new[1]
        # Where prompts are counted too, a match of the completion alone does not prove the way to count.
        if prompt_name is not None and prompt_name not in counts:
            continue
        if type(holder.get("total_tokens")) is int and holder["total_tokens"] == sum(old):
            counts["total_tokens"] = sum(new)
        if counts:
            return {name: value for name, value in counts.items() if holder[name] != value}
    return {}


def _logprob_column(turn: Turn) -> Column | None:
    return next((column for column in turn.columns if column.role is ColumnRole.LOGPROBS), None)


def logged_logprobs(turn: Turn) -> Logprobs | None:
    """The logprobs of a call as its log has them, for ids or for token strings, even if they fit neither."""
    column = _logprob_column(turn)
    if column is not None:
        return np.asarray(column.values, np.float64)
    if turn.token_texts is not None:
        return np.array([token.logprob for token in turn.token_texts], np.float64)
    return turn.completion_logprobs


def _logprobs_agree(column: NDArray[Any], logprobs: Logprobs) -> bool:
    """Whether both are equal where both are known; a column of single precision is compared at its precision."""
    if len(column) != len(logprobs):
        return False
    values = column.astype(np.float64)
    both_known = ~np.isnan(values) & ~np.isnan(logprobs)
    values, wanted, single = values[both_known], logprobs[both_known], values[both_known].astype(np.float32)
    return bool((values == wanted).all() or ((single == values) & (single == wanted.astype(np.float32))).all())


def _sent_messages(rollout: Rollout, turn: Turn) -> object:
    """What templates read of the messages that a call was sent; None if the log has none for it."""
    sent = turn.prompt_messages
    if turn.message_index is not None and sent is None:
        sent = rollout.messages[: turn.message_index]
    if sent is None:
        return None
    return [seen_by_template(message) for message in sent]


TotalEdits = Callable[[Row, Sequence[Rollout], Sequence[Rollout]], Iterator[Edit]]
"""Edits to counts over several calls, from the row and its rollouts before and after."""


def listed_calls(read: Read, sources: SourcesOf, **how: Any) -> RowFunctions:
    """The functions of a format whose rows list calls; `how` are further arguments of `update_calls`."""

    def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        return (update_calls(row, repaired, read, sources, **how),)

    return RowFunctions(read=read, sources=sources, update=update)


def update_calls(
    row: Row,
    repaired: Sequence[RepairedRollout],
    read: Read,
    sources: SourcesOf,
    *,
    dropped_as: Any = None,
    only_numbers: bool = False,
    totals: TotalEdits | None = None,
    drop_error: str = "a call can neither be left out of this format's row nor moved in it",
    fork_error: str = "",
    row_error: str = "",
) -> Row:
    """The row with its repaired calls, read back and compared; the same object if nothing changed.

    `dropped_as` replaces a dropped column: null, or ABSENT if the format omits nulls. With `only_numbers` an
    unknown logprob is refused, as the format has no null for it. `drop_error` is the error if a call is left out,
    `fork_error` the error for a fork, `row_error` the error if the training row changes, in a format that has one.
    """
    if fork_error and len({part.rollout.place.item for part in repaired}) < len(repaired):
        raise RecordError(fork_error)
    before = read_before(row, repaired, read)
    chosen = one_repair_each(before, repaired)
    edits: dict[Path, Any] = {}
    changed = False
    logged: Sequence[Sources] = ()
    for item, (rollout, part) in enumerate(zip(before, chosen, strict=True)):
        if len(part.turns_from) != len(rollout.turns):
            raise RecordError(drop_error)
        old, new = rollout.training_row, part.rollout.training_row
        if old is not new and not (row_error and same_trained(old, new)):
            raise RecordError(row_error or "this format's rows hold calls and no training row")
        changes = find_call_changes(rollout, part)
        changed = changed or bool(changes)
        logged = logged or (sources(row, before) if changes else ())
        for number, change in changes.items():
            if only_numbers and change.logprobs is not None and np.isnan(change.logprobs).any():
                recorded = change.recorded_logprobs
                if recorded is None or not np.isnan(recorded).any():
                    raise RecordError(
                        "logprobs of this format can only be numbers, so an unknown one cannot be written"
                    )
            for edit in _call_edits(row, logged[item].calls[number], change, dropped_as):
                if edit.path in edits and not same_value(edits[edit.path], edit.value):
                    raise RecordError(
                        f"{path_text(edit.path)} belongs to several choices, which would need different values"
                    )
                edits[edit.path] = edit.value
    if not changed:
        return row
    after = [part.rollout for part in chosen]
    for edit in totals(row, before, after) if totals is not None else ():
        edits[edit.path] = edit.value
    written: Row = apply_edits(row, [Edit(path, value) for path, value in edits.items()])
    for read_back, part, rollout in zip(read(written, before[0].place), chosen, before, strict=True):
        check_written(read_back, part, rollout)
    return written


def count_tokens(turns: Sequence[Turn]) -> tuple[int, int]:
    """The number of tokens in all prompts, and in all completions."""
    prompts = sum(len(turn.prompt_ids) for turn in turns if turn.prompt_ids is not None)
    return prompts, sum(len(turn.completion_ids) for turn in turns if turn.completion_ids is not None)


def _call_edits(row: Row, source: CallSource, change: CallChange, dropped_as: Any) -> Iterator[Edit]:
    """Edits to every copy of what changed in a call: its prompt, its logprobs and its columns."""
    if source.entry is not None:
        yield Edit(source.entry, updated_call(value_at(row, source.entry), change.before, change.after))
    if change.prompt_ids is not None:
        if source.scored:
            raise RecordError("the server scored the old prompt, and there are no scores for the new one")
        for copy in source.prompts:
            yield from _edits_at(row, copy.path, partial(as_logged, change.prompt_ids))
        # What was computed from the old prompt.
        old_counts, new_counts = count_tokens([change.before]), count_tokens([change.after])
        for path in source.blank:
            if np.asarray(value_at(row, path)).any():
                raise RecordError(f"{path[-1]} trains tokens of a prompt that would change")
            yield Edit(path, as_logged(np.zeros(new_counts[0], np.int64), value_at(row, path)))
        for path in source.routing:
            if value_at(row, path) is not None:
                yield Edit(path, dropped_as)
        for counter in source.counters:
            prefix, holder = counter.prefix, value_at(row, counter.path)
            counts = {name[len(prefix) :]: value for name, value in holder.items() if str(name).startswith(prefix)}
            for name, count in updated_counts(counts, [old_counts], [new_counts]).items():
                yield Edit((*counter.path, prefix + name), count)
        for turn, earlier in source.retries:
            again = replace(turn, prompt_ids=change.prompt_ids)
            yield from _call_edits(row, earlier, CallChange(turn, again, change.prompt_ids, None, {}), dropped_as)
    if source.entry is None:
        if change.logprobs is not None:
            old, new, ids = change.recorded_logprobs, change.logprobs, change.before.completion_ids
            assert old is not None
            if not source.logprobs:
                raise RecordError("the log has these logprobs in a form that cannot be written")
            if any(copy.part is not None for copy in source.logprobs) and len(new) != len(old):
                raise RecordError(source.whole)
            for copy in source.logprobs:
                own = slice(*copy.part) if copy.part is not None else slice(None)
                moved = partial(with_logprobs, layout=copy.layout, old=old[own], new=new[own], ids=ids)
                yield from _edits_at(row, copy.path, moved)
        for name, values in change.columns.items():
            if name not in source.columns:
                raise RecordError(source.whole.format(name=name))
            for copy in source.columns[name]:
                if values is None:
                    yield Edit(copy.path, dropped_as)
                else:
                    yield from _edits_at(row, copy.path, partial(as_logged, values))


def _edits_at(row: Row, path: Path, written: Callable[[Any], Any]) -> Iterator[Edit]:
    """The edit at a path, if its value changes; a list stored as JSON in a string is rewritten in the string."""
    value = value_at(row, path)
    was = parse_literal(value)
    new = written(was)
    if new is not was:
        yield Edit(path, rewrite_json_string(value, was, new) if isinstance(value, str) else new)
