"""fork: one training row for each unbroken run of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tito_audit.chains.fork import ForkedRow, fork_cost, fork_rows
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import empty_ids
from tito_audit.record.finding import Finding
from tito_audit.record.moved import Moved
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Rollout
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import chain_tokens, rebuilt_row, untrained_turns
from tito_audit.settings.model import RepairChoices

_UNTRAINED = frozenset({"MSK403"})
"""Rules that report a part whose turns the row had already left out of the loss."""


def _fits(evidence: Evidence, finding: Finding) -> bool:
    """Whether a call of the rollout does not continue the calls before it."""
    return not finding.code.startswith(("MSK", "LPR")) and any(link.kind.breaks for link in evidence.links)


@repair("fork", cures=("SEQ", "TOK", "TPL"), safety=Safety.SAFE, precedence=15, fits=_fits)
def fork(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Makes one training row of each unbroken run of calls, in the tokens that were seen and sampled.

    ## What it does
    A call whose prompt does not start with everything before it starts a new row. Each row is the last prompt and
    completion of its run; what earlier runs sampled is context in it, in the tokens that the sampler was given. A
    sampled turn is trained once, in the first row that holds it.

    ## When it is safe
    Always: every row is a context that the sampler really saw, and every trained token was sampled in it, with its
    own logprob.

    ## What it costs
    Rows and tokens: the shared history is computed once for each row; the repair says how many. Whatever belongs
    to the whole rollout (its reward, its group) is repeated in each row, so a trainer that averages over rows
    gives a forked rollout more weight.

    ## Example
    ```text
    call 0   prompt A       samples B
    call 1   prompt A B' C  samples D       B' is B re-encoded
    rows     A [B]     and     A B' C [D]
    ```
    """
    rollout = evidence.rollout
    turns = rollout.turns
    calls = [
        (turn.prompt_ids, turn.completion_ids)
        for turn in turns
        if turn.prompt_ids is not None and turn.completion_ids is not None
    ]
    if len(calls) < len(turns):
        return None
    rows = fork_rows(calls)
    if len(rows) < 2:
        return None
    placed: set[int] = set()
    parts = [_part(evidence, row, findings, placed) for row in rows]
    row_count, more_tokens = fork_cost(calls, rows)
    silent = [k for k in range(len(turns)) if k not in placed]
    masks = [moved.row.loss_mask for _, moved in parts if moved and moved.row.loss_mask is not None]
    return Proposal(
        tuple(mended for mended, _ in parts),
        notes=tuple(f"turn {k} sampled nothing and is in no row" for k in silent),
        cost=f"{row_count} rows instead of 1, {more_tokens:,} more tokens in all",
        more_tokens=more_tokens,
        stale=_union(moved.stale for _, moved in parts if moved),
        dropped=_union(moved.dropped for _, moved in parts if moved),
        adds=frozenset() if all(mask.any() for mask in masks) else _UNTRAINED,
    )


def _part(
    evidence: Evidence, row: ForkedRow, findings: Sequence[Finding], placed: set[int]
) -> tuple[RepairedRollout, Moved | None]:
    """One run of calls as a rollout of its own, without the calls that an earlier row holds."""
    rollout = evidence.rollout
    calls = tuple(k for k in row.calls if k not in placed)
    placed.update(calls)
    turns = tuple(rollout.turns[k] for k in calls)
    moved = _row(evidence, row, findings)
    part: Rollout = replace(rollout, turns=turns, training_row=moved.row if moved else None)
    return RepairedRollout(part, calls), moved


def _row(evidence: Evidence, part: ForkedRow, findings: Sequence[Finding]) -> Moved | None:
    row = evidence.rollout.training_row
    if row is None:
        return None
    left_out = untrained_turns(evidence, part.calls, findings)
    target = chain_tokens(evidence.rollout.turns, part.calls, empty_ids())
    return rebuilt_row(row, evidence.row, target, evidence.rollout.turns, set(part.trained) - left_out)


def _union(columns: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in columns for name in names))  # type: ignore[attr-defined]
