"""Rows whose every token is known, by any convention and slid in every way: what stands is what trying everything
leaves, the truth is never ruled out, and what is put back is the truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.evidence.harm import find_harm
from tito_audit.evidence.judgement import (
    Judgement,
    judge_spans,
    judge_view,
    judgement,
    restored_logprobs,
    restored_mask,
)
from tito_audit.evidence.logprob_values import MAX_SLIDE
from tito_audit.evidence.masks import MAX_PREFILL
from tito_audit.evidence.model import Evidence, RowView, SampledSpan
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.roles import TEMPLATE, Roles
from tito_audit.evidence.witness import witness
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.build import build_training_row
from tito_audit.record.reading import NO_CONVENTIONS, TO_END, Conventions, EndConvention, FirstConvention, Slide
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.speakers import ASSISTANT
from tito_audit.record.testimony import AnswerEnds, Verdict

END = 2
FILLS = (0.0, 1.0, float("nan"), -9999.0)
FIRSTS = (
    (FirstConvention.WHOLE, 0),
    (FirstConvention.PREFILL, 1),
    (FirstConvention.PREFILL, 3),
    (FirstConvention.LEFT_OUT, 1),
    (FirstConvention.LEFT_OUT, 2),
)
ENDS = ("trained", "kept", "filled")


@dataclass(frozen=True)
class Truth:
    """A row as its writer means it: where answers are, what each logprob is, and the writer's conventions."""

    ids: Ids
    spans: tuple[tuple[int, int, bool], ...]
    """Start, place of the end token, and whether the end token was sampled."""
    logprobs: Logprobs
    fill: float
    first: tuple[FirstConvention, int] = (FirstConvention.WHOLE, 0)
    end: str = "trained"

    @property
    def columns(self) -> tuple[Mask, Logprobs]:
        """Mask and logprobs."""
        mask, values = np.zeros(len(self.ids), np.bool_), np.full(len(self.ids), self.fill)
        kind, tokens = self.first
        for start, end, stopped in self.spans:
            begin = min(start + tokens, end)
            mask[begin : end + (stopped and self.end == "trained")] = True
            valued = slice(
                begin if kind is FirstConvention.PREFILL else start, end + (stopped and self.end != "filled")
            )
            values[valued] = self.logprobs[valued]
        return mask, values

    def row(self, slide: Slide = Slide()) -> TrainingRow:  # noqa: B008
        """The row with a slide."""
        mask, values = self.columns
        trained = self._slid(mask, slide.mask, slide, False)
        column = self._slid(values, slide.logprobs, slide, self.fill)
        return build_training_row(
            self.ids, mask=("loss_mask", trained.astype(np.int64)), logprobs=("logprobs", column)
        )

    def _slid(self, column: np.ndarray, places: int, slide: Slide, fill: object) -> np.ndarray:
        """The column with its entries of the slid answers so many places later; what leaves an end is lost."""
        last = len(self.spans) - 1 if slide.last == TO_END else slide.last
        low, high = self.spans[slide.first][0], self.spans[last][1] + 1
        out = column.copy()
        out[low:high] = fill
        for at in range(low, high):
            if 0 <= at + places < len(out) and not same(column[at], fill):
                out[at + places] = column[at]
        return out

    def sampled_spans(self) -> tuple[SampledSpan, ...]:
        """The answers with the ends that roles leave open."""
        size = len(self.ids)
        return tuple(SampledSpan(start, (end, end + 1) if end < size else (end,)) for start, end, _ in self.spans)

    def view(self) -> RowView:
        """What roles tell: the answers with their end tokens, sampled or not."""
        sampled = np.zeros(len(self.ids), np.bool_)
        for start, end, _ in self.spans:
            sampled[start : end + 1] = True
        roles = Roles((TEMPLATE, ASSISTANT), sampled.astype(np.int16))
        nobody = np.full(len(self.ids), -1, np.int32)
        return RowView(sampled, False, roles, nobody, nobody, None, np.zeros(len(self.ids), np.bool_))

    def evidence(self, row: TrainingRow, stated: Conventions = NO_CONVENTIONS) -> Evidence:
        rollout = Rollout(Place("made up", 0), "toy", training_row=row)
        view, _ = judge_view(self.view(), row, frozenset((END,)), stated=stated)
        return Evidence(
            rollout, None, Needs.ROW | Needs.MASK, end_ids=frozenset((END,)), row=view, conventions=stated
        )


def same(value: object, other: object) -> bool:
    return value == other or (value != value and other != other)


@st.composite
def truths(draw: st.DrawFn, *, plain: bool = False) -> Truth:
    spans, at = [], draw(st.integers(9, 14))
    for _ in range(draw(st.integers(1, 4))):
        end = at + draw(st.integers(5, 12))
        spans.append((at, end, draw(st.booleans())))
        at = end + 1 + draw(st.integers(9, 12))
    size = at if draw(st.booleans()) else spans[-1][1] + 1
    dice = np.random.default_rng(draw(st.integers(0, 9999)))
    ids = dice.integers(10, 90, size).astype(np.int32)
    ids[[end for _, end, _ in spans]] = END
    logprobs = -dice.random(size) - 0.01
    if not plain:
        logprobs[dice.random(size) < draw(st.sampled_from((0.0, 0.1, 0.4)))] = 0.0
    fill = draw(st.sampled_from(FILLS))
    if plain:
        return Truth(ids, tuple(spans), logprobs, fill)
    return Truth(ids, tuple(spans), logprobs, fill, draw(st.sampled_from(FIRSTS)), draw(st.sampled_from(ENDS)))


@st.composite
def slides(draw: st.DrawFn, truth: Truth) -> Slide:
    """A slide of the row, of its answers from one on, or of one of them."""
    far, shift = draw(st.integers(-3, 3)), draw(st.integers(-3, 3))
    first = draw(st.integers(0, len(truth.spans) - 1))
    shape = draw(st.sampled_from(((0, TO_END), (first, TO_END), (first, first))))
    return Slide(far, shift, *shape)


ROWS = truths().flatmap(lambda truth: st.tuples(st.just(truth), slides(truth)))


def judged(truth: Truth, row: TrainingRow) -> Judgement:
    judged_row = judge_spans(row, truth.sampled_spans())
    assert judged_row is not None
    return judged_row


# The slow reference


def places_of(truth: Truth, row: TrainingRow) -> tuple[set[int], set[int]]:
    """The trained places, and those whose entry is not the fill."""
    assert row.loss_mask is not None
    assert row.logprobs is not None
    valued = {at for at, value in enumerate(row.logprobs.tolist()) if not same(value, truth.fill)}
    return set(np.flatnonzero(row.loss_mask).tolist()), valued


def may_be_right(truth: Truth, row: TrainingRow) -> bool:
    trained, valued = places_of(truth, row)
    inside = {at for span in truth.sampled_spans() for at in range(span.start, span.ends[-1])}
    return trained <= inside and valued <= inside and (truth.fill == 0.0 or trained <= valued)


def explains(truth: Truth, row: TrainingRow, slide: Slide) -> bool:
    """Whether a slide explains a row under any convention, by trying all of them on every answer."""
    trained, valued = places_of(truth, row)
    spans, size = truth.sampled_spans(), len(truth.ids)
    windows = [set(range(span.start - MAX_SLIDE, span.ends[-1] + MAX_SLIDE)) for span in spans]
    if not trained | valued <= set().union(*windows):
        return False
    last = len(spans) - 1 if slide.last == TO_END else slide.last
    return any(
        all(
            explains_answer(
                span,
                (first, prefilled),
                (slide.mask, slide.logprobs) if slide.first <= number <= last else (0, 0),
                (trained & window, valued & window),
                range(size),
                certain=truth.fill != 0.0,
            )
            for number, (span, window) in enumerate(zip(spans, windows, strict=True))
        )
        for first in range(MAX_PREFILL + 1)
        for prefilled in {0, first}
    )


def explains_answer(
    span: SampledSpan,
    firsts: tuple[int, int],
    places: tuple[int, int],
    shown: tuple[set[int], set[int]],
    row: range,
    *,
    certain: bool,
) -> bool:
    """Whether the trained and the valued places of one answer are those of its tokens, so many places off."""

    def moved(start: int, end: int, by: int) -> set[int]:
        return {at + by for at in range(min(start, span.ends[0]), end) if at + by in row}

    def values_fit(least: int) -> bool:
        columns = (moved(span.start + firsts[1], end, places[1]) for end in span.ends if end >= least)
        return any(shown[1] == column if certain else shown[1] <= column for column in columns)

    if not shown[0]:
        return not shown[1] or values_fit(0)
    return any(shown[0] == moved(span.start + firsts[0], end, places[0]) and values_fit(end) for end in span.ends)


@settings(max_examples=examples(60, 600), deadline=None)
@given(ROWS)
def test_what_stands_is_what_trying_everything_leaves(case: tuple[Truth, Slide]) -> None:
    truth, slide = case
    row = truth.row(slide)
    result = judged(truth, row)
    assume(result.values is not None and same(result.values.fill, truth.fill))
    assert result.is_plausible == may_be_right(truth, row)
    for fit in result.fits if result.explains_mask else ():
        assert explains(truth, row, fit.slide), fit.slide
    if result.exact:  # the simplest of all readings, so no other is looked for
        return
    tried = (
        Slide(far, shift, first, last)
        for far in range(-MAX_SLIDE, MAX_SLIDE + 1)
        for shift in range(-MAX_SLIDE, MAX_SLIDE + 1)
        for first, last in shapes(len(truth.spans), of_row=result.is_plausible)
        if far or shift
    )
    standing = {(fit.slide.mask, fit.slide.logprobs) for fit in result.fits}
    for each in tried:
        if explains(truth, row, each) and moves(truth, row, each):
            assert (each.mask, each.logprobs) in standing, each


def shapes(answers: int, *, of_row: bool) -> Iterator[tuple[int, int]]:
    yield 0, TO_END
    if not of_row:
        yield from ((first, TO_END) for first in range(1, answers))
        yield from ((first, first) for first in range(answers))


def moves(truth: Truth, row: TrainingRow, slide: Slide) -> bool:
    """Whether a slide concerns an answer of which something is trained."""
    trained, _ = places_of(truth, row)
    last = len(truth.spans) - 1 if slide.last == TO_END else slide.last
    return any(
        at + slide.mask in trained
        for start, end, _ in truth.spans[slide.first : last + 1]
        for at in range(start, end + 1)
    )


# The truth


@settings(max_examples=examples(80, 800), deadline=None)
@given(truths())
def test_a_right_row_of_any_convention_is_never_faulty(truth: Truth) -> None:
    result = judged(truth, truth.row())
    assert result.is_plausible
    assert result.fit is None
    assert result.slide == Slide()


@settings(max_examples=examples(80, 800), deadline=None)
@given(ROWS)
def test_a_slide_that_is_named_is_the_true_one_and_is_put_back(case: tuple[Truth, Slide]) -> None:
    truth, slide = case
    row = truth.row(slide)
    evidence = truth.evidence(row)
    result = judgement(evidence)
    assert result is not None
    if result.fit is None or result.values is None or not result.explains_mask:
        return
    trained, _ = places_of(truth, row)
    assume(trained)
    assert result.slide.mask in (slide.mask, 0)  # nothing of a slid answer may be trained
    assert result.slide.logprobs in (slide.logprobs, 0)
    mask, values = truth.columns
    back = restored_mask(evidence)
    if result.slide.mask:
        assert back is not None
        assert not (back & ~mask).any()
    if result.slide.logprobs:
        logprobs, lost = restored_logprobs(row, result)
        on = (row.loss_mask if back is None else back) & ~lost & mask
        np.testing.assert_array_equal(logprobs[on], values[on])


@settings(max_examples=examples(60, 400), deadline=None)
@given(truths(plain=True), st.integers(-3, 3), st.integers(-3, 3))
def test_a_row_slid_in_the_plain_convention_between_other_tokens_is_always_named(
    truth: Truth, far: int, shift: int
) -> None:
    """Every answer sampled its end, trains all of it, and has tokens of the template around it."""
    spans = tuple((start, end, True) for start, end, _ in truth.spans)
    truth = replace(truth, spans=spans, logprobs=np.minimum(truth.logprobs, -0.01))
    assume((far or shift) and spans[-1][1] + 8 < len(truth.ids))
    result = judged(truth, truth.row(Slide(far, shift)))
    assert not result.is_plausible
    assert Slide(far, shift) in {fit.slide for fit in result.fits}
    if truth.fill != 0.0 or (far >= 0 and shift >= 0):
        assert result.slide == Slide(far, shift), result.fits


@settings(max_examples=examples(60, 400), deadline=None)
@given(ROWS, st.integers(-3, 3).filter(bool))
def test_moving_a_column_that_may_lie_right_is_harm(case: tuple[Truth, Slide], far: int) -> None:
    truth, slide = case
    before = truth.evidence(truth.row(slide))
    result, old = judgement(before), before.rollout.training_row
    assert result is not None
    assert old is not None
    assert old.loss_mask is not None
    assert old.logprobs is not None
    assert find_harm(before, before) is None
    if not result.is_plausible or result.values is None:
        return
    moved = truth._slid(old.logprobs, far, Slide(), truth.fill)
    inside = np.zeros(len(old.loss_mask), np.bool_)
    for span, end in zip(result.spans, result.ends, strict=True):
        inside[span.start : span.ends[-1] if end is None else end] = True
    changed = old.loss_mask & inside & ~np.isclose(moved, old.logprobs, equal_nan=True)
    after = replace(before, rollout=replace(before.rollout, training_row=replace(old, logprobs=moved)), memo={})
    assert (find_harm(before, after) is not None) or not changed.any()


# Single cases

ONE = Truth(np.array([9] * 10 + [5, 6, 7, 8, END], np.int32), ((10, 14, True),), np.full(15, -0.5), 0.0)
"""One answer, at the end of its row."""


def verdict(truth: Truth, row: TrainingRow, stated: Conventions = NO_CONVENTIONS) -> Verdict:
    reading = witness(truth.evidence(row, stated))
    assert reading is not None
    return reading.verdict


def test_a_certain_first_token_whose_end_keeps_its_logprob_is_open_or_clean_and_never_faulty() -> None:
    values = ONE.logprobs.copy()
    values[10] = 0.0
    for end in ENDS:
        truth = replace(ONE, logprobs=values, end=end)
        assert verdict(truth, truth.row()) is (Verdict.OPEN if end == "kept" else Verdict.CLEAN)


def test_a_null_in_front_of_the_only_answer_is_undecided_where_the_row_ends_with_it() -> None:
    """Either the values lie one place late and the last fell off, or the first was never recorded."""
    truth = replace(ONE, fill=float("nan"))
    result = judged(truth, truth.row(Slide(0, 1)))
    assert not result.is_plausible
    assert result.may_lack_values
    assert result.is_ambiguous
    assert {fit.slide.logprobs for fit in result.fits} == {1}


def test_what_is_stated_narrows_the_readings() -> None:
    """A late mask whose last entry fell off reads like a first token left out on purpose."""
    row = ONE.row(Slide(1, 0))
    assert verdict(ONE, row) is Verdict.CLEAN
    whole = Conventions(FirstConvention.WHOLE)
    result = judge_spans(row, ONE.sampled_spans(), whole)
    assert result is not None
    assert result.slide == Slide(1, 0)
    left = replace(ONE, first=(FirstConvention.LEFT_OUT, 1))
    assert verdict(left, left.row(), Conventions(FirstConvention.LEFT_OUT, 1)) is Verdict.CLEAN
    reading = witness(left.evidence(left.row(), whole))
    assert reading is not None
    assert reading.contradicts == ("--convention first",)
    untrained = witness(ONE.evidence(ONE.row(), Conventions(end=EndConvention.UNTRAINED)))
    assert untrained is not None
    assert untrained.contradicts == ("--convention end",)


def test_a_slide_is_assumed_where_the_row_allows_it_and_nowhere_else() -> None:
    stated = Conventions(slide=Slide(0, 1))
    late = judge_spans(ONE.row(Slide(0, 1)), ONE.sampled_spans(), stated)
    assert late is not None
    assert late.slide == Slide(0, 1)
    right = judge_spans(ONE.row(), ONE.sampled_spans(), stated)
    assert right is not None
    assert right.is_plausible
    reading = witness(ONE.evidence(ONE.row(), stated))
    assert reading is not None
    assert reading.contradicts == ("--assume",)


@pytest.mark.parametrize(
    ("first", "tokens"),
    [((FirstConvention.WHOLE, 0), 0), ((FirstConvention.PREFILL, 2), 0), ((FirstConvention.LEFT_OUT, 2), 2)],
)
def test_a_right_row_tells_what_it_leaves_out_of_the_loss(first: tuple[FirstConvention, int], tokens: int) -> None:
    for end, kind in (("trained", AnswerEnds.TRAINED), ("kept", AnswerEnds.KEPT), ("filled", AnswerEnds.OPEN)):
        truth = replace(ONE, first=first, end=end)
        reading = witness(truth.evidence(truth.row()))
        assert reading is not None
        assert (reading.first, reading.ends) == (tokens, kind)


def test_finish_reasons_say_which_turn_ends_were_sampled() -> None:
    ids = np.array([9] * 10 + [5, 6, 7, END] + [9] * 5, np.int32)
    truth = Truth(ids, ((10, 13, False),), np.full(len(ids), -0.5), 0.0)
    for reasons, ends in (((), (13, 14)), (("length",), (13,)), (("stop",), (14,))):
        row = replace(truth.row(), loss_mask=None, logprobs=None, columns=(), finish_reasons=reasons)
        assert judge_view(truth.view(), row, frozenset((END,)))[0].spans[0].ends == ends


def test_an_answer_cut_off_before_its_first_token_is_judged_too() -> None:
    ids = np.array([9] * 10 + [5, 6, 7, END] + [9] * 5 + [END, 9], np.int32)
    truth = Truth(ids, ((10, 13, True), (19, 19, False)), np.full(len(ids), -0.5), 0.0)
    mask = np.isin(ids, (5, 6, 7))
    row = replace(truth.row(), loss_mask=mask, logprobs=None, columns=(), finish_reasons=("stop", "length"))
    view, judged = judge_view(truth.view(), row, frozenset((END,)))
    assert [(span.start, span.ends) for span in view.spans] == [(10, (14,)), (19, (19,))]
    assert judged is not None
    assert judged.is_plausible


@settings(max_examples=examples(40, 300), deadline=None)
@given(truths(plain=True), st.sampled_from((1, 2, 3)))
def test_values_rolled_over_the_end_of_a_row_all_come_back(truth: Truth, places: int) -> None:
    start, end, stopped = truth.spans[-1]
    spans = tuple((a + 100, b + 100, stop) for a, b, stop in truth.spans)
    ids = np.concatenate((np.full(100, 50, np.int32), truth.ids[: max(end + stopped, start + 1)]))
    truth = Truth(ids, spans, np.concatenate((np.full(100, -1.0), truth.logprobs))[: len(ids)], truth.fill)
    mask, values = truth.columns
    row = build_training_row(
        ids, mask=("loss_mask", mask.astype(np.int64)), logprobs=("logprobs", np.roll(values, places))
    )
    result = judge_spans(row, truth.sampled_spans())
    assert result is not None
    assert not result.is_plausible
    if result.fit is None:
        return
    assert result.slide == Slide(0, places)
    logprobs, lost = restored_logprobs(row, result)
    assert not (lost & mask).any()
    np.testing.assert_array_equal(logprobs, values)
