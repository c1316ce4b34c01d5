"""Judges whether the mask and logprobs of a training row are on its tokens, from everything in the row together.

The evidence is where answers begin and end (headers, turn ends, the template), why turns ended, the edges of the
mask, and which logprob entries are values and which fill. A row is faulty if no reading without a fault explains
it (`readings.py`), clean if the simplest reading has no fault, and open otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from tito_audit.evidence.logprob_values import (
    LOWEST_LOGPROB,
    MAX_SLIDE,
    LogprobValues,
    find_logprob_values,
    first_covered,
    logprob_values_on_mask,
    wrapped_places,
)
from tito_audit.evidence.masks import exact_mask_slide, possible_spans, sampled_turns, slide_back
from tito_audit.evidence.model import Evidence, RowView, SampledSpan, Verified
from tito_audit.evidence.readings import Readings, SlideFit
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.reading import NO_CONVENTIONS, Conventions, Slide
from tito_audit.record.rollout import TrainingRow, effective_loss_mask
from tito_audit.record.runs import trained_runs

_THINK = re.compile(r"\s*<think>\s*(?:</think>\s*)?")


JUDGEMENT = "judgement"
"""The key of the judgement in the memo of its evidence, where `gather` may put it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the sampled spans of a row, its mask and its logprobs show together."""

    spans: tuple[SampledSpan, ...]
    ends: tuple[int | None, ...]
    """Where the sampling of each span ended; None if several ends are possible."""
    values: LogprobValues | None
    """None if values of the logprob column and its fill cannot be told apart."""
    departures: int | None = 0
    """How many departures from the usual a reading without fault supposes; None if there is no such reading."""
    fits: tuple[SlideFit, ...] = ()
    """Every slide that explains the row, the simplest first; of a plausible row, only slides of the whole row."""
    may_lack_values: bool = False
    """Whether both columns may be in place, with logprobs missing that the loss needs."""
    explains_mask: bool = True
    """False if no reading explains the mask, so that only the logprobs were judged."""
    values_in_place: bool = True
    """Whether every value is at a token that may have been sampled."""
    exact: bool = False
    """Whether the trained runs are exactly the spans, and exactly the trained tokens have values."""

    @property
    def is_plausible(self) -> bool:
        """Whether a reading without any fault explains the row."""
        return self.departures is not None

    @property
    def fit(self) -> SlideFit | None:
        """The slide of a faulty row, if a single one explains it."""
        return self.fits[0] if len(self.fits) == 1 and not self.is_plausible and not self.may_lack_values else None

    @property
    def slide(self) -> Slide:
        """How far the columns slid, if a single slide explains the row; else no slide."""
        return self.fit.slide if self.fit is not None else Slide()

    @property
    def is_ambiguous(self) -> bool:
        """Whether the row is faulty and several faults explain it."""
        return not self.is_plausible and len(self.fits) + self.may_lack_values > 1

    @property
    def is_open(self) -> bool:
        """Whether the row is plausible, but its simplest reading has a fault."""
        return self.departures is not None and any(fit.departures < self.departures for fit in self.fits)

    @property
    def logprobs_in_place(self) -> bool:
        """Whether the logprobs are in place under every reading of the row."""
        shifted = any(fit.slide.logprobs for fit in self.fits)
        return self.values is not None and self.values_in_place and not shifted


def judgement(evidence: Evidence) -> Judgement | None:
    """The judgement of the training row; None without a row, or if nothing says what was sampled."""
    judged: Judgement | None = evidence.memo.get(JUDGEMENT)
    if JUDGEMENT in evidence.memo:
        return judged
    row, view = evidence.rollout.training_row, evidence.row
    if row is not None and view is not None and view.proven:
        runs = sorted(run for _, turn_runs in sampled_turns(evidence) for run in turn_runs)
        judged = judge_spans(row, tuple(SampledSpan(start, (end,)) for start, end in runs))
    elif row is not None and view is not None:
        spans = view.spans or _spans_by_roles(view, row, evidence.end_ids)
        judged = judge_spans(row, tuple(sorted(spans, key=attrgetter("start"))), evidence.conventions)
    evidence.memo[JUDGEMENT] = judged
    return judged


def judge_view(
    view: RowView,
    row: TrainingRow,
    end_ids: frozenset[int],
    decode: Callable[[Ids], str] = lambda _ids: "",
    stated: Conventions = NO_CONVENTIONS,
) -> tuple[RowView, Judgement | None]:
    """A view derived from roles or messages, with the starts and ends of answers that mask, logprobs and finish
    reasons show; and the judgement.

    The judgement is None without answers, or if calls prove the view. First tokens of an answer that have neither
    mask nor logprobs were given, not sampled; in a row without logprobs, only those of an empty think block.
    """
    if view.proven:
        return view, None
    spans = _apply_finish_reasons(view.spans, row) or _spans_by_roles(view, row, end_ids)
    judged = judge_spans(row, spans, stated)
    if judged is None:
        return replace(view, spans=spans), None
    if not judged.exact:
        # A model may have stopped at any of the end tokens that follow one.
        ids, longer = row.token_ids, []
        for span in spans:
            ends = list(span.ends)
            while ends[-1] > span.content_end and ends[-1] < len(ids) and int(ids[ends[-1]]) in end_ids:
                ends.append(ends[-1] + 1)
            longer.append(SampledSpan(span.start, tuple(ends), span.content))
        if tuple(longer) != spans:
            spans = tuple(longer)
            judged = judge_spans(row, spans, stated) or judged
    if judged.exact and row.loss_mask is not None:
        verified = view.verified
        values, logprobs, first = judged.values, row.logprobs, judged.ends[0]
        if values is not None and logprobs is not None and first is not None:
            starts = np.array([span.start for span in spans])
            plausible = LOWEST_LOGPROB < values.lowest <= values.highest < 0 and first - spans[0].start >= 2
            repeated = np.logical_or.reduce(logprobs[starts] == logprobs.take(starts + 1, mode="clip"))
            shown = _EXACT if plausible and not repeated else Verified.MASK
            if verified is Verified.NOTHING:
                verified = shown
            else:
                verified = _EXACT_IDS if verified is Verified.IDS and shown is _EXACT else verified | shown
        return replace(view, spans=spans, sampled=row.loss_mask, verified=verified), judged
    if judged.is_plausible and row.loss_mask is not None:
        later = _without_prefills(spans, row, row.loss_mask, judged.values, decode)
        if later != spans:
            spans, judged = later, replace(judged, spans=later)
    sampled = np.zeros_like(view.sampled)
    for span, end in zip(spans, judged.ends, strict=True):
        if end is None and judged.values is None:
            end = span.ends[-1]
        elif end is None:
            # The logprob of a certain token may equal the fill, so neither a value nor its absence proves an end.
            # Take the end of the mask, if that did not slide.
            end = span.ends[0]
            if row.loss_mask is not None and not judged.slide.mask:
                end = [at for at in span.ends if row.loss_mask[end:at].all()][-1]
        sampled[span.start : end] = True
    return replace(view, spans=spans, sampled=sampled), judged


_EXACT = Verified.MASK | Verified.LOGPROBS
_EXACT_IDS = Verified.IDS | _EXACT
"""What is verified of most rows; each `|` of flags costs several calls."""


def _without_prefills(
    spans: tuple[SampledSpan, ...],
    row: TrainingRow,
    mask: Mask,
    values: LogprobValues | None,
    decode: Callable[[Ids], str],
) -> tuple[SampledSpan, ...]:
    """The spans of a plausible row without the first tokens that, by mask and logprobs, were given."""
    later = []
    for span in spans:
        # The first tokens of the answer that are not trained.
        trained = mask[span.start : span.ends[-1]]
        first = slice(span.start, span.start + int(trained.argmax()) if trained.any() else span.start)
        if values is not None and values.real[first].any():
            return spans  # if one answer has values there, others may have lost theirs
        prefilled = span.start < first.stop <= span.content_end
        if prefilled and values is None:
            # Without logprobs, only a think block of a few tokens is known to be given.
            few = first.stop - first.start <= 12
            prefilled = few and _THINK.fullmatch(decode(row.token_ids[first])) is not None
        later.append(SampledSpan(first.stop, span.ends, span.content) if prefilled else span)
    return tuple(later)


def judge_spans(
    row: TrainingRow, spans: tuple[SampledSpan, ...], stated: Conventions = NO_CONVENTIONS
) -> Judgement | None:
    """What these spans, the mask and the logprobs of a row show together; None without spans."""
    if not spans:
        return None
    if stated is NO_CONVENTIONS:
        exact = _judge_exact_row(row, spans)
        if exact is not None:
            return exact
    mask, values = effective_loss_mask(row), find_logprob_values(row, spans)
    covered = first_covered(row, ColumnRole.LOSS_MASK), first_covered(row)
    readings = Readings(spans, mask, values, covered, stated)
    departures = readings.departures_in_place()
    explains_mask = True
    if departures is not None:
        fits = readings.find_fits(of_row=True)
    else:
        fits = readings.find_fits()
        if not fits and not readings.may_lack_values and values is not None:
            # Try without the values that `np.roll` may have carried to an end of the row.
            real = values.real.copy()
            for far in (MAX_SLIDE, -MAX_SLIDE):
                real[wrapped_places(spans, far, len(real))] = False
            without_wrapped = Readings(spans, mask, replace(values, real=real), covered, stated)
            fits = without_wrapped.find_fits()
            if fits or without_wrapped.may_lack_values:
                readings = without_wrapped
        if not fits and not readings.may_lack_values and mask is not None and values is not None:
            explains_mask, fits = False, readings.find_fits(with_mask=False)
            if readings.values_in_place:
                fits = []  # only the mask is wrong
    assumed = [fit for fit in fits if fit.slide == stated.slide]
    if assumed:
        departures, fits = None, assumed
    return Judgement(
        spans,
        readings.ends(fits[0] if len(fits) == 1 and departures is None else None),
        values,
        departures,
        tuple(fits),
        may_lack_values=readings.may_lack_values and not assumed,
        explains_mask=explains_mask,
        values_in_place=readings.values_in_place,
    )


def may_have_slid(evidence: Evidence) -> bool:
    """Whether a slide is one of several readings of the row, so that a gap in it may be evidence of the slide."""
    judged, view = judgement(evidence), evidence.row
    return bool(judged and judged.fits and judged.fit is None and view and not view.proven)


def row_mask_slide(evidence: Evidence) -> int:
    """How many places late (+) or early (-) the loss mask of the row slid; 0 if it did not, or if that is open."""
    view, judged = evidence.row, judgement(evidence)
    if view is None or judged is None:
        return 0
    return exact_mask_slide(evidence) if view.proven else judged.slide.mask


def restored_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the mask with every trained run that slid moved back onto its answer; None if none slid.

    A token that some possible reading does not train stays out of the loss.
    """
    row, view = evidence.rollout.training_row, evidence.row
    judged, slide = judgement(evidence), row_mask_slide(evidence)
    if row is None or row.loss_mask is None or view is None or judged is None or not slide:
        return None
    if view.proven:
        return slide_back(row.loss_mask, view.sampled)
    assert judged.fit is not None
    out = row.loss_mask.copy()
    runs = [*zip(judged.fit.starts.tolist(), judged.fit.ends.tolist(), strict=True)]
    moved = [runs[number] for number in judged.fit.answers]
    for start, end in moved:
        out[max(start + slide, 0) : max(end + slide, 0)] = False
    for start, end in moved:
        out[start:end] = True
    return out


def restored_logprobs(row: TrainingRow, judged: Judgement) -> tuple[Logprobs, Mask]:
    """`[T]` each: the logprobs of a slid column back on their tokens, and which answer tokens lost theirs past an
    end of the row.

    Values that `np.roll` carried over an end are taken from the other end.
    """
    assert judged.fit is not None
    assert judged.values is not None
    assert row.logprobs is not None
    far, size, fill, first = judged.slide.logprobs, len(row.logprobs), judged.values.fill, first_covered(row)
    out, lost = row.logprobs.copy(), np.zeros(size, np.bool_)
    spans = [judged.spans[number] for number in judged.fit.answers]
    for span in spans:
        out[max(span.start + far, first) : max(span.ends[-1] + far, first)] = fill
    for span in spans:
        places = np.arange(span.start, span.ends[-1])
        inside = (places + far >= first) & (places + far < size)
        out[places] = np.where(inside, row.logprobs[np.clip(places + far, 0, size - 1)], fill)
        lost[places[~inside]] = True
    for place in range(*wrapped_places(judged.spans, far, size).indices(size)) if judged.slide.whole_row else ():
        at = (place - far) % size
        if judged.values.real[place] and lost[at]:
            out[at], out[place], lost[at] = row.logprobs[place], fill, False
    return out, lost


def _judge_exact_row(row: TrainingRow, spans: tuple[SampledSpan, ...]) -> Judgement | None:
    """The judgement of a row whose mask and values lie exactly on its spans, as in most; None for other rows."""
    first = first_covered(row, ColumnRole.LOSS_MASK)
    if row.loss_mask is None or row.hidden is not None or spans[0].start < first + (len(spans) == 1):
        return None
    runs = trained_runs(row.loss_mask)
    if len(runs) != len(spans):
        return None
    for (start, end), span in zip(runs, spans, strict=True):
        if start != span.start or end not in span.ends:
            return None
    values = logprob_values_on_mask(row, spans, inside=True)
    if values is None:
        return None
    return Judgement(spans, tuple([end for _, end in runs]), values, exact=True)


def _spans_by_roles(view: RowView, row: TrainingRow, end_ids: frozenset[int]) -> tuple[SampledSpan, ...]:
    """The spans sampled according to roles or messages, each with its possible ends."""
    return _apply_finish_reasons(possible_spans(view, row.token_ids, end_ids), row)


def _apply_finish_reasons(spans: tuple[SampledSpan, ...], row: TrainingRow) -> tuple[SampledSpan, ...]:
    """The spans with the ends that their finish reasons allow, which are those of the last turns."""
    reasons = row.finish_reasons[-len(spans) :] if spans else ()
    first = len(spans) - len(reasons)
    finished = list(spans[:first])
    for span, reason in zip(spans[first:], reasons, strict=True):
        if reason is None or len(span.ends) == 1:
            finished.append(span)
        elif reason in ("length", "max_tokens", "abort"):
            finished.append(SampledSpan(span.start, span.ends[:1]))
        else:
            finished.append(SampledSpan(span.start, span.ends[1:], span.content_end))
    return tuple(finished)
