"""rescore: fills in a model's logprobs where the log has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.logprobs import logprob_shifts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, Column, ColumnRole
from tito_audit.record.finding import Finding
from tito_audit.record.model_scores import RECORDED, ModelScores
from tito_audit.record.repaired import unrepaired
from tito_audit.record.rollout import TrainingRow, Turn
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import column_of, edit_row
from tito_audit.settings.model import RepairChoices
from tito_audit.terminal.words import many


@repair(
    "rescore",
    cures=("LPR503", "LPR505"),
    safety=Safety.DEPENDS,
    precedence=55,
    chosen=lambda choices: choices.rescored is not None,
    by_model=True,
)
def rescore(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Fills in a model's logprobs where the log has none.

    ## What it does
    A model scores the recorded tokens (`--provider`), each given exactly the tokens before it. Its logprob is
    written where a sampled token has none: null, infinite, or a placeholder. A token of the training row that a
    call sampled gets its call's logprob, so both stay equal. If the log has no column at all, one is added
    (`logprobs`, `completion_logprobs`), except in tables, whose columns are fixed. `tito-audit rescore -o OUT`
    does the same, and with `--unsafe` also replaces recorded logprobs, which are then kept in a second column,
    `recorded_logprobs`.

    ## When it is safe
    If it only fills gaps. Recorded logprobs are replaced only with `--unsafe`: they are what the sampler computed,
    and another model computes something else. A column that may be off its tokens is refused: run `realign` first.

    ## What it costs
    The filled logprobs come from the model and weights named in the `tito_audit` column. If the sampler had other
    weights, precision or temperature, ratios against them are not those of the run; `tito-audit rescore` shows how
    far the two agree where the log has logprobs.

    ## Example
    ```text
    completion  Hello  !      <|im_end|>
    logprobs    -0.4   null   -0.02
    logprobs    -0.4   -0.13  -0.02         as the model says
    ```
    """
    scores = choices.rescored(evidence) if choices.rescored is not None else None
    if not isinstance(scores, ModelScores):
        return None
    turns, filled, replaced = [*evidence.rollout.turns], 0, 0
    for number, turn in enumerate(evidence.rollout.turns):
        model, old = scores.calls.get(number), turn.completion_logprobs
        if model is None or turn.completion_ids is None:
            continue
        stated = scores.recorded.get(number, np.zeros(len(model), np.bool_))
        values = _merge(old, model, stated, scores)
        if values is None:
            continue
        changed = int((_differs(old, values) & stated).sum())
        filled += int((np.isfinite(model) & ~stated).sum())
        replaced += changed
        columns = list(turn.columns)
        at = next((k for k, column in enumerate(columns) if column.role is ColumnRole.LOGPROBS), None)
        if at is None:
            _require_new_column(scores)
            columns.append(Column("completion_logprobs", ColumnRole.LOGPROBS, values, Alignment.CALL))
        else:
            columns[at] = replace(columns[at], values=values, alignment=Alignment.CALL)
            if changed and old is not None:
                _require_new_column(scores)
                columns.append(Column(RECORDED, ColumnRole.OTHER, old, Alignment.CALL))
        turns[number] = replace(turn, completion_logprobs=values, columns=tuple(columns))
    row = evidence.rollout.training_row
    if row is not None and scores.row is not None:
        new = _rescore_row(evidence, row, scores, turns)
        if new is not row:
            assert new.logprobs is not None
            differs = _differs(row.logprobs, new.logprobs)
            stated = scores.recorded.get(None, np.zeros(len(differs), np.bool_))
            filled += int((differs & ~stated).sum())
            replaced += int((differs & stated).sum())
        row = new
    same = all(new is old for new, old in zip(turns, evidence.rollout.turns, strict=True))
    if same and row is evidence.rollout.training_row:
        return None
    if logprob_shifts(evidence):
        raise RecordError("the row's logprobs are off their tokens, or may be: run `realign` first")
    rollout = replace(evidence.rollout, training_row=row, turns=tuple(turns))
    notes = [f"{many(filled, 'sampled token')} without a logprob got one from {scores.source}"] if filled else []
    if replaced:
        notes.append(
            f"{replaced:,} recorded logprobs were replaced with those of {scores.source}; {RECORDED} keeps them"
        )
    unsafe = "recorded logprobs would be replaced" if replaced else ""
    return Proposal(
        (unrepaired(rollout),),
        Safety.UNSAFE if unsafe else Safety.SAFE,
        unsafe,
        tuple(notes),
        adds=frozenset({"LPR507", "LPR509"}),
    )


def _merge(recorded: Logprobs | None, model: Logprobs, stated: Mask, scores: ModelScores) -> Logprobs | None:
    """The recorded values with those of the model where wanted; None if nothing changes."""
    old = np.full(len(model), np.nan) if recorded is None else recorded
    take = np.isfinite(model) & (~stated | scores.replaces)
    new = np.where(take, model, old)
    return None if not _differs(recorded, new).any() else new


def _differs(recorded: Logprobs | None, new: Logprobs) -> Mask:
    """`[N]` True where the new value is another one; NaN equals NaN."""
    if recorded is None:
        return np.isfinite(new)
    return np.asarray(~((recorded == new) | (np.isnan(recorded) & np.isnan(new))))


def _rescore_row(evidence: Evidence, row: TrainingRow, scores: ModelScores, turns: Sequence[Turn]) -> TrainingRow:
    """The row with its gaps filled, from the calls that sampled the tokens, else from the model."""
    assert scores.row is not None
    stated = scores.recorded.get(None, np.zeros(len(row.token_ids), np.bool_))
    view, model = evidence.row, scores.row.copy()
    if view is not None and view.proven:
        for number, turn in enumerate(turns):
            if turn.completion_logprobs is not None:
                at = np.flatnonzero((view.turn == number) & np.isfinite(scores.row))
                values = turn.completion_logprobs[view.turn_offset[at]]
                model[at] = np.where(np.isfinite(values), values, model[at])
    new = _merge(row.logprobs, model, stated, scores)
    if new is None:
        return row
    if column_of(row, ColumnRole.LOGPROBS) is None:
        if row.logprobs is None and any(each.role is ColumnRole.LOGPROBS for each in row.columns):
            raise RecordError("the row's logprobs do not fit its tokens, so which belongs to which is unknown")
        _require_new_column(scores)
        column = Column("logprobs", ColumnRole.LOGPROBS, new, Alignment.FULL)
        return replace(row, logprobs=new, columns=(*row.columns, column))
    out = edit_row(row, logprobs=new)
    if row.logprobs is not None and (_differs(row.logprobs, new) & stated).any():
        _require_new_column(scores)
        recorded = Column(RECORDED, ColumnRole.OTHER, row.logprobs, Alignment.FULL)
        out = replace(out, columns=(*out.columns, recorded))
    return out


def _require_new_column(scores: ModelScores) -> None:
    """Raise RecordError if no column may be added."""
    if not scores.adds:
        raise RecordError("a column would be added, and the columns of a table are fixed: write the log as JSONL")
