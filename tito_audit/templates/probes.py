"""Test conversations: each kind of answer, and each kind of message after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tito_audit.errors import RenderError
from tito_audit.record.message import Message, ToolSpec, as_messages
from tito_audit.render.renderer import Renderer

_Wire = Mapping[str, Any]

USER = "What is the weather in Paris?"
SECOND_USER = "And in Rome?"
REASONING = "They ask for the weather, so I look it up."
ANSWER = "It is sunny in Paris."
RESULT = '{"degrees": 22}'
TOOLS: tuple[ToolSpec, ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time in a city.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation to render, built in or from a log."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_args: Mapping[str, object] = field(default_factory=dict)
    """Arguments that the log states for it."""

    def render(self, renderer: Renderer, count: int | None = None, *, opens: bool = True) -> str:
        """The text of the first `count` messages, `opens`: with a generation prompt; RenderError if refused."""
        return renderer.render(
            self.messages[:count], self.tools, add_generation_prompt=opens, template_kwargs=self.template_args
        )

    def try_render(self, renderer: Renderer, count: int | None = None, *, opens: bool = True) -> str | None:
        """What `render` returns; None if the template refuses the messages."""
        try:
            return self.render(renderer, count, opens=opens)
        except RenderError:
            return None


def answer_kind(message: Message) -> str:
    """What an answer consists of, in words: `answer with reasoning`, `tool calls`."""
    calls = {0: "", 1: "tool call"}.get(len(message.tool_calls), "several tool calls")
    inline = "<think>" in message.text or "</think>" in message.text
    words = calls or ("answer" if message.text else "empty answer")
    added = ["text"] if calls and message.text and not inline else []
    added += ["reasoning"] if message.reasoning else []
    added += ["<think> in its content"] if inline else []
    return f"{words} with {' and '.join(added)}" if added else words


def tool_call(arguments: object, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    """One tool call in OpenAI chat form; arguments are usually JSON text, as a model may have written it."""
    # Mistral's templates demand an id of nine letters and digits.
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def tool_result(number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    """A tool's answer to call `number`, in OpenAI chat form."""
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": RESULT}


def assistant(content: str | None, reasoning: str | None = None, *calls: _Wire) -> dict[str, Any]:
    """An assistant message in OpenAI chat form."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


def make_probe(name: str, wires: Sequence[_Wire], tools: Sequence[ToolSpec] = ()) -> Probe:
    """A probe of messages in OpenAI chat form."""
    return Probe(name, as_messages(wires, name), tuple(tools))


_SYSTEM: _Wire = {"role": "system", "content": "You answer in one sentence."}
_SECOND_SYSTEM: _Wire = {"role": "system", "content": "From now on, answer in French."}
_QUESTION: _Wire = {"role": "user", "content": USER}
_SECOND_QUESTION: _Wire = {"role": "user", "content": SECOND_USER}
_LAST_QUESTION: _Wire = {"role": "user", "content": "Thank you. Which is warmer?"}
_CALL = tool_call('{"city": "Paris"}')
_SECOND_CALL = tool_call('{"city": "Rome"}', 2)
_ANSWERS: Mapping[str, _Wire] = {
    "answer": assistant(ANSWER),
    "answer with reasoning": assistant(ANSWER, REASONING),
    "answer with <think> in its content": assistant(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"),
    "answer with JSON": assistant('{ "city":"Paris", "degrees" : 22.0 }'),
    "answer with other scripts": assistant("Café in 東京 — 🌤️ עברית"),
    "empty answer": assistant(""),
    "empty answer with reasoning": assistant("", REASONING),
}
_CALLS: Mapping[str, _Wire] = {
    "tool call": assistant(None, None, _CALL),
    "tool call with empty content": assistant("", None, _CALL),
    "tool call with text": assistant("I look it up.", None, _CALL),
    "tool call with reasoning": assistant("", REASONING, _CALL),
    "tool call with text and reasoning": assistant("I look it up.", REASONING, _CALL),
    "tool call with <think> in its content": assistant(f"<think>\n{REASONING}\n</think>\n\n", None, _CALL),
    "tool call with arguments as object": assistant(None, None, tool_call({"city": "Paris"})),
    "tool call without arguments": assistant(None, None, tool_call("{}", name="get_time")),
    "tool call with other scripts": assistant(None, None, tool_call({"city": 'Zürich 東京 "q" <b>&\''})),
}
_SEVERAL: Mapping[str, _Wire] = {
    "several tool calls": assistant(None, None, _CALL, _SECOND_CALL),
    "several tool calls with text and reasoning": assistant("I look it up.", REASONING, _CALL, _SECOND_CALL),
}


def _make_probes() -> Iterator[Probe]:
    first, second, last = _QUESTION, _SECOND_QUESTION, _LAST_QUESTION
    plain, thinking = _ANSWERS["answer"], _ANSWERS["answer with reasoning"]
    for name, answer in _ANSWERS.items():
        yield make_probe(f"{name}, then the user", [first, answer, second, answer, last])
    yield make_probe("a system prompt and two answers", [_SYSTEM, first, thinking, second, thinking, last])
    for name, calling in _CALLS.items():
        result = tool_result(name="get_time") if "without arguments" in name else tool_result()
        again = {**calling, "tool_calls": [{**calling["tool_calls"][0], "id": "call00002"}]}
        then = [calling, result, again, {**result, "tool_call_id": "call00002"}, assistant(ANSWER), second]
        yield make_probe(f"{name}, then its result", [first, *then], TOOLS)
    for name, calling in _SEVERAL.items():
        then = [calling, tool_result(), tool_result(2), assistant(ANSWER, REASONING), second]
        yield make_probe(f"{name}, then their results", [_SYSTEM, first, *then], TOOLS)
    result, calling = tool_result(), _CALLS["tool call with reasoning"]
    turns = [first, calling, result, thinking, second, assistant("", REASONING, _SECOND_CALL), tool_result(2)]
    yield make_probe("tools in two turns", [*turns, thinking, last], TOOLS)
    yield make_probe("an answer before a tool call", [first, thinking, second, calling, result, thinking], TOOLS)
    yield make_probe(
        "a tool call, then the user", [first, _CALLS["tool call"], result, second, plain, last], TOOLS
    )
    yield make_probe("a system message in the middle", [_SYSTEM, first, plain, _SECOND_SYSTEM, second])
    yield make_probe("a system message last", [first, plain, _SECOND_SYSTEM])
    yield make_probe("two system messages", [_SYSTEM, _SECOND_SYSTEM, first, plain, second])
    yield make_probe("two users in a row", [first, second, plain, last, second, plain, first])
    yield make_probe("two answers in a row", [first, plain, plain, second])


PROBES: tuple[Probe, ...] = tuple(_make_probes())
CORE: tuple[Probe, ...] = tuple(
    each
    for each in PROBES
    if each.name
    in {
        "answer, then the user",
        "answer with reasoning, then the user",
        "answer with <think> in its content, then the user",
        "tool call, then its result",
        "tool call with text and reasoning, then its result",
        "several tool calls with text and reasoning, then their results",
        "tools in two turns",
    }
)
"""Probes like usual training conversations, few enough to try many settings with."""
