"""TPL204: reasoning stripped from the history."""

from __future__ import annotations

import re

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import changed_thought, holding_mark


@cause("TPL204", Severity.ERROR, precedence=65, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def reasoning_stripped(difference: Difference, evidence: Evidence) -> Reason | None:
    """Reasoning stripped from the history.

    ## What it finds
    A reasoning block that was sampled and that the later prompt, the row or the template lacks, or has only as an
    empty `<think></think>`.

    ## Why it matters
    Templates of reasoning models drop old reasoning. The prompt then no longer starts with what was said, the
    rollout splits into several training rows, and a single row would train a turn after a context it never had.

    ## Example
    Sampled `<think>2+2 is 4</think>It is 4`; the next prompt holds `It is 4`.

    ## Repair
    `fork` gives one row per unbroken run of calls; a template argument that keeps reasoning avoids the break.
    """
    change = changed_thought(difference)
    if change is not None and change[0] and not change[1]:
        what = "reasoning is emptied, and its markers stay"
        return Reason("reasoning emptied", what)
    recorded, canonical = holding_mark(difference, b"think>")
    analysis = b"<|channel|>analysis" in difference.recorded.data
    if canonical or not (recorded or analysis):
        return None
    inside = re.search(rb"<think>(.*?)</think>", difference.recorded.data, re.DOTALL)
    word = "empty reasoning" if inside and not inside[1].strip() else "reasoning"
    return Reason(f"{word} stripped", f"{word} is stripped")
