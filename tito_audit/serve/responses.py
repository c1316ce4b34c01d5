"""OpenAI's Responses API: items to chat messages, and sampled answers to items and events.

A request becomes the messages that a chat completion would have, so both APIs continue the same sessions. The
items of one answer (reasoning, text, calls) are one assistant message.
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
    ChatAsked,
    as_answer,
    as_function,
    as_result,
    as_schema,
    body_of,
    chat_of,
    count_of,
    value_of,
)

Item = dict[str, Any]
Events = Iterator[tuple[str, dict[str, Any]]]
"""Events by type, still without their sequence numbers."""

_REFUSED = {
    "background": "an answer is given while its client waits",
    "conversation": "pass previous_response_id, or the whole history",
    "prompt": "prompt templates are stored at OpenAI; pass instructions and input",
    "context_management": "the gateway drops nothing from a history",
    "top_logprobs": "the log has the logprobs; `return_token_ids` shows ids and logprobs",
}
_OWN = frozenset(
    (
        *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "store"),
        *("previous_response_id", "include", "truncation", "max_tool_calls", "stream_options", "client_metadata"),
        *("prompt_cache_retention", "prompt_cache_options", "messages", "n", "logprobs", "max_tokens"),
        *("max_completion_tokens", "response_format", "reasoning_effort", *_REFUSED),
    )
)
"""Fields that are translated or ignored; every other field is read as in a chat completion."""
_ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "temperature", "top_p", "user")),
    **{"metadata": {}, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None}, "store": True},
    **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "truncation": "disabled"},
}
"""What a response repeats of its request, and what it says where the request says nothing."""
_IN_NAMESPACE = "__"
"""What stands between a namespace and a function of it in the names that the template has."""
_SETTINGS = {
    "web_search": '; in Codex, set web_search = "disabled"',
    "image_generation": "; in Codex, set image_generation = false under [features]",
    "tool_search": "; in Codex, set apps = false and tool_suggest = false under [features]",
}
"""What turns off the hosted tools that a harness sends by itself."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and where it is."""
_ROLES = ("user", "system", "developer")
_ENCRYPTED = "reasoning.encrypted_content"
_SEALED = "tito-audit:"
"""What `encrypted_content` begins with; the reasoning follows in base64, for clients that keep nothing else."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})[0-9a-f]{4}")
"""The ids of the items of one answer hold its id."""
_MOST_STORED, _MOST_BYTES = 8192, 256 << 20
"""How many responses are stored, and how many bytes of requests; beyond this the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class ResponseAsked(ChatAsked):
    """A request to `/v1/responses`."""

    endpoint: ClassVar[str] = "responses"
    id_prefix: ClassVar[str] = "resp_"
    own: Body = field(default_factory=dict)
    """Its body."""
    items: Sequence[Item] = ()
    """All that it answers: its input, after the items of the responses that it continues."""
    history: Sequence[Mapping[str, Any]] = ()
    """The same as chat messages."""
    bytes: int = 0

    @property
    def seals(self) -> bool:
        return _ENCRYPTED in (self.own.get("include") or ())


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that later requests can name."""

    response: Mapping[str, Any]
    fields: ResponseAsked
    session_id: str
    message: Mapping[str, Any]
    """The answer as a chat message."""


class Responses:
    """The endpoints of the Responses API, and the responses they stored."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, Item] = {}
        """The output items of these, by id."""
        self._bytes = 0

    def read_fields(self, data: bytes) -> ResponseAsked:
        """The request in a body; Refused names the field that is wrong."""
        body = body_of(data)
        for name, why in _REFUSED.items():
            if body.get(name):
                raise Refused(f"`{name}` is not supported: {why}", name)
        if body.get("truncation") not in (None, "disabled"):
            raise Refused("`truncation` can only be disabled: the gateway drops nothing", "truncation")
        if value_of(body, "n", int, default=1) != 1:
            raise Refused("`n` is not supported: a response is one answer", "n")
        include = value_of(body, "include", list, "a list", default=[])
        if "message.output_text.logprobs" in include:
            raise Refused(f"`include`: logprobs are not supported: {_REFUSED['top_logprobs']}", "include")
        value_of(body, "store", bool, default=True)
        name = value_of(body, "previous_response_id", str)
        if name is not None and name not in self._stored:
            raise Refused(
                f"Previous response with id '{name}' not found: it was not stored, or is no longer in memory.",
                "previous_response_id",
                code="previous_response_not_found",
            )
        previous = None if name is None else self._stored[name]
        items = _input_items(body)
        history: list[Any] = _messages(items, self._items)
        if previous is not None:
            items = [*previous.fields.items, *previous.response["output"], *items]
            history = [*previous.fields.history, previous.message, *history]
        instructions = value_of(body, "instructions", str)
        messages = [{"role": "system", "content": instructions}, *history] if instructions else history
        if not messages:
            raise Refused("`input` is empty", "input")
        return chat_of(
            {**_chat_body(body), "messages": messages},
            ResponseAsked,
            own=body,
            items=items,
            history=history,
            bytes=len(data),
            session_id=None if previous is None else previous.session_id,
        )

    def answer(self, gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
        output = AnswerItems(call)
        for delta in call.answers[0].wires:
            for _ in output.add(delta):
                pass
        return self._ended(gateway, call, output)[1]

    async def stream(self, gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response. The last ones are sent once it is in the log."""
        output, numbers = AnswerItems(call), count()

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
        events, response = self._ended(gateway, call, output)
        for kind, fields in events:
            yield event(kind, fields)
        yield event(f"response.{response['status']}", {"response": response})

    def retrieve(self, request: web.Request) -> Mapping[str, Any]:
        """`GET /v1/responses/{response}`"""
        if request.query.get("stream", "false").lower() not in ("false", "0", ""):
            raise Refused("`stream` is not supported: a stored response is given whole", "stream")
        return self._named(request).response

    def delete(self, request: web.Request) -> Mapping[str, Any]:
        """`DELETE /v1/responses/{response}`"""
        name = str(self._named(request).response["id"])
        self._forget(name)
        return {"id": name, "object": "response", "deleted": True}

    def input_items(self, request: web.Request) -> Mapping[str, Any]:
        """`GET /v1/responses/{response}/input_items`: all that it answered, the latest item first."""
        query, items = request.query, self._named(request).fields.items
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
        more = len(page) < len(items)
        return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}

    def _ended(
        self, gateway: Gateway, call: Call, output: AnswerItems
    ) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """The last events of an answer, and the response, which is stored now."""
        (answer,), fields = call.answers, call.fields
        assert isinstance(fields, ResponseAsked)
        done = answer.why() in ("stop", "tool_calls")
        status = "completed" if done else "incomplete"
        events = list(output.close(status))
        why = None if done else {"reason": "max_output_tokens" if answer.finish_reason == "length" else None}
        response = _response(gateway, call, output.items, status=status, incomplete_details=why)
        if fields.own.get("store") is not False:
            self._stored[call.call_id] = Stored(response, fields, call.session.id, answer.message())
            self._items |= {item["id"]: item for item in output.items}
            self._bytes += fields.bytes
            while len(self._stored) > _MOST_STORED or (self._bytes > _MOST_BYTES and len(self._stored) > 1):
                self._forget(next(iter(self._stored)))
        if fields.token_ids:
            tokens = {"generation_token_ids": answer.ids, "generation_log_probs": answer.logprobs}
            last = {**output.items[-1], **call.prompt_wire, **tokens}
            response = {**response, "output": [*output.items[:-1], last]}
        return events, response

    def _forget(self, name: str) -> None:
        stored = self._stored.pop(name)
        self._bytes -= stored.fields.bytes
        for item in stored.response["output"]:
            self._items.pop(item["id"], None)

    def _named(self, request: web.Request) -> Stored:
        name = request.match_info["response"]
        if name not in self._stored:
            raise Refused(f"Response with id '{name}' not found.", status=404)
        return self._stored[name]


def _chat_body(body: Body) -> dict[str, Any]:
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat["max_completion_tokens"] = count_of(body, "max_output_tokens", 1)
    if tools := _tools(value_of(body, "tools", list, "a list of tool definitions", default=[])):
        chat["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        whole = [full for full, (_, name) in _namespaced(body).items() if name == choice.get("name")]
        choice = as_function(whole[0] if len(whole) == 1 else choice.get("name"))
    chat["tool_choice"] = None if choice == "auto" else choice
    if reasoning := value_of(body, "reasoning", dict, default={}):
        chat["reasoning_effort"] = value_of(reasoning, "effort", str)
    text = value_of(body, "text", dict, default={})
    wanted = value_of(text, "format", dict, default={})
    if choice == "required" or isinstance(choice, dict):
        wanted = {}  # a forced answer has calls alone, and no text for a format
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        chat["response_format"] = as_schema(**schema)
    elif wanted.get("type") == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif wanted.get("type") not in (None, "text"):
        raise Refused(f"`text.format` of type {_name(wanted)} is not supported", "text")
    return chat


def _tools(tools: Sequence[Any], where: str = "tools", namespace: str = "") -> list[dict[str, Any]]:
    """Function tools in chat form, keys in the order in which servers pass them to templates.

    A function in a namespace is called NAMESPACE__NAME, as vLLM calls it (`flat_namespace_tool_name`).
    """
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        place, kind = f"{where}[{number}]", tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "namespace") or (kind == "namespace" and namespace):
            setting = _SETTINGS.get(str(kind), "")
            raise Refused(
                f"`{place}` is of type {_name(tool)}: the gateway has no hosted tools, only functions{setting}",
                "tools",
            )
        if not isinstance(tool.get("name"), str):
            raise Refused(f"`{place}` has no name", "tools")
        if kind == "namespace":
            inner = value_of(tool, "tools", list, "a list of functions", default=[])
            functions += _tools(inner, f"{place}.tools", f"{tool['name']}{_IN_NAMESPACE}")
            continue
        more = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
        functions.append(as_function(namespace + tool["name"], **more))
    return functions


def _namespaced(body: Body) -> dict[str, tuple[str, str]]:
    """The functions in namespaces by the names that the template has: the namespace, and their own name in it."""
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
class _ItemsOfAnswer:
    """An assistant message while its items are read."""

    answer: str | None
    """The id of the answer that its items name."""
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    last: str = ""
    """The type of its last item."""
    answered: bool = False
    """Results of its calls have followed."""

    def takes(self, kind: str, answer: str | None) -> bool:
        """Whether the next item belongs to it: by its id, or where ids were dropped by the order of an answer."""
        if answer is not None and self.answer is not None:
            return answer == self.answer
        follows = kind == "function_call" or (self.last != "message" and kind == "message")
        return not self.answered and (follows or kind == self.last == "reasoning")


def _messages(items: Sequence[Item], stored: Mapping[str, Item]) -> list[dict[str, Any]]:
    """Items as chat messages; `stored` are the items that a reference may name."""
    read: list[_ItemsOfAnswer | dict[str, Any]] = []
    turn: _ItemsOfAnswer | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item["type"] == "item_reference":
            if item["id"] not in stored:
                raise Refused(f"Item with id '{item['id']}' not found.", "input", status=404)
            item = stored[item["id"]]
        kind = item["type"]
        if kind == "function_call_output":
            name = _text(item, "call_id", where)
            content = _content(item.get("output"), f"{where}.output")
            read.append(as_result(name, content))
            if turn is not None:
                turn.answered = True
            continue
        if kind == "message" and item.get("role") in _ROLES:
            read.append({"role": item["role"], "content": _content(item.get("content"), f"{where}.content")})
            turn = None
            continue
        if kind not in ("reasoning", "function_call") and (kind, item.get("role")) != ("message", "assistant"):
            what = f"a message of role {item.get('role')!r:.60}" if kind == "message" else f"of type {_name(item)}"
            raise Refused(f"`{where}` is {what}: the gateway reads messages, functions and reasoning", "input")
        match = _ITEM_ID.fullmatch(item["id"])
        answer = match[1] if match is not None else None
        if turn is None or not turn.takes(kind, answer):
            turn = _ItemsOfAnswer(answer)
            read.append(turn)
        turn.last, turn.answer = kind, turn.answer or answer
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            turn.texts += [content] if isinstance(content, str) else [part["text"] for part in content]
        elif kind == "reasoning":
            turn.reasonings += filter(None, [_reasoning(item, stored, where)])
        else:
            name, arguments = _text(item, "name", where), _text(item, "arguments", where)
            if item.get("namespace") is not None:
                name = _text(item, "namespace", where) + _IN_NAMESPACE + name
            turn.calls.append({"id": _text(item, "call_id", where), **as_function(name, arguments=arguments)})
    return [
        entry if isinstance(entry, dict) else as_answer(entry.texts, entry.reasonings, entry.calls)
        for entry in read
    ]


def _content(content: Any, where: str) -> Any:
    """Content as a chat message has it: one text as a string, several as parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"`{where}` is neither a text nor a list of parts", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise Refused(f"`{where}` has a part of type {_name(part)}: the gateway supports text only", "input")
        texts.append(text)
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _reasoning(item: Item, stored: Mapping[str, Item], where: str) -> str:
    """The text of a reasoning item, as the client has it or else as it was stored; "" if it is unknown."""
    for name in ("content", "summary"):
        parts = item.get(name) or ()
        if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
            raise Refused(f"`{where}.{name}` is not a list of parts", "input")
        if texts := [part["text"] for part in parts if isinstance(part.get("text"), str)]:
            return "\n".join(texts)
        sealed = item.get("encrypted_content")
        if sealed and name == "content":
            try:
                start, text = sealed[: len(_SEALED)], sealed[len(_SEALED) :]
                if start == _SEALED:
                    return urlsafe_b64decode(text).decode("utf-8")
            except (ValueError, TypeError):
                pass
            raise Refused(
                f"`{where}.encrypted_content` is not from this gateway: send the item without it, "
                "or leave the item out",
                "input",
                code="invalid_encrypted_content",
            )
    own = stored.get(item["id"], {}).get("content") or ()
    return "".join(part["text"] for part in own)


def _text(item: Item, name: str, where: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise Refused(f"`{where}` has no `{name}` that is a text", "input")
    return text


def _name(item: Any) -> str:
    """The type of an object that is not supported, for a message."""
    return repr(item.get("type") if isinstance(item, dict) else type(item).__name__)[:60]


# Items of an answer


_KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "reasoning": ("rs", "reasoning_text", {"summary": [], "content": []}),
    "message": ("msg", "output_text", {"role": "assistant", "content": []}),
    "function_call": ("fc", "function_call_arguments", {"arguments": ""}),
}
"""What the id of an item begins with, the name of its text in events, and its fields before any sampling."""


class AnswerItems:
    """The items of one answer, and the events that write them in OpenAI's order: each ends before the next."""

    def __init__(self, call: Call) -> None:
        assert isinstance(call.fields, ResponseAsked)
        self.items: list[Item] = []
        """Those that are complete."""
        self._answer = call.call_id.removeprefix(ResponseAsked.id_prefix)
        self._seals = call.fields.seals
        self._namespaced = _namespaced(call.fields.own)
        self._open: Item | None = None
        # Of the open item: its text so far, its name in events, where it is, and what else a text has.
        self._texts: list[str] = []
        self._word, self._place, self._more = "", dict[str, Any](), dict[str, Any]()

    def add(self, delta: Mapping[str, Any]) -> Events:
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(name):
                if self._open is None or self._open["type"] != kind:
                    yield from self._begin(kind)
                yield self._delta(text)
        for part in delta.get("tool_calls") or ():
            function = part["function"]
            if "id" in part:
                space, name = self._namespaced.get(function["name"], (None, function["name"]))
                more = {} if space is None else {"namespace": space}
                yield from self._begin("function_call", call_id=part["id"], name=name, **more)
            if function["arguments"]:
                yield self._delta(function["arguments"])

    def close(self, status: str) -> Events:
        """The events that end the last item; an answer without any is an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message")
        yield from self._end(status)

    def _begin(self, kind: str, **fields: Any) -> Events:
        yield from self._end("completed")
        (prefix, self._word, blank), at, self._texts = _KINDS[kind], len(self.items), []
        name = f"{prefix}_{self._answer}{at:04x}"
        self._open = {"id": name, "type": kind, "status": "in_progress", **blank, **fields}
        self._place = {"item_id": name, "output_index": at}
        self._more = {"logprobs": []} if kind == "message" else {}
        yield "response.output_item.added", {"output_index": at, "item": self._open}
        if kind != "function_call":
            self._place["content_index"] = 0
            yield "response.content_part.added", {**self._place, "part": self._part("")}

    def _delta(self, text: str) -> tuple[str, dict[str, Any]]:
        self._texts.append(text)
        return f"response.{self._word}.delta", {**self._place, "delta": text, **self._more}

    def _end(self, status: str) -> Events:
        item = self._open
        if item is None:
            return
        text, done = "".join(self._texts), f"response.{self._word}.done"
        if item["type"] == "function_call":
            yield done, {**self._place, "arguments": text, "name": item["name"]}
            item = {**item, "arguments": text}
        else:
            yield done, {**self._place, "text": text, **self._more}
            part = self._part(text)
            yield "response.content_part.done", {**self._place, "part": part}
            item = {**item, "content": [part]}
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = _SEALED + urlsafe_b64encode(text.encode("utf-8")).decode("ascii")
        item["status"] = status
        self._open = None
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self._word, "text": text, **({"annotations": []} if self._more else {}), **self._more}


def _response(gateway: Gateway, call: Call, output: Sequence[Item], *, status: str, **more: Any) -> dict[str, Any]:
    """The response object, as far as the answer has come."""
    fields = call.fields
    assert isinstance(fields, ResponseAsked)
    response: dict[str, Any] = {
        "id": call.call_id,
        "object": "response",
        "created_at": int(call.created),
        "status": status,
        "background": False,
        "completed_at": int(gateway.clock()) if status == "completed" else None,
        "error": None,
        "incomplete_details": None,
        "model": fields.model or gateway.model,
        "output": list(output),
        "service_tier": "default",
        "top_logprobs": 0,
        "usage": None,
        **more,
    }
    for name, default in _ECHOED.items():
        stated = fields.own.get(name)
        response[name] = default if stated is None else stated
    if status in ("completed", "incomplete"):
        prompt, sampled = len(call.ids), call.sampled
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return response
