"""LPR501: more or fewer logprobs than tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._masks import has_shifted_column
from tito_audit.rules._words import counted


@rule(
    "LPR501",
    Severity.ERROR,
    headline="{n} with too many or too few logprobs",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
)
def logprob_count(evidence: Evidence) -> Iterator[Hit]:
    """More or fewer logprobs than tokens.

    ## What it finds
    A logprob column whose length fits nothing that it could describe: neither the completion of its call, nor the
    row, its response (from the first trained token on, if the log states no `prompt_length`) or its trained
    tokens. A column that could cover a longer response is a warning (`undecided`). Where calls and row can be
    compared, the finding says whether the extra entry is the first or the last.

    ## Why it matters
    With one entry too many or too few, code that truncates or pads to fit gives every value to a neighbouring
    token. Every importance ratio is then wrong, while the loss still looks like a loss.

    ## Example
    One logprob too many for its call:

    ```text
    error LPR501 turn 0 completion 0:3
      `logprobs` has 4 entries for 3 completion tokens, one too many (the first is null, as servers
      write for a token without context); no value can be matched to its token
           0 │4 │!│<|im_end|>│
          id  19 0 2002
      logprobs  ?  -0.50  -0.25  -0.01
    ```

    ## Repair
    `realign` drops the extra entry where the log proves which it is; `splice` takes the values of the calls.
    """
    row, view = evidence.rollout.training_row, evidence.row
    for number, turn in enumerate(evidence.rollout.turns):
        if turn.completion_ids is None or not len(turn.completion_ids):
            continue
        length = len(turn.completion_ids)
        for column in turn.columns:
            if column.role is ColumnRole.LOGPROBS and column.alignment is None:
                row_values = None
                if row is not None and row.logprobs is not None and view is not None:
                    own = (view.turn == number).nonzero()[0]
                    row_values = np.full(length, np.nan)
                    row_values[view.turn_offset[own]] = row.logprobs[own]
                yield _hit(column, Where.COMPLETION, number, {length: "completion token"}, row_values, length)
    expected = view.expected_logprobs if view is not None else None
    for column in row.columns if row is not None else ():
        if row is not None and column.role is ColumnRole.LOGPROBS and column.alignment is None:
            full = len(row.token_ids)
            fits = {full - 1: "target token"} if has_shifted_column(row, ColumnRole.LOSS_MASK) else {full: "token"}
            if row.prompt_length:
                fits[full - row.prompt_length] = "response token"
            if row.loss_mask is not None and row.loss_mask.any():
                from_first = full - int(row.loss_mask.argmax())
                fits.setdefault(int(row.loss_mask.sum()), "trained token")
                count = len(column.values)
                if not (row.prompt_length or evidence.rollout.turns) and from_first + 1 < count < full - 1:
                    # The column may cover a response that begins before the first trained token.
                    message = (
                        f"`{column.name}` has {counted(count, 'entry', 'entries')} for {full:,} tokens; a "
                        f"response of that length would begin {counted(count - from_first, 'token')} before the "
                        "first trained one, and the log does not say so (`prompt_length`)"
                    )
                    yield Hit(Where.ROW, 0, full, message, cause="undecided", severity=Severity.WARNING)
                    continue
                if row.prompt_length is None:
                    fits.setdefault(from_first, "response token")
            yield _hit(column, Where.ROW, None, fits, expected, full)


def _hit(
    column: Column, where: Where, turn: int | None, fits: dict[int, str], row_values: Logprobs | None, end: int
) -> Hit:
    """The finding for a column, compared with the expected length nearest to its own."""
    count = len(column.values)
    # If the format knew a column of exactly this length, it would have been read as one.
    base = min([length for length in fits if length != count] or fits, key=lambda length: abs(length - count))
    extra = count - base
    message = f"`{column.name}` has {counted(count, 'entry', 'entries')} for {counted(base, fits[base])}"
    cause = {1: "one too many", -1: "one too few"}.get(extra, "other count")
    if abs(extra) == 1:
        message += f", {cause}"
    values, front, back = column.values, False, False
    if extra == 1 and row_values is not None and len(row_values) == base:
        finite = np.isfinite(row_values)
        front, back = (
            bool(finite.any() and (np.abs(part[finite] - row_values[finite]) <= ROUNDING).all())
            for part in (values[1:], values[:-1])
        )
    if front != back:
        message += f" (the {'first' if front else 'last'}: without it they equal the values recorded elsewhere)"
    elif extra == 1 and np.isnan(values[0]) and not np.isnan(values[1:]).any():
        message += " (the first is null, as servers write for a token without context)"
    return Hit(where, 0, end, f"{message}; no value can be matched to its token", turn=turn, cause=cause)
