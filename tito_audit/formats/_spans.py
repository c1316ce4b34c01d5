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

_MAX_DEPTH = 16


def unflattened(attributes: Mapping[str, Any], prefix: str) -> Any:
    """The nested value below a prefix, with numbered keys as lists; None if there is none."""
    start = f"{prefix}."
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if not isinstance(key, str) or not key.startswith(start) or value is None:
            continue
        steps = key[len(start) :].split(".", _MAX_DEPTH)
        inner = nested
        for step in steps[:-1]:
            deeper = inner.setdefault(step, {})
            if not isinstance(deeper, dict):
                raise RecordError(f"attributes: {key!r} continues the key of a value")
            inner = deeper
        inner[steps[-1]] = value
    return _listed(nested) if nested else None


def literal(value: Any) -> Any:
    """A value, parsed if it is text: JSON, or a literal as Python prints it."""
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
    """The messages in a span's contents; () if some are missing.

    A span stores an answer's tool calls separately, so contents that lack them are not a conversation.
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
    """The tools of a request, whose parameters are JSON strings."""
    if not isinstance(functions, list | tuple):
        return ()
    return tuple(
        {"type": "function", "function": {**one, "parameters": literal(one.get("parameters"))}}
        for one in functions
        if isinstance(one, Mapping)
    )


def _wire(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry in chat form; its tool calls have name and arguments at the top level."""
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
    """Text as it is, or the content parts that the tracer wrote as a JSON string."""
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
    """The value with every object whose keys count from 0 turned into a list."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    numbers: Sequence[str] = sorted((key for key in inner if key.isdecimal()), key=int)
    if numbers and [int(key) for key in numbers] == list(range(len(numbers))):
        # Next to the entries a tracer may keep facts about all of them (`prompt_filter_results`).
        return [inner[key] for key in numbers]
    return inner
