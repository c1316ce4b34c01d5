"""TPL205: reasoning inserted."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import changed_reasoning, hold_mark, reasoning_blocks


@cause(
    "TPL205",
    Severity.ERROR,
    headline="{n} with empty reasoning inserted",
    precedence=64,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def reasoning_inserted(difference: Difference, evidence: Evidence) -> Reason | None:
    """Reasoning inserted.

    ## What it finds
    A reasoning block, usually an empty `<think></think>`, that the template, a later prompt or the training row
    holds and the sampled tokens do not.

    ## Why it matters
    Templates of reasoning models add it to answers without reasoning. The trained context then holds tokens that
    the sampler never saw, and if the mask covers them, the model learns to skip its reasoning.

    ## Example
    The training row has empty reasoning before the answer:

    ```text
    error TPL205 turn 0 completion at 0
      empty reasoning is inserted: sampled nothing, the training row has
      '<think>'+'\\n\\n'+'</think>'+'\\n\\n'; the trainer would learn from tokens that were not sampled
      sampled      │                        │4 │<|im_end|>│
                                             19 2002
      training row │<think>│⏎⏎ │</think>│⏎⏎ │4 │<|im_end|>│
                    2005    284 2006     284 19 2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    change = changed_reasoning(difference.recorded, difference.canonical)
    if change is not None and change[1] and not change[0]:
        what = "reasoning is inserted into an empty block"
        return Reason("reasoning inserted into an empty block", what)
    recorded, canonical = hold_mark(difference, b"think>")
    if recorded or not canonical:
        return None
    inside = next(reasoning_blocks(difference.canonical.data), None)
    word = "reasoning" if inside and inside[1].strip() else "empty reasoning"
    return Reason(f"{word} inserted", f"{word} is inserted")
