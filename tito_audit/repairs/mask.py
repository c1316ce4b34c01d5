"""mask: takes tokens that must not be trained out of the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.judgement import judgement, may_have_slid
from tito_audit.evidence.masks import WholeMask, agreed_mask, may_be_inverted, whole_mask
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.roles import unclear_tokens
from tito_audit.record.arrays import Mask, Offsets
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import PERHAPS_INVERTED, UNTRAINED, column_of, edit_row, with_row
from tito_audit.settings.model import RepairChoices
from tito_audit.terminal.words import many


@dataclass(frozen=True, slots=True)
class _CoveredTokens:
    """The tokens of the row that one finding covers."""

    positions: Offsets
    """Tokens to take out of the loss."""
    first: int
    """Where the finding begins, even if the row holds none of its tokens."""
    turn: int = -1
    """The turn it lies in, if a call shows it; else -1."""
    in_answer: bool = True
    """Whether it lies in an answer, so that the whole turn can be taken out."""
    diverges: bool = False
    """Whether later tokens stand in another context than the one they were sampled in."""


@repair(
    "mask",
    cures=("TOK", "TPL", "MSK401", "MSK403", "MSK404", "LPR503", "LPR504", "LPR505", "REC003"),
    safety=Safety.SAFE,
    precedence=50,
    # The finding covers a trained token of a row whose mask can leave it out.
    fits=lambda evidence, finding: (
        (row := evidence.rollout.training_row) is not None
        and row.loss_mask is not None
        and column_of(row, ColumnRole.LOSS_MASK) is not None
        and not may_be_inverted(evidence)
        and (place := _covered_tokens(evidence, row, finding)) is not None
        and bool(row.loss_mask[place.positions].any())
    ),
)
def mask(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Takes drifted or unproven tokens out of the loss.

    ## What it does
    Tokens of the row that drifted, trained tokens that were not sampled, tokens outside the vocabulary and tokens
    without a usable logprob (null, infinite, above zero, a placeholder) leave the loss. `--mask-by turn` takes out
    the whole turn around such a token; `first-divergence` takes out everything after the first token that is not
    the one that was sampled. Ids and logprobs stay.

    If that would leave nothing to train, because the mask trains none of the tokens that, according to the
    messages, were sampled, the sampled tokens that have a logprob enter the loss instead.

    ## When it is safe
    Always: what it takes out was not the policy's own choice, or has no probability to weight it by. It adds a
    token to the loss only where messages say that it was sampled and the logprobs lie on exactly these tokens. It
    leaves a gap that may be the only sign of a shifted column, and a mask that may be inverted.

    ## What it costs
    The gradient of these tokens. Sampled tokens after a drifted one were sampled in another context than the
    row's; `span` keeps them in the loss, `first-divergence` does not.

    ## Example
    ```text
    row     ▁Skinny  ▁cat  <|im_end|>
    mask       1       1       1          before: ▁Skinny was sampled as ▁Skin ny
    mask       0       1       1          after
    ```
    """
    row, judged = evidence.rollout.training_row, judgement(evidence)
    if row is None or row.loss_mask is None or column_of(row, ColumnRole.LOSS_MASK) is None:
        return None
    if judged is not None and judged.is_ambiguous and evidence.row is not None and not evidence.row.proven:
        raise RecordError("the row alone does not show how far its columns are shifted")
    if may_be_inverted(evidence):
        raise RecordError(PERHAPS_INVERTED)
    out = np.zeros(len(row.token_ids), np.bool_)
    for finding in findings:
        parts: Iterable[Finding] = (finding,)
        if choices.mask_by == "turn":
            # Each place may widen to other turns, so the places of a folded finding are taken one by one.
            parts = (
                replace(finding, hit=replace(finding.hit, turn=turn, start=start, end=end), folded=None)
                for turn, start, end in finding.spans()
            )
        for part in parts:
            place = _covered_tokens(evidence, row, part)
            if place is None:
                continue
            out[place.positions] = True
            if choices.mask_by == "turn" and place.in_answer:
                out |= _turns_around(evidence, row, place)
            elif choices.mask_by == "first-divergence" and place.diverges:
                out[place.first :] = True
    count = int((row.loss_mask & out).sum())
    if not count:
        return None
    left = row.loss_mask & ~out
    notes = [f"{count:,} of {int(row.loss_mask.sum()):,} trained tokens left the loss"]
    if not left.any():
        # The mask trains no sampled token: they enter the loss if values lie on exactly these tokens or, without
        # logprobs, if messages and headers agree. Rollouts with calls are left to `splice`.
        if judged is None or evidence.row is None or evidence.row.proven:
            raise RecordError("nothing would be left to train")
        if judged.values is None:
            agreed = agreed_mask(evidence)
            if agreed is None or not agreed.any():
                raise RecordError("nothing would be left to train")
            left = agreed
        elif judged.logprobs_in_place:
            left = evidence.row.sampled & judged.values.real
        else:
            raise RecordError("nothing would be left to train, and the logprobs are not on the sampled tokens")
        if not left.any():
            raise RecordError("nothing would be left to train: no sampled token has a logprob")
        notes.append(f"{many(int(left.sum()), 'sampled token')} entered it, none of them trained before")
    return Proposal(with_row(evidence, edit_row(row, loss_mask=left)), notes=tuple(notes), adds=UNTRAINED)


def _covered_tokens(evidence: Evidence, row: TrainingRow, finding: Finding) -> _CoveredTokens | None:
    """The tokens of the row that a finding covers; None if a mask cannot or must not leave them out."""
    hit, view = finding.hit, evidence.row
    if finding.code.startswith(("TOK", "TPL")) and hit.where is not Where.ROW:
        return _drifted_tokens(view, evidence, finding) if view is not None and view.proven else None
    if hit.where is not Where.ROW:
        return None
    if finding.folded is None:
        span, first = np.arange(hit.start, hit.end), hit.start
    else:
        _, starts, ends = finding.folded.places.T
        # The running sum is how many ranges have begun and not ended at each position.
        size = len(row.token_ids) + 1
        opened = np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size)
        span, first = np.flatnonzero(np.cumsum(opened)), int(starts.min())
    if finding.code.startswith(("TOK", "TPL")) or finding.code == "REC003":
        return _CoveredTokens(span, first, diverges=True)
    if finding.code.startswith("MSK"):
        if whole_mask(evidence) is WholeMask.INVERTED:
            return None  # nothing would be left to train; `normalize` inverts the mask
        if may_have_slid(evidence):
            return None  # several slides explain the row, and what lies outside the answers is evidence of them
        unsampled = span[~(view.sampled | unclear_tokens(evidence))[span]] if view is not None else span[:0]
        return _CoveredTokens(unsampled, first, in_answer=False)
    if finding.code in ("LPR503", "LPR505") and may_have_slid(evidence):
        return None  # the gap may be the only sign that the column is shifted
    if finding.code == "LPR504" and row.logprobs is not None and row.loss_mask is not None:
        values = row.logprobs[row.loss_mask & np.isfinite(row.logprobs)]
        if (values > -1e-6).all():  # no trained value is below zero, so none is a logprob
            return _CoveredTokens(np.arange(len(row.token_ids)), 0)
    return _CoveredTokens(span, first)


def _drifted_tokens(view: RowView, evidence: Evidence, finding: Finding) -> _CoveredTokens:
    """The drifted row tokens that correspond to a finding in a prompt or completion of a call.

    These are, for each range of the finding, those between the sampled tokens that the row holds before and after.
    """
    hit, sampled_at = finding.hit, np.flatnonzero(view.turn >= 0)
    starts: dict[int, list[int]] = {}
    for call, begin, _ in finding.spans():
        starts.setdefault(-1 if call is None else call, []).append(begin)
    before = []
    turns, offset = view.turn[sampled_at], view.turn_offset[sampled_at]
    prompts = [0 if (ids := turn.prompt_ids) is None else len(ids) for turn in evidence.rollout.turns]
    for number, begins in starts.items():
        # For each range, how many sampled tokens come before it or before a sampled token that does.
        if hit.where is Where.COMPLETION:
            earlier, same = np.flatnonzero(turns < number), np.flatnonzero(turns == number)
            at = offset[same]
        else:
            earlier, same = np.zeros(0, np.int64), np.flatnonzero(turns < number)
            at = np.array(prompts, np.int64)[turns[same]] + offset[same]
        order = np.argsort(at, kind="stable")
        furthest = np.concatenate([[int(earlier[-1]) if len(earlier) else -1], same[order]])
        before.append(np.maximum.accumulate(furthest)[np.searchsorted(at[order], begins)] + 1)
    gaps = np.unique(np.concatenate(before))
    # Gap n ends at sampled token n and begins after the one before it.
    edges = np.concatenate([[-1], sampled_at, [len(view.turn)]])
    drifted = np.flatnonzero(view.drifted & (view.turn < 0))
    positions = drifted[np.isin(np.searchsorted(sampled_at, drifted), gaps)]
    start, end = edges[gaps[0] : gaps[0] + 2].tolist()
    first = int(positions[0]) if len(positions) and positions[0] < end else start + 1
    in_answer = hit.where is Where.COMPLETION
    turn = hit.turn if in_answer and hit.turn is not None else -1
    return _CoveredTokens(positions, first, turn, in_answer=in_answer, diverges=True)


def _turns_around(evidence: Evidence, row: TrainingRow, place: _CoveredTokens) -> Mask:
    """`[T]` the turns that the covered tokens lie in: by the calls, else by the sampled or trained runs."""
    view, out = evidence.row, np.zeros(len(row.token_ids), np.bool_)
    positions = place.positions if len(place.positions) else np.array([place.first])
    positions = positions[positions < len(out)]
    if view is not None and view.proven:
        turns = {place.turn} if place.turn >= 0 else set(view.turn[positions].tolist())
        for turn in turns - {-1}:
            own = np.concatenate([np.flatnonzero(view.turn == turn), place.positions])
            if len(own):
                out[own.min() : own.max() + 1] = True
        return out
    sampled = row.loss_mask if view is None else view.sampled
    for start, end in trained_runs(np.zeros(0, np.bool_) if sampled is None else sampled):
        if ((positions >= start) & (positions < end)).any():
            out[start:end] = True
    return out
