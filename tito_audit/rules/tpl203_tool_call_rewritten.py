"""TPL203: tool call written differently."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import answer_texts, in_answer
from tito_audit.rules._toolcalls import compare_calls


@cause("TPL203", Severity.ERROR, precedence=70, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def tool_call_rewritten(difference: Difference, evidence: Evidence) -> Reason | None:
    """Tool call written differently.

    ## What it finds
    A tool call whose text differs between the sampled tokens and the template, a later prompt or the row. The
    cause says how: markers around it, spacing, key order, escapes, a Python literal, values as strings, empty
    arguments, other fields next to the arguments, or a call on one side only.

    ## Why it matters
    Parsers read a call into an object and templates write it back in their own way. The tokens change although the
    call is the same, so the prefix breaks and the trainer sees a call that the model did not write.

    ## Example
    Sampled `{"name": "search","arguments": {"q": 1}}`, the template writes
    `<tool_call>\\n{"name": "search", "arguments": {"q": 1}}\\n</tool_call>`.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls, `mask` takes the stretch out of the loss.
    """
    if difference.where is Where.PROMPT and not in_answer(difference):
        return None
    how = compare_calls(*answer_texts(difference))
    if how is None:
        return None
    return Reason(f"tool call: {how}", f"the tool call is rewritten ({how})")
