"""DeepSeek-V3 and R1: calls in control tokens, arguments in a JSON code block."""

from __future__ import annotations

from tito_audit.parser import Parser, Reads
from tito_audit.parsers._deepseek import CALL_BEGIN, CALLS_BEGIN, read_section
from tito_audit.parsers._runs import tool_parser

PARSER = Parser(
    name="deepseek_v3",
    title="calls in control tokens, arguments in a JSON block: DeepSeek-V3, R1",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {CALLS_BEGIN: read_section(fenced=True)}),
    templates=(CALL_BEGIN, "```json"),
)
