"""The tokens of a row that correspond to places in its calls, all at once and one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_audit.record.finding import Finding, FoldedFindings, Hit, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.repairs import mask


def slow(view: Any, prompts: list[int], where: Where, number: int, start: int) -> tuple[set[int], int]:
    """The drifted tokens between the sampled ones that the row holds before and after a place, and the first."""
    size = len(view.turn)
    in_turns = [at for at in range(size) if view.turn[at] >= 0]

    def comes_before(at: int) -> bool:
        turn, offset = int(view.turn[at]), int(view.turn_offset[at])
        if where is Where.COMPLETION:
            return turn < number or (turn == number and offset < start)
        return turn < number and prompts[turn] + offset < start

    low = max((at for at in in_turns if comes_before(at)), default=-1)
    high = min((at for at in in_turns if at > low), default=size)
    drifted = {at for at in range(low + 1, high) if view.drifted[at]}
    return drifted, min(drifted, default=low + 1)


@st.composite
def rows(draw: st.DrawFn) -> Any:
    """What a row holds of a few calls: runs of their completions, mostly in order, and other tokens between."""
    several = draw(st.integers(1, 4))
    tokens: list[tuple[int, int]] = []
    for turn in range(several):
        tokens += [(-1, -1)] * draw(st.integers(0, 4))
        first = draw(st.integers(0, 2))
        tokens += [(turn, first + at) for at in range(draw(st.integers(0, 5)))]
    if draw(st.integers(0, 4)) == 0:
        tokens = draw(st.permutations(tokens))
    turn, offset = np.array(tokens, np.int32).reshape(-1, 2).T
    drifted = np.array(draw(st.lists(st.booleans(), min_size=len(turn), max_size=len(turn))), np.bool_)
    prompts = draw(st.lists(st.integers(0, 12), min_size=several, max_size=several))
    return SimpleNamespace(turn=turn, turn_offset=offset, drifted=drifted), prompts


@given(rows(), st.sampled_from([Where.PROMPT, Where.COMPLETION]), st.data())
def test_folded_places_cover_what_each_of_them_covers(row: Any, where: Where, data: st.DataObject) -> None:
    view, prompts = row
    place = st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 16))
    places = data.draw(st.lists(place, min_size=1, max_size=6))
    turns = [SimpleNamespace(prompt_ids=np.zeros(size, np.int32)) for size in prompts]
    evidence: Any = SimpleNamespace(rollout=SimpleNamespace(turns=turns))
    hit = Hit(where, places[0][1], places[0][1] + 1, "", turn=places[0][0])
    packed = np.array([(turn, start, start + 1) for turn, start in places], np.int64).tobytes()
    folded = FoldedFindings(len(places), 1, len(places), packed) if len(places) > 1 else None
    finding = Finding("TOK101", Severity.ERROR, Place("log.jsonl", 0), hit, folded=folded)

    tokens_of_finding = mask._drifted_tokens(view, evidence, finding)
    every = [slow(view, prompts, where, *place) for place in places]
    assert set(tokens_of_finding.positions.tolist()) == set().union(*(tokens for tokens, _ in every))
    assert tokens_of_finding.first == min(first for _, first in every)


@pytest.mark.parametrize("spans", [[(2, 4)], [(0, 3), (2, 5), (5, 5)], [(7, 7), (1, 2)], [(3, 8), (0, 1)]])
def test_folded_ranges_cover_what_each_of_them_covers(spans: list[tuple[int, int]]) -> None:
    packed = np.array([(-1, *span) for span in spans], np.int64).tobytes()
    folded = FoldedFindings(len(spans), 1, 0, packed)
    finding = Finding(
        "LPR504", Severity.ERROR, Place("log.jsonl", 0), Hit(Where.ROW, *spans[0], ""), folded=folded
    )
    evidence: Any = SimpleNamespace(row=None)
    row: Any = SimpleNamespace(token_ids=range(8), logprobs=None)
    place = mask._covered_tokens(evidence, row, finding)
    assert place is not None
    assert place.positions.tolist() == sorted(set().union(*(range(*span) for span in spans)))
    assert place.first == min(start for start, _ in spans)
