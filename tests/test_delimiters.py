"""Delimiters of chat templates, and stored turns joined with them: as the template writes them, or refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import table
from tests.test_template_facts import FAULTS
from tests.tiers import some
from tests.toy import TOKENIZERS, toy_tokenizer
from tito_audit import StoredTurn, build_multi_turn_ids, delimiters
from tito_audit.errors import SetupError, SpliceError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.sessions.delimiters import Delimiters
from tito_audit.templates.probes import TOOLS, assistant, tool_call
from tito_audit.templates.seams import Writing, find_contents
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

REAL = Path(os.environ.get("TITO_AUDIT_TOKENIZERS", "no-such-folder"))
TOYS = [TOKENIZERS / name for name in ("toy_bpe", "toy_metaspace")]
TEMPLATES = sorted(path.parent for path in REAL.glob("*/tokenizer.json") if path.parent.name != "gpt-oss")
FOLDERS = [*TOYS, *some(TEMPLATES, 2)]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USUAL: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant"),
)
WORDS = ("Is it 7?", " spaced ", "\n\nlines\n", 'a "b" \\ <c>', "Été 東京", '{"d": 1}', "x" * 40)


@cache
def loaded(folder: Path) -> tuple[Tokenizer, Renderer, Delimiters]:
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, make_renderer(tokenizer), delimiters(tokenizer)


def of_template(body: str = "{{ m.content }}", source: str = CHATML) -> Delimiters:
    """The delimiters of a template with the toy tokenizer."""
    renderer = make_renderer(toy_tokenizer(), chat_template=source.replace("BODY", body))
    return delimiters(toy_tokenizer(), renderer)


def rendered(renderer: Renderer, wires: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
    opens = wires[-1]["role"] != "assistant"
    return renderer.render(as_messages(wires, "a test"), tools, add_generation_prompt=opens)


def turns_of(written: Delimiters, wires: Iterable[Mapping[str, Any]]) -> list[StoredTurn]:
    """Messages as turns; answers as canonical ids where the template does not let them be text."""
    turns = []
    for wire in wires:
        content: Any = wire["content"]
        if wire["role"] == "assistant" and (
            written.answer.opens is None or written.contents["assistant"].writing is Writing.OTHERWISE
        ):
            content = written.tokenizer.encode(content + written.answer.end)
        turns.append(StoredTurn(wire["role"], content))
    return turns


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
@pytest.mark.parametrize("roles", USUAL, ids=" ".join)
def test_joined_turns_are_the_ids_that_the_template_writes(folder, roles):
    tokenizer, renderer, written = loaded(folder)
    for shift, word in enumerate(some(WORDS, 4)):
        texts = [word, *WORDS[shift:], *WORDS]
        wires = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        for wire in wires:  # a sampled answer begins a token of its own
            wire["content"] = wire["content"].lstrip() if wire["role"] == "assistant" else wire["content"]
        ids = build_multi_turn_ids(turns_of(written, wires), written)
        expected = tokenizer.encode(rendered(renderer, wires))
        if roles[-1] == "assistant":  # what a template writes after the last end token was never sampled
            if written.answer.opens is None:
                continue
            assert len(expected) - len(ids) <= 1
            expected = expected[: len(ids)]
        assert ids.dtype == np.int32
        assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_tool_results_are_joined_to_a_stored_prompt(folder):
    tokenizer, renderer, written = loaded(folder)
    calls = [assistant("Call.", None, tool_call('{"city": "Oslo"}', number)) for number in (1, 2)]
    result = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": ' {"degrees": 2}\n'}
    wires = [
        {"role": "user", "content": "Weather?"},
        calls[0],
        result,
        calls[1],
        result,
        assistant("Cold."),
    ]
    wires.append({"role": "user", "content": "And now?"})
    if ("tool", "assistant") not in written.pairs:
        assert folder.name in {"gemma-3", "toy_metaspace"}, "their templates know no tools"
        return
    prompts = [rendered(renderer, wires[:count], TOOLS) for count in (1, 3, 5, 7)]
    turns = [StoredTurn("prompt", tokenizer.encode(prompts[0]))]
    if folder.name == "deepseek-v3":
        turns += [StoredTurn("assistant", tokenizer.encode("Call." + written.answer.end))]
        with pytest.raises(SpliceError, match="depends on the messages"):
            build_multi_turn_ids([*turns, StoredTurn("tool", result["content"])], written)
        return
    end = written.answer.end
    for number, (before, after) in enumerate(pairwise(prompts)):
        answer = after[len(before) : after.index(end, len(before)) + len(end)]
        assert after.startswith(before + answer)
        spoken = wires[2 * number + 2]
        turns += [
            StoredTurn("assistant", tokenizer.encode(answer)),
            StoredTurn(spoken["role"], spoken["content"]),
        ]
        assert build_multi_turn_ids(turns, written).tolist() == tokenizer.encode(after).tolist()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_answer_that_was_cut_gets_its_end_token_and_one_that_ended_does_not_get_it_twice(folder):
    tokenizer, renderer, written = loaded(folder)
    wires = [
        {"role": "user", "content": "Go on?"},
        assistant("It is"),
        {"role": "user", "content": "More."},
    ]
    questions = StoredTurn("user", "Go on?"), StoredTurn("user", "More.")
    prompt = rendered(renderer, wires[:1])
    cut_text = prompt + ("" if written.answer.opens is None else written.answer.opens) + "It is"
    before = len(tokenizer.encode(prompt))
    cut, whole = (tokenizer.encode(text)[before:] for text in (cut_text, cut_text + written.answer.end))
    for ids in (cut, whole):
        joined = build_multi_turn_ids([questions[0], StoredTurn("assistant", ids), questions[1]], written)
        assert joined.tolist() == tokenizer.encode(rendered(renderer, wires)).tolist()
    last = build_multi_turn_ids([questions[0], StoredTurn("assistant", cut)], written)
    assert last[-len(cut) :].tolist() == cut.tolist()
    unended = StoredTurn("assistant", whole, ended=False)
    twice = build_multi_turn_ids([questions[0], unended, questions[1]], written)
    assert len(twice) == len(joined) + len(written.answer.end_ids or ())


@given(st.lists(st.integers(0, 1999), max_size=8), st.booleans(), st.text("ab .\n", max_size=8))
def test_sampled_ids_stay_where_they_are_whatever_they_are(sampled, ended, question):
    tokenizer, _, written = loaded(TOYS[0])
    stored = [*sampled, *(tokenizer.eos_ids if ended else ())]
    turns = [StoredTurn("user", "a"), StoredTurn("assistant", stored), StoredTurn("user", question)]
    ids = build_multi_turn_ids(turns, written).tolist()
    before = build_multi_turn_ids(turns[:1], written).tolist()
    after = tokenizer.encode(f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert ids == [*before, *sampled, *tokenizer.eos_ids, *after]


@pytest.mark.parametrize("fault", FAULTS)
def test_turns_of_a_faulty_template_are_joined_as_it_writes_them_or_refused(fault):
    renderer = make_renderer(toy_tokenizer(), chat_template=FAULTS[fault][0])
    written = delimiters(toy_tokenizer(), renderer)
    joined, refused = 0, []
    for roles in (*USUAL, ("user", "assistant") * 3 + ("user",), ("user", "user"), ("system", "system", "user")):
        wires = [{"role": role, "content": f"{role[0]} {number}"} for number, role in enumerate(roles)]
        if roles[-1] == "assistant":
            continue
        turns = [
            StoredTurn(wire["role"], toy_tokenizer().encode(wire["content"] + written.answer.end))
            if wire["role"] == "assistant"
            else StoredTurn(wire["role"], wire["content"])
            for wire in wires
        ]
        try:
            ids = build_multi_turn_ids(turns, written)
        except SpliceError as error:
            refused.append(str(error))
            continue
        joined += 1
        assert ids.tolist() == toy_tokenizer().encode(rendered(renderer, wires)).tolist()
    assert all("Render this conversation with the template instead." in message for message in refused)
    assert joined >= (0 if "opens reasoning in the generation prompt" in fault else 2)


def test_every_delimiter_of_a_real_template_was_seen_in_several_places():
    for folder in FOLDERS:
        _, _, written = loaded(folder)
        assert ("start", "user") in written.pairs
        assert ("user", "assistant") in written.pairs
        assert ("assistant", "user") in written.pairs
        for pair, delimiter in written.pairs.items():
            assert (delimiter.left, delimiter.right) == pair
            assert delimiter.seen >= 5
            assert (delimiter.text is None) == (delimiter.ids is None) == (delimiter.reason is not None)


def test_a_text_that_depends_on_position_is_no_delimiter():
    source = CHATML.replace("'<|im_start|>'", "(loop.index|string if loop.index > 2 else '') + '<|im_start|>'")
    written = of_template(source=source)
    with pytest.raises(SpliceError, match="between user and assistant is not fixed: a longer conversation has"):
        written.between("user", "assistant")
    assert written.between("start", "user").text == "<|im_start|>user\n"
    turns = [StoredTurn("user", "a"), StoredTurn("assistant", [5, 2002]), StoredTurn("user", "b")]
    with pytest.raises(SpliceError, match="a longer conversation"):
        build_multi_turn_ids(turns, written)


def test_a_cut_answer_is_refused_where_its_end_is_not_known():
    written = of_template(source=CHATML.replace("<|im_end|>\n", "\n"))
    assert written.answer.end_ids is None
    turns = [StoredTurn("user", "a"), StoredTurn("assistant", [5]), StoredTurn("user", "b")]
    with pytest.raises(SpliceError, match="no end token"):
        build_multi_turn_ids(turns, written)


def test_a_pair_that_the_template_refuses_is_unknown():
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
    with pytest.raises(SpliceError, match="between assistant and tool is unknown"):
        of_template(refuses).between("assistant", "tool")


@pytest.mark.parametrize(*table(__file__, "how_a_content_is_written_is_told_and_joined_so"))
def test_how_a_content_is_written_is_told_and_joined_so(body, way):
    written, writing = of_template(body), Writing[way]
    assert written.contents["user"].writing is writing
    text = ' two "words"\n'
    if writing is Writing.OTHERWISE:
        assert written.contents["user"].unlike is not None
        with pytest.raises(SpliceError, match="contents of user is not known"):
            build_multi_turn_ids([StoredTurn("user", text)], written)
        return
    renderer = make_renderer(toy_tokenizer(), chat_template=CHATML.replace("BODY", body))
    ids = build_multi_turn_ids([StoredTurn("user", text)], written)
    assert ids.tolist() == toy_tokenizer().encode(rendered(renderer, [{"role": "user", "content": text}])).tolist()


def test_a_template_that_strips_reasoning_takes_answers_as_ids_only():
    tokenizer, _, written = loaded(TOYS[0])
    turns = [StoredTurn("user", "a"), StoredTurn("assistant", "<think>b</think>c"), StoredTurn("user", "d")]
    with pytest.raises(SpliceError, match=r"contents of assistant is not known, such as '<think>"):
        build_multi_turn_ids(turns, written)
    turns[1] = StoredTurn("assistant", tokenizer.encode("<think>b</think>c<|im_end|>"))
    assert "<think>b</think>c" in tokenizer.vocabulary.text(build_multi_turn_ids(turns, written))


def test_ids_of_a_given_message_stay_or_are_refused():
    tokenizer, _, written = loaded(TOYS[0])
    as_text, as_ids = (
        build_multi_turn_ids([StoredTurn("user", content)], written)
        for content in ("Hello there", tokenizer.encode("Hello there"))
    )
    assert as_text.tolist() == as_ids.tolist()
    split = [token for char in "Hello" for token in tokenizer.encode(char).tolist()]
    with pytest.raises(SpliceError, match="the ids of a stored message"):
        build_multi_turn_ids([StoredTurn("user", split)], written)
    merging = tokenizer.encode("\nHello")  # the line before it is one token with the role's
    with pytest.raises(SpliceError, match="A token reaches across"):
        build_multi_turn_ids([StoredTurn("user", merging)], written)


def test_a_prompt_comes_first_as_ids_and_opens_an_answer():
    tokenizer, _, written = loaded(TOYS[0])
    prompt = StoredTurn("prompt", tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"))
    answer = StoredTurn("assistant", [7, 2002])
    assert build_multi_turn_ids([prompt], written).tolist() == list(prompt.content)
    assert build_multi_turn_ids([prompt, answer], written).tolist() == [*prompt.content, 7, 2002]
    for turns, words in (
        ([answer, prompt], "only the first turn"),
        ([StoredTurn("prompt", "text")], "as text"),
        ([prompt, StoredTurn("user", "x")], "opens an answer"),
        ([StoredTurn("user", "x"), answer, StoredTurn("tool", "y")], "begins with their definitions"),
    ):
        with pytest.raises(SpliceError, match=words):
            build_multi_turn_ids(turns, written)


def test_nothing_is_joined_to_nothing():
    _, _, written = loaded(TOYS[0])
    assert build_multi_turn_ids([], written).tolist() == []
    bare = build_multi_turn_ids([StoredTurn("user", "x")], written, generation_prompt=False)
    assert toy_tokenizer().vocabulary.text(bare) == "<|im_start|>user\nx"


def test_a_tokenizer_without_a_template_has_no_delimiters(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((TOYS[0] / "tokenizer.json").read_bytes())
    with pytest.raises(SetupError, match="no chat template"):
        delimiters(tmp_path)


def test_contents_are_told_of_every_place_that_a_role_has():
    last_only = "{{ m.content | trim if loop.last else m.content }}"
    renderer = make_renderer(toy_tokenizer(), chat_template=CHATML.replace("BODY", last_only))
    contents = {content.role: content for content in find_contents(renderer)}
    assert contents["system"].writing is Writing.AS_IS
    assert contents["user"].writing is Writing.OTHERWISE
