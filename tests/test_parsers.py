"""Parsers of sampled answers: what they read, and that it does not depend on how the text is cut."""

from __future__ import annotations

import itertools
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import stored
from tests.tiers import examples
from tito_audit.parser import Delta, Parsed, ParsedCall, ParseOptions, Parser, Reads
from tito_audit.parsers import all_parsers, join_deltas, parse_answer

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "fixtures" / "parsers"
TOOLS = stored(__file__, "TOOLS")
NAMES = [parser.name for parser in all_parsers()]
FIXTURES = {name: tomllib.loads((CASES / f"{name}.toml").read_text(encoding="utf-8")) for name in NAMES}
WRITTEN_ANEW = ("pythonic", "qwen3_coder")
"""Parsers of syntaxes whose arguments are not JSON."""
PARTS = {name: fixture["parts"] for name, fixture in FIXTURES.items()}


def cases() -> list:
    """Every case of every parser, with the name of the parser."""
    return [
        pytest.param(name, case, id=f"{name}: {case['name']}")
        for name, fixture in FIXTURES.items()
        for case in fixture["case"]
    ]


def parser_of(name: str) -> Parser:
    return next(parser for parser in all_parsers() if parser.name == name)


def streamed(parser: Parser, options: ParseOptions, pieces: list[str]) -> list[Delta]:
    run = parser.start(options)
    return [delta for piece in pieces for delta in run.feed(piece)] + list(run.close())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def expected(case: dict) -> Parsed:
    calls = tuple(ParsedCall(name, arguments) for name, arguments in case.get("calls", ()))
    return Parsed(case.get("content"), case.get("reasoning"), calls)


@pytest.mark.parametrize(("name", "case"), cases())
def test_an_answer_is_read_as_its_case_says_and_the_same_character_by_character(name: str, case: dict) -> None:
    options = ParseOptions(() if case.get("no_tools") else TOOLS, case.get("prompt_end", ""))
    parser = parser_of(name)
    assert join_deltas(streamed(parser, options, [case["text"]])) == expected(case)
    assert join_deltas(streamed(parser, options, list(case["text"]))) == expected(case)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20, 2000))
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_cut(name: str, data) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS[name]), max_size=12)))
    options = ParseOptions(TOOLS)
    parser = parser_of(name)
    whole = join_deltas(streamed(parser, options, [text]))
    places = data.draw(st.lists(st.integers(0, 400), max_size=8))
    assert join_deltas(streamed(parser, options, cut(text, places))) == whole
    assert join_deltas(streamed(parser, options, list(text))) == whole
    assert join_deltas(streamed(parser, options, ["", *cut(text, places), ""])) == whole
    if parser.reads is Reads.TOOLS and not whole.tool_calls:
        assert (whole.content or "") == text
    arguments = [call.arguments for call in whole.tool_calls if name not in WRITTEN_ANEW]
    for shown in (whole.content, whole.reasoning, *arguments):
        rest = iter(text)
        joined = (shown or "").replace("\n", "") if name == "openai" else shown or ""
        assert all(character in rest for character in joined), "characters come in the order of the text"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(15, 1000))
@given(data=st.data())
def test_nothing_that_was_given_is_taken_back_when_the_answer_goes_on(name: str, data) -> None:
    parts = st.lists(st.sampled_from(PARTS[name]), max_size=8)
    first, second = "".join(data.draw(parts)), "".join(data.draw(parts))
    run = parser_of(name).start(ParseOptions(TOOLS))
    so_far = join_deltas(run.feed(first))
    whole = join_deltas(streamed(parser_of(name), ParseOptions(TOOLS), [first + second]))
    assert (whole.content or "").startswith(so_far.content or "")
    assert (whole.reasoning or "").startswith(so_far.reasoning or "")
    assert len(whole.tool_calls) >= len(so_far.tool_calls)
    for earlier, later in zip(so_far.tool_calls, whole.tool_calls, strict=False):
        assert earlier.name == later.name
        assert later.arguments.startswith(earlier.arguments)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="abc .,\n\té中😀", max_size=40))
def test_plain_words_come_back_to_the_character(name: str, text: str) -> None:
    parsed = parse_answer(text, None, parser_of(name), ParseOptions(TOOLS))
    assert (parsed.reasoning or "") + (parsed.content or "") == text
    assert not parsed.tool_calls


@pytest.mark.parametrize("name", [name for name in NAMES if Reads.TOOLS in parser_of(name).reads])
@settings(max_examples=examples(20, 2000))
@given(data=st.data())
def test_without_tools_in_the_request_no_call_is_read(name: str, data) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS[name]), max_size=12)))
    parsed = parse_answer(text, None, parser_of(name))
    assert not parsed.tool_calls
    if parser_of(name).reads is Reads.TOOLS:
        assert parsed == Parsed(text or None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece", ["all at once", "in pieces"])
def test_a_hostile_answer_takes_linear_time(name: str, piece: str) -> None:
    parts = [part for part in PARTS[name] if part.strip()]
    texts = [part * (200_000 // len(part)) for part in parts]
    texts += ["".join(pair) * (200_000 // len("".join(pair))) for pair in itertools.pairwise(parts)]
    texts += [f"{part}{brackets * 100_000}" for part in parts for brackets in ("{", "[", '{"a":')]
    for text in texts[:: examples(9, 1)]:
        text = text[: examples(10_000, 400_000)]
        begun = time.process_time()
        pieces = [text] if piece == "all at once" else [text[at : at + 4] for at in range(0, len(text), 4)]
        streamed(parser_of(name), ParseOptions(TOOLS), pieces)
        assert time.process_time() - begun < examples(2, 16), text[:60]
