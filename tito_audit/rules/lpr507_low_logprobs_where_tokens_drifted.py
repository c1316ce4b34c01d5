"""LPR507: logprobs that are very low exactly where tokens drifted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.logprob_values import IMPOSSIBLE, LOWEST_LOGPROB
from tito_audit.evidence.logprobs import ROUNDING, logprob_shifts
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.policy_columns import expand_to_row, trainer_columns
from tito_audit.record.rollout import effective_loss_mask
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._words import head
from tito_audit.terminal.words import decimal, percent

_LOW = -8.0
"""A logprob below which the policy samples a token less than once in 3,000."""
_CHANCE = -2.0
"""Decimal logarithm of the chance below which drift explains where low values lie."""


@rule(
    "LPR507",
    Severity.WARNING,
    headline="{n} with very low logprobs where tokens drifted",
    needs=(Needs.COMPLETIONS, Needs.ROW, Needs.ROW_LOGPROBS | Needs.TRAINER_LOGPROBS),
    silent=Verified.IDS,
)
def low_logprobs_where_tokens_drifted(evidence: Evidence) -> Iterator[Hit]:
    """Logprobs are very low exactly where the tokens drifted.

    ## What it finds
    Rows whose calls prove that tokens in the loss were not sampled, and a column of logprobs, the sampler's or the
    trainer's, that shows what it costs: the median logprob of these tokens is -8 or less, and at least 5 below the
    median of the tokens that were sampled. It is reported only if chance does not explain it: values dealt to the
    row's tokens at random would put so many low ones on drifted tokens less than once in a hundred times. The
    message gives their number, their range and their share of the row's summed logprob. `tito-audit rescore` asks
    the same of a model's values, as the column `rescored_logprobs`.

    ## Why it matters
    The policy would hardly ever sample these tokens, since it writes the same text with others. Their gradients
    are the largest of the row, and their importance ratios clip or explode: a few tokens outweigh all that was
    sampled.

    ## Example
    The trainer's logprobs of re-encoded tokens are very low:

    ```text
    warning LPR507 row 11:12
      2 tokens in the loss were not sampled, with logprobs of -14.2 to -9.5 in `old_log_probs`; the
      median of the 14 that were sampled is -0.15, so 92 % of the row's summed logprob comes from
      drift
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │The│·answer│4 │
                                                                                    === ####### =
          id  2001         314 257 198 17 2002       198 2001         1620      198 322 492     19
          13 │4 │9 │2 │3 │5 │4 │·answer│9 │2 │3 │5 │!│<|im_end|>│
              =  =  =  =  =  =  ======= =  =  =  =  = ==========
          id  19 24 17 18 20 19 492     24 17 18 20 0 2002
      old_log_probs  0  0  0  0  0  0  0  0  0  0  -0.10  -14.20  … 26 entries
    ```

    ## Repair
    None of its own: the repair that cures the drift (`splice`, `fork`) or takes it out of the loss (`mask`) cures
    this too.
    """
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or view is None or not view.proven or not view.drifted.any() or logprob_shifts(evidence):
        return
    inside = effective_loss_mask(row)
    if inside is None:
        return
    columns = [(column.name, expand_to_row(column, row)) for column in trainer_columns(row.columns)]
    if row.logprobs is not None:
        name = next((c.name for c in row.columns if c.role is ColumnRole.LOGPROBS), "logprobs")
        columns.insert(0, (name, row.logprobs))
    for name, values in columns:
        scored = inside & np.isfinite(values) & (values <= ROUNDING) & (values > LOWEST_LOGPROB)
        for fill in (*IMPOSSIBLE, *(() if row.sentinel is None else (row.sentinel,))):
            scored &= values != fill
        drifted = scored & view.drifted & ~view.sampled
        others = values[scored & ~view.drifted & view.sampled]
        low_values = values[drifted]
        if not len(low_values) or len(others) < 8:  # too few to show what is usual in the row
            continue
        middle, usual = float(np.median(low_values)), float(np.median(others))
        # 5 below the others is a factor of 150 in probability.
        if middle > _LOW or middle > usual - 5 or _chance(low_values, others) >= _CHANCE:
            continue
        share = float(low_values.sum() / (low_values.sum() + others.sum()))
        low, high = float(low_values.min()), float(low_values.max())
        what = (
            f"logprobs of {decimal(low, 3)} to {decimal(high, 3)}"
            if len(low_values) > 1
            else f"a logprob of {decimal(low, 3)}"
        )
        subject = (
            "1 token in the loss was" if len(low_values) == 1 else f"{len(low_values)} tokens in the loss were"
        )
        message = (
            f"{subject} not sampled, with {what} in `{name}`; the median of the {len(others)} that were "
            f"sampled is {decimal(usual, 3)}, so {percent(share)} of the row's summed logprob comes from drift"
        )
        lowest = int(drifted.nonzero()[0][low_values.argmin()])
        start, end = next(run for run in trained_runs(drifted) if run[0] <= lowest < run[1])
        side = head(evidence, row.token_ids[start:end])
        yield Hit(Where.ROW, start, end, message, cause="low where drifted", recorded=side)


def _chance(drifted: Logprobs, others: Logprobs) -> float:
    """The decimal logarithm of the chance that at least this many of the low values fall on the drifted tokens."""
    low = int((drifted <= _LOW).sum())
    all_low, size, drawn = low + int((others <= _LOW).sum()), len(drifted) + len(others), len(drifted)
    ways = sum(
        math.exp(_choose(all_low, k) + _choose(size - all_low, drawn - k) - _choose(size, drawn))
        for k in range(low, min(all_low, drawn) + 1)
        if drawn - k <= size - all_low
    )
    return math.log10(ways) if ways > 0 else -math.inf


def _choose(size: int, drawn: int) -> float:
    """The natural logarithm of the number of ways to draw `drawn` out of `size`."""
    return math.lgamma(size + 1) - math.lgamma(drawn + 1) - math.lgamma(size - drawn + 1)
