"""Who continues whom: histories, links and chains against plain loops."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_audit.chains.histories import Histories, History, closest
from tito_audit.chains.links import (
    Link,
    LinkKind,
    broken_link,
    chain_to,
    last_calls,
    link_without_text,
    parents_of,
    repeating_link,
    sibling_link,
)
from tito_audit.evidence.chains import chain_turns
from tito_audit.evidence.differences import CompletionSpan
from tito_audit.evidence.trainings import trainings_of
from tito_audit.join._calls import order_calls
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import Place, Rollout, Turn

some = settings(max_examples=100, deadline=None, derandomize=True)


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def history(turn: int, prompt: list[int], answer: list[int]) -> History:
    return History(turn, ids(*prompt), ids(*prompt, *answer))


def histories(*calls: History) -> Histories:
    every = Histories()
    for call in calls:
        every.add(call)
    return every


@st.composite
def grown_calls(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Calls of which many continue an earlier one, whole, in part, or with its own prompt."""
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    calls: list[tuple[list[int], list[int]]] = []
    for _ in range(dice.randrange(1, 9)):
        prompt: list[int] = []
        if calls and dice.random() < 0.9:
            parent, answer = dice.choice(calls)
            seen = parent + answer
            cut = dice.choice((len(parent), len(seen), len(seen), dice.randrange(len(seen) + 1)))
            prompt = seen[:cut]
        prompt = prompt + [dice.randrange(3) for _ in range(dice.randrange(3))]
        calls.append((prompt, [dice.randrange(3) for _ in range(dice.randrange(3))]))
    return calls


def prefix_size(seen: list[int], prompt: list[int]) -> int:
    """The tokens of a history that a prompt starts with; -1 where it does not start with all of them."""
    return len(seen) if prompt[: len(seen)] == seen else -1


def shared(seen: list[int], prompt: list[int]) -> int:
    return next(
        (k for k in range(min(len(seen), len(prompt))) if seen[k] != prompt[k]), min(len(seen), len(prompt))
    )


@some
@given(grown_calls())
def test_histories_are_found_as_a_loop_finds_them(calls: list[tuple[list[int], list[int]]]) -> None:
    every = Histories()
    for k, (prompt, completion) in enumerate(calls):
        before = [earlier + answer for earlier, answer in calls[:k]]
        whole = [(prefix_size(seen, prompt), j) for j, seen in enumerate(before) if prefix_size(seen, prompt) >= 0]
        longest = every.longest_prefix(ids(*prompt))
        assert (longest and longest.turn) == (max(whole)[1] if whole else None)
        if before:
            near = max((shared(seen, prompt), j) for j, seen in enumerate(before))
            assert every.closest(ids(*prompt)).turn == near[1]
            assert every.longest_prefix_or_closest(ids(*prompt)).turn == (max(whole) if whole else near)[1]
            assert every.last.turn == k - 1
        every.add(history(k, prompt, completion))
        assert [entry.turn for entry in reversed(every)] == list(range(k, -1, -1))


@some
@given(grown_calls(), st.lists(st.integers(0, 2), max_size=9))
def test_with_the_longest_first_the_closest_is_found_without_the_short_ones(
    calls: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    every = sorted((history(k, *call) for k, call in enumerate(calls)), key=lambda entry: -len(entry.seen))
    turns: list[int] = []

    def lookups() -> Any:
        for entry in every:
            turns.append(entry.turn)
            yield entry

    best, common = closest(ids(*prompt), lookups(), longest_first=True)
    assert best is closest(ids(*prompt), every)[0]
    assert best is not None
    assert common == shared(best.seen.tolist(), prompt) == max(shared(old.seen.tolist(), prompt) for old in every)
    assert all(len(entry.seen) <= common for entry in every[len(turns) :])


def test_nothing_is_close_where_nothing_came_before() -> None:
    assert closest(ids(1), []) == (None, 0)
    assert Histories().longest_prefix(ids(1)) is None
    assert len(Histories()) == 0


@pytest.mark.parametrize("at", range(40))
def test_a_prompt_with_one_other_id_does_not_start_with_a_history(at: int) -> None:
    seen = [k % 3 for k in range(40)]
    every = histories(history(0, seen[:30], seen[30:]), history(1, [7], [8] * 60))
    assert every.longest_prefix(ids(*seen, 5)) is not None
    changed = [*seen[:at], 3 + seen[at], *seen[at + 1 :], 5]
    assert every.longest_prefix(ids(*changed)) is None
    swapped = [*seen[:at], *seen[at : at + 2][::-1], *seen[at + 2 :], 5]
    assert (every.longest_prefix(ids(*swapped)) is None) is (swapped[:40] != seen)


def test_ids_alone_tell_what_continues_and_what_is_asked_again() -> None:
    every = histories(history(0, [1], [2]), history(2, [1, 2, 3], [4]))
    retry = repeating_link(3, ids(1), every)
    assert retry == Link(3, 0, LinkKind.RETRY, 1, 1, "the same prompt as turn 0")
    assert repeating_link(3, ids(1, 2, 9), every) is None
    turns = Turn(ids(1), ids(2)), Turn(None, ids(5)), Turn(ids(1, 2, 3), ids(4)), Turn(ids(1, 2, 3, 4, 5), None)
    linked = chain_turns(Rollout(Place("log", 0), "toy", turns=turns), None).links
    assert linked == (Link(2, 0, LinkKind.CONTINUES, 3, 2), Link(3, 2, LinkKind.CONTINUES, 5, 4))


def test_without_text_a_prompt_continues_an_earlier_call_or_parts_from_the_closest() -> None:
    every = histories(history(0, [1], [2]), history(1, [1, 2, 3], [4]))
    beside = link_without_text(2, ids(1, 2, 9), every)
    assert beside == Link(2, 0, LinkKind.SIBLING, 3, 2, "continues turn 0, not turn 1")
    assert beside == sibling_link(2, ids(1, 2, 9), history(0, [1], [2]), every.last)
    parted = link_without_text(2, ids(1, 8), every)
    assert (parted.parent, parted.kind, parted.at, parted.seen_at) == (1, LinkKind.TEMPLATE, 1, 1)


def test_an_orphan_has_no_parent() -> None:
    link = broken_link(1, ids(7, 8), history(0, [7], [9]), LinkKind.ORPHAN, "why")
    assert link == Link(1, None, LinkKind.ORPHAN, 1, 1, "why")


def test_each_kind_says_whether_it_continues_or_breaks() -> None:
    assert {kind for kind in LinkKind if kind.continues} == {LinkKind.CONTINUES, LinkKind.SIBLING}
    assert {kind for kind in LinkKind if kind.only_tokens_differ} == {LinkKind.RETOKENIZED, LinkKind.TEMPLATE}
    unbroken = {kind for kind in LinkKind if not kind.breaks}
    assert unbroken == {LinkKind.CONTINUES, LinkKind.SIBLING, LinkKind.RETRY}


@some
@given(grown_calls())
def test_every_call_is_in_the_chain_of_a_last_one_and_each_continues_the_one_before(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    every, links = Histories(), []
    for k, (prompt, completion) in enumerate(calls):
        if k:
            link = repeating_link(k, ids(*prompt), every) or link_without_text(k, ids(*prompt), every)
            last = every.last
            if starts_with(ids(*prompt), last.seen):
                link = Link(k, last.turn, LinkKind.CONTINUES, len(prompt), len(last.seen))
            links.append(link)
        every.add(history(k, prompt, completion))
    turns = tuple(Turn(ids(*prompt), ids(*completion)) for prompt, completion in calls)
    rollout = Rollout(Place("log", 0), "toy", turns=turns)
    made, spans = chain_turns(rollout, None), list[tuple[CompletionSpan, ...]]()
    assert made.links == tuple(links)
    for k, ((prompt, completion), link) in enumerate(zip(calls, [None, *links], strict=True)):
        before = spans[link.parent or 0] if link is not None and link.kind is LinkKind.CONTINUES else ()
        spans.append((*before, CompletionSpan(k, len(prompt), len(prompt) + len(completion))))
    assert [made.completions[k] for k in reversed(range(len(calls)))] == spans[::-1]
    assert trainings_of(rollout, links) == trainings_of(rollout)
    parents = parents_of(links)
    last = last_calls(range(len(calls)), parents)
    chains = [chain_to(call, parents) for call in last]
    assert {call for chain in chains for call in chain} == set(range(len(calls)))
    assert [chain[-1] for chain in chains] == last
    for chain in chains:
        assert chain[0] not in parents
        for first, second in pairwise(chain):
            assert parents[second] == first < second
            assert prefix_size(calls[first][0] + calls[first][1], calls[second][0]) >= 0
    for link in links:
        assert link.kind.continues is (link.turn in parents)
        if link.kind is LinkKind.TEMPLATE:
            prompt = calls[link.turn][0]
            longest = max(prefix_size(earlier + answer, prompt) for earlier, answer in calls[: link.turn])
            # Behind a longer prompt of a call stands another answer than that call's.
            assert longest < 0 or any(prefix_size(earlier, prompt) > longest for earlier, _ in calls[: link.turn])


@some
@given(grown_calls(), st.randoms(use_true_random=False))
def test_captured_calls_are_one_conversation_in_whatever_order_they_come(
    calls: list[tuple[list[int], list[int]]], dice: random.Random
) -> None:
    turns = [Turn(ids(*prompt), ids(*completion)) for prompt, completion in calls]
    turns[-1] = Turn(None, turns[-1].completion_ids) if len(turns) > 4 else turns[-1]
    times = [float(k) for k in range(len(turns))]
    order, main = order_calls(turns, times)
    assert sorted(order) == list(range(len(turns)))
    assert list(main) == sorted(set(main))
    mixed = dice.sample(range(len(turns)), len(turns))
    again, main_again = order_calls([turns[k] for k in mixed], [times[k] for k in mixed])
    assert [mixed[k] for k in again] == list(order)
    assert main_again == main
    if turns[-1].prompt_ids is None:
        assert order[-1] == len(turns) - 1


@pytest.mark.parametrize("branches", [False, True])
def test_many_calls_are_looked_up_in_no_minute(branches: bool) -> None:
    start = list(range(2_000))
    every, began = Histories(), time.process_time()
    for k in range(400):
        prompt = ids(*start, *([k] if branches else range(5_000, 5_000 + 2 * k)))
        longest = every.longest_prefix(prompt)
        assert (longest is None) is (branches or not k)
        every.add(History(k, prompt, np.append(prompt, np.int32(7 if branches else 5_000 + 2 * k))))
    assert time.process_time() - began < 20
