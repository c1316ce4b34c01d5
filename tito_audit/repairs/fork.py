"""fork: one training row for each unbroken run of calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import attrgetter

from tito_audit.chains.fork import fork_cost, fork_rows
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import empty_ids
from tito_audit.record.finding import Finding
from tito_audit.record.move_row import MovedRow
from tito_audit.record.repaired import RepairedRollout
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import chain_tokens, rebuild_row, untrained_turns
from tito_audit.settings.model import RepairChoices

_BREAKS = attrgetter("kind.breaks")
_UNTRAINED = frozenset({"MSK403"})
"""Rules that report a part whose turns the row had already left out of the loss."""


@repair(
    "fork",
    cures=("SEQ", "TOK", "TPL"),
    safety=Safety.SAFE,
    precedence=15,
    fits=lambda evidence, finding: (
        not finding.code.startswith(("MSK", "LPR")) and any(map(_BREAKS, evidence.links))
    ),
)
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
    parts: list[RepairedRollout] = []
    moves: list[MovedRow] = []
    for row in rows:
        # A rollout of its own, without the calls that an earlier row holds.
        own = tuple(k for k in row.calls if k not in placed)
        placed.update(own)
        part = replace(rollout, turns=tuple(turns[k] for k in own))
        if rollout.training_row is not None:
            trained = set(row.trained) - untrained_turns(evidence, row.calls, findings)
            target = chain_tokens(turns, row.calls, empty_ids())
            moves.append(rebuild_row(rollout.training_row, evidence.row, target, turns, trained))
            part = replace(part, training_row=moves[-1].row)
        parts.append(RepairedRollout(part, own))
    row_count, more_tokens = fork_cost(calls, rows)
    silent = [k for k in range(len(turns)) if k not in placed]
    masks = [moved.row.loss_mask for moved in moves if moved.row.loss_mask is not None]
    return Proposal(
        tuple(parts),
        notes=tuple(f"turn {k} sampled nothing and is in no row" for k in silent),
        cost=f"{row_count} rows instead of 1, {more_tokens:,} more tokens in all",
        more_tokens=more_tokens,
        stale=tuple(dict.fromkeys(chain.from_iterable(moved.stale for moved in moves))),
        dropped=tuple(dict.fromkeys(chain.from_iterable(moved.dropped for moved in moves))),
        adds=frozenset() if all(mask.any() for mask in masks) else _UNTRAINED,
    )
