"""LPR503: trained tokens without a finite logprob."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._logprobs import sampled_values
from tito_audit.rules._words import counted


@rule(
    "LPR503",
    Severity.ERROR,
    headline="{n} with missing or infinite logprobs",
    needs=(Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS,),
    silent=Verified.LOGPROBS,
)
def missing_or_infinite_logprobs(evidence: Evidence) -> Iterator[Hit]:
    """Sampled or trained tokens have no logprob, or an infinite one.

    ## What it finds
    NaN and null (both mean "not recorded") and infinite values, in a completion or under the row's loss mask.

    ## Why it matters
    One NaN or infinity makes the loss of the whole batch NaN, or some code replaces it with 0.0, which says that
    the token was certain. Minus infinity is the logprob of a token that could not be sampled: token and logprob
    come from different distributions (before and after top-k or top-p filtering).

    ## Example
    Two trained tokens have a logprob of minus infinity:

    ```text
    error LPR503 row 11:13
      2 tokens in the loss have an infinite logprob; the loss becomes NaN, or the gap is filled with
      a made-up value
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4    │!    │
                                                                                    =     #
          id  2001         314 257 198 17 2002       198 2001         1620      198 19    0
     logprob  0            0   0   0   0  0          0   0            0         0   -0.50 -inf!
          12 │<|im_end|>│
              ##########
          id  2002
     logprob  -inf!
    ```

    ## Repair
    `splice` takes the values of the calls. `mask` takes the tokens out of the loss. Where the weights are at hand,
    `rescore` fills in a model's logprobs.
    """
    for values in sampled_values(evidence):
        if values.shifted or values.all_plausible:
            continue
        for cause, wrong in (("not recorded", np.isnan(values.logprobs)), ("infinite", np.isinf(values.logprobs))):
            for start, end in trained_runs(wrong & values.trained):
                has = "has" if end - start == 1 else "have"
                what = "no logprob (null or NaN)" if cause == "not recorded" else "an infinite logprob"
                message = (
                    f"{counted(end - start, 'token')} in the loss {has} {what}; the loss becomes NaN, or "
                    "the gap is filled with a made-up value"
                )
                yield values.hit(evidence, start, end, message, cause)
