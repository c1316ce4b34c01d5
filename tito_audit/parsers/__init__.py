"""Parsers of sampled answers: reasoning, content and tool calls, one file a family."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tito_audit.parser import Delta, Parsed, ParsedCall, ParseOptions, Parser, ParserRun, Reads
from tito_audit.parsers._runs import PlainRun as PlainRun
from tito_audit.registry import load_plugins
from tito_audit.unknown import unknown_name

# Parsers by name, and those that fit a chat template.

_WORDS = {Reads.TOOLS: ("tool", "--tool-parser"), Reads.REASONING: ("reasoning", "--reasoning-parser")}


@dataclass(frozen=True, slots=True)
class Guess:
    """The parser that a chat template suggests, if exactly one fits."""

    parser: Parser | None
    line: str
    """What to tell the user: which parser was chosen, or why none was."""


@cache
def all_parsers() -> tuple[Parser, ...]:
    """Every parser, in order of names."""
    return load_plugins(__name__, Parser, lambda parser: parser.name)


def parser_named(name: str, reads: Reads) -> Parser:
    """The parser with this name or alias for tools or reasoning; SetupError, with similar names, if none."""
    parsers = [parser for parser in all_parsers() if reads & parser.reads]
    names = {key: parser for parser in parsers for key in (parser.name, *parser.aliases)}
    if name in names:
        return names[name]
    word, option = _WORDS[reads]
    raise unknown_name(f"{word} parser", name, sorted(names), flag=option, listed_by="tito-audit list parsers")


def guess_parser(template: str | None, reads: Reads) -> Guess:
    """The parser whose `templates` texts a chat template contains; none if several fit."""
    word, option = _WORDS[reads]
    fitting = [
        parser
        for parser in all_parsers()
        if reads & parser.reads and parser.templates and all(text in (template or "") for text in parser.templates)
    ]
    if len(fitting) == 1:
        named = f"{word} parser: {fitting[0].name}, as the chat template suggests ({option} NAME)"
        return Guess(fitting[0], named)
    if not fitting:
        return Guess(None, f"{word} parser: none; the chat template suggests none ({option} NAME)")
    names = " or ".join(parser.name for parser in fitting)
    return Guess(None, f"{word} parser: none; the chat template suggests {names}: choose with {option} NAME")


# A whole answer, parsed into reasoning, content and tool calls, and as OpenAI messages.


class _TwoStageRun:
    """Parses the reasoning with one parser, and the content that it leaves with another, for tool calls."""

    def __init__(self, reasoning: ParserRun, tools: ParserRun) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> Sequence[Delta]:
        return self._parse_content(self._reasoning.feed(text))

    def close(self) -> Sequence[Delta]:
        return [*self._parse_content(self._reasoning.close()), *self._tools.close()]

    def _parse_content(self, deltas: Sequence[Delta]) -> list[Delta]:
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
    """Start parsing one answer; a part whose parser is None stays in the content. A parser that reads both parts
    may be passed as either or as both.
    """
    options = options or ParseOptions()
    if reasoning is None or tools is None or reasoning is tools:
        chosen = reasoning or tools
        return chosen.start(options) if chosen is not None else PlainRun()
    return _TwoStageRun(reasoning.start(options), tools.start(options))


def join_deltas(deltas: Iterable[Delta]) -> Parsed:
    """The answer that its deltas add up to."""
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
    text: str, reasoning: Parser | None = None, tools: Parser | None = None, options: ParseOptions | None = None
) -> Parsed:
    """Parse a whole answer."""
    run = start_answer(reasoning, tools, options)
    return join_deltas([*run.feed(text), *run.close()])


def to_message(parsed: Parsed, call_id: Callable[[int], str]) -> dict[str, Any]:
    """An answer as the assistant message of a chat completion; `call_id` makes the id of a call from its number.

    Reasoning has both names that clients read, `reasoning_content` and `reasoning`.
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
    """A delta as the `delta` of a chat completion's chunk; {} if it adds nothing."""
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


# Grammars that force calls, in the template's own syntax or in JSON.

_ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
_SPACES = {"type": "regex", "pattern": "[ \\n]{0,4}"}
"""What may come between reasoning and calls."""


def calls_grammar(
    reasoning: Parser | None, tools: Parser | None, schemas: Mapping[str, Any], end: str, *, single: bool
) -> dict[str, Any] | None:
    """The structural tag of xgrammar for an answer that calls these functions after its reasoning.

    `schemas` has the JSON schema of their parameters by name; `end` is the end of the prompt, and `single` allows
    one call only. None if the syntax has no grammar.
    """
    form = tools.call_form if tools is not None else None
    if form is None:
        return None
    tags = [
        {
            "type": "tag",
            "begin": form.begin.replace("NAME", json.dumps(name)[1:-1]),
            "content": {"type": form.content, "json_schema": schema or _ANYTHING},
            "end": form.end,
        }
        for name, schema in schemas.items()
    ]
    calls: dict[str, Any] = {"type": "or", "elements": tags}
    if form.separator is not None:  # xgrammar before 0.1.30 takes no empty one.
        calls = {"type": "tags_with_separator", "tags": tags, "separator": form.separator}
        calls |= {"at_least_one": True, "stop_after_first": single}
    answer: dict[str, Any] = {"type": "sequence", "elements": [_SPACES, calls]}
    if reasoning is not None and reasoning.reasoning_tags is not None:
        opens, closes = reasoning.reasoning_tags
        if not end.rstrip().endswith(closes):
            # Reasoning is optional: a server that parses it itself applies the grammar after it.
            begin = "" if end.rfind(opens) > end.rfind(closes) else opens
            thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": closes}
            answer = {"type": "or", "elements": [{"type": "sequence", "elements": [thought, answer]}, answer]}
    return {"type": "structural_tag", "format": answer}


def json_grammar(schemas: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """The structural tag for a syntax without a grammar, as vLLM has it: the arguments of the named function, or a
    list of objects with `name` and `parameters`."""
    if named:
        (schema,) = schemas.values()
        return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema or _ANYTHING}}
    entries = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema or _ANYTHING},
            "required": ["name", "parameters"],
        }
        for name, schema in schemas.items()
    ]
    listed = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": entries}}
    return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": listed}}


class JsonCallsRun:
    """Parses an answer that `json_grammar` forced; if it was cut off, it is content."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> Sequence[Delta]:
        self._text += text
        return ()

    def close(self) -> Sequence[Delta]:
        try:
            value = json.loads(self._text)
            if self._name is not None:
                return (Delta(call=0, name=self._name, arguments=self._text),)
            called = [(entry["name"], json.dumps(entry["parameters"], ensure_ascii=False)) for entry in value]
        except (ValueError, TypeError, KeyError, RecursionError):
            return (Delta(self._text),) if self._text else ()
        return [Delta(call=number, name=name, arguments=text) for number, (name, text) in enumerate(called)]


def finish_reason(parsed: Parsed, sampled: str | None) -> str | None:
    """The finish reason for a client: `tool_calls` where the model stopped after calls, else as sampled."""
    return "tool_calls" if parsed.tool_calls and sampled == "stop" else sampled
