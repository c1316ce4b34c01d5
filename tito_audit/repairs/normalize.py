"""normalize: one mask convention, one sentinel, one padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.judgement import judgement, may_have_slid
from tito_audit.evidence.logprob_values import IMPOSSIBLE
from tito_audit.evidence.logprobs import logprob_shifts
from tito_audit.evidence.masks import WholeMask, whole_mask
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Mask
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding
from tito_audit.record.finding import Finding
from tito_audit.record.rollout import Padding, TrainingRow
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import UNTRAINED, column_of, edit_row, with_row
from tito_audit.settings.model import RepairChoices


@repair(
    "normalize",
    cures=("MSK403",),
    safety=Safety.SAFE,
    precedence=60,
    # An inverted mask is the only fault that shows by itself what the row should be.
    fits=lambda evidence, _: whole_mask(evidence) is WholeMask.INVERTED,
    chosen=lambda choices: (choices.sentinel, choices.mask_style, choices.padding) != (None, None, None),
)
def normalize(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Writes masks, sentinels and padding in one convention.

    ## What it does
    An inverted mask is inverted back. Everything else is chosen: `--sentinel` is the value written where no
    logprob exists, in the row's logprob column at tokens that were neither sampled nor trained; `--mask-style` is
    how the mask marks trained tokens (`labels`: their id, else -100; `binary`, `float`, `bool`); `--padding` is
    the side on which the row is padded, its width unchanged.

    ## When it is safe
    Always: which tokens are trained, and their logprobs, stay as they are. For an inverted mask, the calls or the
    roles of the tokens say what it should be.

    ## What it costs
    Logprobs of prompt tokens, where the log has them and a sentinel is chosen. A mask with several different
    weights keeps its style, since no other can express them.

    ## Example
    ```text
    mask      -100  -100  9707   0        labels
    mask         0     0     1   1        binary
    logprobs   1.0   1.0  -0.4  -0.1      sentinel 1.0
    logprobs   0.0   0.0  -0.4  -0.1      sentinel 0.0
    ```
    """
    row = evidence.rollout.training_row
    if row is None:
        return None
    notes: list[str] = []
    before = row
    view, may_invert = evidence.row, bool(findings) and whole_mask(evidence) is WholeMask.INVERTED
    if may_invert and view is not None and row.loss_mask is not None:
        judged = judgement(evidence)
        if column_of(row, ColumnRole.LOSS_MASK) is None:
            raise RecordError("the row has no mask column that could be inverted back")
        if judged is not None and judged.values is not None and not judged.logprobs_in_place:
            raise RecordError(
                "the logprobs are not on the sampled tokens, and nothing else shows what they belong to"
            )
        mask = view.sampled if view.proven else view.sampled & ~row.loss_mask
        if row.logprobs is not None and all(column.alignment is not Alignment.SAMPLED for column in row.columns):
            # A token without a logprob has no ratio to train with.
            mask = mask & np.isfinite(row.logprobs) & ~np.isin(row.logprobs, IMPOSSIBLE)
        if not mask.any():
            raise RecordError("nothing would be left to train: no sampled token has a logprob")
        notes.append("the inverted mask was inverted back")
        row = edit_row(row, loss_mask=mask)
    row = _with_sentinel(evidence, row, choices, notes)
    row = _with_mask_style(row, choices, notes)
    total = row.padding.left + row.padding.right
    wanted = {"left": Padding(total, 0), "right": Padding(0, total), "none": Padding()}.get(choices.padding or "")
    if wanted is not None and wanted != row.padding:
        side = "left out" if choices.padding == "none" else f"on the {choices.padding}"
        notes.append(f"padding of {total:,} is {side}")
        row = replace(row, padding=wanted)
    if row is before:
        return None
    inverted = row.loss_mask is not before.loss_mask
    return Proposal(with_row(evidence, row), notes=tuple(notes), adds=UNTRAINED if inverted else frozenset())


def _with_sentinel(evidence: Evidence, row: TrainingRow, choices: RepairChoices, notes: list[str]) -> TrainingRow:
    """The row with the chosen sentinel at every token that was neither sampled nor trained."""
    column = column_of(row, ColumnRole.LOGPROBS)
    view = evidence.row
    masks = [mask for mask in (row.loss_mask, view.sampled if view is not None else None) if mask is not None]
    if choices.sentinel is None or column is None or row.logprobs is None or not masks:
        return row
    unused = ~np.logical_or.reduce(masks)
    value = np.nan if choices.sentinel == "null" else float(choices.sentinel)
    part = _cut_to_column(unused, column, row)
    if part is None:
        return row
    if logprob_shifts(evidence) or may_have_slid(evidence):
        raise RecordError(
            f"column {column.name!r} may be shifted, and the values that show it would be overwritten: run "
            "`realign` first"
        )
    values = np.where(part, value, column.values)
    changed = int((~(values == column.values) & ~(np.isnan(values) & np.isnan(column.values))).sum())
    if not changed:
        return row
    notes.append(f"{changed:,} entries of {column.name} became {'null' if np.isnan(value) else f'{value:g}'}")
    sentinel = None if np.isnan(value) else value
    new = replace(column, values=values.astype(column.values.dtype), sentinel=sentinel)
    columns = tuple(new if each is column else each for each in row.columns)
    if column.alignment is Alignment.RESPONSE:  # without entries for the prompt
        unused[: row.prompt_length] = False
    elif column.alignment is Alignment.SHIFTED:
        unused[:1] = False
    logprobs = np.where(unused, value, row.logprobs)
    return replace(row, logprobs=logprobs, sentinel=sentinel, columns=columns)


def _cut_to_column(entries: Mask, column: Column, row: TrainingRow) -> Mask | None:
    """The entries, `[T]`, that the column covers; None if it covers trained tokens only."""
    if column.alignment is Alignment.FULL:
        return entries
    if column.alignment is Alignment.RESPONSE:
        return entries[row.prompt_length :]
    return entries[1:] if column.alignment is Alignment.SHIFTED else None


def _with_mask_style(row: TrainingRow, choices: RepairChoices, notes: list[str]) -> TrainingRow:
    """The row with its mask in the chosen style."""
    column = column_of(row, ColumnRole.LOSS_MASK)
    if choices.mask_style is None or column is None or row.loss_mask is None:
        return row
    style = MaskEncoding(choices.mask_style)
    if column.encoding is style:
        return row
    weights = column.values[column.values > 0] if column.encoding is MaskEncoding.FLOAT else np.ones(1)
    if (weights != 1).any():
        raise RecordError(f"column {column.name!r} holds weights, which the style {style} cannot express")
    trained = _cut_to_column(row.loss_mask, column, row)
    if trained is None:
        return row
    ids = row.token_ids[len(row.token_ids) - len(trained) :]
    values = {
        MaskEncoding.LABELS: np.where(trained, ids, -100).astype(np.int64),
        MaskEncoding.BINARY: trained.astype(np.int64),
        MaskEncoding.FLOAT: trained.astype(np.float64),
        MaskEncoding.BOOL: trained.copy(),
    }[style]
    notes.append(f"{column.name} is written as {style}, not {column.encoding}")
    new = replace(column, values=values, encoding=style)
    return replace(row, columns=tuple(new if each is column else each for each in row.columns))
