"""A training row with new mask or logprobs on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, Column, ColumnRole
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import TrainingRow

UNTRAINED = frozenset({"MSK402", "MSK404"})
"""Rules that report sampled tokens that a repair took out of the loss on purpose."""


def with_row(evidence: Evidence, row: TrainingRow) -> tuple[RepairedRollout, ...]:
    """The rollout with another training row."""
    return (unmended(replace(evidence.rollout, training_row=row)),)


def column_of(row: TrainingRow, role: ColumnRole) -> Column | None:
    """The first column of a role whose length fits; None when there is none."""
    fitting = (column for column in row.columns if column.role is role and column.alignment is not None)
    return next(fitting, None)


def restated(row: TrainingRow, *, loss_mask: Mask | None = None, logprobs: Logprobs | None = None) -> TrainingRow:
    """The row with this mask or these logprobs `[T]`; everything else stays.

    RecordError when a column with entries only for trained tokens would need entries for others.
    """
    mask = row.loss_mask if loss_mask is None else loss_mask
    compact = [column.name for column in row.columns if column.alignment is Alignment.SAMPLED]
    if compact and mask is not None and row.loss_mask is not None and (mask & ~row.loss_mask).any():
        raise RecordError(f"column {compact[0]!r} holds trained tokens only and has no entry for others")
    new = moved_row(
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
