"""The loss mask of a row against what was sampled, judged once for every rule of the MSK family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.roles import ASSISTANT, TURN_END, UNKNOWN
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.rollout import TrainingRow, trained_runs

__all__ = ["JudgedMask", "WholeMask", "judged_mask", "mask_slide", "sampled_turns", "whole_mask"]

_FARTHEST_SLIDE = 2


class WholeMask(StrEnum):
    """A mask that is wrong as a whole, so that no part of it is worth a finding of its own."""

    NOTHING = "all zeros"
    EVERYTHING = "all ones"
    INVERTED = "inverted"


@dataclass(frozen=True, slots=True)
class JudgedMask:
    """Where mask and sampling disagree, each place owned by one rule. All masks are `[T]`."""

    ids: Ids
    trained: Mask
    view: RowView
    slide: int
    """How many places late (+) or early (-) every trained run lies; 0 when they do not slide."""
    end_not_trained: Mask
    """Sampled turn ends out of the loss although their turn is in it."""
    end_not_sampled: Mask
    """Trained turn ends that nobody sampled, right after a sampled token."""
    not_sampled: Mask
    """Other trained tokens that were not sampled."""
    not_trained: Mask
    """Other sampled tokens that are not trained."""


def judged_mask(evidence: Evidence) -> JudgedMask | None:
    """The parts of the mask that are wrong; None without mask or sampling, or when all of it is wrong."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or whole_mask(evidence) is not None:
        return None
    trained = row.loss_mask
    slide = mask_slide(trained, view.sampled)
    missing = np.zeros(len(trained), np.bool_)
    added = missing.copy()
    rewritten = _rewritten(view, trained)
    if not slide:
        missing = _ends_not_trained(row.token_ids, trained, view, evidence.end_ids)
        added = _ends_not_sampled(row.token_ids, trained, view, evidence.end_ids) & ~rewritten
    return JudgedMask(
        ids=row.token_ids,
        trained=trained,
        view=view,
        slide=slide,
        end_not_trained=missing,
        end_not_sampled=added,
        not_sampled=trained & ~view.sampled & ~added & ~rewritten,
        not_trained=view.sampled & ~trained & ~missing,
    )


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
    if not all(_is_end(int(p), row.token_ids, view, end_ids) for p in agrees):
        return False
    return bool((row.loss_mask != view.sampled).any())


def _ends_not_trained(ids: Ids, trained: Mask, view: RowView, end_ids: frozenset[int]) -> Mask:
    out = np.zeros(len(ids), np.bool_)
    for _, spans in sampled_turns(view):
        last = spans[-1][1] - 1
        in_loss = any(trained[start:end].any() for start, end in spans)
        if in_loss and not trained[last] and _is_end(last, ids, view, end_ids):
            out[last] = True
    return out


def _ends_not_sampled(ids: Ids, trained: Mask, view: RowView, end_ids: frozenset[int]) -> Mask:
    out = np.zeros(len(ids), np.bool_)
    follows = np.concatenate(([False], view.sampled[:-1]))
    for position in np.flatnonzero(trained & ~view.sampled & follows):
        out[position] = _is_end(int(position), ids, view, end_ids)
    return out


def _is_end(position: int, ids: Ids, view: RowView, end_ids: frozenset[int]) -> bool:
    return int(ids[position]) in end_ids or view.roles[position] == TURN_END


def _rewritten(view: RowView, trained: Mask) -> Mask:
    """Trained answer tokens that drifted: they stand for sampled ones, and TOK and TPL rules own them."""
    out = view.drifted & trained & ~view.sampled
    for start, end in trained_runs(view.drifted & ~view.sampled):
        # Text of an answer may read as a control token now; its role is then not the answer's any more.
        inside = start > 0 and end < len(out) and view.turn[start - 1] == view.turn[end] >= 0
        for position in range(start, end):
            out[position] &= inside or view.roles[position] in (ASSISTANT, UNKNOWN, TURN_END)
    return out
