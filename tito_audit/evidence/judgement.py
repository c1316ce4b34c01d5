"""How far a row's mask and logprobs are off their tokens, judged from everything in the row together.

The evidence is where answers begin and end (headers, turn ends, the template), why turns ended, the edges of the
mask, and which entries of the logprob column are values and which are fill. A reading is one way in which the row
may have been written. It stands if it accounts for every span of the row, and is proven only if no other reading
stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tito_audit.evidence.fill import FLOOR, REACH, Values, first_covered, rolled_to, values_of, values_on_mask
from tito_audit.evidence.masks import is_end, proven_slide, sampled_turns, spans_of, unslid
from tito_audit.evidence.model import Evidence, RowView, SampledSpan, Sound
from tito_audit.evidence.slides import FARTHEST, Ends, slides_of
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.record.column import ColumnRole
from tito_audit.record.rollout import TrainingRow, seen_by_loss
from tito_audit.record.runs import trained_runs
from tito_audit.record.testimony import CHANCE, Reading, Witness

_PREFILL = 12
"""The most tokens in a think block that was given, not sampled."""
_THINK = re.compile(r"\s*<think>\s*(?:</think>\s*)?")


JUDGEMENT = "judgement"
"""The judgement's key in the memo of its evidence."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the spans of a row, its mask and its logprobs show together."""

    spans: tuple[SampledSpan, ...]
    ends: tuple[int | None, ...]
    """Where the sampling of each span ended; None where several ends are possible."""
    mask_slide: int | None
    """How many places every trained run is late (+) or early (-); None where no single number fits the mask."""
    standing: tuple[Reading, ...]
    """Every reading that accounts for the whole row; () if none does, or there is nothing to read."""
    values: Values | None
    """None where values of the logprob column and its fill cannot be told apart."""
    chances: tuple[tuple[int, ...], ...] = ()
    """For each standing reading, the ids of the tokens that must be certain (logprob 0.0) by chance."""
    exact: bool = False
    """Whether the trained runs are exactly the spans, and exactly the trained tokens have values."""

    @property
    def decided(self) -> Reading | None:
        """The only reading that stands; None when several do, or none."""
        return self.standing[0] if len(self.standing) == 1 else None

    @property
    def undecided(self) -> bool:
        """Whether several readings account for the row."""
        return len(self.standing) > 1

    @property
    def rarity(self) -> tuple[int, int]:
        """How many of the entries well inside the spans are fill, and out of how many."""
        if self.exact:
            return 0, sum(max(span.ends[0] - span.start - 2 * REACH, 0) for span in self.spans)
        return self.values.rarity(self.spans) if self.values is not None else (0, 0)

    @property
    def open_ends(self) -> list[int]:
        """Turn ends outside the mask that may have been sampled, as neither logprobs nor finish reasons tell."""
        if self.values is not None or self.mask_slide != 0:
            return []
        pairs = zip(self.spans, self.ends, strict=True)
        return [end for span, end in pairs if end is not None and end < span.ends[-1]]


def judgement(evidence: Evidence) -> Judgement | None:
    """The judgement of the training row; None without a row, or if nothing says what was sampled."""
    return evidence.once(JUDGEMENT, _judgement)


def witness(evidence: Evidence) -> Witness | None:
    """The readings that the training row leaves open; None without one, or where calls prove its logprobs."""
    found, view = judgement(evidence), evidence.row
    if found is None or not found.standing or view is None or view.expected_logprobs is not None:
        return None
    zeros, inside = found.rarity
    chances = found.chances if found.undecided else ()
    return Witness(found.standing, len(found.spans), chances, zeros, inside)


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


def with_turn_ends(
    view: RowView,
    row: TrainingRow,
    end_ids: frozenset[int],
    text: Callable[[Ids], str] = lambda _ids: "",
) -> tuple[RowView, Judgement | None]:
    """A view by roles or messages with the turn ends that mask, logprobs and finish reasons show, and its
    judgement.

    The judgement is None if there is none, or if calls prove the view. `text` decodes token ids: an empty think
    block before an answer was given, not sampled, if neither mask nor logprobs include it.
    """
    if view.proven:
        return view, None
    spans = _finished(view.spans, row) or _spans(view, row, end_ids)
    spans = tuple(_after_prefill(span, row, spans, text) for span in spans)
    found = judge(row, spans)
    if found is None:
        return replace(view, spans=spans), None
    if found.exact and row.loss_mask is not None:
        return replace(view, spans=spans, sampled=row.loss_mask, sound=_sound(view.sound, row, found)), found
    sampled = np.zeros_like(view.sampled)
    for span, end in zip(spans, found.ends, strict=True):
        sampled[span.start : _as_trained(span, row, found) if end is None else end] = True
    return replace(view, spans=spans, sampled=sampled), found


def _sound(sound: Sound, row: TrainingRow, found: Judgement) -> Sound:
    """What is sound in a row with sound ids whose mask and values lie exactly on its spans."""
    values, logprobs, first = found.values, row.logprobs, found.ends[0]
    if not sound or values is None or logprobs is None or first is None:
        return sound
    if not (FLOOR < values.lowest <= values.highest < 0) or first - found.spans[0].start < 2:
        return sound | Sound.MASK
    starts = np.array([span.start for span in found.spans])
    if (logprobs[starts] == logprobs.take(starts + 1, mode="clip")).any():
        return sound | Sound.MASK
    return sound | Sound.MASK | Sound.LOGPROBS


def _after_prefill(
    span: SampledSpan, row: TrainingRow, spans: tuple[SampledSpan, ...], text: Callable[[Ids], str]
) -> SampledSpan:
    """The span without a leading think block that, by mask and logprobs, was given."""
    if row.loss_mask is None or row.loss_mask[span.start]:
        return span
    inside = row.loss_mask[span.start : span.ends[-1]]
    far = int(inside.argmax())
    if not 0 < far <= _PREFILL or not _THINK.fullmatch(text(row.token_ids[span.start : span.start + far])):
        return span
    values = values_of(row, spans, FARTHEST)
    if values is not None and values.real[span.start : span.start + far].any():
        return span
    return SampledSpan(span.start + far, span.ends)


def _as_trained(span: SampledSpan, row: TrainingRow, found: Judgement) -> int:
    """The assumed end of a span with an unknown end: the mask's, where that is possible.

    The logprob of a certain token may equal the fill, so neither a value nor its absence proves anything.
    """
    if found.values is None or row.loss_mask is None or found.mask_slide:
        return span.ends[-1] if found.values is None else span.ends[0]
    trained = [end for end in span.ends if row.loss_mask[span.ends[0] : end].all()]
    return trained[-1]


def row_slide(evidence: Evidence) -> int:
    """How far the loss mask of the row slid: late (+), early (-); 0 if it did not, or if that is unknown."""
    view, found = evidence.row, judgement(evidence)
    if view is None or found is None:
        return 0
    return proven_slide(evidence) if view.proven else found.mask_slide or 0


def restored_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the mask with every trained run moved back onto its span; None when none slid.

    A turn end that may or may not have been sampled stays out of the loss.
    """
    row, view, found, slide = evidence.rollout.training_row, evidence.row, judgement(evidence), row_slide(evidence)
    if row is None or row.loss_mask is None or view is None or found is None or not slide:
        return None
    if view.proven:
        return unslid(row.loss_mask, view.sampled)
    out, starts = np.zeros_like(row.loss_mask), {start for start, _ in trained_runs(row.loss_mask)}
    first = first_covered(row, ColumnRole.LOSS_MASK)
    for span, end in zip(found.spans, found.ends, strict=True):
        if max(span.start + slide, first) in starts:
            out[span.start : span.ends[0] if end is None else end] = True
    return out


def judge(row: TrainingRow, spans: Sequence[SampledSpan]) -> Judgement | None:
    """What these spans, the mask and the logprobs of a row show together; None without spans."""
    if not spans:
        return None
    spans = tuple(spans)
    at_once = _at_once(row, spans)
    if at_once is not None:
        return at_once
    values = values_of(row, spans, FARTHEST)
    slides, irregular = slides_of(seen_by_loss(row), spans, first_covered(row, ColumnRole.LOSS_MASK))
    if values is None:
        alone = next(iter(slides), None) if len(slides) == 1 else None
        ends = irregular if alone is None else slides[alone]
        return Judgement(spans, ends, alone, tuple(Reading(slide or 0, 0) for slide in slides), None)
    if len(slides) == 1 and values.fill_exactly(spans, slides.get(0)):
        return Judgement(spans, slides[0], 0, (Reading(),), values, ((),))
    found = _with_values(row, spans, slides or {None: irregular}, values)
    if not found or (0 in slides and 0 not in found):  # the mask may leave out turn ends that were sampled
        open_ends = tuple(span.ends[0] if len(span.ends) == 1 else None for span in spans)
        found |= _with_values(row, spans, dict.fromkeys([0] if found else slides or [None], open_ends), values)
    standing = tuple(Reading(slide or 0, far) for slide, (_, shifts) in found.items() for far in shifts)
    chances = tuple(tokens for _, shifts in found.values() for tokens in shifts.values())
    alone = next(iter(found), None) if len(found) == 1 else None
    ends = found[alone][0] if len(found) == 1 else irregular
    fars = {far for _, shifts in found.values() for far in shifts}
    if len(fars) == 1:
        (far,) = fars
        ends = ends if len(found) == 1 else tuple(span.ends[0] if len(span.ends) == 1 else None for span in spans)
        ends = tuple(_by_values(span, end, values, far) for span, end in zip(spans, ends, strict=True))
    return Judgement(spans, ends, alone, standing, values, chances)


def _at_once(row: TrainingRow, spans: tuple[SampledSpan, ...]) -> Judgement | None:
    """The judgement of a row whose mask and values lie exactly on its spans, as in most rows; None for others."""
    first = first_covered(row, ColumnRole.LOSS_MASK)
    if row.loss_mask is None or row.hidden is not None or spans[0].start < first + (len(spans) == 1):
        return None
    runs = trained_runs(row.loss_mask)
    if len(runs) != len(spans) or any(
        start != span.start or end not in span.ends for (start, end), span in zip(runs, spans, strict=True)
    ):
        return None
    values = values_on_mask(row, spans, FARTHEST, inside=True)
    if values is None:
        return None
    return Judgement(spans, tuple(end for _, end in runs), 0, (Reading(),), values, ((),), exact=True)


def _with_values(
    row: TrainingRow, spans: tuple[SampledSpan, ...], slides: Mapping[int | None, Ends], values: Values
) -> dict[int | None, tuple[Ends, dict[int, tuple[int, ...]]]]:
    """The mask slides that the logprobs allow, each with its ends and shifts."""
    found = {slide: (ends, shifts_of(values, row.token_ids, spans, ends)) for slide, ends in slides.items()}
    return {slide: reading for slide, reading in found.items() if reading[1]}


def _spans(view: RowView, row: TrainingRow, end_ids: frozenset[int]) -> tuple[SampledSpan, ...]:
    """The spans that were sampled according to roles or messages, each with its possible ends."""
    ends = spans_of(view.sampled, lambda place: is_end(place, row.token_ids, view, end_ids))
    return _finished(ends, row)


def _finished(spans: tuple[SampledSpan, ...], row: TrainingRow) -> tuple[SampledSpan, ...]:
    """The spans with the ends that the finish reasons of the last turns allow."""
    found = list(spans)
    reasons = row.finish_reasons[-len(found) :] if found else ()
    for number, reason in zip(range(len(found) - len(reasons), len(found)), reasons, strict=True):
        found[number] = _as_finished(found[number], reason)
    return tuple(found)


def _as_finished(span: SampledSpan, reason: str | None) -> SampledSpan:
    """The span with the ends that its finish reason allows."""
    if reason is None or len(span.ends) == 1:
        return span
    if reason in ("length", "max_tokens", "abort"):
        return SampledSpan(span.start, span.ends[:1])
    return SampledSpan(span.start, span.ends[1:])


def _by_values(span: SampledSpan, end: int | None, values: Values, far: int) -> int | None:
    """Where a span ended by its logprobs, `far` places off; None where a certain token may hide it."""
    if end is not None:
        return end
    places = [one for one in span.ends if one > span.ends[0] and 0 <= one - 1 + far < len(values.real)]
    real = [one for one in places if values.real[one - 1 + far]]
    if real:
        return max(real)
    return span.ends[0] if values.certain and len(places) == len(span.ends) - 1 else None


def shifts_of(
    values: Values, ids: Ids, spans: Sequence[SampledSpan], ends: Sequence[int | None]
) -> dict[int, tuple[int, ...]]:
    """Every shift of the logprobs against the spans that accounts for every value.

    Each comes with the ids of the tokens that must be certain by chance. If the fill cannot be a logprob (null,
    1.0), fill inside a span is a fault, and the readings with the fewest faults stand. If it can be one (0.0), a
    reading falls only if it needs far more chance than another.

    Where no reading accounts for every value, all readings ignore values that a roll may have carried to an end of
    the row: they may be stray too.
    """
    real = values.real
    missing = _missing(values, real, spans, ends)
    if not missing:
        real = real.copy()
        for far in (FARTHEST, -FARTHEST):
            real[rolled_to(spans, far, len(real))] = False
        missing = _missing(values, real, spans, ends)
    if values.certain:
        faults = {far: (far != 0) + (len(places) > 0) for far, places in missing.items()}
        fewest = min(faults.values(), default=0)
        return {far: () for far, number in faults.items() if number == fewest}
    chances = {far: _events(ids, places - far) for far, places in missing.items()}
    fewest = min(map(len, chances.values()), default=0)
    zeros, inside = values.rarity(spans)
    rare = math.log10((zeros + 1) / (inside + 2))
    return {far: tokens for far, tokens in chances.items() if (len(tokens) - fewest) * rare >= CHANCE}


def _missing(
    values: Values, real: Mask, spans: Sequence[SampledSpan], ends: Sequence[int | None]
) -> dict[int, Offsets]:
    """How many places these values may be off the spans, and where the moved spans lack one."""
    missing: dict[int, Offsets] = {}
    for far in range(-FARTHEST, FARTHEST + 1):
        widest, least = values.covering(spans, ends, far)
        if not (real & ~widest).any():
            missing[far] = np.flatnonzero(least & ~real)
    return missing


def _events(ids: Ids, places: Offsets) -> tuple[int, ...]:
    """The id of the first token of each run of these places, without repeats: later tokens and equal ids are not
    independent."""
    first = places[np.diff(places, prepend=-2) > 1] if len(places) else places
    return tuple(np.unique(ids[first]).tolist())
