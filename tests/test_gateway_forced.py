"""Calls that a request forces: a grammar in the syntax of the template, and answers that are read as calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.gateway.clients import CLIENTS
from tests.serving import (
    ASK,
    CALL,
    FLAT,
    SAID,
    SCHEMAS,
    TOOLS,
    Scripted,
    asked,
    check_chain,
    client,
    codes_of,
    logged,
    make_gateway,
    plain,
    served,
)
from tito_audit.parser import ParseOptions, Parser, Reads
from tito_audit.parsers import all_parsers, calls_grammar, parse_answer, parser_named
from tito_audit.record.message import as_messages
from tito_audit.serve.gateway import Gateway

HERMES, QWEN = parser_named("hermes", Reads.TOOLS), parser_named("qwen3", Reads.REASONING)
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
FLAT_OTHER: Any = {"type": "function", **OTHER["function"]}
SCHEMA_OTHER: Any = {"name": "other", "input_schema": {"type": "object"}}
FORMS = [parser for parser in all_parsers() if parser.call_form is not None]
ARGUMENTS = {"json_schema": '{"city": "Oslo"}', "qwen_xml_parameter": "<parameter=city>\nOslo\n</parameter>"}


def forced_gateway(
    log: Path, answers: list[str], parsers: tuple[Parser | None, Parser | None] = (QWEN, HERMES)
) -> tuple[Gateway, Scripted]:
    """A gateway before a server that takes grammars."""
    gateway, provider = make_gateway(log, list(answers))
    gateway.parsers = parsers
    provider.forcing = lambda tag: {"structural_tag": tag}  # type: ignore[attr-defined]
    return gateway, provider


def tag_of(provider: Scripted, number: int = -1) -> Mapping[str, Any]:
    tag: Mapping[str, Any] = provider.asked[number].extra["structural_tag"]
    assert tag["type"] == "structural_tag"
    return tag["format"]  # type: ignore[no-any-return]


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


@pytest.mark.parametrize(
    ("api", "more"),
    [
        ("chat", {"tools": [*TOOLS, OTHER], "tool_choice": "required"}),
        (
            "responses, previous",
            {"tools": [*FLAT, FLAT_OTHER], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        ("messages", {"tools": [*SCHEMAS, SCHEMA_OTHER], "tool_choice": {"type": "any"}}),
    ],
)
def test_a_required_call_is_sampled_by_a_grammar_and_continued(tmp_path: Path, api: str, more: Any) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = forced_gateway(log, ["<think>\nHm.\n</think>\n\n" + CALL, SAID])
    with served(gateway) as address:
        agent = CLIENTS[api](address, [{"user": "Oslo?"}])
        assert agent.ask(streams=False, **more).says["why"] == "calls"
        agent.tell("result", "rain", tools=more["tools"])
    thought, calls = tag_of(provider, 0)["elements"][0]["elements"]
    assert (thought["begin"], thought["end"]) == ("<think>", "</think>")
    assert tag_of(provider, 0)["elements"][1] == calls, "a server that reads reasoning begins after it"
    tags = calls["elements"][1]
    assert (tags["at_least_one"], tags["stop_after_first"]) == (True, api == "responses, previous")
    assert [tag["begin"] for tag in tags["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("weather", "other")
    ]
    assert tags["tags"][0]["content"]["json_schema"] == TOOLS[0]["function"]["parameters"]
    rows = logged(log)
    check_chain(rows)
    assert rows[0]["forced"] == {"functions": ["weather", "other"], "syntax": "template"}
    assert "forced" not in rows[1]
    assert provider.asked[1].extra == {}
    assert codes_of(log) == []


def test_a_named_function_is_the_only_one_of_its_grammar(tmp_path: Path) -> None:
    gateway, provider = forced_gateway(tmp_path / "log.jsonl", [CALL, CALL, CALL])
    with served(gateway) as address:
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        agent = client(address)
        agent.chat.completions.create(model="toy", messages=[ASK], tools=[*TOOLS, OTHER], tool_choice=choice)
        flat: Any = {"type": "function", "name": "weather"}
        schema: Any = {"type": "json_schema", "name": "weather", "schema": {"type": "object"}}
        agent.responses.create(model="toy", input="Oslo?", tools=FLAT, tool_choice=flat, text={"format": schema})
        inside = {"type": "namespace", "name": "sky", "description": "", "tools": FLAT}
        agent.responses.create(model="toy", input="Oslo?", tools=[inside], tool_choice=flat)
    assert provider.asked[1].extra.keys() == {"structural_tag"}, "a call leaves no text for a format"
    assert "sky__weather" in str(tag_of(provider, 2))
    for number in (0, 1, 2):
        tags = tag_of(provider, number)["elements"][1]["elements"][1]
        assert [tag["begin"].count("weather") for tag in tags["tags"]] == [1]
        assert tags["stop_after_first"]


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


@pytest.mark.parametrize("streams", [False, True])
def test_without_a_grammar_of_the_syntax_calls_are_json_as_servers_force_them(
    tmp_path: Path, streams: bool
) -> None:
    log = tmp_path / "log.jsonl"
    listed = '[{"name": "weather", "parameters": {"city": "Oslo"}}]<|im_end|>'
    gateway, provider = forced_gateway(log, [listed, '{"city":  "Oslo"}<|im_end|>', '[{"na'], (None, None))
    with served(gateway) as address:
        agent = client(address)
        ask: Any = {"model": "toy", "input": "Oslo?", "tools": FLAT}
        answers = []
        for choice in ("required", {"type": "function", "name": "weather"}, "required"):
            if streams:
                with agent.responses.stream(**ask, tool_choice=choice) as stream:
                    answers.append(stream.get_final_response())
            else:
                answers.append(agent.responses.create(**ask, tool_choice=choice))
    first, second, cut = ([item.to_dict() for item in answer.output] for answer in answers)
    assert [(item["name"], item["arguments"]) for item in first] == [("weather", '{"city": "Oslo"}')]
    assert [(item["name"], item["arguments"]) for item in second] == [("weather", '{"city":  "Oslo"}')]
    assert cut[0]["content"][0]["text"] == '[{"na', "what does not parse stays content"
    assert tag_of(provider, 0)["json_schema"]["minItems"] == 1
    assert tag_of(provider, 1)["json_schema"] == FLAT[0]["parameters"]
    assert [row["forced"]["syntax"] for row in logged(log)] == ["json"] * 3
    assert logged(log)[0]["completion_token_ids"] == list(provider.sampled[0])


def test_what_cannot_be_forced_is_refused(tmp_path: Path) -> None:
    path, body = "/v1/chat/completions", {"messages": [ASK], "tools": TOOLS, "tool_choice": "required"}
    gateway, provider = forced_gateway(tmp_path / "log.jsonl", [])
    with served(gateway) as address:
        for more in (
            {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
            {"tool_choice": {"type": "function"}},
            {"tool_choice": {"type": "allowed_tools"}},
            {"tool_choice": "always"},
            {"tools": None},
            {"tools": [{"type": "function", "function": {"name": ["x"]}}]},
            {"response_format": {"type": "json_object"}},
        ):
            status, answer = asked(address, path, {**body, **more})
            assert (status, answer["error"]["param"]) == (400, "tool_choice"), more
        wrong = [{"type": "function", "function": {"name": "x", "parameters": "y"}}]
        assert asked(address, path, {**body, "tools": wrong})[1]["error"]["param"] == "tools"
    gateway, _ = make_gateway(tmp_path / "other.jsonl", [], start_parser=plain)
    with served(gateway) as address:
        assert "takes no grammars" in asked(address, path, body)[1]["error"]["message"]
    assert not provider.prompts
