"""dump_row: a row as one line of JSON, whatever values it holds."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import orjson

from tito_audit.format import Row

_SIMPLE = {int, float, bool, str, type(None)}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def dump_row(row: Row) -> bytes:
    """A row as one line of JSON; NaN becomes null, infinity is written as Python writes it, bytes as base64."""
    try:
        data = orjson.dumps(row, option=_OPTIONS, default=json_form)
    except (TypeError, ValueError):
        return _dump_slowly(row)
    # orjson writes infinity as null, which would say "not recorded".
    return _dump_slowly(row) if _holds_infinity(row) else data


def json_form(value: object) -> object:
    """The JSON form of a value that JSON has no place for: lists of arrays, base64 of bytes, else text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Set) else str(value)


def _dump_slowly(row: Row) -> bytes:
    """The row as the standard library writes it: lone surrogates, huge integers and infinity included."""
    return json.dumps(_plain(row), separators=(",", ":"), default=json_form).encode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value


def _holds_infinity(value: Any) -> bool:
    if isinstance(value, float):
        return value in (np.inf, -np.inf)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and bool(np.isinf(value).any())
    if isinstance(value, Mapping):
        return any(map(_holds_infinity, value.values()))
    if isinstance(value, list | tuple) and value:
        if {*map(type, value)} <= _SIMPLE:
            return np.inf in value or -np.inf in value
        return any(map(_holds_infinity, value))
    return False
