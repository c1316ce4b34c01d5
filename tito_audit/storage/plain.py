"""plain_row: a row of a Python program with the values that a log would hold."""

from __future__ import annotations

import datetime
import decimal
import enum
import os
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from tito_audit.format import Row
from tito_audit.record.edits import ABSENT, Path

_SIMPLE = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values that stay as they are."""
MISSING = {"NAType", "NaTType"}
"""What pandas calls the types of a missing value."""


class NotPlain(ValueError):
    """A value that no log can hold; the message names its type."""


def plain_row(row: Mapping[Any, Any], *, lean: bool = False) -> Row | str:
    """The row as a log holds it, or the reason why it cannot be read; `row` itself is not changed.

    Arrays and tensors become numpy arrays, other numbers Python's, times text, missing values None. What is plain
    already is shared, not copied. `lean`: objects lose keys without a value, as tables do.
    """
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[str(name)] = plain_value(value, lean=lean)
        except NotPlain as error:
            return f"column {str(name)!r} holds {error}"
    return plain


def plain_value(value: Any, *, lean: bool = False) -> Any:
    """One value as a log holds it; NotPlain if no log can."""
    try:
        return _plain(value, lean)
    except RecursionError:
        raise NotPlain("values nested too deeply to be read") from None


def _plain(value: Any, lean: bool) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if isinstance(value, Mapping):
        plain = {str(key): _plain(entry, lean) for key, entry in value.items()}
        if not lean:
            return plain
        # A number without a fraction was a whole one before a value next to it was missing.
        whole = {
            key: int(entry) for key, entry in plain.items() if isinstance(entry, float) and entry.is_integer()
        }
        return {key: whole.get(key, entry) for key, entry in plain.items() if entry is not None}
    if kind is list:
        return value if set(map(type, value)) <= _SIMPLE else [_plain(entry, lean) for entry in value]
    if isinstance(value, np.ndarray):
        return _of_array(value, lean)
    if _is_tensor(value):
        return _of_array(_of_tensor(value), lean)
    if hasattr(value, "as_py"):
        return _plain(value.as_py(), lean)
    if hasattr(value, "__array__"):
        return _of_array(np.asarray(value), lean)
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview):
        return _plain(list(value), lean)
    return _single(value, lean)


def _single(value: Any, lean: bool) -> Any:
    """A value that holds no others."""
    kind = type(value)
    if kind.__name__ in MISSING and kind.__module__.startswith("pandas."):
        return None
    if isinstance(value, enum.Enum):
        return _plain(value.value, lean)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, memoryview):
        return bytes(value) if value.format in ("B", "b", "c") else value.tolist()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | uuid.UUID):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if kind.__module__.startswith("PIL."):
        return {"path": str(getattr(value, "filename", ""))}
    if kind.__module__.startswith("pandas."):  # a period or an interval
        return str(value)
    raise NotPlain(f"a value of type {kind.__module__}.{kind.__qualname__}, which no log can hold")


def _of_array(values: np.ndarray[Any, Any], lean: bool) -> Any:
    """An array of numbers as it is, if it has one dimension; anything else as a list or a single value."""
    kind = values.dtype.kind
    if kind == "c":
        raise NotPlain(f"numbers of {values.dtype}, which no log can hold")
    if values.ndim == 0:
        if kind == "f":
            return float(values)
        return str(values) if kind in "mM" else _plain(values.item(), lean)
    if kind in "mM":
        return values.astype(str).tolist()
    if kind in "biuf":
        return values if values.ndim == 1 else [_of_array(entry, lean) for entry in values]
    if kind in "OUS":
        return _plain(values.tolist(), lean)
    raise NotPlain(f"an array of {values.dtype}, which no log can hold")


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _of_tensor(value: Any) -> np.ndarray[Any, Any]:
    try:
        value = value.detach().cpu()
        if value.is_floating_point() and value.element_size() < 4:  # numpy has no bfloat16
            value = value.float()
        array: np.ndarray[Any, Any] = value.resolve_conj().numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantized, nested, or without values
        raise NotPlain(f"a tensor that is not an array ({str(error).splitlines()[0]})") from None
    return array


def edited(original: Any, path: Path, value: Any, old: Any = None) -> Any:
    """A copy of a value of a program with one part replaced, or removed by ABSENT, in the form that it had.

    `old` is that part as a log holds it. Tensors, tuples and arrays stay what they are; parts that do not change
    are shared.
    """
    if not path:
        # A list in which entries that are in the old list too are those of the program.
        if not isinstance(value, list) or not isinstance(old, list) or isinstance(original, Mapping | str):
            with_originals = value
        else:
            places = {id(entry): number for number, entry in enumerate(old)}
            with_originals = [original[places[id(entry)]] if id(entry) in places else entry for entry in value]
        return _like(original, with_originals)
    head, rest = path[0], path[1:]
    if isinstance(original, Mapping):
        copy = dict(original)
        key = next((key for key in original if key == head or str(key) == head), head)
        if value is ABSENT and not rest:
            copy.pop(key, None)
        else:
            copy[key] = edited(original.get(key), rest, value, old)
        return copy
    entries = list(original)
    entries[int(head)] = edited(entries[int(head)], rest, value, old)
    return _like(original, entries)


def _like(original: Any, value: Any) -> Any:
    """A value in the form of another: as a tensor, a tuple or an array, else as JSON has it."""
    if _is_tensor(original) and isinstance(value, list | np.ndarray):
        import torch

        return torch.as_tensor(np.asarray(value), dtype=original.dtype, device=original.device)
    if isinstance(original, np.ndarray):
        return _as_array(original.dtype, value) if isinstance(value, list) else value
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(listed) if isinstance(original, tuple) and isinstance(listed, list) else listed


def _as_array(dtype: np.dtype[Any], value: list[Any]) -> Any:
    """A list as an array; as it is if the type cannot hold it."""
    if dtype.kind == "O":
        array = np.empty(len(value), object)
        array[:] = value
        return array
    try:
        return np.array(value, dtype)
    except (TypeError, ValueError, OverflowError):
        return value
