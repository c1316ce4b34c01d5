"""The loss mask of a row compared with what was sampled, for rules and repairs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from operator import itemgetter

import numpy as np

from tito_audit.evidence.fill import FARTHEST, first_covered
from tito_audit.evidence.model import Evidence, RowView, SampledSpan
from tito_audit.evidence.reference import headers_in, pieces_of
from tito_audit.evidence.roles import TURN_END, UNKNOWN, ends_turn, token_roles, unclear_roles, unclear_tokens
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.memo import memoized
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, unknown_role_name
from tito_audit.record.testimony import AnswerEnds

PREFILLED = 3
"""The most first tokens of an answer that a harness is taken to write in every answer."""


class WholeMask(StrEnum):
    """How a mask is wrong as a whole, so its parts need no findings of their own."""

    NOTHING = "all zeros"
    EVERYTHING = "all ones"
    INVERTED = "inverted"


@memoized
def trained_as_sampled(evidence: Evidence) -> bool:
    """Whether the loss mask of the row trains exactly what was sampled."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return False
    return bool((row.loss_mask == view.sampled).all())


@memoized
def proven_slide(evidence: Evidence) -> int:
    """How far the loss mask of the row slid, by `mask_slide`; 0 without a mask or a view of what was sampled."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or trained_as_sampled(evidence):
        return 0
    return mask_slide(row.loss_mask, view.sampled)


@memoized
def whole_mask(evidence: Evidence) -> WholeMask | None:
    """What is wrong with the mask as a whole; None when only parts of it may be wrong."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or not len(row.token_ids):
        return None
    if not row.loss_mask.any():
        return WholeMask.NOTHING
    if row.loss_mask.all():
        # Whether the row is known to start with given tokens.
        if row.prompt_length is not None:
            starts_with_prompt = row.prompt_length > 0
        else:
            starts_with_prompt = (
                view is not None and not bool(view.sampled[0]) and (view.proven or view.roles[0] != UNKNOWN)
            )
        return WholeMask.EVERYTHING if starts_with_prompt else None
    if view is None or trained_as_sampled(evidence) or unclear_tokens(evidence).any():
        return None
    # Inverted: what was given is trained and what was sampled left out, turn ends and prefilled tokens aside.
    first = first_covered(row, ColumnRole.LOSS_MASK)
    trained, sampled = row.loss_mask[first:], view.sampled[first:]
    if not _beside_ends(trained & ~sampled, evidence, first) or not (sampled & ~trained).any():
        return None
    alike = trained == sampled
    for start, end in trained_runs(sampled):
        before = int((~alike[start:end]).argmax())
        if before <= PREFILLED:
            alike[start : start + before] = False
    return None if _beside_ends(alike, evidence, first) else WholeMask.INVERTED


def _beside_ends(tokens: Mask, evidence: Evidence, first: int) -> bool:
    """Whether any of these tokens of the row, from its token `first` on, ends no turn."""
    row, view = evidence.rollout.training_row, evidence.row
    assert row is not None
    assert view is not None
    places = (tokens.nonzero()[0] + first).tolist()
    return any(not is_end(place, row.token_ids, view, evidence.end_ids) for place in places)


def perhaps_inverted(evidence: Evidence) -> bool:
    """Whether the mask trains all that was given and leaves some answers out as a whole.

    Either it trains too much, or it is inverted, and then the answers that it trains are those that were left out
    on purpose.
    """
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or whole_mask(evidence) is not None:
        return False
    first = first_covered(row, ColumnRole.LOSS_MASK)
    trained, sampled = row.loss_mask[first:], view.sampled[first:]
    context = ~sampled & ~view.drifted[first:]
    if _beside_ends(context & ~trained, evidence, first) or not _beside_ends(context, evidence, first):
        return False
    in_loss = []
    for start, end in trained_runs(sampled):
        answer = np.zeros(len(sampled), np.bool_)
        answer[min(start + PREFILLED, end) : end] = True
        if not _beside_ends(answer, evidence, first):
            answer[start:end] = True
        in_loss.append(_beside_ends(answer & trained, evidence, first))
    return any(in_loss) and not all(in_loss)


def mask_slide(trained: Mask, sampled: Mask) -> int:
    """How far every trained run lies after (+) or before (-) a sampled run; 0 when there is no such number.

    A run cut off by the end of the row may be shorter. There must be both a trained token that was not sampled and
    a sampled token that is not trained; otherwise a run just has another length.
    """
    if not (trained & ~sampled).any() or not (sampled & ~trained).any():
        return 0
    runs, full = set(trained_runs(sampled)), len(sampled)
    slid = trained_runs(trained)
    for distance in range(1, FARTHEST + 1):
        for offset in (distance, -distance):
            if all(
                (start - offset, end - offset) in runs or (end == full and (start - offset, full) in runs)
                for start, end in slid
            ):
                return offset
    return 0


def unslid(trained: Mask, sampled: Mask) -> Mask | None:
    """`[T]` the mask with every trained run moved back onto its sampled run; None when it did not slide."""
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
    """The sampled ranges of the row by turn; turn None where no call says which."""
    view = evidence.row
    if view is None:
        return []
    # A range is cut where a sampled token and the sampled token before it belong to different turns.
    turn, sampled = view.turn, view.sampled
    cuts = (((turn[1:] != turn[:-1]) & sampled[1:] & sampled[:-1]).nonzero()[0] + 1).tolist()
    turns: dict[int, list[tuple[int, int]]] = {}
    for number, (start, end) in enumerate(trained_runs(sampled)):
        inner = cuts[bisect_right(cuts, start) : bisect_right(cuts, end)] if cuts else ()
        for a, b in pairwise((start, *inner, end)):
            key = int(turn[a])
            turns.setdefault(key if key >= 0 else -1 - number, []).append((a, b))
    return [(key if key >= 0 else None, spans) for key, spans in turns.items()]


def runs_inside(runs: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of these runs, given in order, that lie inside `[start, end)`."""
    spans = []
    for at in range(bisect_right(runs, start, key=itemgetter(1)), len(runs)):
        first, last = max(runs[at][0], start), min(runs[at][1], end)
        if first >= end:
            break
        spans.append((first, last))
    return spans


def spans_of(sampled: Mask, is_end: Callable[[int], bool]) -> tuple[SampledSpan, ...]:
    """The parts of a row that count as sampled, each with its possible ends.

    `is_end` says whether a token of the row ends a turn.
    """
    spans = []
    for start, stop in trained_runs(sampled):
        first = stop
        while first > start and is_end(first - 1):
            first -= 1
        if first == stop < len(sampled):
            first = max(stop - 1, start)  # no turn end: the last token may be the template's
        spans.append(SampledSpan(start, tuple(range(first, stop + 1))))
    return tuple(spans)


def is_end(position: int, ids: Ids, view: RowView, end_ids: frozenset[int]) -> bool:
    """Whether a row token ends a turn, by its id or its role."""
    return int(ids[position]) in end_ids or ends_turn(view.roles, position)


# What a row leaves out of the loss on purpose: the first tokens, or the end, of every answer that it trains.


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sampled tokens that a row leaves out of the loss in every answer that it trains."""

    tokens: Mask
    """`[T]` these tokens."""
    first: int
    """How many first tokens of each answer."""
    ends: AnswerEnds | None
    """What it does with the ends of answers; None if it has none."""


@memoized
def left_out(evidence: Evidence) -> LeftOut | None:
    """What the row leaves out of every answer that it trains; None if it trains none, or nothing says what was
    sampled."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return None
    mask, tokens = row.loss_mask, np.zeros(len(row.loss_mask), np.bool_)
    first: set[int] = set()
    ends: list[AnswerEnds] = []
    places: list[tuple[int, int]] = []
    for _, stretch in sampled_turns(evidence):
        start, end = stretch[0][0], stretch[-1][1]
        trained = mask[start:end]
        if not trained.any():
            continue
        before = int(trained.argmax())
        ended = is_end(end - 1, row.token_ids, view, evidence.end_ids)
        if before < end - start - ended:  # a shorter answer shows nothing
            first.add(before)
        if ended:
            ends.append(AnswerEnds.TRAINED if trained[-1] else AnswerEnds.KEPT)
        elif end < len(mask) and is_end(end, row.token_ids, view, evidence.end_ids) and not view.proven:
            ends.append(AnswerEnds.TRAINED if mask[end] else AnswerEnds.OPEN)
        places.append((start, end))
    if not places:
        return None
    count = first.pop() if len(first) == 1 else 0
    count = count if count <= PREFILLED else 0
    keeps_ends = AnswerEnds.KEPT in ends and AnswerEnds.TRAINED not in ends
    for start, end in places:
        tokens[start : start + count] = True
        tokens[end - 1] |= keeps_ends and is_end(end - 1, row.token_ids, view, evidence.end_ids)
    # What a row does with its ends: one that is open was appended where others are known.
    shown = {end for end in ends if end is not AnswerEnds.OPEN}
    together = AnswerEnds.MIXED if len(shown) > 1 else shown.pop() if shown else AnswerEnds.OPEN if ends else None
    return LeftOut(tokens & ~mask, count, together)


# The loss mask that messages and role headers prove together in a row without logprobs.


@memoized
def agreed_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the loss mask on which messages and role headers agree; None if they do not, or if there are logprobs.

    Every answer must follow its header and have the text of its message. The end of a turn counts as sampled
    where the row's mask trains it. Rows with logprobs are left to `judgement`.
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
