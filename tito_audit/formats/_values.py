"""Values of one column in the form a log writes them: whole numbers, null or NaN, arrays of a table's type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.formats._columns import is_list, plain


def as_logged(values: NDArray[Any] | Sequence[Any] | None, original: Any) -> Any:
    """One value per token in the form the log had the column; `original` itself if they are equal.

    A numpy array keeps its type, unless a value is unknown and the type has no NaN; RecordError if the
    type cannot hold a value. In a list, whole numbers stay whole numbers if the log had only those, and
    NaN is written as null unless the column itself holds NaN.
    """
    if values is None:
        return None
    if is_list(original) and equal_values(values, original):
        return original
    new = plain(values)
    if isinstance(original, np.ndarray) and original.dtype.kind in "iufb":
        return _as_array(new, original.dtype)
    return _as_list(new, list(original) if is_list(original) else [])


def equal_values(new: Any, old: Any) -> bool:
    """Whether two lists are equal, where NaN and null both mean "unknown" and 1 equals 1.0."""
    if new is old:
        return True
    if len(new) != len(old):
        return False
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and new.dtype.kind in "iufb":
        if old.dtype.kind == "f" and new.dtype.kind == "f":
            return bool(np.array_equal(new, old, equal_nan=True))
        if old.dtype.kind in "iub":
            return bool(np.array_equal(new, old))
    return all(a is b or _equal(a, b) for a, b in zip(plain(new), plain(old), strict=True))


def same_ids(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """True for equal ids, or if both are None."""
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def same_floats(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """True for equal numbers with NaN in the same places, or if both are None."""
    return left is right or (
        left is not None and right is not None and np.array_equal(left, right, equal_nan=True)
    )


def _as_array(new: list[Any], dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return np.array([np.nan if value is None else value for value in new], dtype)
    if any(is_unknown(value) for value in new):
        return [None if is_unknown(value) else as_whole(value) for value in new]
    try:
        made = np.array([as_whole(value) for value in new], dtype)
    except OverflowError:
        made = np.empty(0, dtype)
    if len(made) != len(new) or not np.array_equal(made, np.array(new)):
        raise RecordError(f"a column of {dtype} in this table cannot hold what the repair puts there")
    return made


def _as_list(new: list[Any], old: list[Any]) -> list[Any]:
    if any(isinstance(value, float) and value != value for value in old):
        return new
    plain = [None if is_unknown(value) else value for value in new]
    kinds = {type(value) for value in old} - {type(None)}
    if kinds == {bool}:
        return [value if value is None else bool(value) for value in plain]
    if kinds == {float}:
        return [float(value) if type(value) is int else value for value in plain]
    if int in kinds and not any(isinstance(value, float) and value.is_integer() for value in old):
        return [as_whole(value) for value in plain]
    return plain


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_list(a) and is_list(b):
        return equal_values(a, b)
    if is_list(a) or is_list(b):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, int):
        b = _as_float(b)  # a whole number that no float can hold was read as the nearest float
    elif isinstance(a, int) and isinstance(b, float):
        a = _as_float(a)
    return bool(a == b) or (is_unknown(a) and is_unknown(b))


def _as_float(value: int) -> float | int:
    try:
        return float(value)
    except OverflowError:
        return value


def is_unknown(value: object) -> bool:
    """True for null and for NaN."""
    return value is None or (isinstance(value, float) and value != value)


def as_whole(value: Any) -> Any:
    """A float without a fraction as a whole number; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
