"""The arrays of a rollout, and how they are made from plain values.

Axis letters in names and comments: `T` tokens of a training row, `P` tokens of one prompt, `C` tokens of one
completion, `B` blocks of an alignment, `V` the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError

Ids: TypeAlias = NDArray[np.int32]
"""Token ids, `[N]` int32."""
Mask: TypeAlias = NDArray[np.bool_]
"""True where a token is trained, `[N]` bool."""
Logprobs: TypeAlias = NDArray[np.float64]
"""Natural logarithms of probabilities, `[N]` float64; NaN where nothing was recorded."""
Offsets: TypeAlias = NDArray[np.int64]
"""Positions or lengths, `[N]` int64."""

_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
"""The bounds of int32."""
_NUMBERS = {float, int, bool, type(None)}


def empty_ids() -> Ids:
    """No tokens, `[0]` int32."""
    return np.empty(0, np.int32)


def as_ids(values: Sequence[Any] | NDArray[Any], name: str) -> Ids:
    """Plain integers as `[N]` int32; `name` is the column, for the message.

    RecordError if not token ids: floats, strings, booleans, nested lists, values outside 32 bits.
    """
    if isinstance(values, np.ndarray):
        array = values
    else:
        if not isinstance(values, list | tuple):
            raise RecordError(f"column {name!r} is {json_kind(values)}, not a list of token ids")
        if not set(map(type, values)) <= {int}:
            position, value = next((i, v) for i, v in enumerate(values) if type(v) is not int)
            raise RecordError(f"column {name!r} holds {json_kind(value)} at position {position}, not a token id")
        try:
            return np.array(values, np.int32)
        except OverflowError:
            array = np.array(values)
        if array.dtype != np.int64:
            raise RecordError(f"column {name!r} holds an id of more than 64 bits, which no vocabulary has")
    if array.ndim != 1:
        raise RecordError(f"column {name!r} has {array.ndim} dimensions, token ids have one")
    if array.dtype.kind not in "iu":
        if len(array):
            raise RecordError(f"column {name!r} holds {array.dtype} values, not token ids")
        return empty_ids()
    if (
        array.dtype != np.int32
        and len(array)
        and not _LEAST <= np.minimum.reduce(array) <= np.maximum.reduce(array) <= _MOST
    ):
        position = int(((array > _MOST) | (array < _LEAST)).nonzero()[0][0])
        raise RecordError(
            f"column {name!r} holds id {array[position]} at position {position}, "
            "which no vocabulary has (ids are below 2^31)"
        )
    return array.astype(np.int32, copy=False)


def as_floats(values: Sequence[Any] | NDArray[Any], name: str) -> NDArray[np.float64]:
    """Plain numbers as `[N]` float64, None as NaN ("not recorded"); RecordError for anything else."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iufb":
            raise RecordError(f"column {name!r} holds {values.dtype} values of {values.ndim} dimensions")
        return values.astype(np.float64, copy=False)
    if not isinstance(values, list | tuple):
        raise RecordError(f"column {name!r} is {json_kind(values)}, not a list of numbers")
    kinds = set(map(type, values))
    if not kinds <= _NUMBERS:
        position, value = next((i, v) for i, v in enumerate(values) if type(v) not in _NUMBERS)
        raise RecordError(f"column {name!r} holds {json_kind(value)} at position {position}, not a number")
    try:
        if type(None) not in kinds:
            return np.array(values, dtype=np.float64)
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    except OverflowError:
        raise RecordError(f"column {name!r} holds a number too large for a float") from None


def json_kind(value: object) -> str:
    """The type of a value in JSON's words, for messages."""
    if isinstance(value, np.generic):  # an array element
        value = value.item()
    if value is None:
        return "null"
    words = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    if type(value) in words:
        return words[type(value)]
    if isinstance(value, list | tuple | np.ndarray):
        return "a list"
    return "an object" if isinstance(value, dict) else "a value"
