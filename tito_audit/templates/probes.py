"""Conversations that show what a template does: each kind of answer, and each kind of message after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tito_audit.errors import RenderError
from tito_audit.record.message import Message, ToolSpec, as_messages
from tito_audit.render.renderer import Renderer

_Wire = Mapping[str, Any]

USER = "What is the weather in Paris?"
USER_AGAIN = "And in Rome?"
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
    """A conversation to render, one of ours or from a log."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_args: Mapping[str, object] = field(default_factory=dict)
    """Arguments that a log states for it."""

    def render(self, renderer: Renderer, count: int | None = None, *, opens: bool = True) -> str:
        """What a template writes for its first messages, `opens`: with a generation prompt; RenderError if it
        refuses them."""
        return renderer.render(
            self.messages[:count], self.tools, add_generation_prompt=opens, template_kwargs=self.template_args
        )

    def text(self, renderer: Renderer, count: int | None = None, *, opens: bool = True) -> str | None:
        """The same; None if the template refuses them."""
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


def call(arguments: object, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    """One tool call in OpenAI chat form; arguments are text: JSON as a model may have written it."""
    # Nine letters and digits: what Mistral's templates demand of an id.
    called = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": called}


def answering(content: str | None, reasoning: str | None = None, *calls: _Wire) -> dict[str, Any]:
    """An assistant message in OpenAI chat form."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


def probe(name: str, wires: Sequence[_Wire], tools: Sequence[ToolSpec] = ()) -> Probe:
    """A probe of messages in OpenAI chat form."""
    return Probe(name, as_messages(wires, name), tuple(tools))


_SYSTEM: _Wire = {"role": "system", "content": "You answer in one sentence."}
_SYSTEM_AGAIN: _Wire = {"role": "system", "content": "From now on, answer in French."}
_ASKED: _Wire = {"role": "user", "content": USER}
_ASKED_AGAIN: _Wire = {"role": "user", "content": USER_AGAIN}
_ASKED_LAST: _Wire = {"role": "user", "content": "Thank you. Which is warmer?"}
_CALL = call('{"city": "Paris"}')
_CALL_AGAIN = call('{"city": "Rome"}', 2)
_ANSWERS: Mapping[str, _Wire] = {
    "answer": answering(ANSWER),
    "answer with reasoning": answering(ANSWER, REASONING),
    "answer with <think> in its content": answering(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"),
    "answer with JSON": answering('{ "city":"Paris", "degrees" : 22.0 }'),
    "answer with other scripts": answering("Café in 東京 — 🌤️ עברית"),
    "empty answer": answering(""),
    "empty answer with reasoning": answering("", REASONING),
}
_CALLS: Mapping[str, _Wire] = {
    "tool call": answering(None, None, _CALL),
    "tool call with empty content": answering("", None, _CALL),
    "tool call with text": answering("I look it up.", None, _CALL),
    "tool call with reasoning": answering("", REASONING, _CALL),
    "tool call with text and reasoning": answering("I look it up.", REASONING, _CALL),
    "tool call with <think> in its content": answering(f"<think>\n{REASONING}\n</think>\n\n", None, _CALL),
    "tool call with arguments as object": answering(None, None, call({"city": "Paris"})),
    "tool call without arguments": answering(None, None, call("{}", name="get_time")),
    "tool call with other scripts": answering(None, None, call({"city": 'Zürich 東京 "q" <b>&\''})),
}
_SEVERAL: Mapping[str, _Wire] = {
    "several tool calls": answering(None, None, _CALL, _CALL_AGAIN),
    "several tool calls with text and reasoning": answering("I look it up.", REASONING, _CALL, _CALL_AGAIN),
}


def result(number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    """The answer of a tool."""
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": RESULT}


def _probes() -> Iterator[Probe]:
    for name, answer in _ANSWERS.items():
        yield probe(f"{name}, then the user", [_ASKED, answer, _ASKED_AGAIN, answer, _ASKED_LAST])
    answer = _ANSWERS["answer with reasoning"]
    yield probe("a system prompt and two answers", [_SYSTEM, _ASKED, answer, _ASKED_AGAIN, answer, _ASKED_LAST])
    for name, answer in _CALLS.items():
        of = result(name="get_time") if "without arguments" in name else result()
        again = {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": "call00002"}]}
        then = [answer, of, again, {**of, "tool_call_id": "call00002"}, answering(ANSWER), _ASKED_AGAIN]
        yield probe(f"{name}, then its result", [_ASKED, *then], TOOLS)
    for name, answer in _SEVERAL.items():
        then = [answer, result(), result(2), answering(ANSWER, REASONING), _ASKED_AGAIN]
        yield probe(f"{name}, then their results", [_SYSTEM, _ASKED, *then], TOOLS)
    answer, thought = _ANSWERS["answer"], _ANSWERS["answer with reasoning"]
    called = _CALLS["tool call with reasoning"]
    plain = _CALLS["tool call"]
    again = answering("", REASONING, _CALL_AGAIN)
    yield probe(
        "tools in two turns",
        [_ASKED, called, result(), thought, _ASKED_AGAIN, again, result(2), thought, _ASKED_LAST],
        TOOLS,
    )
    yield probe("an answer before a tool call", [_ASKED, thought, _ASKED_AGAIN, called, result(), thought], TOOLS)
    yield probe("a tool call, then the user", [_ASKED, plain, result(), _ASKED_AGAIN, answer, _ASKED_LAST], TOOLS)
    yield probe("a system message in the middle", [_SYSTEM, _ASKED, answer, _SYSTEM_AGAIN, _ASKED_AGAIN])
    yield probe("a system message last", [_ASKED, answer, _SYSTEM_AGAIN])
    yield probe("two system messages", [_SYSTEM, _SYSTEM_AGAIN, _ASKED, answer, _ASKED_AGAIN])
    yield probe("two users in a row", [_ASKED, _ASKED_AGAIN, answer, _ASKED_LAST, _ASKED_AGAIN, answer, _ASKED])
    yield probe("two answers in a row", [_ASKED, answer, answer, _ASKED_AGAIN])


PROBES: tuple[Probe, ...] = tuple(_probes())
"""Every probe."""
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
"""The probes of usual training conversations; few enough to try many settings with."""
