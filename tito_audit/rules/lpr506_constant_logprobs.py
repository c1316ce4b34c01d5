"""LPR506: logprobs that are all the same."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.logprobs import placeholder_zeros
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._logprobs import certainty, sampled_values
from tito_audit.terminal.words import decimal


@rule(
    "LPR506",
    Severity.ERROR,
    headline="{n} with constant logprobs",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
    silent=Verified.LOGPROBS,
)
def constant_logprobs(evidence: Evidence) -> Iterator[Hit]:
    """All logprobs of a sampled span are equal or zero.

    ## What it finds
    At least 4 sampled tokens, in one span or the whole row, that share one value (error), or at least 8 that are
    exactly 0.0: an error if all trained tokens of a row are, or if a call recorded other values; else a warning,
    since greedy decoding of certain tokens can produce one such span. It is a note (`undecided`) where other
    values of the rollout lie just below zero and the span is no longer than certainty lasts, as LPR505 judges it.

    ## Why it matters
    A sampler gives every token its own probability. Equal values are a default that was never filled in. Zeros say
    that every token was certain, so the importance ratio becomes the trainer's own probability.

    ## Example
    Zeros in the row where the calls recorded values:

    ```text
    error LPR506 row 10:18
      all 8 logprobs are 0 where the calls recorded others
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │4 │9 │2 │3 │
                                                                                    #  #  #  #  #
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 19 24 17 18
     logprob  0            0   0   0   0  0          0   0            0         0   0  0  0  0  0
          15 │5 │!│<|im_end|>│
              #  # ##########
          id  20 0 2002
     logprob  0  0 0
    ```

    ## Repair
    `splice` takes the values of the calls. Without calls, `drop` removes the row.
    """
    for values in sampled_values(evidence):
        for groups in values.constant_groups:
            start, end = groups[0][0], groups[-1][1]
            count, value = sum(b - a for a, b in groups), values.logprobs[start]
            severity = Severity.ERROR
            message = f"all {count} logprobs are {decimal(value, 4)}; a sampler gives each token its own"
            if value == 0:
                severity = Severity.WARNING
                message = (
                    f"all {count} logprobs are exactly 0; unless decoding was greedy, they were never recorded"
                )
                if values.where is Where.ROW and len(groups) == len(values.runs):
                    severity = Severity.ERROR
                    message = f"all {count} logprobs of the row are exactly 0; they were never recorded"
                recorded = values.expected
                if recorded is not None and placeholder_zeros(values.logprobs, recorded)[start:end].any():
                    severity = Severity.ERROR
                    message = f"all {count} logprobs are 0 where the calls recorded others"
            cause = "all zero" if value == 0 else "all equal"
            proven = severity is Severity.ERROR and value == 0
            if not proven and certainty(evidence).may_be_sampled(values, start, end):
                severity, cause = Severity.NOTE, "undecided"
                message = (
                    f"all {count} logprobs are {decimal(value, 4)}, as certain as others of the rollout, or never "
                    "recorded"
                )
            yield values.hit(evidence, start, end, message, cause, severity)
