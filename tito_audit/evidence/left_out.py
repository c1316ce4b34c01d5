"""What a row leaves out of the loss on purpose: the first tokens, or the end, of every answer that it trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.masks import PREFILLED, is_end, sampled_turns
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Mask
from tito_audit.record.memo import memoized
from tito_audit.record.testimony import EndsOf


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sampled tokens that a row leaves out of the loss in every answer that it trains."""

    tokens: Mask
    """`[T]` these tokens."""
    first: int
    """How many first tokens of each answer."""
    ends: EndsOf | None
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
    ends: list[EndsOf] = []
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
            ends.append(EndsOf.TRAINED if trained[-1] else EndsOf.KEPT)
        elif end < len(mask) and is_end(end, row.token_ids, view, evidence.end_ids) and not view.proven:
            ends.append(EndsOf.TRAINED if mask[end] else EndsOf.OPEN)
        places.append((start, end))
    if not places:
        return None
    count = first.pop() if len(first) == 1 else 0
    count = count if count <= PREFILLED else 0
    keeps_ends = EndsOf.KEPT in ends and EndsOf.TRAINED not in ends
    for start, end in places:
        tokens[start : start + count] = True
        tokens[end - 1] |= keeps_ends and is_end(end - 1, row.token_ids, view, evidence.end_ids)
    # What a row does with its ends: one that is open was appended where others are known.
    shown = {end for end in ends if end is not EndsOf.OPEN}
    together = EndsOf.MIXED if len(shown) > 1 else shown.pop() if shown else EndsOf.OPEN if ends else None
    return LeftOut(tokens & ~mask, count, together)
