"""TPL299: different bytes, cause unknown."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import same_bytes


@cause(
    "TPL299",
    Severity.ERROR,
    headline="{n} with unexplained differences",
    precedence=99,
    needs=(Needs.RENDERING | Needs.SEVERAL_CALLS | Needs.COMPLETIONS,),
)
def unexplained_drift(difference: Difference, evidence: Evidence) -> Reason | None:
    """Different bytes, cause unknown.

    ## What it finds
    Tokens that spell different text on the two sides, for a reason that no other rule knows. Without a tokenizer,
    any ids that differ from the sampled ones.

    ## Why it matters
    Whatever the reason, these are not the tokens that were sampled, or the prompt is not what the template writes.

    ## Example
    The answer was edited before the next prompt:

    ```text
    error TPL299 turn 0 completion 0:3
      the text differs: sampled 'N'+'o'+'.', turn 1's prompt has 'The'+' answer'; turn 1 saw the
      rewritten tokens
      sampled      │N │o │.    │<|im_end|>│
                    45 78 13    2002
      next prompt  │The│·answer│<|im_end|>│
                    322 492     2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    if evidence.vocabulary is None:
        return Reason("other ids", "the ids are not the sampled ones")
    if same_bytes(difference):
        return None
    if not len(difference.canonical.ids):
        return Reason("other text", "text is left out")
    return Reason("other text", "the text differs" if len(difference.recorded.ids) else "text is added")
