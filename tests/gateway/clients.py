"""One conversation by any API of the gateway: what was said so far as data, sent as each API wants it.

A turn of a history is `{"user": TEXT}`, `{"assistant": TEXT}` (an answer that the model is to continue),
`{"result": TEXT}` (of every call of the answer before it), or an `Answer`, which is sent back as its own API
gave it, and to another API as what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anthropic import Anthropic
from openai import APIError

from tests.serving import FLAT, SCHEMAS, TOOLS, client
from tito_audit.serve.messages import MessagesApi as Signing

Message = dict[str, Any]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


# A chat's message in the forms of the other APIs, and back


def items_of(message: Message) -> list[Message]:
    """A message of a chat as items of a response."""
    text, thought = message.get("content"), message.get("reasoning_content")
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}]
    calls = message.get("tool_calls") or []
    content = [{"type": "reasoning_text", "text": thought}]
    items: list[Message] = [{"type": "reasoning", "summary": [], "content": content}] if thought else []
    if text or not (thought or calls):
        items.append({"role": message["role"], "content": text or ""})
    return items + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def from_items(items: Sequence[Message]) -> Message:
    """The items of an answer as a message of a chat."""
    message: Message = {"role": "assistant", "content": None}
    for item in items:
        if item["type"] == "function_call":
            _call(message, item["call_id"], item["name"], item["arguments"])
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            message[name] = (message.get(name) or "") + item["content"][0]["text"]
    return message


def blocks_of(message: Message) -> list[Message]:
    """A message of a chat as content blocks."""
    text, thought = message.get("content") or "", message.get("reasoning_content")
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    signed = {"type": "thinking", "thinking": thought, "signature": Signing().sign(thought or "")}
    blocks = [signed] if thought else []
    if text or message["role"] == "user":
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        value, name = json.loads(call["function"]["arguments"]), call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": value})
    return blocks


def from_blocks(blocks: Sequence[Message]) -> Message:
    """Content blocks as a message of a chat."""
    message: Message = {"role": "assistant", "content": None}
    for block in blocks:
        if block["type"] == "text":
            message["content"] = (message["content"] or "") + block["text"]
        elif block["type"] == "thinking":
            message["reasoning_content"] = block["thinking"]
        else:
            _call(message, block["id"], block["name"], json.dumps(block["input"]))
    return message


def _call(message: Message, call_id: str | None, name: str = "", arguments: str = "") -> Message:
    """Add a call to a message."""
    function = {"name": name, "arguments": arguments}
    call: Message = {"id": call_id, "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)
    return call


def add_delta(message: Message, delta: Mapping[str, Any]) -> None:
    """The message with one more delta of a stream."""
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value or []:
                calls = message.setdefault("tool_calls", [])
                call = calls[part["index"]] if part["index"] < len(calls) else _call(message, None)
                call["id"] = part.get("id") or call["id"]
                for key, text in (part.get("function") or {}).items():
                    call["function"][key] += text or ""
        elif name == "role" or value is None:
            message.setdefault(name, value)
        elif isinstance(value, str):
            message[name] = (message.get(name) or "") + value


def added_up(pieces: Sequence[Any]) -> Message:
    """The message that the chunks of one chat answer add up to."""
    message: Message = {"role": "assistant"}
    for piece in pieces:
        add_delta(message, piece.choices[0].delta.model_dump(exclude_unset=True))
    return message


def as_sent_back(message: Any) -> Message:
    """A chat answer as agents put it into their history."""
    return message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


# Clients


@dataclass(frozen=True)
class Answer:
    """What a client was answered."""

    api: str
    native: Any
    """As its client puts it into a history: a list of messages, items or blocks."""
    message: Message
    """The same as a message of a chat."""
    why: str
    """`stop`, `calls` or `length`."""
    usage: tuple[int, int]
    id: str

    @property
    def calls(self) -> list[Message]:
        return self.message.get("tool_calls") or []

    @property
    def says(self) -> dict[str, Any]:
        """What it says, whichever API it came by."""
        functions = [call["function"] for call in self.calls]
        calls = [[function["name"], json.loads(function["arguments"])] for function in functions]
        text, thought = self.message.get("content") or "", self.message.get("reasoning_content") or ""
        return {"text": text, "reasoning": thought, "calls": calls, "why": self.why}


class Client:
    """A client of one API. The classes below have `stream` (its events), `whole` (an answer, added up where it
    streams) and `converted` (a message of a chat as that API has it).
    """

    api = ""
    """The endpoint's name in the log."""
    tools: Any = ()
    shows_reasoning = True

    def __init__(self, address: str, history: list[Any]) -> None:
        self.address, self.history = address, history

    def ask(self, streams: bool, **fields: Any) -> Answer:
        """The answer to the history, which then has it."""
        answer = self.whole(streams, {"tools": self.tools, **fields})
        self.history.append(answer)
        return answer

    def tell(self, who: str, text: str, streams: bool = False, **fields: Any) -> Answer:
        """The answer to one more turn of the history."""
        self.history.append({who: text})
        return self.ask(streams, **fields)

    def written(self) -> list[Any]:
        """The history as this API has it."""
        out: list[Any] = []
        calls: list[Message] = []
        for turn in self.history:
            if isinstance(turn, Answer):
                calls = turn.calls
                out += turn.native if turn.api == self.api else self.converted(turn.message)
            elif "result" in turn:
                for call in calls:
                    out += self.converted({"role": "tool", "tool_call_id": call["id"], "content": turn["result"]})
            else:
                ((role, text),) = turn.items()
                out.append({"role": role, "content": text})
        return out

    def check_error(self, error: Any, status: int, broken: bool) -> None:
        """An error has its status, in the form and with the type of this API; that of a broken stream need not."""
        if broken:
            return
        kinds = {429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        assert error.status_code == status
        assert error.body.keys() == {"message", "type", "param", "code"}
        assert error.body["type"] == kind


class Chat(Client):
    """Chat completions."""

    api, tools = "chat.completions", TOOLS

    def __init__(self, address: str, history: list[Any], keeps_reasoning: bool = False) -> None:
        super().__init__(address, history)
        reasoning = ("reasoning_content",) if keeps_reasoning else ()
        self.sent_back = ("role", "content", "tool_calls", *reasoning)

    def asking(self, system: str = "", **fields: Any) -> dict[str, Any]:
        first = [{"role": "system", "content": system}] if system else []
        return {"model": "toy", "messages": [*first, *self.written()], **fields}

    def stream(self, **fields: Any) -> Any:
        return client(self.address).chat.completions.create(**self.asking(**fields), stream=True)

    def whole(self, streams: bool, fields: dict[str, Any]) -> Answer:
        if streams:
            *pieces, last = self.stream(**fields, stream_options={"include_usage": True})
            message, why = added_up(pieces), pieces[-1].choices[0].finish_reason
            assert last.choices == []
        else:
            last = client(self.address).chat.completions.create(**self.asking(**fields))
            (choice,) = last.choices
            message, why = choice.message.to_dict(), choice.finish_reason
        sent_back = {name: message[name] for name in self.sent_back if message.get(name)}
        usage = (last.usage.prompt_tokens, last.usage.completion_tokens)
        native = [{"content": "", **sent_back}]
        return Answer(self.api, native, message, "calls" if why == "tool_calls" else why, usage, last.id)

    def converted(self, message: Message) -> list[Any]:
        return [message]


class Responses(Client):
    """Responses: by the whole history, by the response before, with reasoning sealed, or without ids of items."""

    api, tools = "responses", FLAT

    def __init__(self, address: str, history: list[Any], how: str = "history") -> None:
        super().__init__(address, history)
        self.how = how

    def asking(self, system: str = "", **fields: Any) -> dict[str, Any]:
        before = [turn for turn in self.history if isinstance(turn, Answer)]
        asking: dict[str, Any] = {"model": "toy", "input": self.written(), **fields}
        if "max_tokens" in asking:
            asking["max_output_tokens"] = asking.pop("max_tokens")
        if system:
            asking["instructions"] = system
        if self.how == "previous" and before:
            new = Responses(self.address, self.history[self.history.index(before[-1]) :]).written()
            asking |= {"input": new[len(before[-1].native) :], "previous_response_id": before[-1].id}
        if self.how == "not stored":
            asking |= {"store": False, "include": ["reasoning.encrypted_content"]}
        return asking

    def stream(self, **fields: Any) -> Any:
        return client(self.address).responses.create(**self.asking(**fields), stream=True)

    def whole(self, streams: bool, fields: dict[str, Any]) -> Answer:
        if streams:
            with client(self.address).responses.stream(**self.asking(**fields)) as stream:
                last: Any = list(stream)[-1]  # the package knows no final response that was cut
            if last.type == "response.failed":
                raise APIError(last.response.error.message, None, body=None)
            response = last.response
        else:
            response = client(self.address).responses.create(**self.asking(**fields))
        items = [item.to_dict() for item in response.output]
        assert items, "an answer of nothing is an empty message"
        message = from_items(items)
        assert response.output_text == (message["content"] or "")
        for item in items:
            item.pop("parsed_arguments", None)
            if self.how == "not stored" and item["type"] == "reasoning":
                del item["content"]
            if self.how == "without ids":
                del item["id"]
        usage = (response.usage.input_tokens, response.usage.output_tokens)
        assert response.usage.total_tokens == sum(usage)
        ended = "calls" if "tool_calls" in message else "stop"
        why = "length" if response.status == "incomplete" else ended
        return Answer(self.api, items, message, why, usage, response.id)

    def converted(self, message: Message) -> list[Any]:
        return items_of(message)


class Messages(Client):
    """Anthropic's Messages, with and without thinking."""

    api, tools = "messages", SCHEMAS
    requests = 0

    def __init__(self, address: str, history: list[Any], thinks: bool = False) -> None:
        super().__init__(address, history)
        self.shows_reasoning = thinks

    def asking(self, system: str = "", **fields: Any) -> dict[str, Any]:
        self.requests += 1
        asking = {"model": "toy", "max_tokens": 500, "messages": self.written(), **fields}
        if system:  # With the line that Claude Code changes from call to call.
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={self.requests};"}
            asking["system"] = [billing, {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        return {**asking, "thinking": THINKING} if self.shows_reasoning else asking

    def written(self) -> list[Any]:
        """Consecutive results are one message."""
        out: list[Any] = []
        for message in super().written():
            results = message["role"] == "user" and not isinstance(message["content"], str)
            if results and isinstance(out[-1]["content"], list) and out[-1]["role"] == "user":
                out[-1]["content"] += message["content"]
            else:
                out.append(message)
        return out

    def stream(self, **fields: Any) -> Any:
        return client(self.address, kind=Anthropic).messages.create(**self.asking(**fields), stream=True)

    def whole(self, streams: bool, fields: dict[str, Any]) -> Answer:
        messages = client(self.address, kind=Anthropic).messages
        if streams:
            with messages.stream(**self.asking(**fields)) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = messages.create(**self.asking(**fields))
            assert answer._request_id == answer.id
        blocks = [block.to_dict(exclude_none=True) for block in answer.content]
        kinds = [block["type"] for block in blocks]
        assert kinds == sorted(kinds, key=("thinking", "text", "tool_use").index), "in the order of the answer"
        why = {"tool_use": "calls", "max_tokens": "length"}.get(answer.stop_reason, "stop")
        usage = (answer.usage.input_tokens, answer.usage.output_tokens)
        native = [{"role": "assistant", "content": blocks}]
        return Answer(self.api, native, from_blocks(blocks), why, usage, answer.id)

    def converted(self, message: Message) -> list[Any]:
        role = "user" if message["role"] == "tool" else message["role"]
        return [{"role": role, "content": blocks_of(message)}]

    def check_error(self, error: Any, status: int, broken: bool) -> None:
        kinds = {429: "rate_limit_error", 404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
        assert broken or error.status_code == status
        assert error.body == {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


CLIENTS: dict[str, Any] = {
    "chat": Chat,
    "responses": Responses,
    "responses, previous": partial(Responses, how="previous"),
    "responses, not stored": partial(Responses, how="not stored"),
    "responses, without ids": partial(Responses, how="without ids"),
    "messages": Messages,
    "messages, thinking": partial(Messages, thinks=True),
}
