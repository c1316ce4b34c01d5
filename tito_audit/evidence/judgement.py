"""What all witnesses of a training row say together: how far its mask and its logprobs lie off their tokens.

The witnesses are where answers begin and end (headers, turn ends, the template), why turns ended, the edges of the
mask, and which values of the logprob column are values and which stand for none. A reading is one way in which the
row may have been written; it stands when it accounts for every span of the row, and only one that stands alone is
proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tito_audit.evidence.fill import Values, values_of
from tito_audit.evidence.masks import is_end, proven_slide, sampled_turns, unslid
from tito_audit.evidence.model import Evidence, RowView, SampledSpan
from tito_audit.record.arrays import Mask
from tito_audit.record.rollout import TrainingRow, trained_runs
from tito_audit.record.testimony import Reading, Witness

__all__ = [
    "FARTHEST",
    "Judgement",
    "judge",
    "judgement",
    "mask_back",
    "refined",
    "row_slide",
    "shifts_of",
    "witness",
]

FARTHEST = 4
"""Places by which a mask or a column is looked for off its tokens."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the spans of a row, its mask and its logprobs say together."""

    spans: tuple[SampledSpan, ...]
    ends: tuple[int | None, ...]
    """Of each span, where sampling ended; None where nothing tells which of its ends it was."""
    mask_slide: int | None
    """Places that every trained run lies late (+) or early (-); None where no one number accounts for the mask."""
    standing: tuple[Reading, ...]
    """Every reading that accounts for all of the row; () where none does, or there is nothing to read."""
    values: Values | None
    """None where no column tells values from what stands for none."""

    @property
    def decided(self) -> Reading | None:
        """The one reading that stands; None when several do, or none."""
        return self.standing[0] if len(self.standing) == 1 else None

    @property
    def undecided(self) -> bool:
        """Whether several readings account for the row."""
        return len(self.standing) > 1

    @property
    def open_ends(self) -> list[int]:
        """Turn ends that the mask leaves out, of which neither a value nor a reason tells if they were sampled."""
        if self.values is not None or self.mask_slide != 0:
            return []
        pairs = zip(self.spans, self.ends, strict=True)
        return [end for span, end in pairs if end is not None and end < span.ends[-1]]


def judgement(evidence: Evidence) -> Judgement | None:
    """The judgement of the training row; None without one, or where nothing says what was sampled."""
    return evidence.once("judgement", _judgement)


def witness(evidence: Evidence) -> Witness | None:
    """What the training row leaves open; None without one, without sampling, or where calls prove all of it."""
    found, view = judgement(evidence), evidence.row
    if found is None or not found.standing or view is None or view.expected_logprobs is not None:
        return None
    return Witness(found.standing, len(found.spans))


def _judgement(evidence: Evidence) -> Judgement | None:
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or view is None:
        return None
    spans = view.spans or _spans(view, row, evidence.end_ids)
    if view.proven:
        spans = tuple(SampledSpan(a, (b,)) for _, stretch in sampled_turns(evidence) for a, b in stretch)
    found = judge(row, tuple(sorted(spans, key=lambda span: span.start)))
    if found is None or evidence.log_reading is None or evidence.log_reading not in found.standing:
        return found
    return replace(found, standing=(evidence.log_reading,))


def refined(view: RowView, row: TrainingRow, end_ids: frozenset[int]) -> RowView:
    """A view by roles or messages with the ends of its turns as mask, logprobs and finish reasons show them."""
    if view.proven:
        return view
    spans = _spans(view, row, end_ids)
    found = judge(row, spans)
    if found is None:
        return replace(view, spans=spans)
    spans = found.spans
    sampled = np.zeros_like(view.sampled)
    for span, end in zip(spans, found.ends, strict=True):
        sampled[span.start : span.ends[-1] if end is None else end] = True
    return replace(view, spans=spans, sampled=sampled)


def row_slide(evidence: Evidence) -> int:
    """How far the loss mask of the row slid: late (+), early (-); 0 where it did not, or nothing tells."""
    view, found = evidence.row, judgement(evidence)
    if view is None or found is None:
        return 0
    return proven_slide(evidence) if view.proven else found.mask_slide or 0


def mask_back(evidence: Evidence) -> Mask | None:
    """`[T]` the mask of the row with every trained run on the span that it slid off; None when none did.

    A turn end of which nothing tells whether it was sampled stays out of the loss.
    """
    row, view, found, slide = evidence.rollout.training_row, evidence.row, judgement(evidence), row_slide(evidence)
    if row is None or row.loss_mask is None or view is None or found is None or not slide:
        return None
    if view.proven:
        return unslid(row.loss_mask, view.sampled)
    out, starts = np.zeros_like(row.loss_mask), {start for start, _ in trained_runs(row.loss_mask)}
    for span, end in zip(found.spans, found.ends, strict=True):
        if max(span.start + slide, 0) in starts:
            out[span.start : span.ends[0] if end is None else end] = True
    return out


def judge(row: TrainingRow, spans: Sequence[SampledSpan]) -> Judgement | None:
    """What these spans, the mask and the logprobs of a row say together; None without a span."""
    if not spans:
        return None
    spans, values = tuple(spans), values_of(row, spans, FARTHEST)
    slide, ends = _by_mask(row.loss_mask, spans)
    standing: tuple[Reading, ...] = ()
    if values is not None:
        shifts = shifts_of(values, spans, ends)
        if not shifts:  # the mask may leave out turn ends that were sampled
            ends = tuple(span.ends[0] if len(span.ends) == 1 else None for span in spans)
            shifts = shifts_of(values, spans, ends)
        standing = tuple(Reading(slide or 0, far) for far in shifts)
        if len(shifts) == 1:
            ends = tuple(_by_values(span, end, values, shifts[0]) for span, end in zip(spans, ends, strict=True))
    elif slide is not None:
        standing = (Reading(slide, 0),)
    return Judgement(spans, ends, slide, standing, values)


def _spans(view: RowView, row: TrainingRow, end_ids: frozenset[int]) -> tuple[SampledSpan, ...]:
    """The stretches that roles or messages say were sampled, each with the ends that it may have had."""
    found = []
    for start, stop in trained_runs(view.sampled):
        first = stop
        while first > start and is_end(first - 1, row.token_ids, view, end_ids):
            first -= 1
        found.append(SampledSpan(start, tuple(range(first, stop + 1))))
    reasons = row.finish_reasons[-len(found) :] if found else ()
    for number, reason in zip(range(len(found) - len(reasons), len(found)), reasons, strict=True):
        found[number] = _as_finished(found[number], reason)
    return tuple(found)


def _as_finished(span: SampledSpan, reason: str | None) -> SampledSpan:
    """The span with the ends that its finish reason leaves."""
    if reason is None or len(span.ends) == 1:
        return span
    if reason in ("length", "max_tokens", "abort"):
        return SampledSpan(span.start, span.ends[:1])
    return SampledSpan(span.start, span.ends[1:])


def _by_mask(mask: Mask | None, spans: tuple[SampledSpan, ...]) -> tuple[int | None, tuple[int | None, ...]]:
    """By how many places every trained run lies off its span, and where that says each span ended.

    None where no one number does so; then the ends are those of the spans that the mask trains as they are.
    """
    known = tuple(span.ends[0] if len(span.ends) == 1 else None for span in spans)
    if mask is None or not mask.any():
        return None, known
    size, runs = len(mask), dict(trained_runs(mask))
    for far in sorted(range(-FARTHEST, FARTHEST + 1), key=abs):
        fitted = [_fitted(span, runs, far, size) for span in spans]
        matched = sum(bool(ends) for ends in fitted)
        if matched == len(runs) and all(ends is None or ends for ends in fitted):
            ends = [one[0] if one is not None and len(one) == 1 else None for one in fitted]
            return far, tuple(a if b is None else b for a, b in zip(known, ends, strict=True))
    fitted = [_fitted(span, runs, 0, size) for span in spans]
    ends = [one[0] if one else None for one in fitted]
    return None, tuple(a if b is None else b for a, b in zip(known, ends, strict=True))


def _fitted(span: SampledSpan, runs: dict[int, int], far: int, size: int) -> list[int] | None:
    """The ends of a span with which a run lies `far` places off it; None where no run begins there.

    [] where one begins there and ends elsewhere.
    """
    start = max(span.start + far, 0)
    if start not in runs:
        return None
    return [end for end in span.ends if max(min(end + far, size), 0) == runs[start]]


def _by_values(span: SampledSpan, end: int | None, values: Values, far: int) -> int | None:
    """Where a span ended, as its logprobs show it, `far` places off; None where a certain token may hide it."""
    if end is not None:
        return end
    places = [one for one in span.ends if one > span.ends[0] and 0 <= one - 1 + far < len(values.real)]
    real = [one for one in places if values.real[one - 1 + far]]
    if real:
        return max(real)
    return span.ends[0] if len(places) == len(span.ends) - 1 else None


def shifts_of(values: Values, spans: Sequence[SampledSpan], ends: Sequence[int | None]) -> list[int]:
    """Every number of places by which the logprobs may lie off the spans, every value accounted for.

    What stands for no logprob inside a span is a fault of its own where it cannot be one (null, 1.0), so that of
    two readings the one with fewer faults stands. Where it can be one (0.0), any reading may be so by chance.
    """
    found: dict[int, int] = {}
    for far in range(-FARTHEST, FARTHEST + 1):
        widest, least = values.covering(spans, ends, far)
        if not (values.real & ~widest).any():
            found[far] = int((least & ~values.real).sum())
    if values.certain:
        faults = {far: (far != 0) + (missing > 0) for far, missing in found.items()}
        fewest = min(faults.values(), default=0)
        return [far for far, number in faults.items() if number == fewest]
    return list(found)
