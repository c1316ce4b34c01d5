"""Parsers of sampled answers: reasoning, content and tool calls, one file a family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tito_audit.parser import Delta, Parsed, ParsedCall, ParseOptions, Parser, ParserRun, Reads
from tito_audit.parsers._calls import PlainRun
from tito_audit.registry import plugins
from tito_audit.unknown import unknown

# Parsers by name, and those that fit a chat template.

_WORDS = {Reads.TOOLS: ("tool", "--tool-parser"), Reads.REASONING: ("reasoning", "--reasoning-parser")}


@dataclass(frozen=True, slots=True)
class Guess:
    """The parser that fits a chat template, if exactly one does."""

    parser: Parser | None
    line: str
    """For the user: what was chosen, or why nothing was."""


def named(parsers: Sequence[Parser], name: str, reads: Reads) -> Parser:
    """The parser with a name or alias; SetupError with similar names if there is none."""
    names = {key: parser for parser in parsers if reads & parser.reads for key in (parser.name, *parser.aliases)}
    if name in names:
        return names[name]
    word, option = _WORDS[reads]
    raise unknown(f"{word} parser", name, sorted(names), flag=option, listed_by="tito-audit list parsers")


def guessed(parsers: Sequence[Parser], template: str | None, reads: Reads) -> Guess:
    """The only parser whose texts a chat template contains; none if several fit."""
    word, option = _WORDS[reads]
    fitting = [
        parser
        for parser in parsers
        if reads & parser.reads and parser.templates and all(text in (template or "") for text in parser.templates)
    ]
    if len(fitting) == 1:
        return Guess(
            fitting[0], f"{word} parser: {fitting[0].name}, as the chat template suggests ({option} NAME)"
        )
    if not fitting:
        return Guess(None, f"{word} parser: none; the chat template suggests none ({option} NAME)")
    names = " or ".join(parser.name for parser in fitting)
    return Guess(None, f"{word} parser: none; the chat template suggests {names}: choose with {option} NAME")


# A whole answer, parsed into reasoning, content and tool calls, and as OpenAI messages.


class _ParsedAnswer:
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
        rest: list[Delta] = []
        for delta in deltas:
            if delta.reasoning:
                rest.append(Delta(reasoning=delta.reasoning))
            if delta.content:
                rest += self._tools.feed(delta.content)
        return rest


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
    return _ParsedAnswer(reasoning.start(options), tools.start(options))


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


__all__ = [
    "Guess",
    "PlainRun",
    "all_parsers",
    "collected",
    "finish_reason",
    "guess_parser",
    "parse_answer",
    "parser_named",
    "start_answer",
    "to_delta",
    "to_message",
]


@cache
def all_parsers() -> tuple[Parser, ...]:
    """Every parser, in order of names."""
    return plugins(__name__, Parser, lambda parser: parser.name)


def parser_named(name: str, reads: Reads) -> Parser:
    """The parser of that name or alias that reads tools or reasoning; SetupError when there is none."""
    return named(all_parsers(), name, reads)


def guess_parser(template: str | None, reads: Reads) -> Guess:
    """The parser of tools or reasoning that a chat template suggests, with a line that says so."""
    return guessed(all_parsers(), template, reads)
