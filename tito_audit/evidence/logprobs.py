"""How far the logprobs of a row are off their tokens, for rules and repairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.fill import FARTHEST, FLOOR, IMPOSSIBLE, first_covered, values_of
from tito_audit.evidence.judgement import judgement
from tito_audit.evidence.masks import runs_inside, sampled_turns
from tito_audit.evidence.model import Evidence, RowView, SampledSpan, Sound
from tito_audit.evidence.readings import Readings
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.memo import memoized
from tito_audit.record.reading import NO_CONVENTIONS, Slide
from tito_audit.record.rollout import TrainingRow
from tito_audit.record.runs import trained_runs

ROUNDING = 1e-3
"""Values this close count as equal: logs round, some to four decimals."""
_EXACT = 1e-6
"""Rounding that single precision explains."""


@dataclass(frozen=True, slots=True)
class LogprobShift:
    """A range of the row whose logprobs are off their tokens, or are not those that the calls recorded."""

    start: int
    end: int
    turn: int | None
    offset: int
    """How many places late (+) or early (-); 0 when no offset gives the calls' values."""
    by_calls: bool
    values: int
    """How many values do not belong to their token."""
    among: tuple[Slide, ...] = ()
    """Without calls, every slide that explains the row; if there are several, the row does not show which."""
    missing: bool = False
    """Whether nothing may be off, but values are missing."""
    against_mask: bool = False
    """True if only mask and logprobs were compared, so either may be the one that is off."""

    @property
    def undecided(self) -> bool:
        """Whether the row alone shows that something is off, but not what."""
        return self.against_mask or len(self.among) + self.missing > 1


def sound_of(evidence: Evidence) -> Sound:
    """What is known to be right in the training row of a rollout without calls, or in its calls without a row.

    Logprobs of calls are sound if the rules could find nothing: all are plausible, no two zeros follow each other,
    and the first two of each call differ.
    """
    turns, row = evidence.rollout.turns, evidence.rollout.training_row
    if not turns or row is not None:
        return Sound.NOTHING if turns else evidence.sound
    columns = [turn.completion_logprobs for turn in turns if turn.completion_logprobs is not None]
    values = np.concatenate([np.empty(0), *columns])
    if not len(values) or not FLOOR < np.minimum.reduce(values) <= (highest := np.maximum.reduce(values)) <= 0:
        return Sound.NOTHING
    if any([len(column) > 1 and column[0] == column[1] for column in columns]):  # noqa: C419  # a list is quicker
        return Sound.NOTHING
    two_zeros = highest == 0 and ((values[1:] == 0) & (values[:-1] == 0)).any()
    return Sound.NOTHING if two_zeros else Sound.LOGPROBS


@memoized
def shifts(evidence: Evidence) -> list[LogprobShift]:
    """The ranges of the row whose logprobs provably belong to other tokens; [] when there are none."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None:
        return []
    if view is not None and view.expected_logprobs is not None:
        return _against_calls(evidence, row, row.logprobs, view, view.expected_logprobs)
    # The answers whose values are off, or may be, if no reading without a fault stands: see `judgement`.
    judged = judgement(evidence)
    if judged is None:
        slides = slides_against_mask(row)
        if not slides or row.loss_mask is None:
            return []
        spans = _spans_of_runs(row.loss_mask)
        values = values_of(row, spans, FARTHEST)
        # Trained tokens have to have a fill that cannot be a logprob.
        if values is None or not values.certain or not (row.loss_mask & ~values.real).any():
            return []
        return [LogprobShift(spans[0].start, spans[-1].ends[-1], None, 0, False, 0, slides, against_mask=True)]
    if judged.right or not any(fit.slide.logprobs for fit in judged.fits):
        return []
    assert judged.values is not None
    slides = tuple(fit.slide for fit in judged.fits)
    spans = [judged.spans[number] for number in judged.fit.answers] if judged.fit else [*judged.spans]
    trained = row.loss_mask if row.loss_mask is not None else judged.values.real
    lost = int((trained & ~judged.values.real).sum())
    shift = LogprobShift(
        spans[0].start, spans[-1].ends[-1], None, judged.slide.logprobs, False, lost, slides, judged.missing
    )
    return [shift]


def _against_calls(
    evidence: Evidence, row: TrainingRow, logprobs: Logprobs, view: RowView, expected: Logprobs
) -> list[LogprobShift]:
    """Turns whose values differ from their call's, with the offset at which they match."""
    # Infinite values are LPR503's, and their differences show nothing.
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
    none = np.isnan(logprobs) | np.isin(logprobs, (*IMPOSSIBLE, 0.0, row.sentinel or 0.0))
    turns = _turns_with(evidence, wrong)
    spans = [span for _, stretch in turns for span in stretch]
    offset = _offset(np.where(none, np.nan, logprobs), expected, spans)
    if turns:
        near = ~(np.abs(logprobs - expected) <= _EXACT) & compared
        if offset:
            # Turns without such a value moved with the others, if one of their values is exact only there: it is
            # what the calls recorded for the token this many entries before, to the last digit.
            source = np.arange(len(logprobs)) - offset
            inside = (source >= 0) & (source < len(logprobs))
            recorded = np.where(inside, expected.take(source, mode="clip"), np.nan)
            moved = near & ~none & np.asarray(np.abs(logprobs - recorded) <= _EXACT)
            for turn, stretch in sampled_turns(evidence):
                if (turn, stretch) not in turns and True in [bool(moved[a:b].any()) for a, b in stretch]:
                    for a, b in stretch:
                        wrong[a:b] = near[a:b] if row.loss_mask is None else near[a:b] & row.loss_mask[a:b]
        else:
            # Beside other values than the calls recorded, a fill near a value close to zero is one too.
            near &= placeholder_zeros(logprobs, expected)
            wrong |= near if row.loss_mask is None else near & row.loss_mask
        turns = _turns_with(evidence, wrong)
    shifted = []
    for turn, stretch in turns:
        marked = np.concatenate([wrong[a:b].nonzero()[0] + a for a, b in stretch])
        start, end = (stretch[0][0], stretch[-1][1]) if offset else (int(marked[0]), int(marked[-1]) + 1)
        shifted.append(LogprobShift(start, end, turn, offset, True, len(marked)))
    return shifted


def _turns_with(evidence: Evidence, marked: Mask) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """The sampled turns of the row that hold a marked token."""
    runs = trained_runs(marked)
    return [
        (turn, spans) for turn, spans in sampled_turns(evidence) if any(runs_inside(runs, a, b) for a, b in spans)
    ]


def placeholder_zeros(logprobs: Logprobs, expected: Logprobs) -> Mask:
    """`[N]` True where a value is 0.0 and the call recorded one farther from it than the row rounds its others."""
    finite = np.isfinite(logprobs) & np.isfinite(expected)
    apart = np.abs(np.where(finite, logprobs, np.nan) - np.where(finite, expected, np.nan))
    others = apart[(logprobs != 0) & (apart <= ROUNDING)]
    rounds = max(float(others.max()), _EXACT) if len(others) else ROUNDING
    return np.asarray((logprobs == 0) & (apart > rounds))


def _offset(logprobs: Logprobs, expected: Logprobs, spans: list[tuple[int, int]]) -> int:
    """The offset at which all values inside the spans are the expected ones; 0 when there is none.

    At least two entries must be wrong in place and right at the offset, one a value; otherwise values close
    to zero would prove something. Values are NaN where the row has a fill, as for an end that it does not train.
    """
    for distance in range(1, FARTHEST + 1):
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
    """How far the logprobs may be off the mask, where nothing says what was sampled; () if they are in place."""
    if row.loss_mask is None or not row.loss_mask.any() or row.loss_mask.all():
        return ()
    spans = _spans_of_runs(row.loss_mask)
    values = values_of(row, spans, FARTHEST)
    if values is None:
        return ()
    readings = Readings(spans, None, values, (0, first_covered(row)), NO_CONVENTIONS)
    lacks = values.certain and bool((row.loss_mask & ~values.real).any())
    if readings.values_in_place and not lacks:
        return ()
    return tuple(fit.slide for fit in readings.slides(of_row=True))


def _spans_of_runs(mask: Mask) -> list[SampledSpan]:
    return [SampledSpan(start, (end,)) for start, end in trained_runs(mask)]
