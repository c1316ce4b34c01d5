"""Qwen3's reasoning: `<think>…</think>`, opened by the answer or by the generation prompt."""

from __future__ import annotations

from tito_audit.parser import Parser, Reads
from tito_audit.parsers._runs import think_parser

PARSER = Parser(
    name="qwen3",
    title="`<think>` reasoning of Qwen3; a tool call ends it too",
    reads=Reads.REASONING,
    start=think_parser(ends_at=("<tool_call>",), must_open=True),
    templates=("<think>", "</think>", "<tool_call>"),
    reasoning_tags=("<think>", "</think>"),
)
