"""In what two spellings of a tool call differ."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["compare_calls"]

_WRAPPERS = re.compile(
    r"</?tool_calls?>|```\w*|<\|tool_call(?:s_begin|_begin|_end)?\|>|\[/?TOOL_CALLS?\]|<function=|</function>|<\|python_tag\|>"
)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call found in text: its spelling, its value and what stands around it."""

    text: str
    value: dict[str, Any]


def compare_calls(recorded: str, canonical: str) -> str | None:
    """What changed between two texts that hold tool calls; None when neither holds one or it is the same.

    Calls are JSON objects with a `name` and `arguments` or `parameters`; a call that one side writes as a
    Python literal is read too.
    """
    left, right = _calls(recorded), _calls(canonical)
    if not left and not right:
        return None
    if len(left) != len(right):
        return "only one side has it" if not left or not right else "another number of calls"
    for a, b in zip(left, right, strict=True):
        how = _difference(a, b)
        if how is not None:
            return how
    if _WRAPPERS.findall(recorded) != _WRAPPERS.findall(canonical):
        return "wrapped in other markers"
    return None


def _calls(text: str) -> list[_Call]:
    """Every tool call in a text, in order."""
    found, at = [], text.find("{")
    while at >= 0:
        call = _call_at(text, at)
        if call is not None:
            found.append(call)
        at = text.find("{", at + (len(call.text) if call else 1))
    return found


def _call_at(text: str, at: int) -> _Call | None:
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _python_call(text, at)
    is_call = isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)
    return _Call(text[at:end], value) if is_call else None


def _python_call(text: str, at: int) -> _Call | None:
    """A call written as a Python literal on one line: `{'name': 'f', 'arguments': {'x': True}}`."""
    line = text[at:].split("\n", 1)[0]
    end = line.rfind("}") + 1
    if not 0 < end <= 20_000 or "name" not in line:
        return None
    try:
        value = ast.literal_eval(line[:end])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    is_call = isinstance(value, dict) and "name" in value and "arguments" in value
    return _Call(line[:end], value) if is_call else None


def _difference(a: _Call, b: _Call) -> str | None:
    """How the spelling of one call became that of the other; None when it is the same."""
    if a.text == b.text:
        return None
    if a.value != b.value:
        return _other_value(a.value, b.value)
    if a.text.startswith("{'") != b.text.startswith("{'") or "True" in a.text + b.text:
        return "Python literal instead of JSON"
    if re.sub(r"\s+", "", a.text) == re.sub(r"\s+", "", b.text):
        return "spacing"
    if json.dumps(a.value) != json.dumps(b.value):
        return "key order"
    return "escapes" if "\\" in a.text + b.text else "number or string spelling"


def _other_value(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What differs between two calls that are not equal as values."""
    x, y = (value.get("arguments", value.get("parameters")) for value in (a, b))
    if isinstance(x, str) != isinstance(y, str) and a.get("name") == b.get("name"):
        return "arguments as a string instead of an object"
    if not x and not y:
        return "empty arguments written otherwise"
    if a.get("name") == b.get("name") and _text(x).lower() == _text(y).lower():
        return "booleans or letter case"
    return "other keys or values"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str).replace('"', "")
