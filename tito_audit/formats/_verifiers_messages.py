"""Messages and tools of verifiers in the chat form that templates read.

Both of its record models write tool calls and tools flat (`name`, `arguments`; `name`, `description`,
`parameters`). They are converted for templates as the training client does it:
PrimeIntellect-ai/verifiers `verifiers/v1/dialects/chat.py` (`message_to_wire`) and `v1/clients/train.py`
(`tool_to_wire`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.formats._responses_items import message_wire, text_of
from tito_audit.record.message import Message, ToolSpec, as_message, as_tools
from tito_audit.record.nesting import parsed_json


def chat_message(value: object, where: str) -> Message:
    """A message with its tool calls in chat form; `where` names it in errors."""
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is not a message: an object with a `role` is expected")
    wire = message_wire(value)
    calls = wire.get("tool_calls")
    if isinstance(calls, list | tuple):
        wire["tool_calls"] = [_chat_call(call) for call in calls]
    elif wire["content"] is None:
        wire["content"] = ""
    return as_message(wire, where)


def chat_messages(values: object, where: str) -> tuple[Message, ...]:
    """A list of messages in chat form; () for None and for a string, which is not a conversation."""
    if values is None or isinstance(values, str):
        return ()
    if not isinstance(values, Sequence):
        raise RecordError(f"{where} is not a list of messages")
    return tuple(chat_message(value, f"{where}[{i}]") for i, value in enumerate(values))


def chat_tools(values: object, where: str) -> tuple[ToolSpec, ...]:
    """Tools in chat form; those of another type than `function`, or of a namespace, stay as they are."""
    return tuple(_chat_tool(tool) for tool in as_tools(values, where))


def _chat_call(call: Any) -> Any:
    if isinstance(call, str):
        # Before v1 the messages of a row hold each call as a string of JSON.
        with contextlib.suppress(ValueError):
            call = parsed_json(call)
    if not isinstance(call, Mapping) or isinstance(call.get("function"), Mapping):
        return call
    if text_of(call.get("type")) == "custom":
        # The input of a free-form tool is in `arguments` too; templates do not support such calls.
        return {"id": call.get("id"), **call}
    function = {key: call[key] for key in ("name", "namespace", "arguments") if call.get(key) is not None}
    return {"id": call.get("id"), "type": "function", "function": function}


def _chat_tool(tool: Mapping[str, Any]) -> ToolSpec:
    if isinstance(tool.get("function"), Mapping) or text_of(tool.get("namespace")):
        return tool
    if not isinstance(tool.get("name"), str) or (text_of(tool.get("type")) or "function") != "function":
        return tool
    function: dict[str, Any] = {
        "name": tool["name"],
        "description": text_of(tool.get("description")) or "",
        "parameters": tool["parameters"] if tool.get("parameters") is not None else {},
    }
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}
