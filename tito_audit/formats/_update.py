"""New values in a row: at paths, in columns with their padding, in every copy of changed ids, in stored counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import gaps, paired_runs
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import (
    ENGINE_COLUMNS,
    FLAT_IDS,
    as_logged,
    equal_values,
    has_entries,
    is_list,
    is_nested_logprobs,
    is_number_list,
    logprobs_as_logged,
    names_in,
    same_ids,
    to_list,
)
from tito_audit.formats._extras import spans_as_logged
from tito_audit.record.arrays import as_floats
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding
from tito_audit.record.edits import Edit, Path, apply_edits
from tito_audit.record.policy_columns import WEIGHTS
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Padding, Rollout, TrainingRow, Turn
from tito_audit.record.sources import CallSource, Source, Sources


def sources_of_calls(calls: Iterable[Iterable[CallSource]]) -> list[Sources]:
    """The sources of rollouts that hold calls and no training row: for each rollout, those of its calls."""
    return [Sources(calls=tuple(own)) for own in calls]


def value_at(row: Any, path: Path) -> Any:
    """The value at a path."""
    for step in path:
        row = row[step]
    return row


def path_text(path: Path) -> str:
    """A path as text: `steps[0].metrics`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def object_at(row: Any, *path: str | int) -> Mapping[str, Any]:
    """The object at a path of keys and list indices; {} if there is none."""
    for key in path:
        if isinstance(row, dict | Mapping):
            row = row.get(key)
        else:
            row = row[key] if isinstance(key, int) and is_list(row) and key < len(row) else None
    return row if row is not None and isinstance(row, dict | Mapping) else {}


def sources_at(paths: Iterable[Path]) -> tuple[Source, ...]:
    """A plain source, with one entry per token, for each path."""
    return tuple(map(Source, paths))


def find_copies(
    value: Any, names: Collection[str], wanted: Any, path: Path = (), skip: Collection[str] = ()
) -> Iterator[Path]:
    """The path of every list equal to `wanted` under one of these names, at any depth but not below `skip`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in skip:
                continue
            if key in names and has_entries(inner) and equals_numbers(inner, wanted):
                yield (*path, key)
            else:
                yield from find_copies(inner, names, wanted, (*path, key), skip)
    elif isinstance(value, list | tuple) and not is_number_list(value):
        for number, inner in enumerate(value):
            yield from find_copies(inner, names, wanted, (*path, number), skip)


def equals_numbers(value: Any, wanted: NDArray[Any] | Sequence[Any] | None) -> bool:
    """Whether a value is a list of these numbers; False if `wanted` is None."""
    if wanted is None or not is_list(value) or len(value) != len(wanted) or not is_number_list(value):
        return False
    try:
        return bool(np.array_equal(as_floats(value, ""), np.asarray(wanted, np.float64), equal_nan=True))
    except RecordError:
        return False


_Object = TypeVar("_Object", bound=Mapping[str, Any])

_PROMPT_COUNTS = names_in(
    """prompt_length prompt_len prompt_tokens input_tokens num_prompt_tokens num_input_tokens
    prompt_token_count"""
)
_RESPONSE_COUNTS = names_in(
    """response_length response_len completion_length completion_len response_tokens completion_tokens
    output_tokens num_response_tokens num_completion_tokens num_generated_tokens num_output_tokens"""
)
TOTAL_COUNTS = names_in(
    """total_length total_len total_tokens input_length input_lengths length num_tokens num_total_tokens
    seq_len seq_length seqlen sequence_length token_count"""
)
_TRAINED_COUNTS = ("effective_response_length", "num_action_tokens", "num_loss_tokens", "num_trained_tokens")
_OBJECTS_WITH_COUNTS = ("usage", "meta_info")
"""Objects in a row or a call that hold counts."""

CountPairs = Mapping[str, Sequence[tuple[int, int]]]
"""For each name of a count, (old, new) pairs: the ways to count that it may follow."""


@dataclass(frozen=True, slots=True)
class RepeatedIds:
    """Changed ids that a row may hold more than once."""

    old: Sequence[Any] | NDArray[Any]
    new: Sequence[Any] | NDArray[Any]
    names: Collection[str]
    """Keys under which a list equal to `old` is a copy."""


def with_new_copies(value: Any, copies: Sequence[RepeatedIds], skip: Collection[str] = ()) -> Any:
    """The object with the new ids in every copy of the old ones; the same object if it holds none."""
    edits: dict[Path, Edit] = {}
    for copy in copies:
        for path in find_copies(value, copy.names, copy.old, skip=skip):
            edits.setdefault(path, Edit(path, as_logged(copy.new, value_at(value, path))))
    return apply_edits(value, [edit for edit in edits.values() if edit.value is not value_at(value, edit.path)])


def list_if_changed(old: Sequence[Any], entries: list[Any]) -> Any:
    """The entries; `old` itself if it holds the same objects."""
    same = len(old) == len(entries) and all(a is b for a, b in zip(old, entries, strict=True))
    return old if same else entries


def with_counts(value: _Object, pairs: CountPairs) -> _Object:
    """The object with new values for its counts that were right; the same object if none changes."""
    changed: dict[str, Any] = {}
    for name, inner in value.items():
        if name in _OBJECTS_WITH_COUNTS and isinstance(inner, Mapping):
            if (new := with_counts(inner, pairs)) is not inner:
                changed[name] = new
        elif isinstance(inner, int | float | np.number) and not isinstance(inner, bool):
            to = next((new for old, new in pairs.get(name, ()) if inner == old), None)
            if to is not None and to != inner:
                number: Callable[[int], Any] = type(inner)
                changed[name] = number(to)
    return {**value, **changed} if changed else value  # type: ignore[return-value]  # a row again


def row_counts(before: TrainingRow, after: TrainingRow) -> CountPairs:
    """The counts that may be stored with a training row, as old and new values."""
    old, new = len(before.token_ids), len(after.token_ids)
    widths = (before.padding.left + old + before.padding.right, after.padding.left + new + after.padding.right)
    pairs: dict[str, list[tuple[int, int]]] = {name: [(old, new), widths] for name in TOTAL_COUNTS}
    if before.prompt_length is not None and after.prompt_length is not None:
        prompts = (before.prompt_length, after.prompt_length)
        ahead = (before.padding.left + prompts[0], after.padding.left + prompts[1])
        pairs |= {name: [prompts, ahead] for name in _PROMPT_COUNTS}
        pairs |= {name: [(old - prompts[0], new - prompts[1])] for name in _RESPONSE_COUNTS}
    if before.loss_mask is not None and after.loss_mask is not None:
        trained = (int(before.loss_mask.sum()), int(after.loss_mask.sum()))
        pairs |= {name: [trained] for name in _TRAINED_COUNTS}
    return pairs


def call_counts(before: Turn, after: Turn) -> CountPairs:
    """The counts that may be stored with a call, as old and new values; completions never change."""
    if before.prompt_ids is None or after.prompt_ids is None:
        return {}
    prompts = (len(before.prompt_ids), len(after.prompt_ids))
    pairs: dict[str, list[tuple[int, int]]] = {name: [prompts] for name in _PROMPT_COUNTS}
    if before.completion_ids is not None:
        completion = len(before.completion_ids)
        pairs |= {name: [(prompts[0] + completion, prompts[1] + completion)] for name in TOTAL_COUNTS}
    return pairs


_DTYPES_OF_MASK = {
    MaskEncoding.BOOL: "b",
    MaskEncoding.FLOAT: "f",
    MaskEncoding.BINARY: "iu",
    MaskEncoding.LABELS: "iu",
}
"""The dtype kinds that a mask of this encoding can have."""


def with_values(row: Row, values: Mapping[str, Any]) -> Row:
    """The row with these values at these keys; the same object if it has them all already."""
    if all(name in row and row[name] is value for name, value in values.items()):
        return row
    return {**row, **values}


def add_padding(values: Any, padding: Padding, fill: Any) -> Any:
    """A column with padding of one value around it, still a list or an array."""
    if not padding.left and not padding.right:
        return values
    if isinstance(values, np.ndarray):
        sides = [np.full(n, fill, values.dtype) for n in (padding.left, padding.right)]
        return np.concatenate([sides[0], values, sides[1]])
    return [fill] * padding.left + list(values) + [fill] * padding.right


def _as_padded_list(
    values: NDArray[Any] | Sequence[Any], original: Any, before: TrainingRow, after: TrainingRow, fill: Any = None
) -> Any:
    """The values with padding around them, in the form of the log; `original` itself if equal.

    The padding is that of the log, cut, or extended by its outermost value. A column that had none gets `fill`;
    RecordError if that is needed and None.
    """
    inner = to_list(values)
    left, right = before.padding.left, before.padding.right
    old = to_list(() if original is None else original)
    if len(old) != left + len(before.token_ids) + right:
        # The column has another width than the ids, so its padding is unknown.
        old, left, right = [], 0, 0
    padding = old[-1:] if right else old[:1] if left else [] if fill is None else [fill]
    ahead = _resized_padding(old[:left], after.padding.left, padding, outer_first=True)
    behind = _resized_padding(old[len(old) - right :], after.padding.right, padding, outer_first=False)
    return as_logged([*ahead, *inner, *behind], original)


def changed_columns(before: TrainingRow | Turn, after: TrainingRow | Turn) -> dict[str, NDArray[Any] | None]:
    """The columns whose values or mask encoding changed, by name; None for one that a repair dropped."""
    now = {column.name: column for column in after.columns}
    changed: dict[str, NDArray[Any] | None] = {}
    for column in before.columns:
        new = now.get(column.name)
        if new is None:
            changed[column.name] = None
        elif not equal_values(new.values, column.values) or new.encoding is not column.encoding:
            changed[column.name] = new.values
    return changed


def column_as_logged(logged: Any, old: Column, new: Column | None, before: TrainingRow, after: TrainingRow) -> Any:
    """A column of a training row in the form of the log, with its padding; None if the repair dropped it."""
    if new is None:
        return None
    if new.role is ColumnRole.LOGPROBS and is_nested_logprobs(logged):
        return logprobs_as_logged(new.values, logged)
    if new.name == WEIGHTS and new.values.dtype.kind == "O":
        return spans_as_logged(logged, before, after)
    blank = _fill_value(new)
    if new.encoding is not old.encoding and new.encoding is not None:
        whole = new.values.tolist()
        if new.alignment is Alignment.FULL:
            whole = add_padding(whole, after.padding, blank)
        encoding = new.encoding or MaskEncoding.BINARY
        kind = {MaskEncoding.BOOL: bool, MaskEncoding.FLOAT: float}.get(encoding, int)
        plain = [kind(value) for value in whole]
        if not isinstance(logged, np.ndarray):
            return plain
        if logged.dtype.kind not in _DTYPES_OF_MASK.get(encoding, ""):
            raise RecordError(
                f"column {new.name!r} is {logged.dtype} in this table and cannot hold a {encoding} mask"
            )
        return as_logged(plain, logged)
    if new.alignment is Alignment.FULL:
        return _as_padded_list(new.values, logged, before, after, blank)
    return as_logged(new.values, logged)


def updated_columns(row: Row, before: TrainingRow, after: TrainingRow, ids: str | None) -> dict[str, Any]:
    """The values of a training row's columns by name; unchanged ones are the same objects.

    `ids` is the column of token ids; None if they are written elsewhere. RecordError if the attention mask hides
    tokens that may have moved.
    """
    values: dict[str, Any] = {}
    if ids is not None:
        values[ids] = _as_padded_list(after.token_ids, row[ids], before, after)
    changed = changed_columns(before, after)
    now = {column.name: column for column in after.columns}
    for old in before.columns:
        if old.name in changed or before.padding != after.padding:
            original = row.get(old.name)
            values[old.name] = column_as_logged(original, old, now.get(old.name), before, after)
    names_before = {column.name for column in before.columns}
    for new in after.columns:
        if new.name not in names_before:
            values[new.name] = added_column(row, new, after.padding)
    mask: Any = row.get("attention_mask")
    left, full = before.padding.left, len(before.token_ids)
    if not is_list(mask) or len(mask) != left + full + before.padding.right:
        return values
    values["attention_mask"] = mask
    if before.padding != after.padding or full != len(after.token_ids):
        seen = np.unique(np.asarray(mask)[left : left + full])
        if len(seen) != 1 or not seen[0] > 0:
            raise RecordError(
                "attention_mask hides tokens between visible ones, and it is unclear where they are now"
            )
        visible = seen.tolist() * len(after.token_ids)
        values["attention_mask"] = as_logged(add_padding(visible, after.padding, 0), mask)
    return values


def added_column(holder: Mapping[str, Any], column: Column, padding: Padding | None = None) -> list[Any]:
    """A column that a repair adds to a row or call, null where unknown; RecordError if its name is taken."""
    if holder.get(column.name) is not None:
        raise RecordError(f"column {column.name!r} would be added, and the log has one of that name")
    values = [None if isinstance(value, float) and value != value else value for value in column.values.tolist()]
    return list(add_padding(values, padding or Padding(), _fill_value(column)))


def updated_row(
    row: Row, before: TrainingRow | None, after: TrainingRow | None, ids: str, *, can_pad: bool = False
) -> Row:
    """A row that is one training row, with new columns, copies and counts; the same object if nothing changed.

    With `can_pad` the format says elsewhere which tokens are padding; else RecordError if there is any.
    """
    if before is None or after is None:
        if before is not after:
            raise RecordError("a training row can neither be added to this format's row nor removed")
        return row
    if not can_pad and after.padding != Padding():
        raise RecordError("this format has no padding: nothing in its rows would tell padding from tokens")
    values = updated_columns(row, before, after, ids)
    copies = [RepeatedIds(row[ids], values[ids], FLAT_IDS)] if values[ids] is not row[ids] else []
    if not same_ids(before.token_ids, after.token_ids):
        values |= {key: None for key in ENGINE_COLUMNS if row.get(key) is not None}
    return with_counts(with_values(with_new_copies(row, copies), values), row_counts(before, after))


def same_trained(before: TrainingRow | None, after: TrainingRow | None) -> bool:
    """Whether two training rows have the same ids and loss mask, or both are None."""
    if before is None or after is None:
        return before is after
    return same_ids(before.token_ids, after.token_ids) and equal_values(before.loss_mask, after.loss_mask)


def one_repair_each(rollouts: Sequence[Rollout], repaired: Sequence[RepairedRollout]) -> list[RepairedRollout]:
    """The one repaired form of each rollout of a row, in order; RecordError if a rollout is forked or missing."""
    by_item: dict[int, list[RepairedRollout]] = {}
    for part in repaired:
        by_item.setdefault(part.rollout.place.item, []).append(part)
    if any(len(by_item.get(rollout.place.item, [])) != 1 for rollout in rollouts):
        raise RecordError("this format holds one training row for each rollout and cannot hold a fork of it")
    return [by_item[rollout.place.item][0] for rollout in rollouts]


def _resized_padding(old: list[Any], size: int, values: list[Any], *, outer_first: bool) -> list[Any]:
    """One side's padding at a new size: its outermost entries, or all of it after or before more of `values`."""
    if size <= len(old):
        return old[:size] if outer_first else old[len(old) - size :]
    if not values:
        raise RecordError("the row would need padding, and nothing in it says with which value")
    more = values * (size - len(old))
    return more + old if outer_first else old + more


def _fill_value(column: Column) -> Any:
    """What a column holds where there is no token; None if that is unknown."""
    if column.role is ColumnRole.LOSS_MASK:
        return -100 if column.encoding is MaskEncoding.LABELS else 0
    return column.sentinel


def moved_boundaries(
    before: TrainingRow, after: TrainingRow, ends: Sequence[int], generated: Sequence[bool]
) -> list[int]:
    """Where the boundaries `ends` of messages in the old ids are in the new ids.

    Both lists start with 0 and end with the length. A boundary next to an unchanged token moves with it. One
    inside a change, or where tokens were inserted, goes where the loss mask switches between two messages of which
    one was sampled; `generated` says which were. RecordError if neither applies.
    """
    old, new = before.token_ids, after.token_ids
    # Frequent tokens are no anchors in very long sequences, or the search would take minutes.
    # A region is `[start, end)` of the old ids, then of the new ids.
    regions = list(gaps(paired_runs(old, new, frequent_from=2001), len(old), len(new)))
    moved = [0]
    for number, end in enumerate(ends[1:-1]):
        region = next((region for region in regions if region[0] <= end <= region[1]), None)
        if region is None:
            moved.append(end + sum((r[3] - r[2]) - (r[1] - r[0]) for r in regions if r[1] < end))
            continue
        old_start, old_end, start, new_end = region
        if old_start < old_end and end in (old_start, old_end):
            # Only one side of the boundary changed.
            moved.append(start if end == old_start else new_end)
            continue
        # The boundary is where the mask switches between the two messages.
        if start < new_end:
            own = None if after.loss_mask is None else after.loss_mask[start:new_end] == generated[number]
            same = generated[number] == generated[number + 1]
            if own is None or same or not own[: int(own.sum())].all():
                raise RecordError(
                    f"the tokens between message_log[{number}] and message_log[{number + 1}] changed, and it is "
                    "unclear which of the two messages they belong to"
                )
            start += int(own.sum())
        moved.append(start)
    moved.append(len(new))
    if any(a > b for a, b in itertools.pairwise(moved)):
        raise RecordError("it is unclear which message the changed tokens belong to")
    return moved
