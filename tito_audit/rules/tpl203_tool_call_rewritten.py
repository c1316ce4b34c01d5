"""TPL203: tool call rewritten."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import answer_texts, in_answer
from tito_audit.rules._toolcalls import compare_calls


@cause(
    "TPL203",
    Severity.ERROR,
    headline="{n} with a tool call rewritten by the template",
    precedence=70,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def tool_call_rewritten(difference: Difference, evidence: Evidence) -> Reason | None:
    """Tool call rewritten.

    ## What it finds
    A tool call whose text differs between the sampled tokens and the template, a later prompt or the training row.
    The cause says how: the markers around it, spacing, key order, escapes, a Python literal, values as strings,
    empty arguments, extra fields beside the arguments, or a call on one side only.

    ## Why it matters
    Parsers turn a call into an object, and templates write that object in their own style. The call is the same
    and its tokens are not: the prefix breaks, and the trainer sees a call that the model did not sample.

    ## Example
    A bare call comes back wrapped in markers:

    ```text
    error TPL203 turn 0 completion at 0
      the tool call is rewritten (wrapped in other markers): sampled nothing, turn 1's prompt has
      '<tool_call>'+'\\n'; turn 1 saw tokens that turn 0 lacks
      sampled      │               │{" │name│": │
                                    299 330  270
      next prompt  │<tool_call>│⏎  │{" │name│": │
                    2003        198 299 330  270
    error TPL203 turn 0 completion 14:16
      the tool call is rewritten (wrapped in other markers): sampled '}'+'}', turn 1's prompt has
      '}}\\n'+'</tool_call>'; turn 1 saw the rewritten tokens
      sampled      │": │·tr│ue │} │}            │<|im_end|>│
                    270 411 360 92 92            2002
      next prompt  │": │·tr│ue │}}⏎│</tool_call>│<|im_end|>│
                    270 411 360 400 2004         2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    if difference.where is Where.PROMPT and not in_answer(difference):
        return None
    how = compare_calls(*answer_texts(difference))
    if how is None:
        return None
    return Reason(f"tool call: {how}", f"the tool call is rewritten ({how})")
