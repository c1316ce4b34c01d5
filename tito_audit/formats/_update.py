"""Writing a row back: values in the log's own form, in a copy that shares what did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import FLAT_IDS, is_list
from tito_audit.formats._copies import Copy, row_counts, with_copies, with_counts
from tito_audit.formats._values import as_logged, equal_values, logprobs_as_logged
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Padding, Rollout, TrainingRow

_STYLES = {MaskEncoding.BOOL: "b", MaskEncoding.FLOAT: "f", MaskEncoding.BINARY: "iu", MaskEncoding.LABELS: "iu"}
"""The dtype kinds that a mask of this encoding can have."""


def with_values(row: Row, values: Mapping[str, Any]) -> Row:
    """The row with these values at these keys, in its key order; the same object if it has them all already."""
    if all(name in row and row[name] is value for name, value in values.items()):
        return row
    return {**row, **values}


def padded(values: Any, padding: Padding, fill: Any) -> Any:
    """A column with padding added around it, still a list or an array."""
    if not padding.left and not padding.right:
        return values
    if isinstance(values, np.ndarray):
        sides = [np.full(n, fill, values.dtype) for n in (padding.left, padding.right)]
        return np.concatenate([sides[0], values, sides[1]])
    return [fill] * padding.left + list(values) + [fill] * padding.right


def _as_padded(
    values: NDArray[Any] | Sequence[Any], original: Any, before: TrainingRow, after: TrainingRow, fill: Any = None
) -> Any:
    """One value per token in the log's form, with the log's padding around them; `original` itself if equal.

    Padding that grows repeats its outermost value; `fill` is for a column that had none. RecordError if it
    grows and no value is known.
    """
    inner = values.tolist() if isinstance(values, np.ndarray) else list(values)
    left, right = before.padding.left, before.padding.right
    old: list[Any] = original.tolist() if isinstance(original, np.ndarray) else list(original or ())
    if len(old) != left + len(before.token_ids) + right:
        # The column did not fit, so its padding is unknown.
        old, left, right = [], 0, 0
    known = old[-1:] if right else old[:1] if left else [] if fill is None else [fill]
    ahead = _side(old[:left], after.padding.left, known, outer_first=True)
    behind = _side(old[len(old) - right :], after.padding.right, known, outer_first=False)
    return as_logged([*ahead, *inner, *behind], original)


def changed_columns(before: TrainingRow, after: TrainingRow) -> dict[str, NDArray[Any] | None]:
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


def column_as_logged(
    original: Any, old: Column, new: Column | None, before: TrainingRow, after: TrainingRow
) -> Any:
    """A column of a training row as the log writes it, padding included; None if it was dropped."""
    if new is None:
        return None
    if new.role is ColumnRole.LOGPROBS and _is_nested(original):
        return logprobs_as_logged(new.values, original)
    blank = _fill_value(new)
    if new.encoding is not old.encoding and new.encoding is not None:
        whole = new.values.tolist()
        if new.alignment is Alignment.FULL:
            whole = padded(whole, after.padding, blank)
        return _restyled(whole, new, original)
    if new.alignment is Alignment.FULL:
        return _as_padded(new.values, original, before, after, blank)
    return as_logged(new.values, original)


def updated_columns(row: Row, before: TrainingRow, after: TrainingRow, ids: str | None) -> dict[str, Any]:
    """The new values of a flat training row's columns, by name; unchanged ones are the same objects.

    `ids` is the column of token ids; None if they are written elsewhere.
    """
    values: dict[str, Any] = {}
    if ids is not None:
        values[ids] = _as_padded(after.token_ids, row[ids], before, after)
    changed = changed_columns(before, after)
    now = {column.name: column for column in after.columns}
    for old in before.columns:
        if old.name in changed or before.padding != after.padding:
            original = row.get(old.name)
            values[old.name] = column_as_logged(original, old, now.get(old.name), before, after)
    values.update(_attention(row, before, after))
    return values


def updated_row(
    row: Row, before: TrainingRow | None, after: TrainingRow | None, ids: str, *, can_pad: bool = False
) -> Row:
    """A row that is one flat training row, with new columns and counts; the same object if nothing changed."""
    if before is None or after is None:
        if before is not after:
            raise RecordError("a training row can neither be added to this format's row nor removed")
        return row
    if not can_pad and after.padding != Padding():
        raise RecordError("this format has no padding: nothing in its rows would tell padding from tokens")
    values = updated_columns(row, before, after, ids)
    copies = [Copy(row[ids], values[ids], FLAT_IDS)] if values[ids] is not row[ids] else []
    return with_counts(with_values(with_copies(row, copies), values), row_counts(before, after))


def at_most_one_each(rollouts: Sequence[Rollout], repaired: Sequence[RepairedRollout]) -> list[RepairedRollout]:
    """The repaired form of each of the row's rollouts, in order; RecordError if one is forked or missing."""
    by_item: dict[int, list[RepairedRollout]] = {}
    for one in repaired:
        by_item.setdefault(one.rollout.place.item, []).append(one)
    if any(len(by_item.get(rollout.place.item, [])) != 1 for rollout in rollouts):
        raise RecordError("this format holds one training row for each rollout and cannot hold a fork of it")
    return [by_item[rollout.place.item][0] for rollout in rollouts]


def _side(old: list[Any], size: int, known: list[Any], *, outer_first: bool) -> list[Any]:
    """Padding of a new size on one side: the outermost part of the old one, or the old one extended."""
    if size <= len(old):
        return old[:size] if outer_first else old[len(old) - size :]
    if not known:
        raise RecordError("the row would need padding, and nothing in it says with which value")
    more = known * (size - len(old))
    return more + old if outer_first else old + more


def _attention(row: Row, before: TrainingRow, after: TrainingRow) -> dict[str, Any]:
    """`attention_mask` for the new length and padding, if the row has one over its ids."""
    original = row.get("attention_mask")
    left, full, right = before.padding.left, len(before.token_ids), before.padding.right
    if not is_list(original) or len(original) != left + full + right:  # type: ignore[arg-type]
        return {}
    if before.padding == after.padding and full == len(after.token_ids):
        return {"attention_mask": original}
    seen = np.unique(np.asarray(original)[left : left + full])
    if len(seen) != 1 or not seen[0] > 0:
        raise RecordError("attention_mask hides tokens between visible ones, and it is unclear where they are now")
    values = seen.tolist() * len(after.token_ids)
    return {"attention_mask": as_logged(padded(values, after.padding, 0), original)}


def _fill_value(column: Column) -> Any:
    """What a column holds where there is no token; None if unknown."""
    if column.role is ColumnRole.LOSS_MASK:
        return -100 if column.encoding is MaskEncoding.LABELS else 0
    return column.sentinel


def _restyled(values: list[Any], column: Column, original: Any) -> Any:
    """A mask written in a new encoding; RecordError if the table's type cannot hold it."""
    encoding = column.encoding or MaskEncoding.BINARY
    kind = {MaskEncoding.BOOL: bool, MaskEncoding.FLOAT: float}.get(encoding, int)
    plain = [kind(value) for value in values]
    if not isinstance(original, np.ndarray):
        return plain
    if original.dtype.kind not in _STYLES.get(encoding, ""):
        raise RecordError(
            f"column {column.name!r} is {original.dtype} in this table and cannot hold a {encoding} mask"
        )
    return as_logged(plain, original)


def _is_nested(original: object) -> bool:
    """True for logprobs stored with other data: an object, or one list per token."""
    return isinstance(original, Mapping) or (
        isinstance(original, list | tuple) and len(original) > 0 and is_list(original[0])
    )
