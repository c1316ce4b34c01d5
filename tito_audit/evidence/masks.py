"""Compares the loss mask of a row with what was sampled, for rules and repairs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from tito_audit.evidence.logprob_values import MAX_SLIDE, first_covered
from tito_audit.evidence.model import Evidence, RowView, SampledSpan
from tito_audit.evidence.reference import headers_in, pieces_of
from tito_audit.evidence.roles import TURN_END, UNKNOWN, LazyRoles, token_roles, unclear_roles, unclear_tokens
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.memo import memoized
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, unknown_role_name
from tito_audit.record.testimony import AnswerEnds

MAX_PREFILL = 3
"""How many first tokens of every answer a harness may have written."""


class WholeMask(StrEnum):
    """How a mask is wrong as a whole, so that its parts need no findings."""

    NOTHING = "all zeros"
    EVERYTHING = "all ones"
    INVERTED = "inverted"


@memoized
def trained_as_sampled(evidence: Evidence) -> bool:
    """Whether the loss mask trains exactly what was sampled."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return False
    return bool((row.loss_mask == view.sampled).all())


@memoized
def exact_mask_slide(evidence: Evidence) -> int:
    """How far the loss mask slid off what was sampled, by `mask_slide`; 0 without a mask or a view."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or trained_as_sampled(evidence):
        return 0
    return mask_slide(row.loss_mask, view.sampled)


@memoized
def whole_mask(evidence: Evidence) -> WholeMask | None:
    """What is wrong with the mask as a whole; None if only parts of it may be wrong."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or not len(row.token_ids):
        return None
    if not row.loss_mask.any():
        return WholeMask.NOTHING
    if row.loss_mask.all():
        if row.prompt_length is not None:
            starts_with_prompt = row.prompt_length > 0
        else:
            starts_with_prompt = (
                view is not None and not view.sampled[0] and (view.proven or view.roles[0] != UNKNOWN)
            )
        return WholeMask.EVERYTHING if starts_with_prompt else None
    if view is None or trained_as_sampled(evidence) or unclear_tokens(evidence).any():
        return None
    # Inverted: given tokens are trained and sampled ones are not, turn ends and prefilled tokens aside.
    first = first_covered(row, ColumnRole.LOSS_MASK)
    trained, sampled = row.loss_mask[first:], view.sampled[first:]
    if not _any_inside_turns(trained & ~sampled, evidence, first) or not (sampled & ~trained).any():
        return None
    alike = trained == sampled
    for start, end in trained_runs(sampled):
        before = int((~alike[start:end]).argmax())
        if before <= MAX_PREFILL:
            alike[start : start + before] = False
    return None if _any_inside_turns(alike, evidence, first) else WholeMask.INVERTED


def _any_inside_turns(tokens: Mask, evidence: Evidence, first: int) -> bool:
    """Whether any of these tokens is no turn end; `tokens` begins at token `first` of the row."""
    row, view = evidence.rollout.training_row, evidence.row
    assert row is not None
    assert view is not None
    places = (tokens.nonzero()[0] + first).tolist()
    return any(not is_turn_end(place, row.token_ids, view, evidence.end_ids) for place in places)


def may_be_inverted(evidence: Evidence) -> bool:
    """Whether the mask trains all that was given and leaves some whole answers out.

    It then trains too much, or it is inverted and trains the very answers that were meant to be left out.
    """
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or whole_mask(evidence) is not None:
        return False
    first = first_covered(row, ColumnRole.LOSS_MASK)
    trained, sampled = row.loss_mask[first:], view.sampled[first:]
    context = ~sampled & ~view.drifted[first:]
    if _any_inside_turns(context & ~trained, evidence, first) or not _any_inside_turns(context, evidence, first):
        return False
    in_loss = []
    for start, end in trained_runs(sampled):
        answer = np.zeros(len(sampled), np.bool_)
        answer[min(start + MAX_PREFILL, end) : end] = True
        if not _any_inside_turns(answer, evidence, first):
            answer[start:end] = True
        in_loss.append(_any_inside_turns(answer & trained, evidence, first))
    return any(in_loss) and not all(in_loss)


def mask_slide(trained: Mask, sampled: Mask) -> int:
    """How many places every trained run lies after (+) or before (-) a sampled run; 0 if there is no such number.

    A run cut off by the end of the row may be shorter. Some trained token must not be sampled and some sampled
    token not trained; otherwise a run just has another length.
    """
    if not (trained & ~sampled).any() or not (sampled & ~trained).any():
        return 0
    runs, full = set(trained_runs(sampled)), len(sampled)
    slid = trained_runs(trained)
    for distance in range(1, MAX_SLIDE + 1):
        for offset in (distance, -distance):
            if all(
                (start - offset, end - offset) in runs or (end == full and (start - offset, full) in runs)
                for start, end in slid
            ):
                return offset
    return 0


def slide_back(trained: Mask, sampled: Mask) -> Mask | None:
    """`[T]` the mask with every trained run moved back onto its sampled run; None if it did not slide."""
    offset = mask_slide(trained, sampled)
    if not offset:
        return None
    runs, out = set(trained_runs(sampled)), np.zeros(len(trained), np.bool_)
    for start, end in trained_runs(trained):
        cut_off = (start - offset, len(trained))
        first, last = cut_off if end == len(trained) and cut_off in runs else (start - offset, end - offset)
        out[first:last] = True
    return out


@memoized
def sampled_turns(evidence: Evidence) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """(turn, its ranges) for everything sampled in the row; each range has turn None if no call shows its turn."""
    view = evidence.row
    if view is None:
        return []
    # A run is cut where neighboring sampled tokens belong to different turns.
    turn, sampled = view.turn, view.sampled
    cuts = (((turn[1:] != turn[:-1]) & sampled[1:] & sampled[:-1]).nonzero()[0] + 1).tolist()
    turns: dict[int, list[tuple[int, int]]] = {}
    for number, (start, end) in enumerate(trained_runs(sampled)):
        inner = cuts[bisect_right(cuts, start) : bisect_right(cuts, end)] if cuts else ()
        for a, b in pairwise((start, *inner, end)):
            key = int(turn[a])
            turns.setdefault(key if key >= 0 else -1 - number, []).append((a, b))
    return [(key if key >= 0 else None, spans) for key, spans in turns.items()]


def possible_spans(view: RowView, ids: Ids, end_ids: frozenset[int]) -> tuple[SampledSpan, ...]:
    """The sampled runs of a row with these ids, each with its possible ends."""
    spans = []
    for start, stop in trained_runs(view.sampled):
        first = stop
        while first > start and is_turn_end(first - 1, ids, view, end_ids):
            first -= 1
        if first == stop < len(ids):
            first = max(stop - 1, start)  # no turn end: the last token may be the template's
        spans.append(SampledSpan(start, tuple(range(first, stop + 1))))
    return tuple(spans)


def is_turn_end(position: int, ids: Ids, view: RowView, end_ids: frozenset[int]) -> bool:
    """Whether a row token ends a turn by its id or its role, without computing lazy roles."""
    if int(ids[position]) in end_ids:
        return True
    roles = view.roles
    return bool(roles.turn_ends[position]) if type(roles) is LazyRoles else roles[position] == TURN_END


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The sampled tokens that a row leaves out of the loss on purpose, in every answer that it trains."""

    tokens: Mask
    """`[T]`"""
    first: int
    """How many first tokens of each answer are left out."""
    ends: AnswerEnds | None
    """Whether the ends of answers are trained; None if there are none."""


@memoized
def left_out(evidence: Evidence) -> LeftOut | None:
    """What the row leaves out of every answer that it trains; None if it trains none, or if nothing says what was
    sampled."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return None
    mask, tokens = row.loss_mask, np.zeros(len(row.loss_mask), np.bool_)
    first: set[int] = set()
    ends: list[AnswerEnds] = []
    places: list[tuple[int, int]] = []
    for _, ranges in sampled_turns(evidence):
        start, end = ranges[0][0], ranges[-1][1]
        trained = mask[start:end]
        if not trained.any():
            continue
        untrained = int(trained.argmax())
        ended = is_turn_end(end - 1, row.token_ids, view, evidence.end_ids)
        if untrained < end - start - ended:  # a shorter answer shows nothing
            first.add(untrained)
        if ended:
            ends.append(AnswerEnds.TRAINED if trained[-1] else AnswerEnds.KEPT)
        elif end < len(mask) and is_turn_end(end, row.token_ids, view, evidence.end_ids) and not view.proven:
            ends.append(AnswerEnds.TRAINED if mask[end] else AnswerEnds.OPEN)
        places.append((start, end))
    if not places:
        return None
    count = first.pop() if len(first) == 1 else 0
    count = count if count <= MAX_PREFILL else 0
    keeps_ends = AnswerEnds.KEPT in ends and AnswerEnds.TRAINED not in ends
    for start, end in places:
        tokens[start : start + count] = True
        tokens[end - 1] |= keeps_ends and is_turn_end(end - 1, row.token_ids, view, evidence.end_ids)
    # An open end counts only if all are open: where others are known, it was appended.
    decided = {end for end in ends if end is not AnswerEnds.OPEN}
    of_row = (
        AnswerEnds.MIXED if len(decided) > 1 else decided.pop() if decided else AnswerEnds.OPEN if ends else None
    )
    return LeftOut(tokens & ~mask, count, of_row)


@memoized
def agreed_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the loss mask on which messages and role headers agree; None if they do not, or if there are logprobs.

    Every answer must follow its header and hold the text of its message. A turn end counts as sampled if the mask
    of the row trains it. Rows with logprobs are left to `judgement`.
    """
    row, view, vocabulary = evidence.rollout.training_row, evidence.row, evidence.vocabulary
    if row is None or row.loss_mask is None or row.logprobs is not None or view is None or vocabulary is None:
        return None
    messages = evidence.rollout.messages
    if (
        any(unknown_role_name(message.speaker) is not None for message in messages)
        or unclear_roles(evidence) is not None
    ):
        return None
    pieces = pieces_of(row.token_ids, vocabulary)
    roles = token_roles(pieces, evidence.end_ids, headers_in(vocabulary, "", evidence.speakers))
    sampled = roles.among((ASSISTANT, TURN_END))
    answers = [message for message in messages if message.sampled]
    by_messages = np.zeros_like(sampled)
    for span in view.spans:
        by_messages[span.start : span.ends[-1]] = True
    runs = trained_runs(sampled)
    if not answers or not np.array_equal(sampled, by_messages) or len(runs) != len(answers):
        return None
    for (start, end), message in zip(runs, answers, strict=True):
        text = vocabulary.text(row.token_ids[start:end])
        if not all(part in text for part in (message.text.strip(), *(call.name for call in message.tool_calls))):
            return None
    return sampled & (~roles.among((TURN_END,)) | row.loss_mask)
