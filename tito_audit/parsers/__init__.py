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
    """The parser that fits a chat template, if exactly one does."""

    parser: Parser | None
    line: str
    """For the user: what was chosen, or why nothing was."""


@cache
def all_parsers() -> tuple[Parser, ...]:
    """Every parser, in order of names."""
    return load_plugins(__name__, Parser, lambda parser: parser.name)


def parser_named(name: str, reads: Reads) -> Parser:
    """The parser of that name or alias that reads tools or reasoning; SetupError with similar names."""
    parsers = [parser for parser in all_parsers() if reads & parser.reads]
    names = {key: parser for parser in parsers for key in (parser.name, *parser.aliases)}
    if name in names:
        return names[name]
    word, option = _WORDS[reads]
    raise unknown_name(f"{word} parser", name, sorted(names), flag=option, listed_by="tito-audit list parsers")


def guess_parser(template: str | None, reads: Reads) -> Guess:
    """The only parser whose texts a chat template contains, none if several fit, with a line that says so."""
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


# Calls that a request forces: a grammar in the template's own syntax, or one of JSON.

_ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
_SPACES = {"type": "regex", "pattern": "[ \\n]{0,4}"}
"""What models write between reasoning and calls."""


def forced_format(
    reasoning: Parser | None, tools: Parser | None, schemas: Mapping[str, Any], end: str, *, single: bool
) -> dict[str, Any] | None:
    """The structural tag, as xgrammar has them, of an answer that is calls of these functions after its reasoning.

    `schemas` are their parameters by name, `end` is the end of the prompt, and `single` allows one call only. None
    if the syntax has no grammar.
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
            # A server that reads reasoning itself begins its grammar after it.
            begin = "" if end.rfind(opens) > end.rfind(closes) else opens
            thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": closes}
            answer = {"type": "or", "elements": [{"type": "sequence", "elements": [thought, answer]}, answer]}
    return {"type": "structural_tag", "format": answer}


def forced_json(schemas: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """The same as vLLM has it where a syntax has no grammar: the arguments of the function that was named, or a
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


class JsonCalls:
    """Parses an answer that `forced_json` forced; one that was cut is content."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> Sequence[Delta]:
        """Nothing: the answer is read when it is complete."""
        self._text += text
        return ()

    def close(self) -> Sequence[Delta]:
        """Its calls."""
        try:
            value = json.loads(self._text)
            if self._name is not None:
                return (Delta(call=0, name=self._name, arguments=self._text),)
            called = [(entry["name"], json.dumps(entry["parameters"], ensure_ascii=False)) for entry in value]
        except (ValueError, TypeError, KeyError, RecursionError):
            return (Delta(self._text),) if self._text else ()
        return [Delta(call=number, name=name, arguments=text) for number, (name, text) in enumerate(called)]


def finish_reason(parsed: Parsed, sampled: str | None) -> str | None:
    """The finish reason for a client: `tool_calls` if the model stopped after calls."""
    return "tool_calls" if parsed.tool_calls and sampled == "stop" else sampled
