"""Grammars that force calls in the syntax of a template; `transcripts/gateway/forced.txt` has their requests."""

from __future__ import annotations

import pytest

from tests import toy
from tests.serving import ASK, TOOLS
from tito_audit.parser import ParseOptions, Parser, Reads
from tito_audit.parsers import all_parsers, calls_grammar, parse_answer, parser_named
from tito_audit.record.message import as_messages

HERMES, QWEN = parser_named("hermes", Reads.TOOLS), parser_named("qwen3", Reads.REASONING)
FORMS = [parser for parser in all_parsers() if parser.call_form is not None]
ARGUMENTS = {"json_schema": '{"city": "Oslo"}', "qwen_xml_parameter": "<parameter=city>\nOslo\n</parameter>"}


@pytest.mark.parametrize("parser", FORMS, ids=lambda parser: str(parser.name))
def test_a_parser_reads_what_its_grammar_forces(parser: Parser) -> None:
    form = parser.call_form
    call_text = form.begin.replace("NAME", "weather") + ARGUMENTS[form.content] + form.end
    for count in (1, 2) if form.separator is not None else (1,):
        text = (form.separator or "").join([call_text] * count)
        parsed = parse_answer(text, None, parser, ParseOptions(TOOLS))
        assert [call.name for call in parsed.tool_calls] == ["weather"] * count
        assert not parsed.content


def test_the_grammar_begins_a_call_as_the_template_writes_it() -> None:
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    history = [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
    text = toy.toy_renderer("toy_bpe").render(as_messages(history, ""), TOOLS, add_generation_prompt=False)
    form = HERMES.call_form
    assert form.begin.replace("NAME", "weather") + '{"city": "Oslo"}' + form.end in text


@pytest.mark.parametrize("parser", FORMS, ids=lambda parser: str(parser.name))
def test_no_grammar_has_an_empty_separator(parser: Parser) -> None:
    """xgrammar before 0.1.30, which vLLM had up to 0.17, takes none."""
    grammar = calls_grammar(None, parser, {"f": None, "g": None}, "", single=False)
    calls = grammar["format"]["elements"][1]
    assert calls.get("separator") != ""
    assert len(calls.get("tags") or calls["elements"]) == 2


def test_reasoning_that_the_prompt_opened_or_closed_is_known() -> None:
    for end, begin in (("<|im_start|>assistant\n<think>\n", ""), ("<|im_start|>assistant\n", "<think>")):
        grammar = calls_grammar(QWEN, HERMES, {"f": None}, end, single=True)
        assert grammar["format"]["elements"][0]["elements"][0]["begin"] == begin
    closed = calls_grammar(QWEN, HERMES, {"f": None}, "<think>\n\n</think>\n\n", single=True)
    assert closed["format"]["type"] == "sequence"
