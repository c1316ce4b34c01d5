"""Faults put into clean rollouts at random places are found there, and nothing is found elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import END, Found, Log, clean_logs, encode, found_in, literal, places, spelling, text_of

many = settings(max_examples=40, deadline=None, derandomize=True)
few = settings(max_examples=20, deadline=None, derandomize=True)
anywhere = st.integers(0, 10**6)

Place = tuple[int, int, int, list[int]]
"""Turn, start and end of the tokens that are replaced, and what is put there."""


def ids_of(data: bytes) -> int | None:
    """An ordinary token with these bytes."""
    vocabulary = toy.toy_tokenizer().vocabulary
    return next((i for i in vocabulary.ids_of_bytes(data) if i not in vocabulary.added_ids), None)


def picked(options: Iterator[Place], choice: int) -> Place:
    """One of the places at which a fault can be put; an example without any is passed over."""
    found = list(options)
    assume(found)
    return found[choice % len(found)]


def same_start(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences start with in common."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def broken_prefix(code: str, log: Log, turn: int, severity: str = "error") -> Found:
    """The finding of a link that the prompt behind a turn breaks."""
    seen, prompt = log.prompts[turn] + log.completions[turn], log.prompts[turn + 1]
    at = same_start(seen, prompt)
    return code, severity, "prompt", turn + 1, at, at + 1


@many
@given(clean_logs())
def test_nothing_is_found_in_a_clean_log(log: Log) -> None:
    assert found_in(log.rollout()) == []
    log.has_row = False
    assert found_in(log.rollout()) == []


def merges(log: Log, turns: range) -> Iterator[Place]:
    """A token as two that spell it."""
    for turn, at, (token,) in places(log, 1, turns):
        data = spelling(token)
        for cut in range(1, len(data)):
            left, right = ids_of(data[:cut]), ids_of(data[cut:])
            if left is not None and right is not None:
                yield turn, at, at + 1, [left, right]


def splits(log: Log, turns: range) -> Iterator[Place]:
    """Two tokens as the one that spells both, which the tokenizer does not choose there."""
    for turn, at, run in places(log, 2, turns):
        whole = ids_of(b"".join(map(spelling, run)))
        if whole is not None:
            yield turn, at, at + 2, [whole]


def resplits(log: Log, turns: range) -> Iterator[Place]:
    """Two tokens as two others with a boundary elsewhere."""
    for turn, at, run in places(log, 2, turns):
        data = b"".join(map(spelling, run))
        for cut in range(1, len(data)):
            left, right = ids_of(data[:cut]), ids_of(data[cut:])
            if cut != len(spelling(run[0])) and left is not None and right is not None:
                yield turn, at, at + 2, [left, right]


def controls(log: Log, turns: range) -> Iterator[Place]:
    """A control token spelled by ordinary tokens, put between two tokens."""
    for literal_text in ("<|im_start|>", "<|endoftext|>", END):
        spelled = [*encode(literal_text[:5]), *encode(literal_text[5:])]
        for turn, at, _ in places(log, 1, turns):
            said = log.completions[turn]
            if at and encode(text_of(said[:at])) == said[:at] and encode(text_of(said[at:])) == said[at:]:
                yield turn, at, at, spelled


def cut_characters(log: Log, turns: range) -> Iterator[Place]:
    """The last token of a character of several tokens left out."""
    for turn, at, run in places(log, 2, turns):
        data = b"".join(map(spelling, run))
        kept = [run[0]]
        broken = text_of(kept)
        if "\ufffd" not in data.decode("utf-8", "replace") and "\ufffd" in broken:
            said = log.completions[turn]
            before, after = said[:at], said[at + 2 :]
            whole = encode(text_of([*before, *kept, *after]))
            if whole[:at] == before and whole[len(whole) - len(after) :] == after:
                yield turn, at, at + 2, kept


def seams(log: Log, turns: range) -> Iterator[Place]:
    """A newline in front of the answer, where the prompt ends with one."""
    for turn in turns:
        yield turn, 0, 0, encode("\n")


TOKENIZER_FAULTS = {
    "TOK101": merges,
    "TOK102": splits,
    "TOK103": resplits,
    "TOK104": seams,
    "TOK105": controls,
    "TOK106": cut_characters,
}
OTHER_TEXT = ("TOK104", "TOK105", "TOK106")


def fault(log: Log, code: str, turns: range, choice: int) -> tuple[Log, int, int, int]:
    """The log with a fault in one of the turns, whose tokens every later prompt keeps; and where it is."""
    turn, start, end, new = picked(TOKENIZER_FAULTS[code](log, turns), choice)
    out = log.replaced(turn, start, end, new)
    if code in OTHER_TEXT:
        out.messages[out.indices[turn]]["content"] = out.texts[turn]
    else:
        assume(encode(text_of(out.completions[turn])) == log.completions[turn])
    return out, turn, start, start + len(new)


def logs_for(code: str) -> st.SearchStrategy[Log]:
    return clean_logs(tools=False) if code in OTHER_TEXT else clean_logs()


@pytest.mark.parametrize("code", TOKENIZER_FAULTS)
@few
@given(data=st.data(), choice=anywhere)
def test_other_tokens_that_everything_later_keeps_are_one_note(code: str, data: st.DataObject, choice: int) -> None:
    log = data.draw(logs_for(code))
    log, turn, start, end = fault(log, code, range(len(log)), choice)
    wanted = [(code, "note", "completion", turn, start, end)]
    assert found_in(log.rollout()) == wanted
    log.has_row = False
    assert found_in(log.rollout()) == wanted


@pytest.mark.parametrize("code", TOKENIZER_FAULTS)
@few
@given(data=st.data(), choice=anywhere)
def test_other_tokens_that_the_next_prompt_encodes_again_are_an_error(
    code: str, data: st.DataObject, choice: int
) -> None:
    log = data.draw(logs_for(code))
    kept, turn, start, end = fault(log, code, range(len(log) - 1), choice)
    again = kept.forgotten(turn, encode(text_of(kept.completions[turn])))
    if code == "TOK104":
        # The seam is encoded together: the newline that ended the prompt becomes part of the token.
        again.gaps[turn] = again.gaps[turn][:-1]
        again.heard[turn] = encode("\n" + text_of(kept.completions[turn]))
        prompts, gap = kept.prompts, kept.gaps[turn]
        again.lay()
        again.prompts[turn] = prompts[turn]
        assert gap[-1] == literal("\n")
    wanted = sorted([(code, "error", "completion", turn, start, end), broken_prefix("SEQ301", again, turn)])
    again.has_row = False
    assert found_in(again.rollout()) == wanted
    again.has_row = True
    assert found_in(again.rollout()) == wanted
