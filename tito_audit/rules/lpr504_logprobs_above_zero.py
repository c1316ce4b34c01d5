"""LPR504: logprobs above zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._logprobs import SampledValues, sampled_values
from tito_audit.rules._words import counted
from tito_audit.terminal.words import decimal

_TOLERANCE = 1e-6


@rule(
    "LPR504",
    Severity.ERROR,
    headline="{n} with logprobs above zero",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
    silent=Verified.LOGPROBS,
)
def logprobs_above_zero(evidence: Evidence) -> Iterator[Hit]:
    """Logprobs above zero.

    ## What it finds
    Values greater than 0.000001 in a completion or under the loss mask. When all values are, it is one finding
    that says what the column looks like: probabilities, or logprobs that lost their sign. The sentinel 1.0 belongs
    to LPR505.

    ## Why it matters
    The logarithm of a probability is never above zero, so the column holds something else: probabilities, negative
    log-likelihoods, rewards. Importance ratios computed from it are wrong everywhere.

    ## Example
    One value above zero:

    ```text
    error LPR504 turn 0 completion 1:2
      1 logprob is above zero, up to 0.25; no probability has such a logarithm
           0 │4    │!   │<|im_end|>│
                    ^
          id  19    0    2002
     logprob  -0.50 0.25 -0.01
    ```

    ## Repair
    None is certain: convert the column where it is written, or `drop` the rollout.
    """
    for values in sampled_values(evidence):
        if values.all_plausible:
            continue
        above = values.trained & (values.logprobs > _TOLERANCE) & np.isfinite(values.logprobs)
        above &= ~values.placeholders
        if not above.any():
            continue
        in_loss = values.logprobs[values.trained & np.isfinite(values.logprobs)]
        if len(in_loss) > 1 and (in_loss > -_TOLERANCE).all():
            marked = above.nonzero()[0]
            start, end = int(marked[0]), int(marked[-1]) + 1
            yield _hit(evidence, values, start, end, len(marked), in_loss)
            continue
        del in_loss  # not needed while there may be very many
        for start, end in trained_runs(above):
            yield _hit(evidence, values, start, end, end - start, None)


def _hit(
    evidence: Evidence, values: SampledValues, start: int, end: int, count: int, whole: Logprobs | None
) -> Hit:
    highest = float(np.nanmax(values.logprobs[start:end]))
    verb = "is" if count == 1 else "are"
    message, cause = f"{counted(count, 'logprob')} {verb} above zero, up to {decimal(highest, 4)}", "above zero"
    if whole is not None and whole.max() <= 1:
        message += "; every value lies between 0 and 1, so these look like probabilities"
        cause = "looks like probabilities"
    elif whole is not None:
        message += "; none is below zero, so these look like logprobs that lost their sign"
        cause = "looks like a lost sign"
    else:
        message += "; no probability has such a logarithm"
    return values.hit(evidence, start, end, message, cause)
