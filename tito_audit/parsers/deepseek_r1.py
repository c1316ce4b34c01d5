"""DeepSeek-R1's reasoning: `<think>…</think>`; the generation prompt may have opened it."""

from __future__ import annotations

from tito_audit.parser import Parser, Reads
from tito_audit.parsers._runs import think_parser

PARSER = Parser(
    name="deepseek_r1",
    title="`<think>` reasoning of DeepSeek-R1 and its distilled models",
    reads=Reads.REASONING,
    start=think_parser(),
    templates=("</think>", "<｜Assistant｜>"),
    reasoning_tags=("<think>", "</think>"),
)
