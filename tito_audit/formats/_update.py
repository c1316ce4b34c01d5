"""Writing a row again: values in the form the log had them, in a copy that shares what did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.record.mended import Mended
from tito_audit.record.rollout import Padding, Rollout, TrainingRow

__all__ = ["as_logged", "at_most_one_each", "changed_columns", "padded", "with_values"]


def with_values(row: Row, values: Mapping[str, Any]) -> Row:
    """The row with these values at these keys, in its key order; itself when all are there already."""
    if all(name in row and row[name] is value for name, value in values.items()):
        return row
    return {**row, **values}


def as_logged(values: NDArray[Any] | Sequence[Any] | None, original: Any) -> Any:
    """One value a token in the form in which the log had the column; `original` itself when they are equal.

    A numpy array stays one, of its type, unless a value is unknown and the type cannot say so. In a list,
    whole numbers stay whole numbers where the log had only such, and NaN is written as null unless the
    column itself holds NaN.
    """
    if values is None:
        return None
    new = values.tolist() if isinstance(values, np.ndarray) else list(values)
    old = original.tolist() if isinstance(original, np.ndarray) else original
    if isinstance(old, list | tuple) and _equal(new, list(old)):
        return original
    if isinstance(original, np.ndarray) and original.dtype.kind in "iufb":
        if original.dtype.kind == "f" or not any(_unknown(value) for value in new):
            return np.array([np.nan if value is None else value for value in new], original.dtype)
        return [None if _unknown(value) else _whole(value) for value in new]
    kinds = {type(value) for value in old or ()} - {type(None)}
    if any(isinstance(value, float) and np.isnan(value) for value in old or ()):
        return new
    plain = [None if _unknown(value) else value for value in new]
    if kinds == {int}:
        plain = [_whole(value) for value in plain]
    elif kinds == {bool}:
        plain = [value if value is None else bool(value) for value in plain]
    return plain


def padded(values: Any, padding: Padding, fill: Any) -> Any:
    """A column with its padding around it, as the kind of list it is."""
    if not padding.left and not padding.right:
        return values
    if isinstance(values, np.ndarray):
        sides = [np.full(n, fill, values.dtype) for n in (padding.left, padding.right)]
        return np.concatenate([sides[0], values, sides[1]])
    return [fill] * padding.left + list(values) + [fill] * padding.right


def changed_columns(before: TrainingRow, after: TrainingRow) -> dict[str, NDArray[Any] | None]:
    """The columns whose values changed, by name; None for one that a repair dropped."""
    now = {column.name: column.values for column in after.columns}
    changed: dict[str, NDArray[Any] | None] = {}
    for column in before.columns:
        values = now.get(column.name)
        if values is None:
            changed[column.name] = None
        elif values is not column.values and not _equal(values.tolist(), column.values.tolist()):
            changed[column.name] = values
    return changed


def at_most_one_each(row_rollouts: Sequence[Rollout], mended: Sequence[Mended]) -> list[Mended]:
    """The mended rollout of each of the row's rollouts, in order; RecordError for a fork or a gap."""
    by_item: dict[int, list[Mended]] = {}
    for one in mended:
        by_item.setdefault(one.rollout.place.item, []).append(one)
    if any(len(by_item.get(rollout.place.item, [])) != 1 for rollout in row_rollouts):
        raise RecordError("this format holds one training row for each rollout and cannot hold a fork of it")
    return [by_item[rollout.place.item][0] for rollout in row_rollouts]


def _equal(new: list[Any], old: list[Any]) -> bool:
    """Equal values, where NaN and null are both "unknown"."""
    return len(new) == len(old) and all(
        a == b or (_unknown(a) and _unknown(b)) for a, b in zip(new, old, strict=True)
    )


def _unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
