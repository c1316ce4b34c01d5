"""Whether the mask and logprobs of a training row are on its tokens, judged from everything in the row together.

The evidence is where answers begin and end (headers, turn ends, the template), why turns ended, the edges of the
mask, and which entries of the logprob column are values and which are fill. A row is faulty only if no reading
without a fault stands (`readings.py`); it is clean if the simplest one has no fault, and open otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tito_audit.evidence.fill import FARTHEST, FLOOR, Values, first_covered, rolled_to, values_of, values_on_mask
from tito_audit.evidence.masks import is_end, proven_slide, sampled_turns, spans_of, unslid
from tito_audit.evidence.model import Evidence, RowView, SampledSpan, Sound
from tito_audit.evidence.readings import Fit, Readings
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.reading import NO_CONVENTIONS, Conventions, Slide
from tito_audit.record.rollout import TrainingRow, effective_loss_mask
from tito_audit.record.runs import trained_runs

_THINK = re.compile(r"\s*<think>\s*(?:</think>\s*)?")


JUDGEMENT = "judgement"
"""The judgement's key in the memo of its evidence."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the spans of a row, its mask and its logprobs show together."""

    spans: tuple[SampledSpan, ...]
    ends: tuple[int | None, ...]
    """Where the sampling of each span ended; None where several ends are possible."""
    values: Values | None
    """None where values of the logprob column and its fill cannot be told apart."""
    departures: int | None = 0
    """How many unusual things the reading without any fault supposes; None if none stands."""
    fits: tuple[Fit, ...] = ()
    """Every slide that explains the row, the simplest first; of a right row, only those of the whole row."""
    missing: bool = False
    """Whether both columns may be in place, with logprobs missing that the loss needs."""
    masked: bool = True
    """False where no reading explains the mask, so that only the logprobs were judged."""
    values_in_place: bool = True
    """Whether no value is at a token that was not sampled."""
    exact: bool = False
    """Whether the trained runs are exactly the spans, and exactly the trained tokens have values."""

    @property
    def right(self) -> bool:
        """Whether a reading without any fault stands."""
        return self.departures is not None

    @property
    def fit(self) -> Fit | None:
        """The slide of a faulty row, if a single one explains it."""
        return self.fits[0] if len(self.fits) == 1 and not self.right and not self.missing else None

    @property
    def slide(self) -> Slide:
        """How far the columns slid, if that is proven; nothing else."""
        return self.fit.slide if self.fit is not None else Slide()

    @property
    def several(self) -> bool:
        """Whether the row is faulty, and several faults explain it."""
        return not self.right and len(self.fits) + self.missing > 1

    @property
    def open(self) -> bool:
        """Whether a fault is the simplest reading of a row that may be right."""
        return self.departures is not None and any(fit.departures < self.departures for fit in self.fits)

    @property
    def sure(self) -> bool:
        """Whether the logprobs are in place under every reading."""
        shifted = any(fit.slide.logprobs for fit in self.fits)
        return self.values is not None and self.values_in_place and not shifted


def judgement(evidence: Evidence) -> Judgement | None:
    """The judgement of the training row; None without a row, or if nothing says what was sampled."""
    return evidence.once(JUDGEMENT, _judgement)


def _judgement(evidence: Evidence) -> Judgement | None:
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or view is None:
        return None
    spans = view.spans or _spans(view, row, evidence.end_ids)
    if view.proven:
        spans = tuple(SampledSpan(a, (b,)) for _, stretch in sampled_turns(evidence) for a, b in stretch)
    spans = tuple(sorted(spans, key=lambda span: span.start))
    return judge(row, spans, NO_CONVENTIONS if view.proven else evidence.conventions)


def with_turn_ends(
    view: RowView,
    row: TrainingRow,
    end_ids: frozenset[int],
    text: Callable[[Ids], str] = lambda _ids: "",
    stated: Conventions = NO_CONVENTIONS,
) -> tuple[RowView, Judgement | None]:
    """A view by roles or messages with the answer starts and ends that mask, logprobs and finish reasons show, and
    its judgement.

    The judgement is None if there is none, or if calls prove the view. First tokens of an answer that neither mask
    nor logprobs include were given, not sampled; without logprobs, only an empty think block is. `text` decodes
    token ids.
    """
    if view.proven:
        return view, None
    spans = _finished(view.spans, row) or _spans(view, row, end_ids)
    judged = judge(row, spans, stated)
    if judged is None:
        return replace(view, spans=spans), None
    longer = () if judged.exact else tuple(_to_the_last_end(span, row.token_ids, end_ids) for span in spans)
    if longer and longer != spans:
        spans, judged = longer, judge(row, longer, stated) or judged
    if judged.exact and row.loss_mask is not None:
        return replace(view, spans=spans, sampled=row.loss_mask, sound=_sound(view.sound, row, judged)), judged
    if judged.right:
        later = tuple(_after_prefill(span, row, judged.values, text) for span in spans)
        # Where one answer has values for first tokens out of the loss, others may have lost theirs.
        if later != spans and not any(_leaves_values_out(span, row, judged.values) for span in later):
            spans, judged = later, replace(judged, spans=later)
    sampled = np.zeros_like(view.sampled)
    for span, end in zip(spans, judged.ends, strict=True):
        if end is None and judged.values is None:
            end = span.ends[-1]
        elif end is None:
            # The mask's, where possible: the logprob of a certain token may equal the fill, so neither a value nor
            # its absence proves an end.
            end = span.ends[0]
            if row.loss_mask is not None and not judged.slide.mask:
                end = [at for at in span.ends if row.loss_mask[end:at].all()][-1]
        sampled[span.start : end] = True
    return replace(view, spans=spans, sampled=sampled), judged


_EXACT = Sound.MASK | Sound.LOGPROBS


def _sound(sound: Sound, row: TrainingRow, judged: Judgement) -> Sound:
    """What is sound in a row whose mask and values lie exactly on its spans."""
    values, logprobs, first = judged.values, row.logprobs, judged.ends[0]
    if values is None or logprobs is None or first is None:
        return sound
    plausible = FLOOR < values.lowest <= values.highest < 0 and first - judged.spans[0].start >= 2
    starts = np.array([span.start for span in judged.spans])
    if not plausible or (logprobs[starts] == logprobs.take(starts + 1, mode="clip")).any():
        return sound | Sound.MASK
    return sound | _EXACT


def _after_prefill(
    span: SampledSpan, row: TrainingRow, values: Values | None, text: Callable[[Ids], str]
) -> SampledSpan:
    """The span of a right row without the first tokens that, by mask and logprobs, were given."""
    if row.loss_mask is None or row.loss_mask[span.start]:
        return span
    inside = row.loss_mask[span.start : span.ends[-1]]
    far = int(inside.argmax())
    first = slice(span.start, span.start + far)
    if not 0 < far < span.ends[-1] - span.start or span.start + far > span.shut:
        return span
    if values is not None:
        prefilled = not values.real[first].any()
    else:
        # Without logprobs, only a think block of a few tokens is known to be given.
        prefilled = far <= 12 and _THINK.fullmatch(text(row.token_ids[first])) is not None
    return SampledSpan(first.stop, span.ends, span.content) if prefilled else span


def _to_the_last_end(span: SampledSpan, ids: Ids, end_ids: frozenset[int]) -> SampledSpan:
    """The span with every end token that follows it: a model may have stopped at any of them."""
    ends = list(span.ends)
    while ends[-1] > span.shut and ends[-1] < len(ids) and int(ids[ends[-1]]) in end_ids:
        ends.append(ends[-1] + 1)
    return SampledSpan(span.start, tuple(ends), span.content)


def _leaves_values_out(span: SampledSpan, row: TrainingRow, values: Values | None) -> bool:
    """Whether first tokens of an answer have a logprob and are not trained, though others of it are."""
    if values is None or row.loss_mask is None:
        return False
    inside = row.loss_mask[span.start : span.ends[-1]]
    return bool(inside.any() and values.real[span.start : span.start + int(inside.argmax())].any())


def judge(
    row: TrainingRow, spans: tuple[SampledSpan, ...], stated: Conventions = NO_CONVENTIONS
) -> Judgement | None:
    """What these spans, the mask and the logprobs of a row show together; None without spans."""
    if not spans:
        return None
    if stated is NO_CONVENTIONS:
        at_once = _at_once(row, spans)
        if at_once is not None:
            return at_once
    mask, values = effective_loss_mask(row), values_of(row, spans, FARTHEST)
    covered = first_covered(row, ColumnRole.LOSS_MASK), first_covered(row)
    readings = Readings(spans, mask, values, covered, stated)
    departures = readings.departures_in_place()
    masked = True
    if departures is not None:
        fits = readings.slides(of_row=True)
    else:
        fits = readings.slides()
        if not fits and not readings.missing and values is not None:
            # Without the values that a roll may have carried to an end of the row.
            real = values.real.copy()
            for far in (FARTHEST, -FARTHEST):
                real[rolled_to(spans, far, len(real))] = False
            bare = Readings(spans, mask, replace(values, real=real), covered, stated)
            fits = bare.slides()
            readings = bare if fits or bare.missing else readings
        if not fits and not readings.missing and mask is not None and values is not None:
            masked, fits = False, readings.slides(with_mask=False)
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
        missing=readings.missing and not assumed,
        masked=masked,
        values_in_place=readings.values_in_place,
    )


def contested(evidence: Evidence) -> bool:
    """Whether a slide explains the row besides other readings, so that a gap may be evidence of it."""
    judged, view = judgement(evidence), evidence.row
    return bool(judged and judged.fits and judged.fit is None and view and not view.proven)


def row_slide(evidence: Evidence) -> int:
    """How far the loss mask of the row slid: late (+), early (-); 0 if it did not, or if that is unknown."""
    view, judged = evidence.row, judgement(evidence)
    if view is None or judged is None:
        return 0
    return proven_slide(evidence) if view.proven else judged.slide.mask


def restored_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the mask with every trained run that slid moved back onto its answer; None when none slid.

    A token that some standing reading does not train stays out of the loss.
    """
    row, view = evidence.rollout.training_row, evidence.row
    judged, slide = judgement(evidence), row_slide(evidence)
    if row is None or row.loss_mask is None or view is None or judged is None or not slide:
        return None
    if view.proven:
        return unslid(row.loss_mask, view.sampled)
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
    """`[T]` each: the logprobs of a slid column back on their tokens, and which tokens of answers lost theirs past
    an end of the row.

    Values that were rolled over an end of the row, as by `np.roll`, are taken from the other end.
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
    for place in range(*rolled_to(judged.spans, far, size).indices(size)) if judged.slide.whole_row else ():
        at = (place - far) % size
        if judged.values.real[place] and lost[at]:
            out[at], out[place], lost[at] = row.logprobs[place], fill, False
    return out, lost


def _at_once(row: TrainingRow, spans: tuple[SampledSpan, ...]) -> Judgement | None:
    """The judgement of a row whose mask and values lie exactly on its spans, as in most rows; None for others."""
    first = first_covered(row, ColumnRole.LOSS_MASK)
    if row.loss_mask is None or row.hidden is not None or spans[0].start < first + (len(spans) == 1):
        return None
    runs = trained_runs(row.loss_mask)
    if len(runs) != len(spans):
        return None
    for (start, end), span in zip(runs, spans, strict=True):
        if start != span.start or end not in span.ends:
            return None
    values = values_on_mask(row, spans, FARTHEST, inside=True)
    if values is None:
        return None
    return Judgement(spans, tuple([end for _, end in runs]), values, exact=True)


def _spans(view: RowView, row: TrainingRow, end_ids: frozenset[int]) -> tuple[SampledSpan, ...]:
    """The spans that were sampled according to roles or messages, each with its possible ends."""
    ends = spans_of(view.sampled, lambda place: is_end(place, row.token_ids, view, end_ids))
    return _finished(ends, row)


def _finished(spans: tuple[SampledSpan, ...], row: TrainingRow) -> tuple[SampledSpan, ...]:
    """The spans with the ends that the finish reasons of the last turns allow."""
    finished = list(spans)
    reasons = row.finish_reasons[-len(finished) :] if finished else ()
    for number, reason in zip(range(len(finished) - len(reasons), len(finished)), reasons, strict=True):
        span = finished[number]
        if reason is None or len(span.ends) == 1:
            continue
        if reason in ("length", "max_tokens", "abort"):
            finished[number] = SampledSpan(span.start, span.ends[:1])
        else:
            finished[number] = SampledSpan(span.start, span.ends[1:], span.shut)
    return tuple(finished)
