"""No syntax at all: the whole answer is content."""

from __future__ import annotations

from tito_audit.parser import Parser, Reads
from tito_audit.parsers._runs import PlainRun

PARSER = Parser(
    name="plain",
    title="nothing: the whole answer is content",
    reads=Reads.REASONING | Reads.TOOLS,
    start=lambda options: PlainRun(),
    aliases=("none",),
)
