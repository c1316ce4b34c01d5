"""DeepSeek-V3 and R1: calls in control tokens, arguments in a JSON code block."""

from __future__ import annotations

import re

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._deepseek import CALL_BEGIN, CALLS_BEGIN, SEP, section
from tito_audit.parsers._runs import with_tools
from tito_audit.parsers._source import Reader, TextSource, json_text, literal, spaces, word

_NAME = re.compile(r"[^\s<`]+")


def _call(source: TextSource) -> Reader[ParsedCall | None]:
    """`function<｜tool▁sep｜>NAME`, a line break, and a block of JSON."""
    if (yield from word(source, _NAME)) is None or not (yield from literal(source, SEP)):
        return None
    name = yield from word(source, _NAME)
    if name is None or not (yield from literal(source, "\n```json")):
        return None
    arguments = yield from json_text(source)
    if arguments is None or ((yield from spaces(source)) and not (yield from literal(source, "```"))):
        return None
    return ParsedCall(name, arguments)


PARSER = Parser(
    name="deepseek_v3",
    title="calls in control tokens, arguments in a JSON block: DeepSeek-V3, R1",
    reads=Reads.TOOLS,
    start=with_tools(lambda options: {CALLS_BEGIN: section(_call)}),
    templates=(CALL_BEGIN, "```json"),
)
