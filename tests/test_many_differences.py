"""Very many differences are columns; whoever looks at one sees what it would be alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_folded import ALL, row, spelled
from tests.toy import toy_renderer, toy_tokenizer
from tito_audit.align.drift import align
from tito_audit.evidence import many
from tito_audit.evidence import stretches as parted
from tito_audit.evidence.differences import difference
from tito_audit.evidence.gather import gather
from tito_audit.evidence.many import ManyDifferences
from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.reference import pieces_of
from tito_audit.evidence.stretches import MANY, ManyStretches, stretches
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.message import Message
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.check import check_explained, explain
from tito_audit.run.fold import SINGLE
from tito_audit.viewer.replacements import replaced

_IDS = st.lists(st.sampled_from([82, 83, 101, 220, 262, 300, 320, 2002]), min_size=1, max_size=12)


def _said(one: Difference) -> tuple[Any, ...]:
    sides = (one.recorded, one.canonical)
    texts = tuple((side.ids.tolist(), side.data, side.before, side.after) for side in sides)
    return *texts, *(getattr(one, name) for name in Difference.__slots__ if name not in ("recorded", "canonical"))


def _array(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


@given(_IDS, _IDS)
def test_a_difference_in_columns_is_what_it_is_alone(recorded: list[int], canonical: list[int]) -> None:
    vocabulary = toy_tokenizer().vocabulary
    held, other = pieces_of(_array(recorded), vocabulary), pieces_of(_array(canonical), vocabulary)
    blocks = align(held, other)
    alone = [
        difference(one, Against.REENCODED, Severity.NOTE, "harmless", regions=(), turn=None, where=Where.ROW)
        for one in stretches(held, other, blocks)
    ]
    if alone:
        found = ManyDifferences.of(alone[0], ManyStretches.of(held, other, blocks))
        assert [_said(one) for one in found] == [_said(one) for one in alone]
        assert [_said(found[at]) for at in range(len(found))] == [_said(one) for one in found]
        assert [_said(one) for one in found[1:]] == [_said(one) for one in alone[1:]]
        assert [(one.start, one.end) for one in found.further(7)] == [
            (one.start + 7, one.end + 7) for one in alone
        ]


def _evidence(several: int) -> Evidence:
    return gather(row(several), toy_tokenizer(), None)


def _findings(evidence: Evidence) -> tuple[Finding, ...]:
    return check_explained(explain(evidence, all_rules()), all_rules(), ALL, all_repairs, SINGLE)[0]


def test_findings_of_very_many_differences_are_those_of_a_list() -> None:
    evidence = _evidence(MANY + 50)
    assert isinstance(evidence.differences, ManyDifferences)
    listed = replace(evidence, differences=tuple(evidence.differences))
    found = _findings(evidence)
    assert found == _findings(listed)
    assert sum(one.times for one in found if one.code == "TOK101") == MANY + 50
    shown = [
        {
            key: [(one.start, one.end, one.code) for one in places]
            for key, places in replaced(explain(seen, all_rules()), found).items()
        }
        for seen in (evidence, listed)
    ]
    assert shown[0] == shown[1]


def test_few_differences_are_a_tuple() -> None:
    assert isinstance(_evidence(MANY - 1).differences, tuple)


def test_differences_after_padding_are_placed_in_the_whole_row() -> None:
    rollout = row(MANY + 50)
    line = rollout.training_row
    assert line is not None
    attended = np.ones(len(line.token_ids), np.bool_)
    attended[:4] = False
    evidence = gather(replace(rollout, training_row=replace(line, hidden=~attended)), toy_tokenizer(), None)
    assert isinstance(evidence.differences, ManyDifferences)
    assert evidence.differences[0].start == 4


@pytest.mark.parametrize("several", [MANY, MANY + 50])
def test_very_many_differences_of_a_completion_are_those_of_a_list(
    several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.array(spelled() * several, np.int32)
    rollout = Rollout(Place("call.jsonl", 0), "generic", turns=(Turn(_array([82, 76]), ids),))
    evidence = gather(rollout, toy_tokenizer(), toy_renderer())
    assert isinstance(evidence.differences, ManyDifferences)
    monkeypatch.setattr(many, "MANY", 10**9)
    monkeypatch.setattr(parted, "MANY", 10**9)
    listed = gather(rollout, toy_tokenizer(), toy_renderer())
    assert isinstance(listed.differences, tuple)
    assert [_said(one) for one in evidence.differences] == [_said(one) for one in listed.differences]
    assert _findings(evidence) == _findings(listed)


_ANSWER = st.lists(st.sampled_from([82, 83, 220, 262, 300, 320, 2002]), min_size=1, max_size=8)
_USER = [2001, 314, 257, 198]
_OPENER = [2002, 198, 2001, 1620, 198]


def _message(role: str, content: str) -> Message:
    return Message(role, {"role": role, "content": content}, content)


@settings(max_examples=100)
@given(st.lists(st.tuples(_ANSWER, _ANSWER), min_size=1, max_size=3), st.none() | _ANSWER, st.booleans())
def test_columns_of_any_number_are_a_list(
    turns: list[tuple[list[int], list[int]]], tail: list[int] | None, told: bool
) -> None:
    tokenizer, calls, seen = toy_tokenizer(), [], _USER + turns[0][0] + _OPENER
    for asked, said in turns:
        calls.append(Turn(_array(seen), _array(said), message_index=1 if told and not calls else None))
        # The next prompt holds what the answer's text encodes as today.
        text = tokenizer.vocabulary.text(_array(seen + said))
        seen = [*tokenizer.encode(text).tolist(), *_USER, *asked, *_OPENER]
    line = None if tail is None else TrainingRow(_array(seen + tail), None, None)
    messages = (_message("user", " thee"), _message("assistant", "4!")) if told else ()
    rollout = Rollout(Place("call.jsonl", 0), "generic", messages, turns=tuple(calls), training_row=line)
    listed = gather(rollout, tokenizer, toy_renderer())
    assert not isinstance(listed.differences, ManyDifferences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "MANY", 1)
        patch.setattr(parted, "MANY", 1)
        evidence = gather(rollout, tokenizer, toy_renderer())
    assert [_said(one) for one in evidence.differences] == [_said(one) for one in listed.differences]
    assert _findings(evidence) == _findings(listed)
