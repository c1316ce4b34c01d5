"""Requests and answers of the Messages API in chat form, as servers convert them before they apply a template.

vllm-project/vllm `vllm/entrypoints/anthropic/serving_messages.py`, OpenPipe/ART `trajectories/_tokenize.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.record.message import Message, ToolSpec, as_message, without_arrays


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request in chat form."""

    messages: tuple[Message, ...]
    """() if it holds something that chat messages cannot express, such as a document."""
    tools: tuple[ToolSpec, ...]


def anthropic_request(request: Mapping[str, Any]) -> ChatRequest:
    """The messages and tools of a request."""
    request = without_arrays(request)
    wires: list[dict[str, Any]] = []
    system = request.get("system")
    if system:
        wires.append({"role": "system", "content": _joined(system)})
    listed = request.get("messages")
    if not isinstance(listed, list | tuple) or not all(isinstance(one, Mapping) for one in listed):
        raise RecordError("request.messages is not a list of messages (objects)")
    known = not wires or wires[0]["content"] is not None
    for message in listed:
        made = _wires(message)
        known = known and made is not None
        wires += made or []
    messages = tuple(as_message(wire, "request.messages") for wire in wires) if known else ()
    return ChatRequest(messages, _tools(request.get("tools")))


def anthropic_answer(response: Mapping[str, Any]) -> Message | None:
    """The answer as an assistant message; None if it holds anything but text, thinking and tool calls."""
    wires = _wires({"role": "assistant", "content": without_arrays(response.get("content"))})
    return as_message(wires[0], "response.content") if wires is not None and len(wires) == 1 else None


def _wires(message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The chat messages that one message becomes: each tool result is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    if not isinstance(content, list | tuple) or not all(isinstance(block, Mapping) for block in content):
        raise RecordError("a message's content is neither text nor a list of blocks (objects)")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = json.dumps(block.get("input") or {}, default=str)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and (told := _joined(block.get("content"))) is not None:
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
        else:
            return None
    said = [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else texts[0] if texts else None
    wire: dict[str, Any] = {"role": role, "content": said}
    if thoughts:
        wire["reasoning_content"] = "\n".join(thoughts)
    if calls:
        wire["tool_calls"] = calls
    return [*results, wire] if texts or thoughts or calls or not results else results


def _joined(content: object) -> str | None:
    """The text of a string or of text-only blocks; None for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return None
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _tools(tools: object) -> tuple[ToolSpec, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RecordError("request.tools is not a list of tool definitions (objects)")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return tuple(
        {"type": "function", "function": {ours: tool[theirs] for theirs, ours in names.items() if theirs in tool}}
        for tool in tools
    )
