"""Rebuilds a training row from the calls that sampled it, or gives it another mask or other logprobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tito_audit.align.runs import paired_runs
from tito_audit.errors import RecordError
from tito_audit.evidence.logprobs import ROUNDING, placeholder_zeros
from tito_audit.evidence.masks import may_be_inverted
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Ids, Logprobs, Mask, Offsets
from tito_audit.record.column import Alignment, Column, ColumnRole
from tito_audit.record.finding import Finding, Severity
from tito_audit.record.move_row import MovedRow, move_row
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import TrainingRow, Turn

PERHAPS_INVERTED = (
    "the mask trains all that was given and leaves whole answers out: it may be inverted, so the row does not "
    "show which answers to train"
)


@dataclass(frozen=True, slots=True)
class ChainTokens:
    """The tokens of one chain of calls, with the call that sampled each; every array is `[T]`."""

    ids: Ids
    turn: Offsets
    """The turn that sampled the token; -1 if it was given."""
    offset: Offsets
    """The position of the token in that completion; -1 if it was given."""


def chain_tokens(turns: Sequence[Turn], chain: Sequence[int], tail: Ids) -> ChainTokens:
    """The prompt and completion of the last call, then `tail`, with the turn that sampled each token.

    Each prompt of the chain must start with everything before it, so a completion begins where its prompt ends.
    """
    seen = turns[chain[-1]].seen_ids
    assert seen is not None
    ids = np.concatenate([seen, tail]).astype(np.int32)
    turn = np.full(len(ids), -1, np.int64)
    offset = turn.copy()
    for number in chain:
        prompt, completion = turns[number].prompt_ids, turns[number].completion_ids
        assert prompt is not None
        assert completion is not None
        place = slice(len(prompt), len(prompt) + len(completion))
        turn[place] = number
        offset[place] = np.arange(len(completion))
    return ChainTokens(ids, turn, offset)


def rebuild_row(
    row: TrainingRow, view: RowView | None, target: ChainTokens, turns: Sequence[Turn], trained: Collection[int]
) -> MovedRow:
    """Rebuild the training row on the tokens of a chain: the mask trains the `trained` turns, with their logprobs.

    Values of the old row stay with their tokens unless the calls say otherwise. If the row has a logprob column, a
    restored token whose call recorded no logprob leaves the loss.
    """
    source = _old_positions(row.token_ids, view, target)
    mask = np.isin(target.turn, np.fromiter(trained, np.int64)) & (target.turn >= 0)
    logprobs = None
    if row.logprobs is not None or any(column.role == "logprobs" for column in row.columns):
        # The values of the calls, else those of the row for the same token.
        old = np.full(len(target.ids), np.nan)
        if row.logprobs is not None:
            old = np.where(source >= 0, row.logprobs[source], np.nan)
        if row.loss_mask is not None:
            # A token that was trained but never sampled had no meaningful value.
            old[(target.turn < 0) & (source >= 0) & row.loss_mask[source]] = np.nan
        of_calls, silent = np.full(len(old), np.nan), np.ones(len(old), np.bool_)
        rounded, certain, shifted = np.zeros(len(old), np.bool_), np.zeros(len(old), np.bool_), False
        for number in np.unique(target.turn[target.turn >= 0]):
            if (values := turns[number].completion_logprobs) is not None:
                at = np.flatnonzero(target.turn == number)
                of_calls[at], silent[at] = values[target.offset[at]], False
        # If all are 0.0, no other value shows that the row rounds.
        zeros = placeholder_zeros(old, of_calls) if old[~silent].any() else old == 0
        for number in np.unique(target.turn[~silent]):
            # A turn is rounded if all its values are near the call's: a shifted column has some by chance.
            at = np.flatnonzero(target.turn == number)
            own, expected = old[at], of_calls[at]
            both = ~np.isnan(own) & ~np.isnan(expected)
            near = bool(np.isclose(own[both], expected[both], rtol=0, atol=ROUNDING).all())
            placeholders = (own == 0) & zeros[at].any()  # if one 0.0 is a placeholder, each may be
            rounded[at] = near & both & ~placeholders
            certain[at] = not (expected < -2 * ROUNDING).any()
            shifted |= not near
        if shifted:
            rounded &= ~certain  # values of near-certain tokens are near each other, whatever the shift
        if row.loss_mask is not None:  # tokens out of the loss may have a fill that is close to the value
            rounded &= ~mask | ((source >= 0) & row.loss_mask[source])
        logprobs = np.where(silent | rounded, old, of_calls)
        logprobs = _drop_strays(logprobs, row, target, turns) if shifted else logprobs
        mask &= ~(silent & np.isnan(logprobs))
    boundary = None
    if row.prompt_length is not None:
        sampled = np.flatnonzero(target.turn >= 0)
        boundary = int(sampled[0]) if len(sampled) else len(target.ids)
        after = np.flatnonzero(source >= row.prompt_length)
        boundary = min(boundary, int(after[0]) if len(after) else len(source))
    return move_row(row, target.ids, source, loss_mask=mask, logprobs=logprobs, prompt_length=boundary)


def untrained_turns(evidence: Evidence, chain: Sequence[int], findings: Sequence[Finding]) -> set[int]:
    """Turns of which the row holds tokens but trains none: a choice of its writer, which repairs respect.

    A mask that trains tokens but no sampled ones is no choice but wrong as a whole. RecordError if the mask may be
    inverted.
    """
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return set()
    # A mask that is wrong as a whole shows no choice; one that trains nothing may have been emptied on purpose.
    if any(
        (f.code == "MSK403" and f.hit.cause != "all zeros") or f.hit.cause.startswith("slid") for f in findings
    ):
        return set()
    if may_be_inverted(evidence):
        raise RecordError(PERHAPS_INVERTED)
    left_out = set()
    turns_in_row = np.unique(view.turn[view.turn >= 0]).tolist()
    for number in turns_in_row:
        at = np.flatnonzero(view.turn == number)
        if not row.loss_mask[at[0] : at[-1] + 1].any():
            left_out.add(number)
    wrong = len(left_out) == len(turns_in_row) and bool(row.loss_mask.any())
    return set() if wrong else left_out & set(chain)


def may_be_intended(finding: Finding) -> bool:
    """Whether a finding only says that a mask leaves sampled tokens out, which its writer may have intended."""
    return finding.code in ("MSK402", "MSK404") and finding.severity < Severity.ERROR


def turn_end_ids(evidence: Evidence) -> frozenset[int]:
    """Ids that end a turn; without a tokenizer, the last ids of the completions."""
    if evidence.end_ids:
        return evidence.end_ids
    completions = [turn.completion_ids for turn in evidence.rollout.turns if turn.finish_reason != "length"]
    return frozenset(int(ids[-1]) for ids in completions if ids is not None and len(ids))


def _drop_strays(values: Logprobs, row: TrainingRow, target: ChainTokens, turns: Sequence[Turn]) -> Logprobs:
    """The values of a shifted column, without those that it moved onto tokens that were not sampled.

    They become the fill, the most frequent entry at such tokens. Without a fill, only values that equal one of a
    call are known to have moved.
    """
    unsampled = target.turn < 0
    rest, counts = np.unique(values[unsampled], return_counts=True)
    fill = row.sentinel
    if fill is None and len(counts) and 2 * counts.max() > counts.sum():
        fill = float(rest[counts.argmax()])
    if fill is not None:
        return np.where(unsampled & np.isfinite(values), fill, values)
    sampled_values = [turn.completion_logprobs for turn in turns if turn.completion_logprobs is not None]
    return np.where(unsampled & np.isin(values, np.concatenate(sampled_values)), np.nan, values)


def _old_positions(old: Ids, view: RowView | None, target: ChainTokens) -> Offsets:
    """`[T]` the position of each new token in the old row; -1 if it was not there."""
    source = np.full(len(target.ids), -1, np.int64)
    anchors = [(-1, -1)]  # (old, new) positions of the same sampled token
    if view is not None:
        sampled = np.flatnonzero(target.turn >= 0).tolist()
        keys = zip(target.turn[sampled].tolist(), target.offset[sampled].tolist(), strict=True)
        new_position = dict(zip(keys, sampled, strict=True))
        for position in np.flatnonzero(view.turn >= 0).tolist():
            new = new_position.get((int(view.turn[position]), int(view.turn_offset[position])))
            if new is not None and new > anchors[-1][1]:
                source[new] = position
                anchors.append((position, new))
    anchors.append((len(old), len(target.ids)))
    for (o1, n1), (o2, n2) in pairwise(anchors):
        # Between two sampled tokens, equal tokens are paired in order: from both ends, then in between.
        for start, other, size in paired_runs(old[o1 + 1 : o2], target.ids[n1 + 1 : n2], longest=4096):
            first = n1 + 1 + other
            source[first : first + size] = o1 + 1 + start + np.arange(size)
    return source


UNTRAINED = frozenset({"MSK402", "MSK404"})
"""Rules that report sampled tokens which a repair took out of the loss on purpose."""


def with_row(evidence: Evidence, row: TrainingRow) -> tuple[RepairedRollout, ...]:
    """The rollout with another training row, as the only part of a proposal."""
    return (unrepaired(replace(evidence.rollout, training_row=row)),)


def column_of(row: TrainingRow, role: ColumnRole) -> Column | None:
    """The first column of this role whose length fits; None if there is none."""
    fitting = (column for column in row.columns if column.role is role and column.alignment is not None)
    return next(fitting, None)


def edit_row(row: TrainingRow, *, loss_mask: Mask | None = None, logprobs: Logprobs | None = None) -> TrainingRow:
    """The row with this mask or these logprobs, `[T]`; everything else stays.

    RecordError if a column with entries for trained tokens only would need entries for others.
    """
    mask = row.loss_mask if loss_mask is None else loss_mask
    compact = [column.name for column in row.columns if column.alignment is Alignment.SAMPLED]
    if compact and mask is not None and row.loss_mask is not None and (mask & ~row.loss_mask).any():
        raise RecordError(f"column {compact[0]!r} holds trained tokens only and has no entry for others")
    new = move_row(
        row,
        row.token_ids,
        np.arange(len(row.token_ids)),
        loss_mask=mask,
        logprobs=row.logprobs if logprobs is None else logprobs,
        prompt_length=row.prompt_length,
    ).row
    changed = {ColumnRole.LOSS_MASK: loss_mask is not None, ColumnRole.LOGPROBS: logprobs is not None}
    columns = tuple(
        moved if changed.get(old.role) or old.alignment is Alignment.SAMPLED else old
        for old, moved in zip(row.columns, new.columns, strict=True)
    )
    return replace(new, columns=columns)
