"""Finds logprobs of a row that are off their tokens, for rules and repairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.judgement import judgement
from tito_audit.evidence.logprob_values import (
    IMPOSSIBLE,
    LOWEST_LOGPROB,
    MAX_SLIDE,
    find_logprob_values,
    first_covered,
)
from tito_audit.evidence.masks import sampled_turns
from tito_audit.evidence.model import Evidence, RowView, SampledSpan, Verified
from tito_audit.evidence.readings import Readings
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.memo import memoized
from tito_audit.record.reading import NO_CONVENTIONS, Slide
from tito_audit.record.rollout import TrainingRow
from tito_audit.record.runs import trained_runs

ROUNDING = 1e-3
"""Values this close count as equal: logs round, some to four decimals."""
_EXACT = 1e-6
"""Values this close differ only by single precision."""


@dataclass(frozen=True, slots=True)
class LogprobShift:
    """A range of the row whose logprobs are off their tokens, or differ from those of the calls."""

    start: int
    end: int
    turn: int | None
    offset: int
    """How many places late (+) or early (-); 0 if no offset gives the values of the calls."""
    by_calls: bool
    values: int
    """How many values do not belong to their token."""
    slides: tuple[Slide, ...] = ()
    """Without calls, every slide that explains the row; of several, the row does not show which."""
    may_lack_values: bool = False
    """Whether the column may be in place, with values missing."""
    against_mask: bool = False
    """True if only mask and logprobs were compared, so that either may be off."""

    @property
    def is_undecided(self) -> bool:
        """Whether the row shows that something is off, but not what."""
        return self.against_mask or len(self.slides) + self.may_lack_values > 1


def verified_parts(evidence: Evidence) -> Verified:
    """What is proven right in the training row of a rollout without calls, or in calls without a training row.

    Logprobs of calls are verified if no rule could find anything: all are plausible, no two zeros follow each
    other, and those of no call are all equal.
    """
    turns, row = evidence.rollout.turns, evidence.rollout.training_row
    if not turns or row is not None:
        return Verified.NOTHING if turns else evidence.verified
    columns = [turn.completion_logprobs for turn in turns if turn.completion_logprobs is not None]
    values = np.concatenate([np.empty(0), *columns])
    if not len(values):
        return Verified.NOTHING
    lowest, highest = np.minimum.reduce(values), np.maximum.reduce(values)
    if not LOWEST_LOGPROB < lowest <= highest <= 0:
        return Verified.NOTHING
    alike = [column for column in columns if len(column) > 1 and column[0] == column[1]]
    if alike and any((column == column[0]).all() for column in alike):
        return Verified.NOTHING
    two_zeros = highest == 0 and ((values[1:] == 0) & (values[:-1] == 0)).any()
    return Verified.NOTHING if two_zeros else Verified.LOGPROBS


@memoized
def logprob_shifts(evidence: Evidence) -> list[LogprobShift]:
    """The ranges of the row whose logprobs provably belong to other tokens."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None:
        return []
    if view is not None and view.expected_logprobs is not None:
        return _shifts_against_calls(evidence, row, row.logprobs, view, view.expected_logprobs)
    judged = judgement(evidence)
    if judged is None:
        slides = slides_against_mask(row)
        if not slides or row.loss_mask is None:
            return []
        spans = _spans_of_runs(row.loss_mask)
        values = find_logprob_values(row, spans)
        # Proven only if a trained token has the fill, and the fill cannot be a logprob.
        if values is None or not values.clear_fill or not (row.loss_mask & ~values.real).any():
            return []
        return [LogprobShift(spans[0].start, spans[-1].ends[-1], None, 0, False, 0, slides, against_mask=True)]
    if judged.is_plausible or not any(fit.slide.logprobs for fit in judged.fits):
        return []
    assert judged.values is not None
    slides = tuple(fit.slide for fit in judged.fits)
    spans = [judged.spans[number] for number in judged.fit.answers] if judged.fit else [*judged.spans]
    trained = row.loss_mask if row.loss_mask is not None else judged.values.real
    lost = int((trained & ~judged.values.real).sum())
    start, end, offset = spans[0].start, spans[-1].ends[-1], judged.slide.logprobs
    return [LogprobShift(start, end, None, offset, False, lost, slides, judged.may_lack_values)]


def _shifts_against_calls(
    evidence: Evidence, row: TrainingRow, logprobs: Logprobs, view: RowView, expected: Logprobs
) -> list[LogprobShift]:
    """The turns whose values differ from those of their call, with the offset at which they match."""
    # Infinite values are LPR503's, and differences from them show nothing.
    compared = np.isfinite(expected) & ~view.drifted
    expected = np.where(compared, expected, np.nan)
    wrong = compared & ~(np.abs(logprobs - expected) <= ROUNDING)
    if row.loss_mask is not None:
        wrong &= row.loss_mask
    if not wrong.any():
        return []
    wrong &= np.isfinite(logprobs)
    for fill in (*IMPOSSIBLE, *(() if row.sentinel is None else (row.sentinel,))):
        wrong &= logprobs != fill
    fill = np.isnan(logprobs) | np.isin(logprobs, (*IMPOSSIBLE, 0.0, row.sentinel or 0.0))
    turns = _turns_holding(evidence, wrong)
    spans = [span for _, ranges in turns for span in ranges]
    offset = _proven_offset(np.where(fill, np.nan, logprobs), expected, spans)
    if turns:
        inexact = ~(np.abs(logprobs - expected) <= _EXACT) & compared
        if offset:
            # Turns without a wrong value moved with the others if one of their values is exact only at the offset:
            # it equals to the last digit what the calls recorded for the token `offset` places before.
            source = np.arange(len(logprobs)) - offset
            inside = (source >= 0) & (source < len(logprobs))
            recorded = np.where(inside, expected.take(source, mode="clip"), np.nan)
            moved = inexact & ~fill & np.asarray(np.abs(logprobs - recorded) <= _EXACT)
            for turn, ranges in sampled_turns(evidence):
                if (turn, ranges) not in turns and True in [bool(moved[a:b].any()) for a, b in ranges]:
                    for a, b in ranges:
                        wrong[a:b] = inexact[a:b] if row.loss_mask is None else inexact[a:b] & row.loss_mask[a:b]
        else:
            # Where other values are wrong too, a 0.0 close to the call's value is a placeholder.
            inexact &= placeholder_zeros(logprobs, expected)
            wrong |= inexact if row.loss_mask is None else inexact & row.loss_mask
        turns = _turns_holding(evidence, wrong)
    shifted = []
    for turn, ranges in turns:
        places = np.concatenate([wrong[a:b].nonzero()[0] + a for a, b in ranges])
        start, end = (ranges[0][0], ranges[-1][1]) if offset else (int(places[0]), int(places[-1]) + 1)
        shifted.append(LogprobShift(start, end, turn, offset, True, len(places)))
    return shifted


def _turns_holding(evidence: Evidence, marked: Mask) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """The turns of `sampled_turns` that hold a marked token."""
    return [
        (turn, ranges) for turn, ranges in sampled_turns(evidence) if any(marked[a:b].any() for a, b in ranges)
    ]


def placeholder_zeros(logprobs: Logprobs, expected: Logprobs) -> Mask:
    """`[N]` True where a value is 0.0 and the call's value is farther from it than the rounding of the row."""
    finite = np.isfinite(logprobs) & np.isfinite(expected)
    apart = np.abs(np.where(finite, logprobs, np.nan) - np.where(finite, expected, np.nan))
    others = apart[(logprobs != 0) & (apart <= ROUNDING)]
    rounds = max(float(others.max()), _EXACT) if len(others) else ROUNDING
    return np.asarray((logprobs == 0) & (apart > rounds))


def _proven_offset(logprobs: Logprobs, expected: Logprobs, spans: list[tuple[int, int]]) -> int:
    """The offset at which all values inside the spans are the expected ones; 0 if there is none.

    At least two entries must be wrong in place and right at the offset, and one of them a value: next to fill
    alone, values close to zero prove nothing. `logprobs` is NaN where the row has fill, as at an untrained end.
    """
    for distance in range(1, MAX_SLIDE + 1):
        for offset in (distance, -distance):
            corrected = others = 0
            for start, end in spans:
                here = np.arange(max(start, start - offset), min(end, end - offset))
                here = here[~np.isnan(expected[here]) & ~np.isnan(logprobs[here + offset])]
                moved = np.abs(logprobs[here + offset] - expected[here]) <= ROUNDING
                if not moved.all():
                    break
                corrected += int((~(np.abs(logprobs[here] - expected[here]) <= ROUNDING)).sum())
                at = np.union1d(here, here + offset)
                others += int((np.abs(logprobs[at] - expected[at]) > ROUNDING).sum())
            else:
                if corrected >= 2 and others:
                    return offset
    return 0


def slides_against_mask(row: TrainingRow) -> tuple[Slide, ...]:
    """The slides that may put the logprobs off the mask, if nothing says what was sampled; () if none does."""
    if row.loss_mask is None or not row.loss_mask.any() or row.loss_mask.all():
        return ()
    spans = _spans_of_runs(row.loss_mask)
    values = find_logprob_values(row, spans)
    if values is None:
        return ()
    readings = Readings(spans, None, values, (0, first_covered(row)), NO_CONVENTIONS)
    lacks = values.clear_fill and bool((row.loss_mask & ~values.real).any())
    if readings.values_in_place and not lacks:
        return ()
    return tuple(fit.slide for fit in readings.find_fits(of_row=True))


def _spans_of_runs(mask: Mask) -> list[SampledSpan]:
    return [SampledSpan(start, (end,)) for start, end in trained_runs(mask)]
