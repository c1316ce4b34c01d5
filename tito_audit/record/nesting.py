"""JSON as values, with a limit on how deeply they are nested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

DEEPEST = 254
"""How many levels of lists and objects a value may have: as many as orjson writes."""
_PARSED = 1024
"""How many levels orjson reads."""
_LONG = 1 << 15
"""In texts of so many bytes, counting brackets takes longer than reading more of them."""
_BEFORE, _AFTER = b"[" * (_PARSED - DEEPEST), b"]" * (_PARSED - DEEPEST)
_FLAT = frozenset((str, int, float, bool, bytes, type(None), np.ndarray))


class TooDeep(ValueError):
    """A value with more than DEEPEST levels, on which code that follows a value level by level would fail."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply to be read: more than {DEEPEST} levels")


def parsed_json(text: bytes | str) -> Any:
    """The value of a JSON text; orjson.JSONDecodeError if orjson cannot read it, TooDeep with too many levels.

    A level more costs orjson nothing, so the text is read inside as many lists as leave it DEEPEST levels.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) <= 2 * DEEPEST or (len(data) < _LONG and data.count(b"[") + data.count(b"{") <= DEEPEST):
        return orjson.loads(data)
    try:
        value = orjson.loads(b"".join((_BEFORE, data, _AFTER)))
        for _ in _BEFORE:
            (value,) = value  # the text may itself close and open a list
    except ValueError:
        orjson.loads(data)  # unless this fails too, only the lists around it were too many
        raise TooDeep from None
    return value


def parsed_by_python(text: str) -> Any:
    """The value of JSON and what Python adds to it (NaN, Infinity, lone surrogates); ValueError if it is not."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeep from None
    if is_too_deep(value):
        raise TooDeep
    return value


def is_too_deep(value: object) -> bool:
    """Whether a value has more than DEEPEST levels of lists and objects."""
    level = [value]
    for _ in range(DEEPEST):
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
