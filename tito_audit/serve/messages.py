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
    ChatRequest,
    assistant_wire,
    build_chat_request,
    function_wire,
    json_schema_format,
    parse_body,
    tool_wire,
)
from tito_audit.sessions.index import comparable_arguments

Block = Mapping[str, Any]
Event = dict[str, Any]
LocatedBlock = tuple[str, Block]
"""The path of a content block in the request, and the block."""

_OWN_FIELDS = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "output_config", "n"),
        *("output_format", "stop", "response_format", "continue_final_message", "add_generation_prompt"),
        # ignored
        *("betas", "billing_policy", "cache_control", "compaction", "context_management", "diagnostics", "speed"),
        *("fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "thread"),
        *("user_profile_id", "workspace_id"),
    )
)
"""Fields that are translated or ignored; all others are read as in a chat completion."""
_UNSUPPORTED = ("container", "mcp_servers")
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_EFFORTS = {"xhigh": "high", "max": "high"}
_BILLING_PREFIX = "x-anthropic-billing-header"
"""How a block of Claude Code's system prompt begins that differs in each call and is not meant for the model."""
_NOT_JSON = "INVALID_JSON"
"""The key under which a `tool_use` holds the text of arguments that are not a JSON object."""
_MAX_NESTING = 190
"""How deep clients can read a nested `input`."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_PING: Event = {"type": "ping"}
_PING_AFTER = 5.0
"""Seconds without an event after which a ping is sent."""


@dataclass(frozen=True, slots=True)
class MessagesRequest(ChatRequest):
    """A request to `/v1/messages`."""

    endpoint: ClassVar[str] = "messages"
    id_prefix: ClassVar[str] = "msg_"
    shows_thinking: bool = False
    """Whether the client gets the reasoning; it is logged in any case."""


class MessagesApi:
    """The endpoints of Anthropic's API in one gateway."""

    def __init__(self, api_key: str | None = None) -> None:
        # Reasoning is signed with a key made of the API key, so that signatures outlive a restart.
        self._key = f"tito-audit {api_key or ''}".encode()
        self._sampled_arguments: OrderedDict[str, str] = OrderedDict()
        """By the id of a call, its arguments as sampled, where a client may send them back in other words."""

    def parse(self, data: bytes, *, counts: bool = False) -> MessagesRequest:
        """The request in a body of `/v1/messages` or, `counts`, of `/v1/messages/count_tokens`.

        Refused names the field that is wrong.
        """
        body = parse_body(data)
        if body.get("max_tokens") is None and not counts:
            raise Refused("max_tokens: a whole number is required")
        for name in _UNSUPPORTED:
            if body.get(name):
                raise Refused(f"{name}: not supported, since the gateway runs no tools")
        if body.get("n") not in (None, 1):
            raise Refused("n: this API gives one answer; /v1/chat/completions gives several")
        stops = body.get("stop_sequences")
        if stops is not None and not (isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)):
            raise Refused("stop_sequences: a list of texts is expected")
        thinks: bool | None = None  # left to the template
        if body.get("thinking") is not None:
            kind = _object_at(body["thinking"], "thinking").get("type")
            if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
                raise Refused(f"thinking.type: {kind!r} is not enabled, adaptive or disabled")
            thinks = kind != "disabled"
        messages = self._chat_messages(body)
        chat = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
        config = _object_at(body.get("output_config") or {}, "output_config")
        effort, form = config.get("effort"), config.get("format") or body.get("output_format")
        if effort is not None:
            chat["reasoning_effort"] = _EFFORTS.get(str(effort), effort)
        if form is not None:
            form = _object_at(form, "output_config.format")
            schema = _object_at(form.get("schema"), "output_config.format.schema")
            chat["response_format"] = json_schema_format(name="answer", schema=schema)
        chat |= {
            **_tool_fields(body),
            "messages": messages,
            "stop": stops,
            "continue_final_message": messages[-1]["role"] == "assistant",
        }
        if thinks is not None:  # templates read one of the two names
            kwargs = _object_at(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
            chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **kwargs}
        return build_chat_request(chat, MessagesRequest, shows_thinking=bool(thinks))

    def _chat_messages(self, body: Body) -> list[dict[str, Any]]:
        """The messages as chat messages; consecutive ones of one role are joined, as Anthropic does."""
        system = [_block_text(*located) for located in _content_blocks(body.get("system"), "system")]
        system = [text for text in system if not text.startswith(_BILLING_PREFIX)]
        messages: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
        sent = body.get("messages")
        if not isinstance(sent, list) or not sent:
            raise Refused("messages: a list of messages is required")
        turns: list[tuple[str, list[LocatedBlock]]] = []
        for number, message in enumerate(sent):
            where = f"messages.{number}"
            role = _object_at(message, where).get("role")
            if role not in ("user", "assistant", "system"):
                raise Refused(f"{where}.role: {role!r} is not user, assistant or system")
            turns.append((role, _content_blocks(message.get("content"), f"{where}.content")))
        for role, same in groupby(turns, lambda turn: turn[0]):
            blocks = [located for _, part in same for located in part]
            if role == "assistant":
                messages.append(self._assistant_message(blocks))
            elif role == "user":
                # Each result of a tool is a message; the texts between two results are one.
                for are_results, part in groupby(blocks, lambda located: located[1].get("type") == "tool_result"):
                    if not are_results:
                        messages.append({"role": "user", "content": _joined_text(list(part))})
                        continue
                    for where, block in part:
                        content = _content_blocks(block.get("content"), f"{where}.content")
                        messages.append(tool_wire(_text_at(block, "tool_use_id", where), _joined_text(content)))
                if not blocks:
                    messages.append({"role": "user", "content": ""})
            else:
                messages.append({"role": role, "content": _joined_text(blocks)})
        return messages

    def _assistant_message(self, blocks: Sequence[LocatedBlock]) -> dict[str, Any]:
        """An earlier answer as a chat message; Refused if its reasoning lacks the gateway's signature."""
        texts, thoughts, calls = [], [], []
        for where, block in blocks:
            match block.get("type"):
                case "thinking":
                    thought = _text_at(block, "thinking", where)
                    signature = _text_at(block, "signature", where)
                    if not hmac.compare_digest(signature.encode(), self.sign(thought).encode()):
                        raise Refused(
                            f"{where}.signature: this gateway did not sign this text; send thinking blocks back "
                            "as they were, or leave them out"
                        )
                    thoughts.append(thought)
                case "tool_use":
                    # The arguments as they were sampled, unless the client changed them.
                    name, call_id = _text_at(block, "name", where), _text_at(block, "id", where)
                    value = _object_at(block.get("input"), f"{where}.input")
                    arguments = self._sampled_arguments.get(call_id)
                    if arguments is None or _parse_arguments(arguments) != value:
                        arguments = _dump_arguments(value)
                    calls.append({"id": call_id, **function_wire(name, arguments=arguments)})
                case _:
                    texts.append(_block_text(where, block))
        return assistant_wire(texts, thoughts, calls)

    def answer(self, gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
        message = call.answers[0].message()
        content: list[dict[str, Any]] = []
        if (thought := message.get("reasoning_content")) and _shows_thinking(call):
            content.append({"type": "thinking", "thinking": thought, "signature": self.sign(thought)})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for tool_call in message.get("tool_calls", ()):
            name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
            block = {"type": "tool_use", "id": tool_call["id"], "name": name}
            content.append({**block, "input": self.tool_input(tool_call["id"], arguments)})
        return {**_message_head(gateway, call), "content": content, **_stop_fields(call), "usage": _usage(call)}

    async def stream(self, gateway: Gateway, call: Call) -> AsyncGenerator[Event, None]:
        """The events of a streamed message; its last block ends once the answer is in the log."""
        blocks = _BlockEvents(self, _shows_thinking(call))
        message = {**_message_head(gateway, call), "stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(call)
        start = {"type": "message_start", "message": message}
        started, last = False, time.monotonic()
        async with aclosing(gateway.stream(call)) as pieces:
            async for _, deltas in pieces:
                events = [] if started else [start, _PING]
                events += [event for delta in deltas for event in blocks.add(delta)]
                started = True
                if not events and time.monotonic() - last > _PING_AFTER:
                    events = [_PING]
                for event in events:
                    yield event
                    last = time.monotonic()
        for event in [*([] if started else [start]), *blocks.end()]:
            yield event
        yield {"type": "message_delta", "delta": _stop_fields(call), "usage": _usage(call)}
        yield {"type": "message_stop"}

    def sign(self, thought: str) -> str:
        return hmac.new(self._key, thought.encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    def tool_input(self, call_id: str, arguments: str) -> dict[str, Any]:
        """Sampled arguments as the `input` of a `tool_use`; remembered if a client may send it in other words."""
        value, floats = _parse_arguments(arguments), list[str]()
        if _NOT_JSON not in value:
            json.loads(arguments or "{}", parse_float=floats.append, parse_int=str)
        # JavaScript writes 1.0 as 1.
        has_whole_float = any(float(number).is_integer() for number in floats)
        round_trip = ToolCall("", _dump_arguments(value))
        if has_whole_float or comparable_arguments(round_trip) != comparable_arguments(ToolCall("", arguments)):
            self._sampled_arguments[call_id] = arguments
            if len(self._sampled_arguments) > 10_000:
                self._sampled_arguments.popitem(last=False)
        return value


class _BlockEvents:
    def __init__(self, api: MessagesApi, shows_thinking: bool) -> None:
        self._api, self._shows_thinking = api, shows_thinking
        self._index = -1
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        """What the open block holds so far. The arguments of a tool call are sent when they are whole."""

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if (thought := delta.get("reasoning_content")) and self._shows_thinking:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._block_delta({"type": "thinking_delta", "thinking": thought}, thought)
        if text := delta.get("content"):
            yield from self._begin({"type": "text", "text": ""})
            yield self._block_delta({"type": "text_delta", "text": text}, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._begin(block)
            self._texts.append(call["function"]["arguments"])

    def end(self) -> Iterator[Event]:
        if self._open is None:
            return
        text = "".join(self._texts)
        if self._open["type"] == "thinking":
            yield self._block_delta({"type": "signature_delta", "signature": self._api.sign(text)})
        elif self._open["type"] == "tool_use":
            value = self._api.tool_input(self._open["id"], text)
            whole = orjson.dumps(value).decode() if _NOT_JSON in value else text
            yield self._block_delta({"type": "input_json_delta", "partial_json": whole})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, unless text or thinking can go on in the open one, which is ended else."""
        if self._open is not None and self._open["type"] == block["type"] != "tool_use":
            return
        yield from self.end()
        self._index, self._open, self._texts = self._index + 1, block, []
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _block_delta(self, delta: dict[str, Any], text: str = "") -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _shows_thinking(call: Call) -> bool:
    return isinstance(call.request, MessagesRequest) and call.request.shows_thinking


def _message_head(gateway: Gateway, call: Call) -> dict[str, Any]:
    model = call.request.model or gateway.model
    return {"id": call.call_id, "type": "message", "role": "assistant", "model": model, "content": []}


def _stop_fields(call: Call) -> dict[str, Any]:
    (answer,) = call.answers
    reason, sequence = answer.client_finish_reason, answer.stop_reason
    if reason == "stop" and isinstance(sequence, str) and sequence in call.request.sampling.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOP_REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def _usage(call: Call) -> dict[str, int]:
    counts = {"input_tokens": len(call.ids), "output_tokens": call.sampled_tokens}
    return {**counts, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Arguments as an object; under `INVALID_JSON` if they are not an object that a client can read."""
    try:
        value = orjson.loads(arguments or "{}")
        if arguments.count("[") + arguments.count("{") > _MAX_NESTING:
            nested = [value]
            for _ in range(250 - _MAX_NESTING):  # orjson raises above 250 levels
                nested = [nested]
            orjson.dumps(nested)
    except (orjson.JSONDecodeError, TypeError):
        value = None
    return value if isinstance(value, dict) else {_NOT_JSON: arguments}


def _dump_arguments(value: Mapping[str, Any]) -> str:
    text = value.get(_NOT_JSON)
    return text if isinstance(text, str) and len(value) == 1 else json.dumps(value, ensure_ascii=False)


def _object_at(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{where}: an object is expected")
    return value


def _text_at(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refused(f"{where}.{name}: a text is required")
    return value


def _joined_text(blocks: Sequence[LocatedBlock]) -> str:
    return "\n".join(_block_text(where, block) for where, block in blocks)


def _content_blocks(content: object, where: str) -> list[LocatedBlock]:
    if content is None or isinstance(content, str):
        return [] if content is None else [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise Refused(f"{where}: a text or a list of content blocks is expected")
    places = [f"{where}.{number}" for number in range(len(content))]
    return [(place, _object_at(block, place)) for place, block in zip(places, content, strict=True)]


def _block_text(where: str, block: Block) -> str:
    if block.get("type") != "text":
        raise Refused(f"{where}: a block of type {block.get('type')!r} is not supported here, only text")
    return _text_at(block, "text", where)


def _tool_fields(body: Body) -> dict[str, Any]:
    """The tools of a request, and which of them it forces, as fields of a chat request."""
    fields: dict[str, Any] = {"tools": None}
    if body.get("tool_choice") is not None:
        choice = _object_at(body["tool_choice"], "tool_choice")
        kind = choice.get("type")
        if kind == "tool":
            fields["tool_choice"] = function_wire(_text_at(choice, "name", "tool_choice"))
        elif isinstance(kind, str) and kind in _TOOL_CHOICES:
            fields["tool_choice"] = _TOOL_CHOICES[kind]
        else:
            raise Refused(f"tool_choice.type: {kind!r} is not auto, any, tool or none")
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    if body.get("tools") is None:
        return fields
    if not isinstance(body["tools"], list):
        raise Refused("tools: a list of tools is expected")
    fields["tools"] = []
    for number, tool in enumerate(body["tools"]):
        where = f"tools.{number}"
        if (kind := _object_at(tool, where).get("type")) not in (None, "custom"):
            raise Refused(f"{where}: a tool of type {kind!r} is not supported: give its name and input_schema")
        name, about = _text_at(tool, "name", where), tool.get("description")
        description = {} if about is None else {"description": _text_at(tool, "description", where)}
        schema = _object_at(tool.get("input_schema"), f"{where}.input_schema")
        fields["tools"].append(function_wire(name, **description, parameters=schema))
    return fields
