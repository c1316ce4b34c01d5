"""Mistral: `[TOOL_CALLS]` and a JSON list, or name and arguments after each `[TOOL_CALLS]`."""

from __future__ import annotations

import re
from collections.abc import Callable

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._runs import json_call, tool_parser
from tito_audit.parsers._source import Reader, TextSource, json_text, literal, skip_spaces, word

_MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}\"]+")


def _read_calls(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """Read the calls after one mark."""
    yield from literal(source, _MARK)
    if not (yield from skip_spaces(source)):
        return False
    listed = source.peek() == "["
    if not listed and source.peek() != "{":
        # `NAME{...}` or `NAME[ARGS]{...}`, as from version 11 of the tokenizer on.
        name = yield from word(source, _NAME)
        if name is None or not (yield from skip_spaces(source)):
            return False
        yield from literal(source, _ARGS)
        arguments = yield from json_text(source)
        if arguments is not None:
            add(ParsedCall(name, arguments))
        return arguments is not None
    if listed:
        source.skip()
    # An object, or a list of them, as up to version 10.
    while not listed or (yield from skip_spaces(source)):
        call = yield from json_call(source)
        if call is None:
            return False
        add(call)
        if not listed:
            return True
        if not (yield from skip_spaces(source)) or source.peek() not in ",]":
            return False
        listed = source.peek() == ","
        source.skip()
        if not listed:
            return True
    return False


PARSER = Parser(
    name="mistral",
    title="calls after `[TOOL_CALLS]`: Mistral, Magistral, Devstral",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {_MARK: _read_calls}),
    templates=(_MARK,),
)
