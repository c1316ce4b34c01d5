"""LPR506: logprobs that are all the same."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.evidence.model import Evidence, Sound
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._logprobs import SampledValues, sampled_values


@rule("LPR506", Severity.ERROR, needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,), silent=Sound.LOGPROBS)
def constant_logprobs(evidence: Evidence) -> Iterator[Hit]:
    """All logprobs of a sampled stretch are equal or zero.

    ## What it finds
    At least 4 sampled tokens, in one stretch or the whole row, that share one value (error), or at least 8 that
    are exactly 0.0: an error when all trained tokens of a row are, or when a call recorded other values; else a
    warning, since greedy decoding of certain tokens can produce one such stretch.

    ## Why it matters
    A sampler gives every token its own probability. Equal values are a default that was never filled in. Zeros say
    that every token was certain, so the importance ratio becomes the trainer's own probability.

    ## Example
    ```text
    completion  The  answer  is  4  .  It  is  even  <|im_end|>
    logprobs    0.0   0.0   0.0 0.0 0.0 0.0 0.0 0.0     0.0
    ```

    ## Repair
    `splice` takes the values of the calls; without calls, `drop` removes the row.
    """
    for values in sampled_values(evidence):
        for parts in values.constant_stretches:
            yield _hit(evidence, values, parts)


def _hit(evidence: Evidence, values: SampledValues, parts: list[tuple[int, int]]) -> Hit:
    start, end = parts[0][0], parts[-1][1]
    count, value = sum(b - a for a, b in parts), values.logprobs[start]
    severity = Severity.ERROR
    message = f"all {count} logprobs are {value:.4g}; a sampler gives each token its own"
    if value == 0:
        severity = Severity.WARNING
        message = f"all {count} logprobs are exactly 0; unless decoding was greedy they were never recorded"
        if values.where is Where.ROW and len(parts) == len(values.runs):
            severity = Severity.ERROR
            message = f"all {count} logprobs of the row are exactly 0; they were never recorded"
        if values.expected is not None and (values.expected[start:end] < -ROUNDING).any():
            severity, message = Severity.ERROR, f"all {count} logprobs are 0 where the calls recorded others"
    return values.hit(evidence, start, end, message, "all zero" if value == 0 else "all equal", severity)
