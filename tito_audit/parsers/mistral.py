"""Mistral: `[TOOL_CALLS]` and a JSON list, or name and arguments after each `[TOOL_CALLS]`."""

from __future__ import annotations

import re

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._calls import Calls, json_call, with_tools
from tito_audit.parsers._json import json_object
from tito_audit.parsers._source import TextSource, literal, spaces, word

_MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}\"]+")


def _calls(source: TextSource) -> Calls:
    """The calls after one mark."""
    yield from literal(source, _MARK)
    if not (yield from spaces(source)):
        return False
    if source.peek() == "{":
        return (yield from _object(source))
    if source.peek() == "[":
        # In a list, as up to version 10 of the tokenizer.
        source.skip()
        while (yield from spaces(source)):
            if not (yield from _object(source)) or not (yield from spaces(source)) or source.peek() not in ",]":
                return False
            closes = source.peek() == "]"
            source.skip()
            if closes:
                return True
        return False
    # `NAME{...}` or `NAME[ARGS]{...}`, as from version 11 on.
    name = yield from word(source, _NAME)
    if name is None or not (yield from spaces(source)):
        return False
    yield from literal(source, _ARGS)
    yield from spaces(source)
    start = source.at
    if (yield from json_object(source)) is None:
        return False
    yield ParsedCall(name, source.text(start, source.at))
    return True


def _object(source: TextSource) -> Calls:
    members = yield from json_object(source)
    call = json_call(source, members) if members is not None else None
    if call is not None:
        yield call
    return call is not None


PARSER = Parser(
    name="mistral",
    title="calls after `[TOOL_CALLS]`: Mistral, Magistral, Devstral",
    reads=Reads.TOOLS,
    start=with_tools(lambda options: {_MARK: _calls}),
    templates=(_MARK,),
)
