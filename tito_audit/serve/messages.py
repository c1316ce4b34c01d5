"""Anthropic's Messages API: its requests as chat messages, and answers as content blocks, whole or streamed.

The `anthropic` package was tried: it checks and writes what clients send, and has nothing for a server.
"""

from __future__ import annotations

import hmac
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import orjson

from tito_audit.provider import GenerationResult
from tito_audit.record.message import ToolCall
from tito_audit.serve.errors import Refused
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.serve.request import (
    Body,
    ChatAsked,
    as_answer,
    as_function,
    as_result,
    as_schema,
    body_of,
    chat_of,
)
from tito_audit.sessions.index import comparable_arguments

Block = Mapping[str, Any]
Event = dict[str, Any]
Placed = tuple[str, Block]
"""Where a content block stands in the request, and the block."""

_OURS = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "output_config", "n"),
        *("output_format", "stop", "response_format", "continue_final_message", "add_generation_prompt"),
        # These change nothing here.
        *("betas", "billing_policy", "cache_control", "compaction", "context_management", "diagnostics", "speed"),
        *("fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "thread"),
        *("user_profile_id", "workspace_id"),
    )
)
"""Fields that are read or ignored here; every other field is taken as in a chat completion."""
_REFUSED = ("container", "mcp_servers")
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_EFFORTS = {"xhigh": "high", "max": "high"}
_BILLING = "x-anthropic-billing-header"
"""A block of the system prompt of Claude Code begins so: it differs in each call, and is not for the model."""
_NOT_JSON = "INVALID_JSON"
"""The only key of a call's input whose arguments are not a JSON object: their text is its value."""
_DEEPEST = 190
"""Clients cannot read an input that is nested deeper."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_NO_END: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
_PING: Event = {"type": "ping"}
_QUIET = 5.0
"""Seconds without an event after which a ping says that tokens are being sampled."""


@dataclass(frozen=True, slots=True)
class MessagesAsked(ChatAsked):
    """A request to `/v1/messages`."""

    endpoint: ClassVar[str] = "messages"
    id_prefix: ClassVar[str] = "msg_"
    shows_thinking: bool = False
    """Whether the client asked for reasoning; else it is only logged."""


class Messages:
    """The endpoint of one gateway."""

    def __init__(self, api_key: str | None = None) -> None:
        """Reasoning is signed with a key made from the gateway's API key, so signatures outlive a restart."""
        self._key = f"tito-audit {api_key or ''}".encode()
        self._arguments: OrderedDict[str, str] = OrderedDict()
        """The arguments of calls by id, where what a client makes of their JSON may come back different."""

    def request(self, data: bytes) -> MessagesAsked:
        """The request in a body of `/v1/messages`; Refused names the field that is wrong."""
        body = body_of(data)
        if body.get("max_tokens") is None:
            raise Refused("max_tokens: a whole number is required")
        return self._fields(body)

    def count_request(self, data: bytes) -> MessagesAsked:
        """The same for a body of `/v1/messages/count_tokens`, which says nothing of sampling."""
        return self._fields(body_of(data))

    def _fields(self, body: Body) -> MessagesAsked:
        for name in _REFUSED:
            if body.get(name):
                raise Refused(f"{name}: not supported, since the gateway runs no tools")
        if body.get("n") not in (None, 1):
            raise Refused("n: this API gives one answer; /v1/chat/completions gives several")
        stops = body.get("stop_sequences")
        if stops is not None and not (isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)):
            raise Refused("stop_sequences: a list of texts is expected")
        thinks: bool | None = None  # left to the template
        if body.get("thinking") is not None:
            kind = _object(body["thinking"], "thinking").get("type")
            if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
                raise Refused(f"thinking.type: {kind!r} is not enabled, adaptive or disabled")
            thinks = kind != "disabled"
        messages = self._messages(body)
        chat = {name: value for name, value in body.items() if name not in _OURS}
        config = _object(body.get("output_config") or {}, "output_config")
        effort, form = config.get("effort"), config.get("format") or body.get("output_format")
        if effort is not None:
            chat["reasoning_effort"] = _EFFORTS.get(str(effort), effort)
        if form is not None:
            schema = _object(_object(form, "output_config.format").get("schema"), "output_config.format.schema")
            chat["response_format"] = as_schema(name="answer", schema=schema)
        chat |= {
            **_tool_choice(body),
            "messages": messages,
            "tools": _tools(body),
            "stop": stops,
            "continue_final_message": messages[-1]["role"] == "assistant",
        }
        if thinks is not None:  # Templates have one of these names.
            own = _object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
            chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **own}
        return chat_of(chat, MessagesAsked, shows_thinking=bool(thinks))

    def _messages(self, body: Body) -> list[dict[str, Any]]:
        """The messages in chat form; consecutive ones of one role are one, as with Anthropic."""
        system = [_text(*placed) for placed in _blocks(body.get("system"), "system")]
        system = [text for text in system if not text.startswith(_BILLING)]
        messages: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
        sent = body.get("messages")
        if not isinstance(sent, list) or not sent:
            raise Refused("messages: a list of messages is required")
        turns: list[tuple[str, list[Placed]]] = []
        for number, message in enumerate(sent):
            where = f"messages.{number}"
            role = _object(message, where).get("role")
            if role not in ("user", "assistant", "system"):
                raise Refused(f"{where}.role: {role!r} is not user, assistant or system")
            turns.append((role, _blocks(message.get("content"), f"{where}.content")))
        for role, same in groupby(turns, lambda turn: turn[0]):
            blocks = [placed for _, own in same for placed in own]
            if role == "assistant":
                messages.append(self._answered(blocks))
            elif role == "user":
                # Texts, and each result of a tool as a message.
                for results, several in groupby(blocks, lambda placed: placed[1].get("type") == "tool_result"):
                    if results:
                        for where, block in several:
                            content = _blocks(block.get("content"), f"{where}.content")
                            text = "\n".join(_text(*placed) for placed in content)
                            messages.append(as_result(_field(block, "tool_use_id", where), text))
                    else:
                        text = "\n".join(_text(*placed) for placed in several)
                        messages.append({"role": "user", "content": text})
                if not blocks:
                    messages.append({"role": "user", "content": ""})
            else:
                messages.append({"role": role, "content": "\n".join(_text(*placed) for placed in blocks)})
        return messages

    def _answered(self, blocks: Sequence[Placed]) -> dict[str, Any]:
        """An answer in chat form; Refused if its reasoning is not as the gateway signed it."""
        texts, thoughts, calls = [], [], []
        for where, block in blocks:
            match block.get("type"):
                case "thinking":
                    thought, signature = _field(block, "thinking", where), _field(block, "signature", where)
                    if not hmac.compare_digest(signature.encode(), self.signed(thought).encode()):
                        raise Refused(
                            f"{where}.signature: this gateway did not sign this text; send thinking blocks back "
                            "as they were, or leave them out"
                        )
                    thoughts.append(thought)
                case "tool_use":
                    # A call in chat form, with the arguments that were sampled unless the client changed them.
                    name, call_id = _field(block, "name", where), _field(block, "id", where)
                    value = _object(block.get("input"), f"{where}.input")
                    arguments = self._arguments.get(call_id)
                    if arguments is None or _input(arguments) != value:
                        arguments = _arguments(value)
                    calls.append({"id": call_id, **as_function(name, arguments=arguments)})
                case _:
                    texts.append(_text(where, block))
        return as_answer(texts, thoughts, calls)

    def answer(self, gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
        message = call.answers[0].message()
        content: list[dict[str, Any]] = []
        if (thought := message.get("reasoning_content")) and _shows_thinking(call):
            content.append({"type": "thinking", "thinking": thought, "signature": self.signed(thought)})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for tool_call in message.get("tool_calls", ()):
            name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
            block = {"type": "tool_use", "id": tool_call["id"], "name": name}
            content.append({**block, "input": self.shown(tool_call["id"], arguments)})
        return {**_begun(gateway, call), "content": content, **_end(call), "usage": _usage(call)}

    async def stream(self, gateway: Gateway, call: Call) -> AsyncGenerator[Event, None]:
        """The events of a streamed message. The last block ends once the answer is in the log."""
        blocks = _Blocks(self, _shows_thinking(call))
        start = {"type": "message_start", "message": {**_begun(gateway, call), **_NO_END, "usage": _usage(call)}}
        started, last = False, time.monotonic()
        async with aclosing(gateway.stream(call)) as pieces:
            async for _, deltas in pieces:
                events = [] if started else [start, _PING]
                events += [event for delta in deltas for event in blocks.take(delta)]
                started = True
                if not events and time.monotonic() - last > _QUIET:
                    events = [_PING]
                for event in events:
                    yield event
                    last = time.monotonic()
        for event in [*([] if started else [start]), *blocks.end()]:
            yield event
        yield {"type": "message_delta", "delta": _end(call), "usage": _usage(call)}
        yield {"type": "message_stop"}

    def signed(self, thought: str) -> str:
        return hmac.new(self._key, thought.encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    def shown(self, call_id: str, arguments: str) -> dict[str, Any]:
        """Sampled arguments as an object, remembered where a client may send another text back for it."""
        value, floats = _input(arguments), list[str]()
        if _NOT_JSON not in value:
            json.loads(arguments or "{}", parse_float=floats.append, parse_int=str)
        # JavaScript writes 1.0 as 1.
        whole = any(float(number).is_integer() for number in floats)
        if whole or _compared(_arguments(value)) != _compared(arguments):
            self._arguments[call_id] = arguments
            if len(self._arguments) > 10_000:
                self._arguments.popitem(last=False)
        return value


class _Blocks:
    """The content blocks of one answer, as events."""

    def __init__(self, messages: Messages, shows_thinking: bool) -> None:
        self._messages, self._shows_thinking = messages, shows_thinking
        self._index = -1
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        """What the open block holds so far; of a tool call, its arguments, which are sent when they are whole."""

    def take(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if (thought := delta.get("reasoning_content")) and self._shows_thinking:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._add({"type": "thinking_delta", "thinking": thought}, thought)
        if text := delta.get("content"):
            yield from self._begin({"type": "text", "text": ""})
            yield self._add({"type": "text_delta", "text": text}, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._begin(block)
            self._text.append(call["function"]["arguments"])

    def end(self) -> Iterator[Event]:
        if self._open is None:
            return
        text = "".join(self._text)
        if self._open["type"] == "thinking":
            yield self._add({"type": "signature_delta", "signature": self._messages.signed(text)})
        elif self._open["type"] == "tool_use":
            value = self._messages.shown(self._open["id"], text)
            whole = orjson.dumps(value).decode() if _NOT_JSON in value else text
            yield self._add({"type": "input_json_delta", "partial_json": whole})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        """End the open block and begin this one; text and thinking go on in an open block of their type."""
        if self._open is not None and self._open["type"] == block["type"] != "tool_use":
            return
        yield from self.end()
        self._index, self._open, self._text = self._index + 1, block, []
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _add(self, delta: dict[str, Any], text: str = "") -> Event:
        self._text.append(text)
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _shows_thinking(call: Call) -> bool:
    return isinstance(call.fields, MessagesAsked) and call.fields.shows_thinking


def _begun(gateway: Gateway, call: Call) -> dict[str, Any]:
    model = call.fields.model or gateway.model
    return {"id": call.call_id, "type": "message", "role": "assistant", "model": model, "content": []}


def _end(call: Call) -> dict[str, Any]:
    (answer,) = call.answers
    reason, sequence = answer.why(), answer.stop_reason
    if reason == "stop" and isinstance(sequence, str) and sequence in call.fields.sampling.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def _usage(call: Call) -> dict[str, int]:
    counts = {"input_tokens": len(call.ids), "output_tokens": call.sampled}
    return {**counts, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


# Arguments of calls, as texts and as objects


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; their text under one key if they are no object that a client can read."""
    try:
        value = orjson.loads(arguments or "{}")
        deep = [value]
        if arguments.count("[") + arguments.count("{") > _DEEPEST:
            for _ in range(250 - _DEEPEST):
                deep = [deep]
            orjson.dumps(deep)
    except (orjson.JSONDecodeError, TypeError):
        value = None
    return value if isinstance(value, dict) else {_NOT_JSON: arguments}


def _arguments(value: Mapping[str, Any]) -> str:
    text = value.get(_NOT_JSON)
    return text if isinstance(text, str) and len(value) == 1 else json.dumps(value, ensure_ascii=False)


def _compared(arguments: str) -> object:
    return comparable_arguments(ToolCall("", arguments))


# Parts of a request


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{where}: an object is expected")
    return value


def _field(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refused(f"{where}.{name}: a text is required")
    return value


def _blocks(content: object, where: str) -> list[Placed]:
    if content is None or isinstance(content, str):
        return [] if content is None else [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise Refused(f"{where}: a text or a list of content blocks is expected")
    places = [f"{where}.{number}" for number in range(len(content))]
    return [(place, _object(block, place)) for place, block in zip(places, content, strict=True)]


def _text(where: str, block: Block) -> str:
    if block.get("type") != "text":
        raise Refused(f"{where}: a block of type {block.get('type')!r} is not supported here, only text")
    return _field(block, "text", where)


def _tools(body: Body) -> list[dict[str, Any]] | None:
    if body.get("tools") is None:
        return None
    if not isinstance(body["tools"], list):
        raise Refused("tools: a list of tools is expected")
    tools = []
    for number, tool in enumerate(body["tools"]):
        where = f"tools.{number}"
        if (kind := _object(tool, where).get("type")) not in (None, "custom"):
            raise Refused(f"{where}: a tool of type {kind!r} is not supported: give its name and input_schema")
        name, about = _field(tool, "name", where), tool.get("description")
        more = {} if about is None else {"description": _field(tool, "description", where)}
        schema = _object(tool.get("input_schema"), f"{where}.input_schema")
        tools.append(as_function(name, **more, parameters=schema))
    return tools


def _tool_choice(body: Body) -> dict[str, Any]:
    if body.get("tool_choice") is None:
        return {}
    choice = _object(body["tool_choice"], "tool_choice")
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if kind == "tool":
        named: object = as_function(_field(choice, "name", "tool_choice"))
    elif isinstance(kind, str) and kind in _CHOICES:
        named = _CHOICES[kind]
    else:
        raise Refused(f"tool_choice.type: {kind!r} is not auto, any, tool or none")
    return {"tool_choice": named, "parallel_tool_calls": False} if single else {"tool_choice": named}
