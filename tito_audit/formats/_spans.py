"""Attributes of OpenTelemetry spans as messages, tools and ids: dotted keys, and values as text.

microsoft/agent-lightning 0.3.0 `adapter/triplet.py`, `adapter/messages.py`, `instrumentation/agentops.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tito_audit.errors import RecordError
from tito_audit.formats._responses_items import message_wire, text_of
from tito_audit.record.message import Message, ToolSpec, as_message

_DEEP = 16


def unflattened(attributes: Mapping[str, Any], prefix: str) -> Any:
    """What stands below a prefix, keys of numbers as lists; None when nothing does."""
    start = f"{prefix}."
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if not isinstance(key, str) or not key.startswith(start) or value is None:
            continue
        steps = key[len(start) :].split(".", _DEEP)
        inner = nested
        for step in steps[:-1]:
            deeper = inner.setdefault(step, {})
            if not isinstance(deeper, dict):
                raise RecordError(f"attributes: {key!r} goes on behind a value")
            inner = deeper
        inner[steps[-1]] = value
    return _listed(nested) if nested else None


def literal(value: Any) -> Any:
    """A value, read out of the text in which a span keeps it: JSON, or as Python prints it."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value


def as_chat(raw: Any, where: str, *, of_prompt: bool = True) -> tuple[Message, ...]:
    """The messages that a span's contents make; () when they are not all there.

    A span keeps an answer's tool calls apart, so contents that lack them are no conversation.
    """
    entries = list(raw) if isinstance(raw, list | tuple) else [raw] if isinstance(raw, Mapping) else []
    messages: list[Message] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            return ()
        messages.append(as_message(_wire(entry), where))
        called = bool(messages[-1].tool_calls)
        if text_of(entry.get("finish_reason")) in ("tool_calls", "function_call") and not called:
            return ()
    answered = False
    for message in messages:
        if message.role == "assistant":
            answered = bool(message.tool_calls)
        elif message.role == "tool" and not answered:
            return ()
    whole = of_prompt or (len(messages) == 1 and messages[0].role == "assistant")
    return tuple(messages) if whole else ()


def span_tools(functions: Any) -> tuple[ToolSpec, ...]:
    """The tools of a request, whose parameters are JSON text."""
    if not isinstance(functions, list | tuple):
        return ()
    return tuple(
        {"type": "function", "function": {**one, "parameters": literal(one.get("parameters"))}}
        for one in functions
        if isinstance(one, Mapping)
    )


def _wire(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry in chat form: its calls have name and arguments on the outside."""
    wire = message_wire(entry, ("finish_reason", "index"))
    wire["content"] = _content(wire.get("content"))
    calls = wire.get("tool_calls")
    if isinstance(calls, list | tuple):
        wire["tool_calls"] = [_call(call) for call in calls]
    return wire


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _content(value: Any) -> Any:
    """Text as it is, or the parts that the tracer wrote as JSON text."""
    if not isinstance(value, str) or not value.startswith('[{"'):
        return value
    try:
        parts = json.loads(value)
    except (ValueError, RecursionError):
        return value
    known = ("text", "image_url", "input_audio", "file")
    whole = isinstance(parts, list) and all(isinstance(p, dict) and p.get("type") in known for p in parts)
    return parts if whole else value


def _listed(value: Any) -> Any:
    """Objects whose keys count from 0 as lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    numbers: Sequence[str] = sorted((key for key in inner if key.isdecimal()), key=int)
    if numbers and [int(key) for key in numbers] == list(range(len(numbers))):
        # Beside the entries a tracer may keep facts about all of them (`prompt_filter_results`).
        return [inner[key] for key in numbers]
    return inner
