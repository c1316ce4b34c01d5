"""DeepSeek-V3.1: calls in control tokens, arguments as bare JSON."""

from __future__ import annotations

import re

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._deepseek import CALLS_BEGIN, SEP, section
from tito_audit.parsers._runs import with_tools
from tito_audit.parsers._source import Reader, TextSource, json_text, literal, word

_NAME = re.compile(r"[^\s<`]+")


def _call(source: TextSource) -> Reader[ParsedCall | None]:
    """`NAME<｜tool▁sep｜>`, then a JSON object."""
    name = yield from word(source, _NAME)
    if name is None or not (yield from literal(source, SEP)):
        return None
    arguments = yield from json_text(source)
    return None if arguments is None else ParsedCall(name, arguments)


PARSER = Parser(
    name="deepseek_v31",
    title="calls in control tokens, arguments as bare JSON: DeepSeek-V3.1",
    reads=Reads.TOOLS,
    start=with_tools(lambda options: {CALLS_BEGIN: section(_call)}),
    templates=("'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",),
)
