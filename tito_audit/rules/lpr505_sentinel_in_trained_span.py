"""LPR505: trained tokens whose logprob is a placeholder."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.rollout import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._logprobs import SampledValues, sampled_values
from tito_audit.rules._words import counted, shown

_EDGE_ZEROS = 8
"""Exact zeros at an edge that are more than the certain end of an answer (`"}]<|im_end|>`)."""
_OTHERS = 3
"""Values that have to stand before zeros at the end of a stretch, to tell what is usual in it."""
_NEARLY_CERTAIN = 1e-3


@rule("LPR505", Severity.ERROR, needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,))
def sentinel_in_trained_span(evidence: Evidence) -> Iterator[Hit]:
    """Sampled or trained tokens carry a placeholder instead of a logprob.

    ## What it finds
    1.0, -9999 or the format's own sentinel in a completion or under the loss mask; 0.0 where the call
    recorded another value. Without calls an exact 0.0 is suspect, not proof, since a certain token
    reaches it: eight or more at the start or the end of a sampled stretch are a warning, and only if no value of
    the same stretch is nearly zero on its own account.

    ## Why it matters
    A placeholder is read as a probability: 0.0 says that the token was certain, 1.0 gives a ratio of 0.37
    to whatever the trainer computes, -9999 an infinite one. Short columns that were padded to fit look
    like this.

    ## Example
    ```text
    tokens    Hello   !     <|im_end|>
    mask        1     1         1
    logprobs  -0.4  -0.01      1.0       padded
    ```

    ## Repair
    `splice` takes the values of the calls; `mask` takes the tokens out of the loss.
    """
    for values in sampled_values(evidence):
        if values.shifted:
            continue
        for start, end in () if values.ordinary else trained_runs(values.placeholders & values.trained):
            shows = f"{values.logprobs[start]:g}"
            yield _hit(evidence, values, start, end, f"the placeholder {shows}", f"sentinel {shows}", None)
        if values.expected is not None:
            for start, end in trained_runs(_refuted(values, values.expected)):
                said = "0 where the call recorded another value"
                yield _hit(evidence, values, start, end, said, "sentinel 0", None)
        else:
            for start, end in _suspect(values):
                said = "exactly 0, which reads like padding"
                yield _hit(evidence, values, start, end, said, "zeros at the edge", Severity.WARNING)


def _hit(
    evidence: Evidence,
    values: SampledValues,
    start: int,
    end: int,
    said: str,
    cause: str,
    severity: Severity | None,
) -> Hit:
    has = "has" if end - start == 1 else "have"
    return Hit(
        values.where,
        start,
        end,
        f"{counted(end - start, 'token')} in the loss {has} a logprob of {said}; it is weighed by a "
        "probability that was never recorded",
        turn=values.turn,
        cause=cause,
        severity=severity,
        recorded=shown(evidence, values.ids[start:end]),
    )


def _refuted(values: SampledValues, expected: Logprobs) -> Mask:
    """`[N]` True where a value in the loss is zero and a call says that it is not close to zero."""
    proven = values.zeros & values.trained & (expected < -ROUNDING)
    for start, end in (run for parts in values.constant_stretches for run in parts):
        # A stretch of nothing but zeros is LPR506's.
        proven[start:end] = False
    return np.asarray(proven)


def _suspect(values: SampledValues) -> Iterator[tuple[int, int]]:
    """Exact zeros at the edges of sampled stretches that nothing else in the stretch makes likely."""
    for start, end in values.runs:
        if values.logprobs[start] != 0 and values.logprobs[end - 1] != 0:
            continue  # most stretches have no zero at an edge
        inside = values.zeros[start:end]
        # All zero is LPR506's; a value that nearly reaches zero makes exact ones likely.
        if inside.all() or not inside.any() or _certain(values.logprobs[start:end]):
            continue
        head = int(np.argmin(inside))
        tail = int(np.argmin(inside[::-1]))
        if inside.sum() != head + tail:
            continue
        if head >= _EDGE_ZEROS:
            yield start, start + head
        if tail >= _EDGE_ZEROS and end - start - tail >= _OTHERS:
            yield end - tail, end


def _certain(logprobs: Logprobs) -> bool:
    """True when some value is nearly zero without being it."""
    negative_zero = (logprobs == 0) & np.signbit(logprobs)
    near = (logprobs != 0) & (np.abs(logprobs) < _NEARLY_CERTAIN)
    return bool((near | negative_zero).any())
