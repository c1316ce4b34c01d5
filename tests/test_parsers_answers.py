"""Whole answers: reasoning and calls together, what a client is sent, and parsers by name and by chat template."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.errors import SetupError
from tito_audit.parser import Delta, Parsed, ParsedCall, ParseOptions, Reads
from tito_audit.parsers import (
    all_parsers,
    finish_reason,
    guess_parser,
    join_deltas,
    parse_answer,
    parser_named,
    start_answer,
    to_delta,
    to_message,
)
from tito_audit.parsers._source import TextSource, json_object, read_until
from tito_audit.tokens.load import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
TOOLS = ({"type": "function", "function": {"name": "f"}},)
CALLS = ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": "</think>"}}')
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", f"<tool_call>\n{CALLS[1]}\n</tool_call>")
PARTS = (*TAGS, "words ", "\n\n", CALLS[0], "<", "</th", "{")


def both() -> tuple:
    return parser_named("qwen3", Reads.REASONING), parser_named("hermes", Reads.TOOLS)


CALLED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<think>\nHm.\n</think>\n\nLook.\n{CALLED}", "\n\nLook.\n"),
        (f"<think>\nHm.\n</think>\n\n{CALLED}", None),
        (f"<think>\nHm.\n{CALLED}", None),
    ],
    ids=["a text between", "only line breaks between", "a call within the reasoning"],
)
def test_reasoning_is_read_first_and_calls_in_the_rest(text: str, content: str | None) -> None:
    assert parse_answer(text, *both(), ParseOptions(TOOLS)) == Parsed(content, "\nHm.\n", (ParsedCall("f", "{}"),))


@settings(max_examples=examples(150, 5000))
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_reasoning_and_calls_do_not_depend_on_how_the_text_is_cut(parts, cuts) -> None:
    text = "".join(parts)
    ends = sorted(cut % (len(text) + 1) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = parse_answer(text, *both(), ParseOptions(TOOLS))
    for given_ in (pieces, list(text)):
        run = start_answer(*both(), ParseOptions(TOOLS))
        assert join_deltas([*(delta for piece in given_ for delta in run.feed(piece)), *run.close()]) == whole
    if not whole.tool_calls and text.startswith("<think>") and text.count("</think>") == 1:
        # Reasoning ends at its tag, or at a call, even one that turns out to be none.
        end = "" if "<tool_call>" in text[: text.index("</think>")] else "</think>"
        assert f"<think>{whole.reasoning or ''}{end}{whole.content or ''}" == text


def test_content_is_given_as_soon_as_it_can_be_nothing_else() -> None:
    run = start_answer(*both(), ParseOptions(TOOLS))
    assert [
        join_deltas(run.feed(piece)) for piece in ("<thi", "nk>a", "b</", "thi", "nk>", "c<", "too", "th ", "<")
    ] == [
        *(Parsed(None), Parsed(None, "a"), Parsed(None, "b"), Parsed(None), Parsed(None)),
        *(Parsed("c"), Parsed(None), Parsed("<tooth "), Parsed(None)),
    ]
    assert join_deltas(run.close()) == Parsed("<")


def test_a_call_that_breaks_is_given_as_content_at_the_character_where_it_breaks() -> None:
    run = parser_named("hermes", Reads.TOOLS).start(ParseOptions(TOOLS))
    assert not run.feed('<tool_call>{"name": "f", "arguments": {"a": ')
    assert join_deltas(run.feed("P")) == Parsed('<tool_call>{"name": "f", "arguments": {"a": P')
    assert join_deltas(run.feed("aris}}")) == Parsed("aris}}")


def test_a_message_has_reasoning_under_both_names_and_calls_with_ids() -> None:
    parsed = Parsed("Hi", "Hm", (ParsedCall("f", '{"a":1}'), ParsedCall("g", "{}")))
    assert to_message(parsed, "call-{}".format) == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "Hm",
        "reasoning": "Hm",
        "tool_calls": [
            {"id": "call-0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "call-1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert to_message(Parsed(None, None, parsed.tool_calls[:1]), str)["content"] is None
    assert to_message(Parsed(None, "Hm"), str)["content"] is None
    assert to_message(Parsed(None), str) == {"role": "assistant", "content": ""}


def test_the_chunks_of_an_answer_add_up_to_its_message() -> None:
    text = '<think>Hm.</think>Look.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    run = start_answer(*both(), ParseOptions(TOOLS))
    chunks = [to_delta(delta, str) for delta in [*run.feed(text), *run.close()]]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert chunks == [
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "Look."},
        {"tool_calls": [{"index": 0, "id": "0", "type": "function", "function": function}]},
    ]
    assert to_delta(Delta(), str) == {}
    arguments = {"index": 1, "function": {"arguments": "x"}}
    assert to_delta(Delta(call=1, arguments="x"), str) == {"tool_calls": [arguments]}


def test_calls_finish_an_answer_that_stopped_by_itself() -> None:
    called = Parsed(None, None, (ParsedCall("f", "{}"),))
    assert finish_reason(called, "stop") == "tool_calls"
    assert finish_reason(called, "length") == "length"
    assert finish_reason(Parsed("Hi"), "stop") == "stop"
    assert finish_reason(Parsed("Hi"), None) is None


def test_one_parser_that_reads_both_runs_once() -> None:
    parser = parser_named("harmony", Reads.TOOLS)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|message|>{}"
    for pair in ((parser, parser), (parser, None), (None, parser)):
        assert parse_answer(text, *pair, ParseOptions(TOOLS)) == Parsed(None, "Hm.", (ParsedCall("f", "{}"),))
    assert parse_answer(text) == Parsed(text)


def test_parsers_are_found_by_name_and_alias() -> None:
    assert parser_named("hermes", Reads.TOOLS).name == "hermes"
    assert parser_named("qwen3_xml", Reads.TOOLS).name == "qwen3_coder"
    assert parser_named("openai_gptoss", Reads.REASONING).name == "openai"
    with pytest.raises(SetupError, match=r'Unknown tool parser "hermse": did you mean hermes\?'):
        parser_named("hermse", Reads.TOOLS)
    with pytest.raises(SetupError, match='Unknown reasoning parser "hermes"'):
        parser_named("hermes", Reads.REASONING)


@pytest.mark.parametrize("reads", [Reads.TOOLS, Reads.REASONING])
def test_no_two_parsers_have_a_name_in_common(reads: Reads) -> None:
    names = [name for parser in all_parsers() if reads & parser.reads for name in (parser.name, *parser.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("folder", "tools", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("qwen2.5-coder", "hermes", None),
        ("deepseek-v3", "deepseek_v3", None),
        ("smollm2", None, None),
    ],
)
def test_the_parsers_of_a_real_chat_template_are_found(folder, tools, reasoning) -> None:
    if not (SHARED / folder).is_dir():
        pytest.skip("the tokenizer is not here")
    template = load_tokenizer(str(SHARED / folder)).chat_templates["default"]
    for reads, name in ((Reads.TOOLS, tools), (Reads.REASONING, reasoning)):
        guess = guess_parser(template, reads)
        assert (guess.parser and guess.parser.name) == name
        assert (name or "none") in guess.line


def test_a_template_that_several_parsers_fit_has_none() -> None:
    both_fit = '<tool_call> "arguments" and [TOOL_CALLS]'
    guess = guess_parser(both_fit, Reads.TOOLS)
    assert guess.parser is None
    assert guess.line == (
        "tool parser: none; the chat template suggests hermes or mistral: choose with --tool-parser NAME"
    )
    assert guess_parser(None, Reads.REASONING).parser is None


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def read_in_pieces(source: TextSource, reader: Any, text: str, size: int) -> Any:
    """What a reader of a source returns, whose text comes in pieces."""
    for piece in [*(text[at : at + size] for at in range(0, len(text), size)), ""]:
        source.add(piece)
        source.last = piece == ""
        try:
            next(reader)
        except StopIteration as ended:
            return ended.value
    raise AssertionError("a reader ends with its text")


def read_object(text: str, size: int) -> tuple[dict[str, str] | None, int]:
    """The members of the object in a text that comes in pieces, as texts, and where the reader stopped."""
    source = TextSource()
    members = read_in_pieces(source, json_object(source), text, size)
    return members and {key: source.text(*span) for key, span in members.items()}, source.offset


@settings(max_examples=examples(60, 5000))
@given(
    value=st.dictionaries(st.text(max_size=3), VALUES, max_size=4),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    size=st.integers(1, 9),
)
def test_every_object_is_read_to_its_end_with_its_members(value, indent, ascii_only, size) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    members, end = read_object(f"{text}x", size)
    assert end == len(text)
    assert {key: json.loads(part) for key, part in members.items()} == value


@settings(max_examples=examples(200, 10_000))
@given(text=st.text(alphabet='{}[]",:\\ \n0-1.eEtrufalsn"{"a":1}', max_size=24), size=st.integers(1, 5))
def test_what_is_no_object_is_refused_exactly_where_json_refuses_it(text: str, size: int) -> None:
    text = "{" + text
    members, end = read_object(text, size)
    try:
        value, length = json.JSONDecoder(parse_constant=lambda name: pytest.fail(name)).raw_decode(text)
    except ValueError:
        assert members is None
        return
    assert members is not None
    assert end == length
    assert {key: json.loads(part) for key, part in members.items()} == value


def test_an_object_nested_too_deep_is_no_call() -> None:
    assert read_object('{"a":' * 150 + "1" + "}" * 150, 7)[0] is not None
    assert read_object('{"a":' * 250 + "1" + "}" * 250, 7)[0] is None


@given(
    text=st.text(alphabet="ab<", max_size=20),
    mark=st.sampled_from(["a", "ab", "aab", "abab", "<<a"]),
    size=st.integers(1, 6),
)
def test_a_mark_is_found_where_it_first_is(text: str, mark: str, size: int) -> None:
    source = TextSource()
    place = read_in_pieces(source, read_until(source, mark), text, size)
    assert place == (text.find(mark) if mark in text else None)
