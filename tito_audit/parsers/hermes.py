"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5 and Qwen3 write it."""

from __future__ import annotations

from collections.abc import Callable

from tito_audit.parser import CallForm, ParsedCall, Parser, Reads
from tito_audit.parsers._runs import json_call, tool_parser
from tito_audit.parsers._source import Reader, TextSource, literal, skip_spaces

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_call(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """Read one call. At the end of an answer the closing tag may be missing, as in vLLM."""
    yield from literal(source, _OPEN)
    yield from skip_spaces(source)
    call = yield from json_call(source)
    if call is None or ((yield from skip_spaces(source)) and not (yield from literal(source, _CLOSE))):
        return False
    add(call)
    return True


PARSER = Parser(
    name="hermes",
    title="JSON in `<tool_call>` tags: Hermes 2 Pro, Qwen2.5, Qwen3",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {_OPEN: _read_call}),
    aliases=("qwen3_json", "qwen25"),
    templates=(_OPEN, '"arguments"'),
    call_form=CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
)
