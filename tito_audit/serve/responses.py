"""OpenAI's Responses API: its items as chat messages, and sampled answers as items and events.

A request becomes the messages of a chat completion, so a session can go on by either API. The items of one answer
(reasoning, text, calls) are one assistant message.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from tito_audit.provider import GenerationResult
from tito_audit.serve.errors import Refused
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.serve.request import (
    Body,
    ChatRequest,
    assistant_wire,
    build_chat_request,
    count_field,
    function_wire,
    json_schema_format,
    parse_body,
    tool_wire,
    typed_field,
)

Item = dict[str, Any]
Events = Iterator[tuple[str, dict[str, Any]]]
"""The type of each event, and its fields without the sequence number."""

_UNSUPPORTED = {
    "background": "an answer is given while its client waits",
    "conversation": "pass previous_response_id, or the whole history",
    "prompt": "prompt templates are stored at OpenAI; pass instructions and input",
    "context_management": "the gateway drops nothing from a history",
    "top_logprobs": "the log has the logprobs; `return_token_ids` shows ids and logprobs",
}
_OWN_FIELDS = frozenset(
    (
        *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "store"),
        *("previous_response_id", "include", "truncation", "max_tool_calls", "stream_options", "client_metadata"),
        *("prompt_cache_retention", "prompt_cache_options", "messages", "n", "logprobs", "max_tokens"),
        *("max_completion_tokens", "response_format", "reasoning_effort", *_UNSUPPORTED),
    )
)
"""Fields that are translated or ignored; all others are read as in a chat completion."""
_ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "temperature", "top_p", "user")),
    **{"metadata": {}, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None}, "store": True},
    **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "truncation": "disabled"},
}
"""Fields of the request that a response repeats, with their defaults."""
_IN_NAMESPACE = "__"
"""Stands between a namespace and the name of a function in the names that the template gets."""
_HOW_TO_DISABLE = {
    "web_search": '; in Codex, set web_search = "disabled"',
    "image_generation": "; in Codex, set image_generation = false under [features]",
    "tool_search": "; in Codex, set apps = false and tool_suggest = false under [features]",
}
"""How to turn off hosted tools that a harness sends unasked."""
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts with text, and the field that holds it."""
_PROMPT_ROLES = ("user", "system", "developer")
_ENCRYPTED = "reasoning.encrypted_content"
_SEAL = "tito-audit:"
"""Begins `encrypted_content`; the reasoning follows in base64, for clients that keep no other copy of it."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})[0-9a-f]{4}")
"""The id of an output item, which holds the id of its answer."""
_MAX_STORED, _MAX_STORED_BYTES = 8192, 256 << 20
"""How many responses, and how many bytes of requests, are stored; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request to `/v1/responses`."""

    endpoint: ClassVar[str] = "responses"
    id_prefix: ClassVar[str] = "resp_"
    sent_body: Body = field(default_factory=dict)
    input_items: Sequence[Item] = ()
    """The items of the responses that it continues, then its own."""
    history: Sequence[Mapping[str, Any]] = ()
    """The input items as chat messages."""
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that later requests can continue by its id."""

    response: Mapping[str, Any]
    request: ResponsesRequest
    session_id: str
    message: Mapping[str, Any]
    """The answer as a chat message."""


class ResponsesApi:
    """The endpoints of the Responses API in one gateway, and the responses they stored."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, Item] = {}
        """By id, the output items of all stored responses."""
        self._bytes = 0
        """Of all stored requests."""

    def parse(self, data: bytes) -> ResponsesRequest:
        """The request in a body of `/v1/responses`; Refused names the field that is wrong."""
        body = parse_body(data)
        for name, why in _UNSUPPORTED.items():
            if body.get(name):
                raise Refused(f"`{name}` is not supported: {why}", name)
        if body.get("truncation") not in (None, "disabled"):
            raise Refused("`truncation` can only be disabled: the gateway drops nothing", "truncation")
        if typed_field(body, "n", int, default=1) != 1:
            raise Refused("`n` is not supported: a response is one answer", "n")
        include = typed_field(body, "include", list, "a list", default=[])
        if "message.output_text.logprobs" in include:
            raise Refused(f"`include`: logprobs are not supported: {_UNSUPPORTED['top_logprobs']}", "include")
        typed_field(body, "store", bool, default=True)
        name = typed_field(body, "previous_response_id", str)
        if name is not None and name not in self._stored:
            raise Refused(
                f"Previous response with id '{name}' not found: it was not stored, or is no longer in memory.",
                "previous_response_id",
                code="previous_response_not_found",
            )
        previous = None if name is None else self._stored[name]
        items = _input_items(body)
        history: list[Any] = _chat_messages(items, self._items)
        if previous is not None:
            items = [*previous.request.input_items, *previous.response["output"], *items]
            history = [*previous.request.history, previous.message, *history]
        instructions = typed_field(body, "instructions", str)
        messages = [{"role": "system", "content": instructions}, *history] if instructions else history
        if not messages:
            raise Refused("`input` is empty", "input")
        return build_chat_request(
            {**_chat_body(body), "messages": messages},
            ResponsesRequest,
            sent_body=body,
            input_items=items,
            history=history,
            body_bytes=len(data),
            session_id=None if previous is None else previous.session_id,
        )

    def answer(self, gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
        output = OutputItems(call)
        for delta in call.answers[0].wire_deltas:
            for _ in output.add(delta):
                pass
        return self._finish(gateway, call, output)[1]

    async def stream(self, gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response; the last ones come once it is in the log."""
        output, numbers = OutputItems(call), count()

        def event(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
            return {"type": kind, "sequence_number": next(numbers), **fields}

        first = {"response": _response(gateway, call, [], status="in_progress")}
        begin = [event("response.created", first), event("response.in_progress", first)]
        try:
            async with aclosing(gateway.stream(call)) as pieces:
                async for _, deltas in pieces:
                    while begin:
                        yield begin.pop(0)
                    for delta in deltas:
                        for kind, fields in output.add(delta):
                            yield event(kind, fields)
        except Refused as error:
            if begin:
                raise
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            why = {"code": code, "message": str(error)}
            failed = _response(gateway, call, output.items, status="failed", error=why)
            yield event("response.failed", {"response": failed})
            return
        for start in begin:
            yield start
        events, response = self._finish(gateway, call, output)
        for kind, fields in events:
            yield event(kind, fields)
        yield event(f"response.{response['status']}", {"response": response})

    def retrieve(self, request: web.Request) -> Mapping[str, Any]:
        """`GET /v1/responses/{response}`"""
        if request.query.get("stream", "false").lower() not in ("false", "0", ""):
            raise Refused("`stream` is not supported: a stored response is given whole", "stream")
        return self._find_response(request).response

    def delete(self, request: web.Request) -> Mapping[str, Any]:
        """`DELETE /v1/responses/{response}`"""
        name = str(self._find_response(request).response["id"])
        self._forget(name)
        return {"id": name, "object": "response", "deleted": True}

    def input_items(self, request: web.Request) -> Mapping[str, Any]:
        """`GET /v1/responses/{response}/input_items`, by default the latest item first."""
        query, items = request.query, self._find_response(request).request.input_items
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        after = query.get("after")
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise Refused("`after` is not the id of an item of this input", "after")
            items = items[places[0] + 1 :]
        limit = query.get("limit", "20")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= 100:
            raise Refused("`limit` is not a number from 1 to 100", "limit")
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        ids = {"first_id": first, "last_id": last, "has_more": len(page) < len(items)}
        return {"object": "list", "data": page, **ids}

    def _finish(
        self, gateway: Gateway, call: Call, output: OutputItems
    ) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """End an answer and store it; its last events and the response."""
        (answer,), request = call.answers, call.request
        assert isinstance(request, ResponsesRequest)
        done = answer.client_finish_reason in ("stop", "tool_calls")
        status = "completed" if done else "incomplete"
        events = list(output.close(status))
        why = None if done else {"reason": "max_output_tokens" if answer.finish_reason == "length" else None}
        response = _response(gateway, call, output.items, status=status, incomplete_details=why)
        if request.sent_body.get("store") is not False:
            self._stored[call.call_id] = StoredResponse(response, request, call.session.id, answer.message())
            self._items |= {item["id"]: item for item in output.items}
            self._bytes += request.body_bytes
            while len(self._stored) > _MAX_STORED or (self._bytes > _MAX_STORED_BYTES and len(self._stored) > 1):
                self._forget(next(iter(self._stored)))
        if request.returns_token_ids:
            tokens = {"generation_token_ids": answer.ids, "generation_log_probs": answer.logprobs}
            last = {**output.items[-1], **call.prompt_ids, **tokens}
            response = {**response, "output": [*output.items[:-1], last]}
        return events, response

    def _forget(self, name: str) -> None:
        stored = self._stored.pop(name)
        self._bytes -= stored.request.body_bytes
        for item in stored.response["output"]:
            self._items.pop(item["id"], None)

    def _find_response(self, request: web.Request) -> StoredResponse:
        name = request.match_info["response"]
        if name not in self._stored:
            raise Refused(f"Response with id '{name}' not found.", status=404)
        return self._stored[name]


def _chat_body(body: Body) -> dict[str, Any]:
    chat = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    chat["max_completion_tokens"] = count_field(body, "max_output_tokens", 1)
    if tools := _chat_tools(typed_field(body, "tools", list, "a list of tool definitions", default=[])):
        chat["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        whole = [full for full, (_, name) in _namespaced_functions(body).items() if name == choice.get("name")]
        choice = function_wire(whole[0] if len(whole) == 1 else choice.get("name"))
    chat["tool_choice"] = None if choice == "auto" else choice
    if reasoning := typed_field(body, "reasoning", dict, default={}):
        chat["reasoning_effort"] = typed_field(reasoning, "effort", str)
    text = typed_field(body, "text", dict, default={})
    wanted = typed_field(text, "format", dict, default={})
    if choice == "required" or isinstance(choice, dict):
        wanted = {}  # a forced answer has calls alone, and no text for a format
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        chat["response_format"] = json_schema_format(**schema)
    elif wanted.get("type") == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif wanted.get("type") not in (None, "text"):
        raise Refused(f"`text.format` of type {_type(wanted)} is not supported", "text")
    return chat


def _chat_tools(tools: Sequence[Any], where: str = "tools", namespace: str = "") -> list[dict[str, Any]]:
    """Function tools as a chat completion has them, with their keys in the order that servers give to templates.

    A function in a namespace becomes NAMESPACE__NAME, as in vLLM (`flat_namespace_tool_name`).
    """
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        place, kind = f"{where}[{number}]", tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "namespace") or (kind == "namespace" and namespace):
            raise Refused(
                f"`{place}` is of type {_type(tool)}: the gateway has no hosted tools, only functions"
                f"{_HOW_TO_DISABLE.get(str(kind), '')}",
                "tools",
            )
        if not isinstance(tool.get("name"), str):
            raise Refused(f"`{place}` has no name", "tools")
        if kind == "namespace":
            inner = typed_field(tool, "tools", list, "a list of functions", default=[])
            functions += _chat_tools(inner, f"{place}.tools", f"{tool['name']}{_IN_NAMESPACE}")
            continue
        fields = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
        functions.append(function_wire(namespace + tool["name"], **fields))
    return functions


def _namespaced_functions(body: Body) -> dict[str, tuple[str, str]]:
    """For each function in a namespace, by its name in the template: the namespace and its own name."""
    spaces = [tool for tool in body.get("tools") or () if tool["type"] == "namespace"]
    inside = [(space["name"], tool["name"]) for space in spaces for tool in space.get("tools") or ()]
    return {_IN_NAMESPACE.join(names): names for names in inside}


# Items of a request


def _input_items(body: Body) -> list[Item]:
    sent = body.get("input")
    if isinstance(sent, str):
        sent = [{"role": "user", "content": [{"type": "input_text", "text": sent}]}]
    if sent is None and body.get("previous_response_id"):
        sent = []
    if not isinstance(sent, list) or not all(isinstance(item, dict) for item in sent):
        raise Refused("`input` is neither a text nor a list of items", "input")
    items = []
    for item in sent:
        kind = item.get("type") or "message"
        prefix = {"function_call_output": "fco", "function_call": "fc", "reasoning": "rs"}.get(str(kind), "msg")
        name = item.get("id")
        content = item.get("content")
        if kind == "message" and isinstance(content, str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": part, "text": content}]}
        named = {"id": name if isinstance(name, str) and name else f"{prefix}_{uuid4().hex}"}
        items.append({**named, "status": "completed", **item, "type": kind, **named})
    return items


@dataclass(slots=True)
class _AssistantItems:
    """The items of the input that make up one assistant message."""

    answer: str | None
    """The id of the answer, from the ids of its items; None if the client dropped them."""
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    last: str = ""
    """The type of the last item."""
    has_results: bool = False
    """Whether results of its calls have followed."""

    def continues_with(self, kind: str, answer: str | None) -> bool:
        """Whether an item belongs to this answer: by its id, else by the order of the items in an answer."""
        if answer is not None and self.answer is not None:
            return answer == self.answer
        follows = kind == "function_call" or (self.last != "message" and kind == "message")
        return not self.has_results and (follows or kind == self.last == "reasoning")


def _chat_messages(items: Sequence[Item], stored: Mapping[str, Item]) -> list[dict[str, Any]]:
    """Items as chat messages; `stored` has the items that an `item_reference` may name."""
    messages: list[_AssistantItems | dict[str, Any]] = []
    turn: _AssistantItems | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item["type"] == "item_reference":
            if item["id"] not in stored:
                raise Refused(f"Item with id '{item['id']}' not found.", "input", status=404)
            item = stored[item["id"]]
        kind = item["type"]
        if kind == "function_call_output":
            call_id = _text_at(item, "call_id", where)
            messages.append(tool_wire(call_id, _chat_content(item.get("output"), f"{where}.output")))
            if turn is not None:
                turn.has_results = True
            continue
        if kind == "message" and item.get("role") in _PROMPT_ROLES:
            content = _chat_content(item.get("content"), f"{where}.content")
            messages.append({"role": item["role"], "content": content})
            turn = None
            continue
        if kind not in ("reasoning", "function_call") and (kind, item.get("role")) != ("message", "assistant"):
            what = f"a message of role {item.get('role')!r:.60}" if kind == "message" else f"of type {_type(item)}"
            raise Refused(f"`{where}` is {what}: the gateway reads messages, functions and reasoning", "input")
        match = _ITEM_ID.fullmatch(item["id"])
        answer = match[1] if match is not None else None
        if turn is None or not turn.continues_with(kind, answer):
            turn = _AssistantItems(answer)
            messages.append(turn)
        turn.last, turn.answer = kind, turn.answer or answer
        if kind == "message":
            content = _chat_content(item.get("content"), f"{where}.content")
            turn.texts += [content] if isinstance(content, str) else [part["text"] for part in content]
        elif kind == "reasoning":
            turn.reasonings += filter(None, [_reasoning_text(item, stored, where)])
        else:
            name, arguments = _text_at(item, "name", where), _text_at(item, "arguments", where)
            if item.get("namespace") is not None:
                name = _text_at(item, "namespace", where) + _IN_NAMESPACE + name
            call_id = _text_at(item, "call_id", where)
            turn.calls.append({"id": call_id, **function_wire(name, arguments=arguments)})
    return [
        entry if isinstance(entry, dict) else assistant_wire(entry.texts, entry.reasonings, entry.calls)
        for entry in messages
    ]


def _chat_content(content: Any, where: str) -> Any:
    """Content as a chat message has it: one text as a string, several texts as parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"`{where}` is neither a text nor a list of parts", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise Refused(f"`{where}` has a part of type {_type(part)}: the gateway supports text only", "input")
        texts.append(text)
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _reasoning_text(item: Item, stored: Mapping[str, Item], where: str) -> str:
    """The text of a reasoning item: as the client sent it, else as it was stored, else ""."""
    for name in ("content", "summary"):
        parts = item.get(name) or ()
        if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
            raise Refused(f"`{where}.{name}` is not a list of parts", "input")
        if texts := [part["text"] for part in parts if isinstance(part.get("text"), str)]:
            return "\n".join(texts)
        sealed = item.get("encrypted_content")
        if sealed and name == "content":
            try:
                start, text = sealed[: len(_SEAL)], sealed[len(_SEAL) :]
                if start == _SEAL:
                    return urlsafe_b64decode(text).decode("utf-8")
            except (ValueError, TypeError):
                pass
            raise Refused(
                f"`{where}.encrypted_content` is not from this gateway: send the item without it, "
                "or leave the item out",
                "input",
                code="invalid_encrypted_content",
            )
    return "".join(part["text"] for part in stored.get(item["id"], {}).get("content") or ())


def _text_at(item: Item, name: str, where: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise Refused(f"`{where}` has no `{name}` that is a text", "input")
    return text


def _type(item: Any) -> str:
    """The type of something that is not supported, for an error message."""
    return repr(item.get("type") if isinstance(item, dict) else type(item).__name__)[:60]


# Items of an answer


_ITEM_KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "reasoning": ("rs", "reasoning_text", {"summary": [], "content": []}),
    "message": ("msg", "output_text", {"role": "assistant", "content": []}),
    "function_call": ("fc", "function_call_arguments", {"arguments": ""}),
}
"""By the type of an item: the prefix of its id, the name of its text in events, and its fields while empty."""


class OutputItems:
    """The output items of one answer, and the events that write them one after the other."""

    def __init__(self, call: Call) -> None:
        assert isinstance(call.request, ResponsesRequest)
        self.items: list[Item] = []
        """The items that are complete."""
        self._answer = call.call_id.removeprefix(ResponsesRequest.id_prefix)
        self._encrypts_reasoning = _ENCRYPTED in (call.request.sent_body.get("include") or ())
        self._namespaced_functions = _namespaced_functions(call.request.sent_body)
        self._open: Item | None = None
        # Of the open item: its text so far, the name of that in events, and fields of all its events and texts.
        self._texts: list[str] = []
        self._kind, self._place, self._extra = "", dict[str, Any](), dict[str, Any]()

    def add(self, delta: Mapping[str, Any]) -> Events:
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(name):
                if self._open is None or self._open["type"] != kind:
                    yield from self._begin(kind)
                yield self._text_delta(text)
        for part in delta.get("tool_calls") or ():
            function = part["function"]
            if "id" in part:
                space, name = self._namespaced_functions.get(function["name"], (None, function["name"]))
                fields = {} if space is None else {"namespace": space}
                yield from self._begin("function_call", call_id=part["id"], name=name, **fields)
            if function["arguments"]:
                yield self._text_delta(function["arguments"])

    def close(self, status: str) -> Events:
        """The events that end the last item; an answer without items gets an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message")
        yield from self._end(status)

    def _begin(self, kind: str, **fields: Any) -> Events:
        yield from self._end("completed")
        (prefix, self._kind, blank), at, self._texts = _ITEM_KINDS[kind], len(self.items), []
        name = f"{prefix}_{self._answer}{at:04x}"
        self._open = {"id": name, "type": kind, "status": "in_progress", **blank, **fields}
        self._place = {"item_id": name, "output_index": at}
        self._extra = {"logprobs": []} if kind == "message" else {}
        yield "response.output_item.added", {"output_index": at, "item": self._open}
        if kind != "function_call":
            self._place["content_index"] = 0
            yield "response.content_part.added", {**self._place, "part": self._part("")}

    def _text_delta(self, text: str) -> tuple[str, dict[str, Any]]:
        self._texts.append(text)
        return f"response.{self._kind}.delta", {**self._place, "delta": text, **self._extra}

    def _end(self, status: str) -> Events:
        item = self._open
        if item is None:
            return
        text, done = "".join(self._texts), f"response.{self._kind}.done"
        if item["type"] == "function_call":
            yield done, {**self._place, "arguments": text, "name": item["name"]}
            item = {**item, "arguments": text}
        else:
            yield done, {**self._place, "text": text, **self._extra}
            part = self._part(text)
            yield "response.content_part.done", {**self._place, "part": part}
            item = {**item, "content": [part]}
        if item["type"] == "reasoning" and self._encrypts_reasoning:
            item["encrypted_content"] = _SEAL + urlsafe_b64encode(text.encode("utf-8")).decode("ascii")
        item["status"] = status
        self._open = None
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self._kind, "text": text, **({"annotations": []} if self._extra else {}), **self._extra}


def _response(gateway: Gateway, call: Call, output: Sequence[Item], *, status: str, **more: Any) -> dict[str, Any]:
    """The response object with these output items and `more` fields."""
    request = call.request
    assert isinstance(request, ResponsesRequest)
    response: dict[str, Any] = {
        "id": call.call_id,
        "object": "response",
        "created_at": int(call.created),
        "status": status,
        "background": False,
        "completed_at": int(gateway.clock()) if status == "completed" else None,
        "error": None,
        "incomplete_details": None,
        "model": request.model or gateway.model,
        "output": list(output),
        "service_tier": "default",
        "top_logprobs": 0,
        "usage": None,
        **more,
    }
    for name, default in _ECHOED.items():
        stated = request.sent_body.get(name)
        response[name] = default if stated is None else stated
    if status in ("completed", "incomplete"):
        prompt, sampled = len(call.ids), call.sampled_tokens
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return response
