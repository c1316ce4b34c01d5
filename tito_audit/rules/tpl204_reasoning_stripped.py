"""TPL204: reasoning stripped from the history."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import changed_reasoning, hold_mark, reasoning_blocks


@cause(
    "TPL204",
    Severity.ERROR,
    headline="{n} with reasoning stripped from the history",
    precedence=65,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def reasoning_stripped(difference: Difference, evidence: Evidence) -> Reason | None:
    """Reasoning stripped from the history.

    ## What it finds
    A sampled reasoning block that a later prompt, the training row or the template drops, or empties to
    `<think></think>`.

    ## Why it matters
    Templates of reasoning models drop old reasoning. The next prompt then no longer starts with what was sampled,
    the rollout splits into several training rows, and a single row would train a turn on a context it never had.

    ## Example
    The template strips the reasoning once the next user message is there:

    ```text
    error TPL204 turn 0 completion 0:11
      reasoning is stripped: sampled '<think>'+'\\n'+'2'+'+'+'2'+' is'+' '+'4' and 3 more tokens,
      turn 1's prompt has nothing; turn 1 did not see these tokens
      sampled      │<think>│⏎  │2 │+ │2 │·is│·  │4 │⏎  │</think>│⏎⏎ │I │t │·is│
                    2005    198 17 10 17 310 220 19 198 2006     284 40 83 310
      next prompt  │                                                │I │t │·is│
                                                                     40 83 310
    ```

    ## Repair
    `splice` puts the sampled ids back where only the training row lost them. `fork` gives one row per unbroken run
    of calls. A template argument that keeps reasoning avoids the break.
    """
    change = changed_reasoning(difference.recorded, difference.canonical)
    if change is not None and change[0] and not change[1]:
        what = "reasoning is emptied, its markers are kept"
        return Reason("reasoning emptied", what)
    recorded, canonical = hold_mark(difference, b"think>")
    analysis = b"<|channel|>analysis" in difference.recorded.data
    if canonical or not (recorded or analysis):
        return None
    inside = next(reasoning_blocks(difference.recorded.data), None)
    word = "empty reasoning" if inside and not inside[1].strip() else "reasoning"
    return Reason(f"{word} stripped", f"{word} is stripped")
