"""Faults put into clean rollouts at random places are found there, and nothing is found elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import END, Found, Log, clean_logs, encode, found_in, literal, places, render, spelling, text_of
from tests.tiers import examples

many = settings(max_examples=examples(10, 40), deadline=None, derandomize=True)
few = settings(max_examples=examples(5, 20), deadline=None, derandomize=True)
anywhere = st.integers(0, 10**6)

Place = tuple[int, int, int, list[int]]
"""Turn, start and end of the tokens that are replaced, and what is put there."""


def ids_of(data: bytes) -> int | None:
    """An ordinary token with these bytes."""
    vocabulary = toy.toy_tokenizer().vocabulary
    return next((i for i in vocabulary.ids_of_bytes(data) if i not in vocabulary.added_ids), None)


def picked(options: Iterator[Place], choice: int) -> Place:
    """One of the places at which a fault can be put; an example without any is passed over."""
    candidates = list(options)
    assume(candidates)
    return candidates[choice % len(candidates)]


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
            answer = log.completions[turn]
            if at and encode(text_of(answer[:at])) == answer[:at] and encode(text_of(answer[at:])) == answer[at:]:
                yield turn, at, at, spelled


def cut_characters(log: Log, turns: range) -> Iterator[Place]:
    """The last token of a character of several tokens left out."""
    for turn, at, run in places(log, 2, turns):
        data = b"".join(map(spelling, run))
        first = [run[0]]
        broken = text_of(first)
        if "\ufffd" not in data.decode("utf-8", "replace") and "\ufffd" in broken:
            answer = log.completions[turn]
            before, after = answer[:at], answer[at + 2 :]
            whole = encode(text_of([*before, *first, *after]))
            if whole[:at] == before and whole[len(whole) - len(after) :] == after:
                yield turn, at, at + 2, first


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
def test_other_tokens_that_everything_later_keeps_are_one_note(
    code: str, data: st.DataObject, choice: int
) -> None:
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
    altered, turn, start, end = fault(log, code, range(len(log) - 1), choice)
    again = altered.forgotten(turn, encode(text_of(altered.completions[turn])))
    if code == "TOK104":
        # The seam is encoded together: the newline that ended the prompt becomes part of the token.
        again.gaps[turn] = again.gaps[turn][:-1]
        again.heard[turn] = encode("\n" + text_of(altered.completions[turn]))
        prompts, gap = altered.prompts, altered.gaps[turn]
        again.lay()
        again.prompts[turn] = prompts[turn]
        assert gap[-1] == literal("\n")
    wanted = sorted([(code, "error", "completion", turn, start, end), broken_prefix("SEQ301", again, turn)])
    again.has_row = False
    assert found_in(again.rollout()) == wanted
    again.has_row = True
    assert found_in(again.rollout()) == wanted


def differing(sampled: list[int], heard: list[int]) -> tuple[int, int]:
    """The tokens of `said` between the common start and the common end."""
    head = same_start(sampled, heard)
    tail = same_start(sampled[head:][::-1], heard[head:][::-1])
    return head, len(sampled) - tail


@few
@given(clean_logs(tools=False), anywhere, st.sampled_from(["\n", "\n\n", "  ", " \n"]))
def test_trimmed_white_space_is_found_at_the_end_of_the_answer(log: Log, choice: int, space: str) -> None:
    turn = choice % (len(log) - 1)
    at = len(log.completions[turn]) - 1
    new = encode(space)
    out = log.replaced(turn, at, at, new)
    out = out.forgotten(turn, log.completions[turn])
    wanted = [broken_prefix("SEQ302", out, turn), ("TPL202", "error", "completion", turn, at, at + len(new))]
    assert found_in(out.rollout()) == wanted


@pytest.mark.parametrize("how", ["spacing", "key order"])
@few
@given(log=clean_logs(tools=True), choice=anywhere)
def test_a_tool_call_that_comes_back_otherwise_is_found(how: str, log: Log, choice: int) -> None:
    turn = choice % (len(log) - 1)
    canonical = log.completions[turn]
    text = text_of(canonical)
    if how == "spacing":
        rewritten = text.replace('", "arguments": {', '","arguments":{')
    else:
        name, rest = text.split('{"name": "search", "arguments": ')
        arguments, end = rest.split("}\n</tool_call>")
        rewritten = f'{name}{{"arguments": {arguments}, "name": "search"}}\n</tool_call>{end}'
    out = log.replaced(turn, 0, len(canonical), encode(rewritten)).forgotten(turn, canonical)
    start, end_of = differing(out.completions[turn], canonical)
    link, *rest = found_in(out.rollout())
    assert link == broken_prefix("SEQ302", out, turn)
    if how == "spacing":
        assert rest == [("TPL203", "error", "completion", turn, start, end_of)]
    else:
        # The arguments moved as they are; where they are long, what stood before and after them are two places.
        assert [finding[:4] for finding in rest] == [("TPL203", "error", "completion", turn)] * len(rest)
        assert (rest[0][4], rest[-1][5]) == (start, end_of)
        assert len(rest) <= 2


@few
@given(clean_logs(tools=False), anywhere, st.sampled_from(["So be it", "We told him\nonce, twice"]))
def test_reasoning_that_the_template_drops_is_found(log: Log, choice: int, thought: str) -> None:
    turn = choice % (len(log) - 1)
    new = encode(f"<think>\n{thought}\n</think>\n\n")
    out = log.replaced(turn, 0, 0, new).forgotten(turn, log.completions[turn])
    out.messages[out.indices[turn]]["reasoning_content"] = thought
    assert found_in(out.rollout()) == [
        broken_prefix("SEQ302", out, turn),
        ("TPL204", "error", "completion", turn, 0, len(new)),
    ]


@few
@given(clean_logs(tools=False), anywhere)
def test_empty_reasoning_in_a_later_prompt_is_found(log: Log, choice: int) -> None:
    turn = choice % (len(log) - 1)
    out = log.forgotten(turn, [*encode("<think>\n\n</think>\n\n"), *log.completions[turn]])
    at = log.regions[turn][0]
    size = len(out.heard[turn]) - len(log.completions[turn])
    assert found_in(out.rollout()) == [
        broken_prefix("SEQ302", out, turn),
        # The prompt is off the template as well, which writes no reasoning for this message.
        ("TPL204", "warning", "prompt", turn + 1, at, at + size),
        ("TPL205", "error", "completion", turn, 0, 0),
    ]


@few
@given(clean_logs(tools=False, system=True))
def test_a_system_prompt_that_only_one_side_has_is_found_once(log: Log) -> None:
    missing, added = log.copy(), log.copy()
    size = log.gaps[0].index(literal(END)) + 2
    missing.gaps[0] = missing.gaps[0][size:]
    assert found_in(missing.lay().rollout()) == [("TPL206", "warning", "prompt", 0, 0, 0)]
    del added.messages[0]
    added.indices = [index - 1 for index in added.indices]
    assert found_in(added.rollout()) == [("TPL206", "warning", "prompt", 0, 0, size)]


@few
@given(clean_logs())
def test_a_generation_prompt_that_is_missing_or_doubled_is_found(log: Log) -> None:
    opener, last = encode("<|im_start|>assistant\n"), len(log) - 1
    missing, doubled = log.copy(), log.copy()
    missing.gaps[last] = missing.gaps[last][: -len(opener)]
    size = len(missing.lay().prompts[last])
    assert found_in(missing.rollout()) == [("TPL207", "warning", "prompt", last, size, size)]
    doubled.gaps[last] = doubled.gaps[last] + opener
    size = len(doubled.lay().prompts[last])
    assert found_in(doubled.rollout()) == [("TPL207", "warning", "prompt", last, size - len(opener), size)]


@few
@given(clean_logs(), anywhere)
def test_a_stop_token_that_comes_back_as_another_is_found(log: Log, choice: int) -> None:
    turn = choice % (len(log) - 1)
    at = len(log.completions[turn]) - 1
    out = log.replaced(turn, at, at + 1, [literal("<|endoftext|>")]).forgotten(turn, log.completions[turn])
    assert found_in(out.rollout()) == [
        broken_prefix("SEQ302", out, turn),
        ("TPL208", "error", "completion", turn, at, at + 1),
    ]


@few
@given(clean_logs(tools=False), anywhere)
def test_an_answer_edited_for_later_prompts_is_unexplained(log: Log, choice: int) -> None:
    turn, at, _, _ = picked(((t, a, 0, r) for t, a, r in places(log, 1, range(len(log) - 1)) if a), choice)
    answer = log.completions[turn]
    new = encode(" rolled Granny")
    heard = [*answer[:at], *new, *answer[at + 1 :]]
    assume(encode(text_of(heard)) == heard and answer[at] not in new and text_of(answer[at : at + 1]).strip())
    out = log.forgotten(turn, heard)
    out.messages[out.indices[turn]]["content"] = text_of(heard[:-1])
    assert found_in(out.rollout()) == [
        broken_prefix("SEQ302", out, turn),
        ("TPL299", "error", "completion", turn, at, at + 1),
    ]


@few
@given(clean_logs(tools=False))
def test_a_prompt_without_its_template_is_found(log: Log) -> None:
    question = log.messages[log.indices[0] - 1]
    question["content"] = text_of(encode(question["content"])[:8]).strip(" \n\ufffd") + "\n"
    del log.messages[: log.indices[0] - 1], log.gaps[1:], log.completions[1:], log.indices[1:]
    del log.messages[2:], log.heard[1:]
    log.indices, log.gaps = [1], [encode(question["content"])]
    # The newline that ends the prompt is also the last thing that the template writes, where it is a token.
    assume(text_of(log.gaps[0][-1:]) == "\n")
    size = len(log.lay().prompts[0]) - 1
    assert found_in(log.rollout()) == [("TPL201", "warning", "prompt", 0, 0, size)]


@few
@given(clean_logs(system=True, tools=False, turns=3), anywhere)
def test_a_prompt_without_the_oldest_messages_is_found(log: Log, choice: int) -> None:
    turn = 1 + choice % (len(log) - 1)
    sent = [log.messages[:index] for index in log.indices]
    cut = [log.messages[0], *log.messages[3 : log.indices[turn]]]
    prompt = encode(render(cut, [], opens=True))
    log.has_row = False
    later = [len(log.prompts[k]) - len(log.prompts[turn]) for k in range(turn, len(log))]
    for k, extra in zip(range(turn, len(log)), later, strict=True):
        log.prompts[k] = prompt + log.prompts[k][len(log.prompts[k]) - extra :] if extra else prompt
        sent[k] = [log.messages[0], *log.messages[3 : log.indices[k]]]
    log.sent = sent
    assert found_in(log.rollout()) == [broken_prefix("SEQ303", log, turn - 1, "warning")]


@few
@given(clean_logs(), anywhere, st.booleans())
def test_a_retry_is_a_note(log: Log, choice: int, row: bool) -> None:
    turn = choice % len(log)
    tried = log.copy()
    tried.has_row = row
    for column in (tried.prompts, tried.completions, tried.texts, tried.logprobs, tried.indices):
        column.insert(turn, column[turn])
    tried.gaps.insert(turn, [])
    tried.indices[turn] = None
    tried.completions[turn] = encode("We do not know" + END)
    tried.texts[turn] = "We do not know"
    tried.logprobs[turn] = [-0.5, -0.25, -0.75, -1.5, -2.5, -3.5][: len(tried.completions[turn])]
    size = len(log.prompts[turn])
    assert found_in(tried.rollout()) == [("SEQ304", "note", "prompt", turn + 1, size, size)]


@few
@given(clean_logs(), st.booleans())
def test_a_foreign_call_at_the_end_is_found(log: Log, row: bool) -> None:
    log.has_row = row
    text = render([{"role": "user", "content": "Is it a good answer?"}], [], opens=True)
    log.prompts.append(encode(text))
    log.gaps.append([])
    log.completions.append(encode("Yes, it is good" + END))
    log.texts.append("Yes, it is good")
    log.logprobs.append([-0.5 - i for i in range(len(log.completions[-1]))])
    log.indices.append(None)
    assert found_in(log.rollout()) == [broken_prefix("SEQ305", log, len(log) - 2, "warning")]


def in_row(log: Log, turn: int, at: int = 0) -> int:
    """Where a token of a turn's answer stands in the row."""
    return log.regions[turn][0] + at


def one_place(log: Log, choice: int) -> tuple[int, int]:
    """A turn and a token of its answer that is neither its first nor its last."""
    turn = choice % len(log)
    return turn, 1 + choice // 7 % (len(log.completions[turn]) - 2)


@few
@given(clean_logs())
def test_a_mask_two_entries_short_is_found(log: Log) -> None:
    # One entry less fits a mask that is shifted by one; two less fit nothing.
    del log.row_mask[-2:]
    assert found_in(log.rollout()) == [("REC002", "error", "row", None, 0, len(log.row_ids))]


@few
@given(clean_logs(tools=False), anywhere, st.sampled_from([-1, 2007, 2100, 10**6]))
def test_an_id_that_is_no_token_is_found_where_it_stands(log: Log, choice: int, wrong: int) -> None:
    turn, at = one_place(log, choice)
    # Of two equal tokens side by side nothing tells which one the id took the place of.
    assume(log.completions[turn][at] != log.completions[turn][at + 1])
    text = text_of(log.completions[turn][at : at + 1])
    assume(text.strip() and "\ufffd" not in text)
    log.row_ids[in_row(log, turn, at)] = wrong
    where = in_row(log, turn, at)
    assert found_in(log.rollout()) == [
        ("REC003", "error", "row", None, where, where + 1),
        # The row also holds something else than was sampled. An id without bytes counts with the token before it.
        ("TOK102", "error", "completion", turn, at - 1, at),
        ("TPL299", "error", "completion", turn, at, at + 1),
    ]


@few
@given(clean_logs(), anywhere)
def test_a_completion_of_one_id_repeated_may_be_a_placeholder(log: Log, choice: int) -> None:
    turn = len(log) - 1
    log.has_row = False
    log.completions[turn] = [literal(" dog") if choice % 2 else 0] * 5
    log.texts[turn], log.logprobs[turn], log.indices[turn] = None, None, None
    findings = [finding for finding in found_in(log.rollout()) if not finding[0].startswith("TOK")]
    # Nothing tells a placeholder from a model in a loop: there are no logprobs, no text and no message.
    assert findings == [("REC004", "warning", "completion", turn, 0, 5)]


@few
@given(clean_logs(), anywhere)
def test_a_completion_without_ids_is_found(log: Log, choice: int) -> None:
    turn = choice % len(log)
    log.completions[turn], log.logprobs[turn] = [], []
    start, end = log.regions[turn]
    # No call is left that sampled what the mask trains there.
    assert found_in(log.rollout()) == [
        ("MSK401", "error", "row", None, start, end),
        ("REC005", "error", "completion", turn, 0, 0),
    ]


@few
@given(clean_logs(), anywhere)
def test_the_text_of_another_turn_is_found(log: Log, choice: int) -> None:
    turn, other = choice % len(log), (choice + 1) % len(log)
    log.texts[turn] = log.texts[other]
    (finding,) = found_in(log.rollout())
    assert finding[:4] == ("REC006", "error", "completion", turn)
    assert finding[4] <= same_start(log.completions[turn], log.completions[other])
    assert finding[5] == len(log.completions[turn])


@few
@given(clean_logs(), anywhere)
def test_a_trained_token_that_was_given_is_found(log: Log, choice: int) -> None:
    given_ones = [i for i, trained in enumerate(log.row_mask) if not trained and i + 1 < len(log.row_mask)]
    where = given_ones[choice % len(given_ones)]
    log.row_mask[where], log.row_logprobs[where] = 1, -1.25
    assert found_in(log.rollout()) == [("MSK401", "error", "row", None, where, where + 1)]


@few
@given(clean_logs(), anywhere)
def test_a_part_of_a_turn_that_is_not_trained_is_found(log: Log, choice: int) -> None:
    turn, at = one_place(log, choice)
    where = in_row(log, turn, at)
    log.row_mask[where] = 0
    assert found_in(log.rollout()) == [("MSK402", "warning", "row", turn, where, where + 1)]


@few
@given(clean_logs(), st.sampled_from(["inverted", "all zeros", "all ones"]))
def test_a_mask_that_is_wrong_as_a_whole_is_one_finding(log: Log, how: str) -> None:
    log.row_mask = [{"inverted": 1 - m, "all zeros": 0, "all ones": 1}[how] for m in log.row_mask]
    log.row_logprobs = [-0.5 - i / 512 if trained else 0.0 for i, trained in enumerate(log.row_mask)]
    for start, end in log.regions:
        turn = log.regions.index((start, end))
        log.row_logprobs[start:end] = log.logprobs[turn] or []
    severity = "warning" if how == "all zeros" else "error"
    assert found_in(log.rollout()) == [("MSK403", severity, "row", None, 0, len(log.row_ids))]


@few
@given(clean_logs(), anywhere)
def test_a_turn_end_that_is_not_trained_is_found(log: Log, choice: int) -> None:
    turn = choice % len(log)
    where = log.regions[turn][1] - 1
    log.row_mask[where] = 0
    assert found_in(log.rollout()) == [("MSK404", "warning", "row", turn, where, where + 1)]


@few
@given(clean_logs(), anywhere, st.sampled_from(["more", "fewer"]))
def test_one_logprob_too_many_or_too_few_is_found(log: Log, choice: int, how: str) -> None:
    turn = choice % len(log)
    values = log.logprobs[turn]
    assert values is not None
    log.logprobs[turn] = [*values, -0.5] if how == "more" else values[:-1]
    size = len(log.completions[turn])
    assert found_in(log.rollout()) == [("LPR501", "error", "completion", turn, 0, size)]
    log.logprobs[turn] = values
    if how == "more":
        log.row_logprobs.append(-0.5)
        assert found_in(log.rollout()) == [("LPR501", "error", "row", None, 0, len(log.row_ids))]


@few
@given(clean_logs(), st.sampled_from([-2, -1, 1, 2]))
def test_shifted_logprobs_are_found_in_every_turn(log: Log, shift: int) -> None:
    log.row_logprobs = [*log.row_logprobs[-shift:], *log.row_logprobs[:-shift]]
    assert found_in(log.rollout()) == [("LPR502", "error", "row", k, a, b) for k, (a, b) in enumerate(log.regions)]


ODD_LOGPROBS = {"LPR503": (None, float("inf"), float("-inf")), "LPR504": (0.3, 0.9, 4.0), "LPR505": (1.0, -9999.0)}


@pytest.mark.parametrize("code", ODD_LOGPROBS)
@few
@given(log=clean_logs(), choice=anywhere)
def test_a_logprob_that_no_probability_has_is_found_in_the_call_and_in_the_row(
    code: str, log: Log, choice: int
) -> None:
    turn, at = one_place(log, choice)
    where, wrong = in_row(log, turn, at), ODD_LOGPROBS[code][choice % len(ODD_LOGPROBS[code])]
    values = log.logprobs[turn]
    assert values is not None
    values[at] = wrong
    log.row_logprobs[where] = wrong
    assert found_in(log.rollout()) == [
        (code, "error", "completion", turn, at, at + 1),
        (code, "error", "row", None, where, where + 1),
    ]


@few
@given(clean_logs(), anywhere)
def test_logprobs_that_are_all_equal_are_found_in_the_call_and_in_the_row(log: Log, choice: int) -> None:
    turn = choice % len(log)
    size, (start, end) = len(log.completions[turn]), log.regions[turn]
    log.logprobs[turn] = [-0.75] * size
    log.row_logprobs[start:end] = [-0.75] * size
    assert found_in(log.rollout()) == [
        ("LPR506", "error", "completion", turn, 0, size),
        ("LPR506", "error", "row", None, start, end),
    ]
