"""Items of the Responses API as chat messages and model calls; shared by the formats that log them.

A call writes several items (reasoning, text, tool calls) that form one assistant message. So items are
grouped into calls first; which of them holds the tokens is decided after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.record.message import Message, ToolSpec, as_message

Item = Mapping[str, Any]

ITEMS_UNREAD = "the answer has items that chat messages have no place for, such as a hosted web search"
"""Why messages of such an answer are not read."""

TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What NeMo-Gym puts on one item of a call: all three or none."""

TEXT_KEYS = ("prompt_str", "generation_str")
"""What NeMo-RL keeps of them when it logs a NeMo-Gym result: the decoded prompt and generation."""

_KNOWN = ("message", "reasoning", "function_call", "function_call_output")


@dataclass(frozen=True, slots=True)
class Step:
    """One chat message and the items it was made of."""

    message: Message
    items: tuple[Item, ...]

    @property
    def is_call(self) -> bool:
        """True for what a model wrote."""
        return self.message.role == "assistant"

    @property
    def token_item(self) -> Item | None:
        """The item that holds the tokens of the call; None if none does."""
        keys = (*TOKEN_KEYS, *TEXT_KEYS)
        token_items = [item for item in self.items if any(item.get(key) is not None for key in keys)]
        return next(
            (item for item in reversed(token_items) if _holds_generation(item)),
            token_items[-1] if token_items else None,
        )


def text_of(*values: object) -> str | None:
    """The first of these values that is a nonempty string; None if none is."""
    return next((value for value in values if isinstance(value, str) and value), None)


def filled_list(*values: object) -> Sequence[Any]:
    """The first of these values that is a nonempty list; () if none is."""
    return next((value for value in values if isinstance(value, list | tuple) and value), ())


def is_response_object(value: Mapping[str, Any]) -> bool:
    """True for an answer of the Responses API."""
    kind = value.get("object")
    return isinstance(kind, str) and kind == "response" and isinstance(value.get("output"), list | tuple)


def input_steps(params: Mapping[str, Any], where: str) -> list[Step]:
    """The steps of a request: `instructions` as a system message, then its input."""
    found: list[Step] = []
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        found.append(_step({"role": "system", "content": instructions}, (), where))
    given = params.get("input")
    if isinstance(given, str):
        found.append(_step({"role": "user", "content": given}, (), where))
    elif given is not None:
        found.extend(steps(given, f"{where}.input"))
    return found


def steps(items: object, where: str) -> list[Step]:
    """The messages that a list of items forms, in order; items of an unknown type are left out."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise RecordError(f"{where} is not a list of items")
    if not all(isinstance(item, Mapping) for item in items):
        raise RecordError(f"{where} holds something that is not an item (an object)")
    found: list[Step] = []
    run: list[Item] = []
    for item in items:
        if _type(item) in ("reasoning", "function_call") or _is_answer(item):
            run.append(item)
            continue
        found.extend(_calls(run, where))
        run = []
        if _type(item) in _KNOWN:
            found.append(_step(_other_wire(item, where), (item,), where))
    return [*found, *_calls(run, where)]


def unread_types(items: object) -> tuple[str, ...]:
    """The item types that chat messages cannot express, such as a hosted web search."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        return ()
    return tuple(sorted({_type(item) for item in items if isinstance(item, Mapping)} - set(_KNOWN)))


def chat_tools(tools: object, where: str) -> tuple[ToolSpec, ...]:
    """Tools of the flat Responses form in chat form; tools of types other than `function` stay as they are.

    Keys are in the order in which servers pass functions to templates. `strict` is left out, as NeMo-Gym
    does: it is an instruction to a hosted service and would show up in the prompt.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RecordError(f"{where} is not a list of tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RecordError(f"{where} holds something that is not a tool definition (an object)")
    return tuple(_chat_tool(tool) for tool in tools)


def message_wire(message: Mapping[str, Any], dropped: Collection[str] = ()) -> dict[str, Any]:
    """A message as templates get it: without empty fields, because templates test for presence."""
    wire = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in message.items()
        if key not in dropped and value is not None and not _is_empty_list(value)
    }
    # A template may read the content of a message that has none, and Parquet keeps no nulls.
    wire.setdefault("content", None)
    return wire


def _calls(run: Sequence[Item], where: str) -> Iterator[Step]:
    """One step for each call in a run of assistant items."""
    for group in _groups(run):
        yield _step(_assistant_wire(group, where), tuple(group), where)


def _groups(run: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """A run of assistant items, split into calls if several of them hold tokens.

    The tokens are usually on the last item of a call, so a call ends there. Some logs have them on the text
    before the tool calls: tool calls without tokens right after a text belong to it.
    """
    ends = [i + 1 for i, item in enumerate(run) if _holds_generation(item)]
    start = 0
    for end in ends[:-1]:
        stop = end
        if _type(run[end - 1]) == "message":
            while _type(run[stop]) == "function_call" and not _holds_generation(run[stop]):
                stop += 1
            # Tool calls that end in one with tokens belong to the next call.
            stop = end if _type(run[stop]) == "function_call" else stop
        yield run[start:stop]
        start = stop
    if start < len(run):
        yield run[start:]


def _step(wire: Mapping[str, Any], items: tuple[Item, ...], where: str) -> Step:
    return Step(as_message(wire, where), items)


def _assistant_wire(group: Sequence[Item], where: str) -> dict[str, Any]:
    """The assistant message of one call."""
    texts = [_answer_text(item, where) for item in group if _is_answer(item)]
    reasoning = [text for item in group if _type(item) == "reasoning" for text in _reasoning(item)]
    calls = [_chat_call(item, where) for item in group if _type(item) == "function_call"]
    wire: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or reasoning else None}
    if reasoning:
        wire["reasoning_content"] = "\n".join(reasoning)
    if calls:
        wire["tool_calls"] = calls
    return wire


def _other_wire(item: Item, where: str) -> dict[str, Any]:
    """The message of an item that a model did not write."""
    if _type(item) == "function_call_output":
        content = _content(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    return {"role": item.get("role"), "content": _content(item.get("content"), where)}


def _content(value: object, where: str) -> object:
    """Content parts in chat form; text-only parts become one string, as servers join them for templates."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if not all(isinstance(part, Mapping) for part in value):
        raise RecordError(f"{where} holds content that is neither text nor a list of parts")
    parts = [_chat_part(part) for part in value]
    if all(text_of(part.get("type")) == "text" and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _chat_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = text_of(part.get("type"))
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return part


def _answer_text(item: Item, where: str) -> str:
    content = item.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise RecordError(f"{where} holds an answer whose content is neither text nor a list of parts")
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _reasoning(item: Item) -> Iterator[str]:
    """The reasoning texts of an item: its summary, or its content if the server logs them there."""
    for part in filled_list(item.get("summary"), item.get("content")):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part["text"]:
            yield part["text"]


def _chat_call(item: Item, where: str) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise RecordError(f"{where} holds a function_call without a name")
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"id": text_of(item.get("call_id"), item.get("id")), "type": "function", "function": function}


def _chat_tool(tool: Mapping[str, Any]) -> ToolSpec:
    if (text_of(tool.get("type")) or "function") != "function" or isinstance(tool.get("function"), Mapping):
        return tool
    first = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    rest = {key: value for key, value in tool.items() if key not in (*first, "type", "strict")}
    return {"type": "function", "function": {**first, **rest}}


def _type(item: Item) -> str:
    """The item's type; one without a type but with a role is a message."""
    kind = item.get("type")
    return kind if isinstance(kind, str) else "message" if isinstance(item.get("role"), str) else ""


def _is_answer(item: Item) -> bool:
    return _type(item) == "message" and text_of(item.get("role")) == "assistant"


def _holds_generation(item: Item) -> bool:
    generated = item.get("generation_token_ids")
    return isinstance(generated, list | tuple | np.ndarray) and len(generated) > 0


def _is_empty_list(value: object) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == 0
