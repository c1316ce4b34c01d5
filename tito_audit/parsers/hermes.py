"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5 and Qwen3 write it."""

from __future__ import annotations

from tito_audit.parser import CallForm, Parser, Reads
from tito_audit.parsers._runs import json_call, tagged_call, tool_parser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

PARSER = Parser(
    name="hermes",
    title="JSON in `<tool_call>` tags: Hermes 2 Pro, Qwen2.5, Qwen3",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {_OPEN: tagged_call(_OPEN, json_call, _CLOSE)}),
    aliases=("qwen3_json", "qwen25"),
    templates=(_OPEN, '"arguments"'),
    call_form=CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
)
