"""Values of one column in the form of the log: integers, null or NaN, arrays of a table's type."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.formats._columns import filled, is_list, plain
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.nesting import parsed_json
from tito_audit.record.sources import Layout


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


def literal(value: Any) -> Any:
    """A value, parsed if it is text: JSON, or a literal as Python prints it."""
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value


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
        raise RecordError(f"a column of {dtype} in this table cannot hold the repaired values")
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


# Logprobs stored together with other data: one object per token, triples, parallel lists


def is_nested(original: Any) -> bool:
    """True for logprobs stored with other data: an object, or one list per token."""
    return isinstance(original, Mapping) or (
        isinstance(original, list | tuple) and len(original) > 0 and is_list(original[0])
    )


def logprobs_as_logged(values: NDArray[Any], original: Any) -> Any:
    """Logprobs put into objects or lists that also hold other data; `original` itself if they are equal.

    OpenAI's object keeps its tokens, SGLang's triples their ids and texts: only numbers change.
    RecordError if their number changes, because the other data cannot be made up.
    """
    inside = isinstance(original, Mapping)
    name = "token_logprobs" if inside and is_list(original.get("token_logprobs")) else "content"
    layout = (Layout.PLAIN if name == "token_logprobs" else Layout.ENTRIES) if inside else Layout.TRIPLES
    old = original.get(name) if inside else original
    old = () if old is None else old
    if len(values) != len(old):
        raise RecordError(
            f"the logprobs are stored with the texts or ids of {len(old)} tokens and would become {len(values)}: "
            "the texts and ids for that many cannot be made up"
        )
    new = rescored(old, layout=layout, old=values, new=values, ids=None)
    if new is old or (layout is not Layout.PLAIN and all(a is b for a, b in zip(new, old, strict=True))):
        return original
    return {**original, name: new} if inside else new


def rescored(value: Any, *, layout: Layout, old: Logprobs, new: Logprobs, ids: Ids | None) -> Any:
    """A value of this layout with `new` logprobs in place of `old`; the same object if they are equal.

    If there are fewer, whole entries are dropped; RecordError if it is unclear which ones. `ids` are the
    completion's.
    """
    if layout is Layout.PLAIN:
        return as_logged(new, value)
    if layout is Layout.ENTRIES:
        return _entries(value, old, new)
    if layout is Layout.TRIPLES:
        return _triples(value, old, new, ids)
    return _parallel(value, old, new)


def _entries(entries: Sequence[Any], old: Logprobs, new: Logprobs) -> Any:
    """The list of objects with a `logprob` each, rescored."""
    if len(new) != len(old):
        start = _kept_from(old, new, [])
        return list(entries[start : start + len(new)])
    was = [entry.get("logprob") for entry in entries]
    values = as_logged(new, was)
    if values is was:
        return entries
    return [
        entry if value is before or (is_unknown(value) and is_unknown(before)) else {**entry, "logprob": value}
        for entry, value, before in zip(entries, _kept_objects(values, was), was, strict=True)
    ]


def _triples(entries: Sequence[Any], old: Logprobs, new: Logprobs, completion: Ids | None) -> Any:
    """The `[logprob, id, text]` entries, rescored; each keeps its id and text."""
    if len(new) != len(old):
        ids = [int(entry[1]) for entry in entries]
        start = _kept_from(old, new, [] if completion is None else [(ids, completion.tolist())])
        return list(entries[start : start + len(new)])
    was = [entry[0] if filled(entry) else None for entry in entries]
    values = _kept_objects(as_logged(new, was), was)
    return [_scored(*each) for each in zip(entries, values, was, strict=True)]


def _scored(entry: Any, value: Any, before: Any) -> Any:
    """One triple with another logprob, still a list or an array."""
    if value is before or (is_unknown(value) and is_unknown(before)):
        return entry
    if not filled(entry):
        raise RecordError("a token's list of logprobs is empty and has no place for the sampled one")
    if isinstance(entry, np.ndarray) and entry.dtype.kind == "f":
        return np.array([np.nan if value is None else value, *entry[1:].tolist()], entry.dtype)
    return [value, *plain(entry[1:])]


def _parallel(logged: Mapping[str, Any], old: Logprobs, new: Logprobs) -> Mapping[str, Any]:
    """The parallel lists of a completion's logprobs, rescored."""
    if len(new) == len(old):
        return {**logged, "token_logprobs": as_logged(new, logged["token_logprobs"])}
    start = _kept_from(old, new, [])
    cut = {
        name: values[start : start + len(new)]
        for name, values in logged.items()
        if is_list(values) and len(values) == len(old)
    }
    return {**logged, **cut}


def _kept_from(old: Logprobs, new: Logprobs, also: Sequence[tuple[list[int], list[int]]]) -> int:
    """The index of the first entry kept; kept entries are contiguous, and the pairs in `also` must match too."""
    size = len(new)
    starts = [
        start
        for start in range(len(old) - size + 1)
        if same_floats(old[start : start + size], new)
        and all(have[start : start + size] == want for have, want in also)
    ]
    if len(starts) != 1:
        raise RecordError(
            f"{len(old)} logprobs should become {size}, and it is unclear which of the log's entries to drop"
        )
    return starts[0]


def _kept_objects(values: Sequence[Any], was: Sequence[Any]) -> list[Any]:
    """The new values, with the old object wherever the values are equal."""
    return [before if value == before else value for value, before in zip(values, was, strict=True)]
