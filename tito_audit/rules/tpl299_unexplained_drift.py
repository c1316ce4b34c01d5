"""TPL299: other bytes, no cause found."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import same_bytes


@cause("TPL299", Severity.ERROR, precedence=99, needs=(Needs.RENDERING | Needs.SEVERAL_CALLS | Needs.COMPLETIONS,))
def unexplained_drift(difference: Difference, evidence: Evidence) -> Reason | None:
    """Other bytes, no cause found.

    ## What it finds
    Recorded and canonical tokens that spell different text for a reason that no other rule knows. Without a
    tokenizer, any ids that differ from the sampled ones.

    ## Why it matters
    Whatever the reason, the tokens are not the ones that were sampled, or the prompt is not what the template
    writes.

    ## Example
    The log's messages hold an answer that was edited after sampling.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls, `mask` takes the stretch out of the loss.
    """
    if evidence.vocabulary is None:
        return Reason("other ids", "other ids than were sampled")
    if same_bytes(difference):
        return None
    if not len(difference.canonical.ids):
        return Reason("other text", "text is left out")
    return Reason("other text", "the text differs" if len(difference.recorded.ids) else "text is added")
