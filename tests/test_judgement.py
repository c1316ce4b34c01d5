"""Rows whose every token is known, slid in every way: the truth stands, and what stands alone is the truth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tito_audit.evidence.harm import harm
from tito_audit.evidence.judgement import Judgement, judge, judgement, restored_mask, with_turn_ends
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.roles import TEMPLATE, Roles
from tito_audit.evidence.slides import FARTHEST
from tito_audit.record import testimony as logs
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.build import training_row
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.speakers import ASSISTANT
from tito_audit.record.testimony import Reading, Witness
from tito_audit.repairs._shift import moved_back

END = 2
FILLS = (0.0, 1.0, float("nan"), -9999.0)


@dataclass(frozen=True)
class Truth:
    """A row as it should be: what was sampled, and the logprob of each sampled token."""

    ids: Ids
    spans: tuple[tuple[int, int, bool], ...]
    """Start, place of the end token, and whether the end token was sampled."""
    logprobs: Logprobs
    fill: float

    @property
    def sampled(self) -> Mask:
        out = np.zeros(len(self.ids), np.bool_)
        for start, end, stopped in self.spans:
            out[start : end + stopped] = True
        return out

    def row(self, mask: int, logprobs: int) -> TrainingRow:
        """The row with mask and logprobs so many places late."""
        values = np.where(self.sampled, self.logprobs, self.fill)
        trained, column = slid(self.sampled, mask, False), slid(values, logprobs, self.fill)
        return training_row(self.ids, mask=("loss_mask", trained.astype(np.int64)), logprobs=("logprobs", column))

    def view(self) -> RowView:
        """What roles tell: the answers with their end tokens, sampled or not."""
        sampled = np.zeros(len(self.ids), np.bool_)
        for start, end, _ in self.spans:
            sampled[start : end + 1] = True
        roles = Roles((TEMPLATE, ASSISTANT), sampled.astype(np.int16))
        nobody = np.full(len(self.ids), -1, np.int32)
        return RowView(sampled, False, roles, nobody, nobody, None, np.zeros(len(self.ids), np.bool_))

    def evidence(self, mask: int, logprobs: int) -> Evidence:
        row = self.row(mask, logprobs)
        rollout = Rollout(Place("made up", 0), "toy", training_row=row)
        view, _ = with_turn_ends(self.view(), row, frozenset((END,)))
        return Evidence(rollout, None, Needs.ROW | Needs.MASK, end_ids=frozenset((END,)), row=view)


def slid(values: np.ndarray, places: int, fill: object) -> np.ndarray:
    """The values so many places later; what leaves an end is lost."""
    if not places:
        return values.copy()
    out = np.full_like(values, fill)
    if places > 0:
        out[places:] = values[:-places]
    else:
        out[:places] = values[-places:]
    return out


@st.composite
def truths(draw: st.DrawFn, zeros: bool = True) -> Truth:
    spans, at = [], draw(st.integers(9, 14))
    for _ in range(draw(st.integers(1, 5))):
        end = at + draw(st.integers(1, 12))
        spans.append((at, end, draw(st.booleans())))
        at = end + 1 + draw(st.integers(9, 12))
    size = at if draw(st.booleans()) else spans[-1][1] + 1
    dice = np.random.default_rng(draw(st.integers(0, 9999)))
    ids = dice.integers(10, 90, size).astype(np.int32)
    ids[[end for _, end, _ in spans]] = END
    logprobs = -dice.random(size) - 0.01
    if zeros:
        logprobs[dice.random(size) < draw(st.sampled_from((0.0, 0.1, 0.4)))] = 0.0
    return Truth(ids, tuple(spans), logprobs, draw(st.sampled_from(FILLS)))


PLACES = st.integers(-3, 3)


def judged(truth: Truth, mask: int, logprobs: int) -> Judgement:
    found = judgement(truth.evidence(mask, logprobs))
    assert found is not None
    return found


@given(truths(), PLACES, PLACES)
def test_the_truth_is_never_ruled_out(truth: Truth, mask: int, logprobs: int) -> None:
    found = judged(truth, mask, logprobs)
    if found.values is None:  # every value left the row, or is like the fill
        assert Reading(mask, 0) in found.standing or not found.standing
    else:
        assert Reading(mask, logprobs) in found.standing or lost_all_ends(truth, mask)


def lost_all_ends(truth: Truth, mask: int) -> bool:
    """Whether the mask moved out of a short last span altogether, so that nothing of it is left."""
    return any(start + mask >= len(truth.ids) for start, _, _ in truth.spans)


@given(truths(), PLACES, PLACES)
def test_what_stands_alone_is_the_truth(truth: Truth, mask: int, logprobs: int) -> None:
    assume(not lost_all_ends(truth, mask))
    found = judged(truth, mask, logprobs)
    if found.decided is not None and found.values is not None:
        assert found.decided == Reading(mask, logprobs)


@given(truths(zeros=False), PLACES)
def test_a_mask_that_slid_is_always_found_and_goes_back_on_sampled_tokens(truth: Truth, mask: int) -> None:
    assume(truth.spans[-1][0] + mask < len(truth.ids))
    evidence = truth.evidence(mask, 0)
    found, back = judgement(evidence), restored_mask(evidence)
    assert found is not None
    trained = truth.row(mask, 0).loss_mask
    assert trained is not None
    standing = {reading.mask for reading in found.standing}
    if mask and not (trained & ~truth.view().sampled).any() and standing != {mask}:
        assert standing >= {0, mask}  # or part of an answer is left out
        return
    assert found.mask_slide == mask
    if mask:
        assert back is not None
        assert not (back & ~truth.sampled).any()
        assert (back | ~truth.sampled | np.isin(truth.ids, (END,))).all()


def simple_readings(truth: Truth, row: TrainingRow) -> set[Reading]:
    """Every mask slide and shift that accounts for the row, by trying all of them with all ends of all turns."""
    assert row.loss_mask is not None
    assert row.logprobs is not None
    size, found = len(truth.ids), set()
    filled = [np.isnan(v) if np.isnan(truth.fill) else v == truth.fill for v in row.logprobs.tolist()]
    for stops in product((0, 1), repeat=len(truth.spans)):
        sampled = {
            at for (start, end, _), stop in zip(truth.spans, stops, strict=True) for at in range(start, end + stop)
        }
        for mask in range(-FARTHEST, FARTHEST + 1):
            if {at + mask for at in sampled if 0 <= at + mask < size} != set(np.flatnonzero(row.loss_mask)):
                continue
            for far in range(-FARTHEST, FARTHEST + 1):
                there = {at + far for at in sampled if 0 <= at + far < size}
                inside = all(at in there for at in range(size) if not filled[at])
                whole = truth.fill == 0.0 or not any(filled[at] for at in there)
                if inside and whole:
                    found.add(Reading(mask, far))
    return found


@given(truths(), PLACES, PLACES)
def test_what_stands_is_what_trying_everything_leaves(truth: Truth, mask: int, logprobs: int) -> None:
    assume(not lost_all_ends(truth, mask))
    row, found = truth.row(mask, logprobs), judged(truth, mask, logprobs)
    assume(found.values is not None)
    simple = simple_readings(truth, row)
    assert row.loss_mask is not None
    # Where the mask trains nothing else, part of an answer may be left out; what cannot be a value may be missing.
    if truth.fill == 0.0 and (row.loss_mask & ~truth.view().sampled).any():
        assert set(found.standing) <= simple
    if len(simple) == 1 and found.standing:
        assert simple <= set(found.standing)


@given(truths(), PLACES, PLACES)
def test_an_end_that_is_told_is_where_sampling_ended(truth: Truth, mask: int, logprobs: int) -> None:
    found = judged(truth, mask, logprobs)
    if found.decided is None or found.values is None:
        return
    for (_, end, stopped), told in zip(truth.spans, found.ends, strict=True):
        assert told is None or told == end + stopped


@given(truths(), PLACES, PLACES, st.integers(-3, 3).filter(bool))
def test_moving_a_column_that_may_lie_right_is_harm(truth: Truth, mask: int, logprobs: int, far: int) -> None:
    before = truth.evidence(mask, logprobs)
    found, old = judgement(before), before.rollout.training_row
    assert found is not None
    assert old is not None
    assert old.loss_mask is not None
    assert old.logprobs is not None
    assert harm(before, before) is None
    if found.values is None or Reading(mask, 0) not in found.standing:
        return
    new = replace(old, logprobs=slid(old.logprobs, far, truth.fill))
    right = old.loss_mask & found.values.real & truth.sampled
    changed = right & ~np.isclose(new.logprobs, old.logprobs, equal_nan=True)
    after = replace(before, rollout=replace(before.rollout, training_row=new), memo={})
    assert (harm(before, after) is not None) or not changed.any()


def test_a_turn_cut_by_length_does_not_turn_a_slid_mask_into_shifted_logprobs() -> None:
    """The mask is one place early and the logprobs are right; one turn has no sampled end."""
    ids = np.array([9] * 10 + [5, 6, 7, END] + [9] * 10 + [5, 6, 7, END] + [9], np.int32)
    logprobs = np.full(len(ids), -0.5)
    truth = Truth(ids, ((10, 13, True), (24, 27, False)), logprobs, 0.0)
    found = judged(truth, -1, 0)
    assert found.standing == (Reading(-1, 0),)
    assert found.ends == (14, 27)


def test_a_null_in_front_of_the_only_turn_is_undecided_where_the_row_ends_with_it() -> None:
    """Either the values lie one place late and the last fell off, or the first was never recorded."""
    ids = np.array([9] * 10 + [5, 6, 7, 8], np.int32)
    logprobs = np.full(len(ids), -0.5)
    truth = Truth(ids, ((10, 14, False),), logprobs, float("nan"))
    row = truth.row(0, 1)
    sampled = np.arange(14) >= 10
    view = replace(truth.view(), sampled=sampled)
    found = judge(row, with_turn_ends(view, row, frozenset((END,)))[0].spans)
    assert found is not None
    assert {reading.logprobs for reading in found.standing} == {0, 1}


def test_finish_reasons_say_which_turn_ends_were_sampled() -> None:
    ids = np.array([9] * 10 + [5, 6, 7, END] + [9] * 5, np.int32)
    truth = Truth(ids, ((10, 13, False),), np.full(len(ids), -0.5), 0.0)
    for reasons, ends in (((), (13, 14)), (("length",), (13,)), (("stop",), (14,))):
        row = replace(truth.row(0, 0), loss_mask=None, logprobs=None, columns=(), finish_reasons=reasons)
        assert with_turn_ends(truth.view(), row, frozenset((END,)))[0].spans[0].ends == ends


@pytest.mark.parametrize("order", [1, -1])
def test_rows_of_a_log_say_together_what_none_says_alone(order: int) -> None:
    late, right = Reading(0, 1), Reading()
    said = [
        Witness((right, late), 1, ((token,), ()), 0, 90) for token in range(6)
    ]  # read as right, six different first tokens would be certain
    whole, parts = logs.Testimony(), (logs.Testimony(), logs.Testimony())
    for number, witness in enumerate(said[::order]):
        whole.add(witness, Place("x", number))
        parts[number % 2].add(witness, Place("x", number))
    parts[0].merge(parts[1])
    assert parts[0].common() == whole.common() == {late}
    lone = logs.Testimony()
    lone.add(said[0], Place("x", 0))
    assert lone.common() == {right, late}


def test_the_farthest_slide_is_that_of_the_search() -> None:
    ids = np.array([9] * 20 + [5, 6, 7, 8, 5, 6, 7, END] + [9] * 20, np.int32)
    truth = Truth(ids, ((20, 27, True),), np.full(len(ids), -0.5), 0.0)
    assert judged(truth, FARTHEST, -FARTHEST).standing == (Reading(FARTHEST, -FARTHEST),)
    assert judged(truth, FARTHEST + 1, 0).mask_slide is None


def after_a_prompt(truth: Truth, size: int) -> Truth:
    """The same row after so many more tokens of a prompt, cut off where its last answer ends."""
    start, end, stopped = truth.spans[-1]
    length = max(end + stopped, start + 1)
    spans = tuple((a + size, b + size, stop) for a, b, stop in truth.spans)
    ids = np.concatenate((np.full(size, 50, np.int32), truth.ids[:length]))
    return Truth(ids, spans, np.concatenate((np.full(size, -1.0), truth.logprobs[:length])), truth.fill)


@given(truths(zeros=False), st.sampled_from((1, 2, 3)))
def test_values_rolled_over_the_end_of_a_row_are_found_and_all_come_back(truth: Truth, places: int) -> None:
    truth = after_a_prompt(truth, 100)
    right = truth.row(0, 0)
    assert right.logprobs is not None
    mask, rolled = truth.sampled.astype(np.int64), np.roll(right.logprobs, places)
    row = training_row(truth.ids, mask=("loss_mask", mask), logprobs=("logprobs", rolled))
    view, found = with_turn_ends(truth.view(), row, frozenset((END,)))
    assert found is not None
    assert Reading(0, places) in found.standing
    if found.decided is None:
        return
    assert found.decided == Reading(0, places)
    rollout = Rollout(Place("made up", 0), "toy", training_row=row)
    back = moved_back(Evidence(rollout, None, Needs.ROW | Needs.MASK, end_ids=frozenset((END,)), row=view))
    assert back is not None
    assert not back.lost.any()
    np.testing.assert_array_equal(back.logprobs, right.logprobs)


@pytest.mark.parametrize(("fill", "stray"), [(0.0, -1.25), (-0.0, 0.0), (float("nan"), -1.25), (1.0, -1.25)])
def test_a_stray_value_before_a_right_answer_is_not_taken_for_a_rolled_one(fill: float, stray: float) -> None:
    """They look alike where the first token of the only answer has no value: was it certain, or rolled away?"""
    truth = Truth(np.arange(100, 220, dtype=np.int32), ((100, 119, True),), np.linspace(-2, -0.1, 120), fill)
    values = np.where(truth.sampled, truth.logprobs, fill)
    values[[0, 100]] = stray, fill
    mask = truth.sampled.astype(np.int64)
    row = training_row(truth.ids, mask=("loss_mask", mask), logprobs=("logprobs", values))
    _, found = with_turn_ends(truth.view(), row, frozenset((END,)))
    assert found is not None
    assert set(found.standing) == {Reading(0, 0), Reading(0, 1)}
