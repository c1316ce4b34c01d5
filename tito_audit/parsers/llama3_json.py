"""Llama 3 and 4: bare JSON objects with `name` and `parameters`, separated by semicolons."""

from __future__ import annotations

from collections.abc import Callable

from tito_audit.parser import CallForm, ParsedCall, Parser, Reads
from tito_audit.parsers._runs import json_call, tool_parser
from tito_audit.parsers._source import Reader, TextSource, literal, skip_spaces

_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")


def _read_calls(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """Read objects that white space or a semicolon separates."""
    yield from literal(source, _TAG)
    yield from skip_spaces(source)
    while True:
        call = yield from json_call(source, _ARGUMENTS)
        if call is None or not call.arguments.startswith("{"):
            # What follows the last call is content, and not searched for calls again.
            return False
        add(call)
        end = source.offset
        more = yield from skip_spaces(source)
        if more and source.peek() == ";":
            source.skip()
            end = source.offset
            more = yield from skip_spaces(source)
        if not more or source.peek() != "{":
            source.seek(end)
            return True


PARSER = Parser(
    name="llama3_json",
    title="bare JSON with `name` and `parameters`: Llama 3.1 to 4",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {_TAG: _read_calls, "{": _read_calls}),
    aliases=("llama4_json",),
    templates=("<|start_header_id|>", '{"name": function name, "parameters"'),
    call_form=CallForm('{"name": "NAME", "parameters": ', "}", None),
)
