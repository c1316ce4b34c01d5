"""Whether a conversation can be rendered again: templates print the tools that a model was offered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tito_audit.record.message import Message, ToolSpec

TOOLS_MISSING = "they call tools that the log does not list"
"""Why messages of such a conversation are not read."""


def calls_unknown_tools(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> bool:
    """True if a message calls a tool that was not logged.

    Either the tools are missing, and no prompt can be rendered as it was, or none were offered and an agent
    parsed the calls from the model's text, which the messages then do not hold.
    """
    functions = (tool.get("function", tool) for tool in tools)
    known = {one.get("name") for one in functions if isinstance(one, Mapping) and isinstance(one.get("name"), str)}
    return any(call.name not in known for message in messages for call in message.tool_calls)
