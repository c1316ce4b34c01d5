"""What DeepSeek's two syntaxes of tool calls share: the section of calls and the tokens in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tito_audit.parser import ParsedCall
from tito_audit.parsers._runs import CallReader
from tito_audit.parsers._source import Reader, TextSource, literal, spaces

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

OneCall: TypeAlias = Callable[[TextSource], Reader[ParsedCall | None]]
"""Reads what is between the beginning and the end of a call."""


def section(read_call: OneCall) -> CallReader:
    """What reads a section of calls. At the end of an answer the tokens that close it may be missing."""

    def read(source: TextSource, found: Callable[[ParsedCall], None]) -> Reader[bool]:
        yield from literal(source, CALLS_BEGIN)
        count = 0
        while (yield from spaces(source)):
            if not (yield from literal(source, CALL_BEGIN)):
                return count > 0 and (yield from literal(source, CALLS_END))
            call = yield from read_call(source)
            if call is None or ((yield from spaces(source)) and not (yield from literal(source, CALL_END))):
                return False
            found(call)
            count += 1
        return count > 0

    return read
