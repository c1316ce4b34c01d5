"""Parses JSON, with a limit on how deeply it is nested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

MAX_DEPTH = 254
"""Levels of lists and objects that a value may have: as many as orjson writes."""
_ORJSON_DEPTH = 1024
"""Levels that orjson reads."""
_LONG = 1 << 15
"""From this many bytes on, counting brackets costs more than parsing inside further lists."""
_BEFORE, _AFTER = b"[" * (_ORJSON_DEPTH - MAX_DEPTH), b"]" * (_ORJSON_DEPTH - MAX_DEPTH)
_FLAT = frozenset((str, int, float, bool, bytes, type(None), np.ndarray))


class TooDeep(ValueError):
    """A value with more than MAX_DEPTH levels, too many for code that recurses into it."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply to be read: more than {MAX_DEPTH} levels")


def load_json(text: bytes | str) -> Any:
    """The value of a JSON text; orjson.JSONDecodeError if orjson cannot parse it, TooDeep with too many levels.

    orjson stops at _ORJSON_DEPTH levels, so the text is parsed inside as many lists as leave it MAX_DEPTH.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) <= 2 * MAX_DEPTH or (len(data) < _LONG and data.count(b"[") + data.count(b"{") <= MAX_DEPTH):
        return orjson.loads(data)
    try:
        value = orjson.loads(b"".join((_BEFORE, data, _AFTER)))
        for _ in _BEFORE:
            (value,) = value  # fails for a text such as `1], [2`
    except ValueError:
        orjson.loads(data)  # raises unless the depth alone was the problem
        raise TooDeep from None
    return value


def load_python_json(text: str) -> Any:
    """The value of JSON text that may hold NaN, Infinity and lone surrogates; ValueError if it is not JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeep from None
    if is_too_deep(value):
        raise TooDeep
    return value


def is_too_deep(value: object) -> bool:
    """Whether a value has more than MAX_DEPTH levels of lists and objects."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for inner in level:
            if isinstance(inner, Mapping):
                below += [entry for entry in inner.values() if type(entry) not in _FLAT]
            elif isinstance(inner, list | tuple):
                below += [entry for entry in inner if type(entry) not in _FLAT]
        if not below:
            return False
        level = below
    return any(isinstance(inner, Mapping | list | tuple) for inner in level)
