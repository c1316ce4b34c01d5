"""DeepSeek-V3.1: calls in control tokens, arguments as bare JSON."""

from __future__ import annotations

from tito_audit.parser import Parser, Reads
from tito_audit.parsers._deepseek import CALLS_BEGIN, read_section
from tito_audit.parsers._runs import tool_parser

PARSER = Parser(
    name="deepseek_v31",
    title="calls in control tokens, arguments as bare JSON: DeepSeek-V3.1",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {CALLS_BEGIN: read_section(fenced=False)}),
    templates=("'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",),
)
