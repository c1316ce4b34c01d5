"""One conversation by any API of the gateway: what was said so far as data, sent as each API wants it.

A turn of a history is `{"user": TEXT}`, `{"assistant": TEXT}` (an answer that the model is to continue),
`{"result": TEXT}` (of every call of the answer before it), or an `Answer`, which is sent back as its own API
gave it, and to another API as what it says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anthropic import Anthropic
from openai import APIError

from tests.serving import FLAT, SCHEMAS, TOOLS, client

THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@dataclass(frozen=True)
class Answer:
    """What a client was answered."""

    api: str
    native: Any
    """As its client puts it into a history: a list of messages, items or blocks."""
    says: dict[str, Any]
    """Text, reasoning, calls as names and objects, and why it ended (`stop`, `calls`, `length`)."""
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments of each call."""
    usage: tuple[int, int]
    id: str


def as_sent_back(message: Any) -> dict[str, Any]:
    """A chat answer as agents put it into their history."""
    return message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


def added_up(pieces: Sequence[Any]) -> dict[str, Any]:
    """The message that the deltas of one chat answer add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for piece in pieces:
        delta = piece.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            calls = message.setdefault("tool_calls", [])
            if call.id is not None:
                calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
            calls[call.index]["function"]["name"] += call.function.name or ""
            calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return message


class Client:
    """A client of one API; the classes below say how that is asked, and how its answers are read."""

    api = ""
    """The endpoint's name in the log."""
    path = ""
    tools: Any = ()
    shows_reasoning = True

    def __init__(self, address: str, history: list[Any]) -> None:
        self.address, self.history = address, history

    def ask(self, streams: bool, **fields: Any) -> Answer:
        """The answer to the history, which then has it."""
        answer = self.whole(streams, {"tools": self.tools, **fields})
        self.history.append(answer)
        return answer

    def whole(self, streams: bool, fields: dict[str, Any]) -> Answer:
        raise NotImplementedError

    def stream(self, **fields: Any) -> Any:
        """The events or chunks of an answer, one after the other."""
        raise NotImplementedError

    def foreign(self, answer: Answer) -> list[Any]:
        """What an answer of another API says, as this one has it."""
        raise NotImplementedError

    def result(self, call_id: str, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def written(self) -> list[Any]:
        """The history as this API has it."""
        out: list[Any] = []
        calls: Any = ()
        for turn in self.history:
            if isinstance(turn, Answer):
                calls = turn.calls
                out += turn.native if turn.api == self.api else self.foreign(turn)
            elif "result" in turn:
                out += [self.result(call_id, turn["result"]) for call_id, *_ in calls]
            else:
                ((role, text),) = turn.items()
                out.append({"role": "user" if role == "user" else "assistant", "content": text})
        return out

    def read(
        self, native: Any, text: str, thought: str, calls: Sequence[Any], why: str, usage: Any, answer_id: str
    ) -> Answer:
        objects = [[name, json.loads(arguments)] for _, name, arguments in calls]
        says = {"text": text, "reasoning": thought, "calls": objects, "why": why}
        return Answer(self.api, native, says, tuple(calls), usage, answer_id)

    def check_error(self, error: Any, status: int, broken: bool) -> None:
        """An error has its status, in the form and with the type of this API; that of a broken stream need not."""
        if broken:
            return
        kinds = {429: "rate_limit_error", 404: "not_found_error"}
        assert error.status_code == status
        assert error.body.keys() == {"message", "type", "param", "code"}
        assert error.body["type"] == kinds.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )


class Chat(Client):
    """Chat completions."""

    api, path, tools = "chat.completions", "/v1/chat/completions", TOOLS

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
            ((why, said),) = ((choice.finish_reason, choice.message) for choice in last.choices)
            message = {**as_sent_back(said), "reasoning_content": getattr(said, "reasoning_content", "")}
        thought = message.pop("reasoning_content")
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        usage = (last.usage.prompt_tokens, last.usage.completion_tokens)
        why = "calls" if why == "tool_calls" else why
        return self.read([message], message.get("content") or "", thought or "", calls, why, usage, last.id)

    def foreign(self, answer: Answer) -> list[Any]:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in answer.calls
        ]
        return [{"role": "assistant", "content": answer.says["text"], **({"tool_calls": calls} if calls else {})}]

    def result(self, call_id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": text}


class Responses(Client):
    """Responses: by the whole history, by the response before, with reasoning sealed, or without ids of items."""

    api, path, tools = "responses", "/v1/responses", FLAT
    how = "history"

    def __init__(self, address: str, history: list[Any], how: str = "history") -> None:
        super().__init__(address, history)
        self.how = how

    def asking(self, system: str = "", **fields: Any) -> dict[str, Any]:
        items, before = self.written(), [turn for turn in self.history if isinstance(turn, Answer)]
        asking: dict[str, Any] = {"model": "toy", "input": items, **fields}
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
                last: Any = list(stream)[-1]
            if last.type == "response.failed":
                raise APIError(last.response.error.message, None, body=None)
            response = last.response
        else:
            response = client(self.address).responses.create(**self.asking(**fields))
        items = [item.to_dict() for item in response.output]
        thought = "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning")
        calls = [
            (item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"
        ]
        for item in items:
            item.pop("parsed_arguments", None)
            if self.how == "not stored" and item["type"] == "reasoning":
                del item["content"]
            if self.how == "without ids":
                del item["id"]
        usage = (response.usage.input_tokens, response.usage.output_tokens)
        assert response.usage.total_tokens == sum(usage)
        why = "length" if response.status == "incomplete" else "calls" if calls else "stop"
        return self.read(items, response.output_text, thought, calls, why, usage, response.id)

    def foreign(self, answer: Answer) -> list[Any]:
        return [
            {"role": "assistant", "content": answer.says["text"]},
            *(
                {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
                for call_id, name, arguments in answer.calls
            ),
        ]

    def result(self, call_id: str, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": text}


class Messages(Client):
    """Anthropic's Messages, with and without thinking."""

    api, path, tools = "messages", "/v1/messages", SCHEMAS
    asked = 0

    def __init__(self, address: str, history: list[Any], thinks: bool = False) -> None:
        super().__init__(address, history)
        self.shows_reasoning = thinks

    def asking(self, system: str = "", **fields: Any) -> dict[str, Any]:
        self.asked += 1
        asking = {"model": "toy", "max_tokens": 500, "messages": self.written(), **fields}
        if system:  # With the line that Claude Code changes from call to call.
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={self.asked};"}
            asking["system"] = [billing, {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        if "stop" in asking:
            asking["stop_sequences"] = asking.pop("stop")
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
        if streams:
            with client(self.address, kind=Anthropic).messages.stream(**self.asking(**fields)) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client(self.address, kind=Anthropic).messages.create(**self.asking(**fields))
            assert message._request_id == message.id
        blocks = [block.to_dict(exclude_none=True) for block in message.content]
        calls = [
            (block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        texts, thoughts = (
            "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("text", "thinking")
        )
        why = {"tool_use": "calls", "max_tokens": "length", "end_turn": "stop"}.get(
            message.stop_reason, message.stop_reason
        )
        usage = (message.usage.input_tokens, message.usage.output_tokens)
        return self.read(
            [{"role": "assistant", "content": blocks}], texts, thoughts, calls, why, usage, message.id
        )

    def foreign(self, answer: Answer) -> list[Any]:
        calls = [
            {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
            for call_id, name, arguments in answer.calls
        ]
        texts = [{"type": "text", "text": answer.says["text"]}] if answer.says["text"] else []
        return [{"role": "assistant", "content": [*texts, *calls]}]

    def result(self, call_id: str, text: str) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        return {"role": "user", "content": [block]}

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
