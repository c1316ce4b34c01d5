"""Numbers and times as Arrow arrays, from the values that a row shows."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_number(kind: Any) -> bool:
    """Whether the values of a type are integers, floats or booleans."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def times(kind: Any, values: list[Any]) -> Any:
    """Times from the texts or counts that a row shows."""
    import pyarrow as pa

    if all(isinstance(value, str) for value in values):
        return _times_of_text(kind, values)
    return pa.array(values, type=kind)


def _times_of_text(kind: Any, values: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_duration(kind) or all(value.lstrip("-").isdigit() for value in values):
        counts = pa.array([int(value) for value in values], pa.int32() if kind.bit_width == 32 else pa.int64())
        return counts.view(kind)
    if pa.types.is_time(kind):
        # Arrow parses a time of day only as part of a timestamp.
        moments = pa.array([f"1970-01-01 {value}" for value in values], pa.string())
        return moments.cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.array(values, pa.string()).cast(kind)


def numbers(kind: Any, values: Any, *, nan_is_null: bool, nullable: bool = True) -> Any:
    """Numbers as an Arrow array, exactly; floats are rounded to the width of the column."""
    import pyarrow as pa

    whole = (
        pa.types.is_integer(kind) and isinstance(values, list) and not any(isinstance(v, float) for v in values)
    )
    array = pa.array(values, type=kind if whole else None)
    given = array.type
    if not (is_number(given) or pa.types.is_null(given)):
        raise TypeError(f"numbers of type {kind} were expected, not {given}")
    if array.null_count and not nullable:
        raise ValueError("an entry must not be null")
    if pa.types.is_floating(kind):
        return _floats(kind, array, nan_is_null)
    if pa.types.is_boolean(kind) and not pa.types.is_boolean(given):
        odd = next((value for value in array.to_pylist() if value not in (0, 1, None)), None)
        if odd is not None:
            raise ValueError(f"{odd} is neither true nor false")
    return array.cast(kind)


def _floats(kind: Any, array: Any, nan_is_null: bool) -> Any:
    import pyarrow as pa

    missing = array.is_null().to_numpy(zero_copy_only=False)
    flat = array.to_numpy(zero_copy_only=False)
    with np.errstate(over="raise"):
        flat = flat.astype(f"float{kind.bit_width}", copy=False)
    if nan_is_null:
        missing = missing | np.isnan(flat)
    return pa.array(flat, type=kind, mask=missing)
