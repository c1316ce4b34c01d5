"""The section of tool calls that DeepSeek's two syntaxes share, and its control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

from tito_audit.parser import ParsedCall
from tito_audit.parsers._runs import CallReader
from tito_audit.parsers._source import Reader, TextSource, json_text, literal, skip_spaces, word

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[^\s<`]+")


def read_section(*, fenced: bool) -> CallReader:
    """A reader of a section of calls. At the end of an answer the closing tokens may be missing.

    A call is `NAME<｜tool▁sep｜>` and a JSON object, or, `fenced`, `function<｜tool▁sep｜>NAME`, a line break,
    and a block of JSON.
    """

    def call(source: TextSource) -> Reader[ParsedCall | None]:
        name = yield from word(source, _NAME)
        if name is None or not (yield from literal(source, SEP)):
            return None
        if fenced:
            name = yield from word(source, _NAME)
            if name is None or not (yield from literal(source, "\n```json")):
                return None
        arguments = yield from json_text(source)
        if arguments is None or (
            fenced and (yield from skip_spaces(source)) and not (yield from literal(source, "```"))
        ):
            return None
        ended = not (yield from skip_spaces(source)) or (yield from literal(source, CALL_END))
        return ParsedCall(name, arguments) if ended else None

    def read(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
        yield from literal(source, CALLS_BEGIN)
        count = 0
        while (yield from skip_spaces(source)):
            if not (yield from literal(source, CALL_BEGIN)):
                return count > 0 and (yield from literal(source, CALLS_END))
            parsed = yield from call(source)
            if parsed is None:
                return False
            add(parsed)
            count += 1
        return count > 0

    return read
