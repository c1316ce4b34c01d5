"""Llama 3 and 4: bare JSON objects with `name` and `parameters`, separated by semicolons."""

from __future__ import annotations

from collections.abc import Callable

from tito_audit.parser import CallForm, ParsedCall, Parser, Reads
from tito_audit.parsers._runs import json_call, with_tools
from tito_audit.parsers._source import Reader, TextSource, literal, spaces

_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")


def _calls(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """Objects, with white space and a semicolon between them."""
    yield from literal(source, _TAG)
    yield from spaces(source)
    while True:
        call = yield from json_call(source, _ARGUMENTS)
        if call is None or not call.arguments.startswith("{"):
            # After a call, text that is not another one is not searched again.
            return False
        add(call)
        end = source.at
        more = yield from spaces(source)
        if more and source.peek() == ";":
            source.skip()
            end = source.at
            more = yield from spaces(source)
        if not more or source.peek() != "{":
            source.go(end)
            return True


PARSER = Parser(
    name="llama3_json",
    title="bare JSON with `name` and `parameters`: Llama 3.1 to 4",
    reads=Reads.TOOLS,
    start=with_tools(lambda options: {_TAG: _calls, "{": _calls}),
    aliases=("llama4_json",),
    templates=("<|start_header_id|>", '{"name": function name, "parameters"'),
    call_form=CallForm('{"name": "NAME", "parameters": ', "}", None),
)
