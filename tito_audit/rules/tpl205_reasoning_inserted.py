"""TPL205: empty reasoning inserted."""

from __future__ import annotations

import re

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import changed_thought, holding_mark


@cause("TPL205", Severity.ERROR, precedence=64, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def reasoning_inserted(difference: Difference, evidence: Evidence) -> Reason | None:
    """Empty reasoning inserted.

    ## What it finds
    A reasoning block, usually an empty `<think></think>`, that the template writes and the recorded tokens do not
    have.

    ## Why it matters
    Templates of reasoning models add it to answers without reasoning. The trained context then holds tokens that
    the sampler never saw, and if the mask covers them, the model learns to skip its reasoning.

    ## Example
    Recorded `It is 4`, the template writes `<think>\\n\\n</think>\\n\\nIt is 4`.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls, `mask` takes the stretch out of the loss.
    """
    change = changed_thought(difference)
    if change is not None and change[1] and not change[0]:
        what = "reasoning is inserted where the block was empty"
        return Reason("reasoning inserted into an empty block", what)
    recorded, canonical = holding_mark(difference, b"think>")
    if recorded or not canonical:
        return None
    inside = re.search(rb"<think>(.*?)</think>", difference.canonical.data, re.DOTALL)
    word = "reasoning" if inside and inside[1].strip() else "empty reasoning"
    return Reason(f"{word} inserted", f"{word} is inserted")
