"""A whole answer, parsed into reasoning, content and tool calls, and as OpenAI messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tito_audit.parser import Delta, Parsed, ParsedCall, ParseOptions, Parser, ParserRun
from tito_audit.parsers._calls import PlainRun


class _Answer:
    """One parser reads the reasoning; another reads tool calls in the remaining content."""

    def __init__(self, reasoning: ParserRun, tools: ParserRun) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds."""
        return self._rest(self._reasoning.feed(text))

    def close(self) -> Sequence[Delta]:
        """What is still held back, at the end of the answer."""
        return [*self._rest(self._reasoning.close()), *self._tools.close()]

    def _rest(self, deltas: Sequence[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if delta.reasoning:
                found.append(Delta(reasoning=delta.reasoning))
            if delta.content:
                found += self._tools.feed(delta.content)
        return found


def start_answer(
    reasoning: Parser | None = None, tools: Parser | None = None, options: ParseOptions | None = None
) -> ParserRun:
    """Starts to parse one answer; None: that part is not parsed. A parser that reads both may be passed as either
    or as both.
    """
    options = options or ParseOptions()
    if reasoning is None or tools is None or reasoning is tools:
        chosen = reasoning or tools
        return chosen.start(options) if chosen is not None else PlainRun()
    return _Answer(reasoning.start(options), tools.start(options))


def collected(deltas: Iterable[Delta]) -> Parsed:
    """The deltas of an answer, added up."""
    content, reasoning = [], []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        if delta.call is None:
            continue
        if delta.call == len(names):
            names.append(delta.name or "")
            arguments.append([])
        arguments[delta.call].append(delta.arguments)
    calls = tuple(ParsedCall(name, "".join(text)) for name, text in zip(names, arguments, strict=True))
    return Parsed("".join(content) or None, "".join(reasoning) or None, calls)


def parse_answer(
    text: str,
    reasoning: Parser | None = None,
    tools: Parser | None = None,
    options: ParseOptions | None = None,
) -> Parsed:
    """A whole answer, parsed."""
    run = start_answer(reasoning, tools, options)
    return collected([*run.feed(text), *run.close()])


def to_message(parsed: Parsed, call_id: Callable[[int], str]) -> dict[str, Any]:
    """An answer as the assistant message of OpenAI's chat completions.

    `call_id` gives the id of each call by its number. Reasoning has both names that clients read:
    `reasoning_content` and `reasoning`.
    """
    nothing = None if parsed.reasoning or parsed.tool_calls else ""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or nothing}
    if parsed.reasoning is not None:
        message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.tool_calls)
        ]
    return message


def to_delta(delta: Delta, call_id: Callable[[int], str]) -> dict[str, Any]:
    """One delta as the `delta` of a chunk of OpenAI's chat completions; {} for one that adds nothing."""
    chunk: dict[str, Any] = {}
    if delta.content:
        chunk["content"] = delta.content
    if delta.reasoning:
        chunk |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.call is not None:
        call: dict[str, Any] = {"index": delta.call, "function": {"arguments": delta.arguments}}
        if delta.name is not None:
            call |= {"id": call_id(delta.call), "type": "function"}
            call["function"]["name"] = delta.name
        chunk["tool_calls"] = [call]
    return chunk


def finish_reason(parsed: Parsed, sampled: str | None) -> str | None:
    """The finish reason for a client: `tool_calls` if the model stopped after calls."""
    return "tool_calls" if parsed.tool_calls and sampled == "stop" else sampled
