"""The loss mask of a row against what was sampled, as far as rules and repairs both ask it."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

import numpy as np

from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.roles import TURN_END, UNKNOWN
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.rollout import TrainingRow, trained_runs

__all__ = ["WholeMask", "is_end", "mask_slide", "sampled_turns", "unslid", "whole_mask"]

_FARTHEST_SLIDE = 2


class WholeMask(StrEnum):
    """A mask that is wrong as a whole, so that no part of it is worth a finding of its own."""

    NOTHING = "all zeros"
    EVERYTHING = "all ones"
    INVERTED = "inverted"


def whole_mask(evidence: Evidence) -> WholeMask | None:
    """What is wrong with the mask as a whole; None when it is worth looking at its parts."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or not len(row.token_ids):
        return None
    if not row.loss_mask.any():
        return WholeMask.NOTHING
    if row.loss_mask.all():
        return WholeMask.EVERYTHING if _starts_with_prompt(row, view) else None
    if view is not None and _inverted(row, view, evidence.end_ids):
        return WholeMask.INVERTED
    return None


def mask_slide(trained: Mask, sampled: Mask) -> int:
    """How far every trained run lies behind (+) or before (-) a sampled run; 0 when it does not.

    A run cut off by the end of the row may be shorter. Both a trained token that was not sampled and a
    sampled one that is not trained have to be there, else it is no slide but a run of another length.
    """
    if not (trained & ~sampled).any() or not (sampled & ~trained).any():
        return 0
    runs, full = set(trained_runs(sampled)), len(sampled)
    mine = trained_runs(trained)
    for far in range(1, _FARTHEST_SLIDE + 1):
        for offset in (far, -far):
            moved = [(start - offset, end - offset if end < full else full) for start, end in mine]
            clipped = [(start - offset, end - offset) for start, end in mine]
            if all(a in runs or b in runs for a, b in zip(moved, clipped, strict=True)):
                return offset
    return 0


def unslid(trained: Mask, sampled: Mask) -> Mask | None:
    """The mask with every trained run on the sampled run that it slid off; None when it did not slide."""
    offset = mask_slide(trained, sampled)
    if not offset:
        return None
    runs, out = set(trained_runs(sampled)), np.zeros(len(trained), np.bool_)
    for start, end in trained_runs(trained):
        cut_off = (start - offset, len(trained))
        first, last = cut_off if end == len(trained) and cut_off in runs else (start - offset, end - offset)
        out[first:last] = True
    return out


def sampled_turns(view: RowView) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """The sampled stretches of the row, turn by turn; turn None where no call says which it was."""
    turns: dict[int, list[tuple[int, int]]] = {}
    for number, (start, end) in enumerate(trained_runs(view.sampled)):
        cuts = np.flatnonzero(np.diff(view.turn[start:end])) + start + 1
        edges = [start, *cuts.tolist(), end]
        for a, b in pairwise(edges):
            turn = int(view.turn[a])
            turns.setdefault(turn if turn >= 0 else -1 - number, []).append((a, b))
    return [(key if key >= 0 else None, spans) for key, spans in turns.items()]


def is_end(position: int, ids: Ids, view: RowView, end_ids: frozenset[int]) -> bool:
    """Whether a row token ends a turn, by its id or by its role."""
    return int(ids[position]) in end_ids or view.roles[position] == TURN_END


def _starts_with_prompt(row: TrainingRow, view: RowView | None) -> bool:
    """True when the row is known to open with tokens that were given, not sampled."""
    if row.prompt_length is not None:
        return row.prompt_length > 0
    return view is not None and not bool(view.sampled[0]) and (view.proven or view.roles[0] != UNKNOWN)


def _inverted(row: TrainingRow, view: RowView, end_ids: frozenset[int]) -> bool:
    """True when the mask trains what was given and leaves out what was sampled, turn ends aside."""
    assert row.loss_mask is not None
    if not view.sampled.any() or view.sampled.all():
        return False
    agrees = np.flatnonzero(row.loss_mask == view.sampled)
    if not all(is_end(int(p), row.token_ids, view, end_ids) for p in agrees):
        return False
    return bool((row.loss_mask != view.sampled).any())
