"""realign: moves logprobs and masks back onto their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.judgement import judgement, restored_mask, row_slide
from tito_audit.evidence.logprobs import shifts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Mask
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, spread
from tito_audit.record.finding import Finding, Where
from tito_audit.record.repaired import unmended
from tito_audit.record.rollout import TrainingRow, Turn
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._counts import fillers, fitted_by_mask, fitted_by_null, fitted_by_values, unprovable
from tito_audit.repairs._same_tokens import UNTRAINED, column_of, restated
from tito_audit.repairs._shift import moved_back
from tito_audit.settings.model import RepairChoices


def _fits(evidence: Evidence, finding: Finding) -> bool:
    """Whether it is a shifted mask, logprobs at an offset, or a column with one entry too many or too few."""
    if finding.code.startswith("MSK"):
        return row_slide(evidence) != 0
    if finding.code == "LPR502":
        return any(shift.offset for shift in shifts(evidence))
    return finding.hit.cause in ("one too many", "one too few")


def _proof(evidence: Evidence, verb: str) -> str:
    """What shows a slide without calls, as a clause."""
    judged = judgement(evidence)
    if judged is not None and judged.slide == evidence.conventions.slide:
        return "as --assume states"
    return f"as the edges of every span {verb}"


@dataclass(slots=True)
class _Work:
    """What was done so far, and what could not be done."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    untrained: int = 0


@repair(
    "realign",
    cures=("LPR501", "LPR502", "MSK401", "MSK402", "MSK404"),
    safety=Safety.SAFE,
    precedence=20,
    fits=_fits,
)
def realign(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Puts logprobs and masks back on their tokens.

    ## What it does
    A logprob column that is some places early or late, or has one entry too many or too few, is moved so that
    every value is at its token. A mask whose trained runs are all shifted off the sampled ones is moved back onto
    them. Values that fell off an end are taken from the calls; where no call has them, their tokens leave the
    loss. Other columns are not touched.

    ## When it is safe
    Always: it moves only what is provable, by the values or the tokens that the calls recorded; or by where
    answers, trained runs and values begin and end, if no convention of a right row explains them and a single
    slide does. It leaves everything else as it is, unless the run states the slide (`--assume`).

    ## What it costs
    Nothing, or the few tokens whose value fell off an end.

    ## Example
    ```text
    tokens    assistant  \\n    Hello  !     <|im_end|>
    logprobs    0.0    -1.3   -0.2  -0.01     0.0       one place early
    logprobs    0.0     0.0   -1.3  -0.2     -0.01      after
    ```
    """
    work = _Work()
    rollout = evidence.rollout
    if _named(findings, "LPR501", Where.COMPLETION):
        turns = tuple(_fitted_turn(evidence, k, turn, work) for k, turn in enumerate(rollout.turns))
        if any(new is not old for new, old in zip(turns, rollout.turns, strict=True)):
            rollout = replace(rollout, turns=turns)
    row = rollout.training_row
    for step, wanted in (
        (_mask_back, _named(findings, "MSK", Where.ROW)),
        (_row_fitted, _named(findings, "LPR501", Where.ROW)),
        (_logprobs_back, _named(findings, "LPR502", Where.ROW)),
    ):
        if wanted and row is not None:
            try:  # what slid is read from the row as logged: a mask moved back alone may leave the logprobs open
                row = step(evidence, row, work)
            except RecordError as error:
                work.problems.append(str(error))
    if row is not rollout.training_row:
        rollout = replace(rollout, training_row=row)
    if rollout is evidence.rollout:
        if work.problems:
            raise RecordError("; ".join(work.problems))
        return None
    adds = UNTRAINED if work.untrained else frozenset()
    return Proposal((unmended(rollout),), notes=tuple(work.notes), adds=adds)


def _named(findings: Sequence[Finding], code: str, where: Where) -> bool:
    return any(one.code.startswith(code) and one.hit.where is where for one in findings)


def _mask_back(evidence: Evidence, row: TrainingRow, work: _Work) -> TrainingRow:
    """The row with every trained run moved back onto the sampled run."""
    view, slide = evidence.row, row_slide(evidence)
    if not slide or view is None or row.loss_mask is None:
        return row
    back = restored_mask(evidence)
    assert back is not None
    shown = "as the calls show" if view.proven else _proof(evidence, "show")
    work.notes.append(f"the mask was moved by {-slide:+d}, {shown}")
    work.untrained += int(np.count_nonzero(view.sampled & ~back))
    # Columns of trained tokens keep their entries: the i-th belongs to the i-th trained token.
    compact = [column for column in row.columns if column.alignment is Alignment.SAMPLED]
    if compact and back.sum() != row.loss_mask.sum():
        raise RecordError(f"column {compact[0].name!r} would lack entries: the row cuts off a trained run")
    bare = tuple(column for column in row.columns if column.alignment is not Alignment.SAMPLED)
    moved = restated(replace(row, columns=bare), loss_mask=back)
    rest = {column.name: _weighted(column, row, back) for column in moved.columns}
    columns = tuple(rest.get(column.name, column) for column in row.columns)
    logprobs = row.logprobs
    for column in compact:
        if column.role is ColumnRole.LOGPROBS:
            logprobs = spread(column.values, Alignment.SAMPLED, full=len(back), trained=back)
    return replace(moved, columns=columns, logprobs=logprobs)


def _weighted(column: Column, row: TrainingRow, trained: Mask) -> Column:
    """A mask of weights with its one weight; RecordError when it had several."""
    old = column_of(row, ColumnRole.LOSS_MASK)
    if old is None or column.name != old.name or old.encoding is not MaskEncoding.FLOAT:
        return column
    weights = np.unique(old.values[old.values > 0])
    if len(weights) > 1:
        raise RecordError(f"column {old.name!r} holds several weights, and which token has which is not recorded")
    return replace(column, values=np.where(column.values > 0, weights[0], 0.0).astype(old.values.dtype))


def _logprobs_back(evidence: Evidence, row: TrainingRow, work: _Work) -> TrainingRow:
    """The row with its logprobs back on their tokens; a token whose value is lost leaves the loss."""
    moved = moved_back(evidence)
    if moved is None:
        return row
    lost = moved.lost if row.loss_mask is None else moved.lost & row.loss_mask
    # The mask without the lost tokens; None when it stays.
    if not lost.any():
        mask = None
    else:
        if row.loss_mask is None or column_of(row, ColumnRole.LOSS_MASK) is None:
            raise RecordError("a value fell off the end, and there is no mask to leave its token out")
        left = row.loss_mask & ~lost
        if not left.any():
            raise RecordError("nothing would be left to train")
        mask = left
    proof = "as the calls prove" if moved.by_calls else _proof(evidence, "prove")
    work.notes.append(f"the logprobs were moved by {-moved.offset:+d}, {proof}")
    if lost.any() and row.loss_mask is not None:
        count = int(lost.sum())
        work.untrained += count
        work.notes.append(f"{count} trained token{'s' * (count > 1)} left the loss, since no value is recorded")
    return restated(row, loss_mask=mask, logprobs=moved.logprobs)


def _row_fitted(evidence: Evidence, row: TrainingRow, work: _Work) -> TrainingRow:
    """The row with a logprob column of the right length; RecordError when nothing proves which entry is wrong."""
    column = next(
        (c for c in row.columns if c.role is ColumnRole.LOGPROBS and c.alignment is None and len(c.values)), None
    )
    if column is None or row.logprobs is not None:
        return row
    full = len(row.token_ids)
    known = evidence.row.expected_logprobs if evidence.row is not None else None
    # The alignments that a logprob column of a row may have, each with the tokens `[T]` it then covers.
    everything = np.ones(len(row.token_ids), np.bool_)
    found = [(Alignment.FULL, everything)]
    if row.prompt_length:
        found.append((Alignment.RESPONSE, np.arange(len(everything)) >= row.prompt_length))
    if row.loss_mask is not None:
        found.append((Alignment.SAMPLED, row.loss_mask))
    for alignment, kept in found:
        values = fitted_by_values(column.values, known[kept]) if known is not None else None
        if values is None and known is None and row.loss_mask is not None:
            if alignment is Alignment.SAMPLED:
                values = fitted_by_null(column.values, int(kept.sum()), column.sentinel)
            else:
                values = fitted_by_mask(column.values, row.loss_mask[kept], column.sentinel)
        if values is not None:
            work.notes.append(_counted(column, len(values)))
            fitted = replace(column, values=values, alignment=alignment)
            columns = tuple(fitted if one is column else one for one in row.columns)
            spread_values = spread(
                values, alignment, full=full, prompt_length=row.prompt_length, trained=row.loss_mask
            )
            return replace(row, logprobs=spread_values, columns=columns)
    raise unprovable(column.name)


def _fitted_turn(evidence: Evidence, number: int, turn: Turn, work: _Work) -> Turn:
    """The call with a logprob column as long as its completion; the call itself when there is no proof."""
    column = next((c for c in turn.columns if c.role is ColumnRole.LOGPROBS and c.alignment is None), None)
    if column is None or turn.completion_ids is None or not len(turn.completion_ids):
        return turn
    length = len(turn.completion_ids)
    by_null = fitted_by_null(column.values, length, column.sentinel)
    # `[C]` the training row's values for the tokens of a turn, NaN where it has none; None if it has no value.
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None or view is None or not view.proven:
        known = None
    else:
        mine = np.flatnonzero(view.turn == number)
        mine = mine[~fillers(row.logprobs[mine], row.sentinel)]
        out = np.full(length, np.nan)
        out[view.turn_offset[mine]] = row.logprobs[mine]
        known = out if np.isfinite(out).any() else None
    values = fitted_by_values(column.values, known) if known is not None else by_null
    contradicted = (
        by_null is not None and values is not None and not np.array_equal(by_null, values, equal_nan=True)
    )
    if values is None or contradicted:
        work.problems.append(str(unprovable(column.name)) + f" (turn {number})")
        return turn
    work.notes.append(f"turn {number}: {_counted(column, length)}")
    fitted = replace(column, values=values, alignment=Alignment.CALL)
    columns = tuple(fitted if one is column else one for one in turn.columns)
    return replace(turn, completion_logprobs=values, columns=columns)


def _counted(column: Column, length: int) -> str:
    what = "the extra entry was removed" if len(column.values) > length else "the missing entry was inserted"
    return f"{column.name}: {what}"
