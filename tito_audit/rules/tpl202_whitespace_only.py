"""TPL202: only white space differs."""

from __future__ import annotations

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import bare, in_answer, same_bytes


@cause("TPL202", Severity.ERROR, precedence=75, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def whitespace_only(difference: Difference, evidence: Evidence) -> Reason | None:
    """Only white space differs.

    ## What it finds
    A difference whose two sides are equal without their white space: a trimmed answer, or a scaffold newline too
    many or too few.

    ## Why it matters
    White space is tokens: a newline that is trimmed, or missing after the turn end, breaks the prefix of every
    later prompt, and the model was never trained with a template that lacks it.

    ## Example
    Sampled `done.\\n`; the next prompt holds `done.`, because the template trims message contents.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls, `mask` takes the stretch out of the loss.
    """
    if same_bytes(difference) or bare(difference.recorded.data) != bare(difference.canonical.data):
        return None
    recorded, canonical = (len(side.data) for side in (difference.recorded, difference.canonical))
    place = "in an answer" if in_answer(difference) else "in the scaffold"
    # Before sampling, white space is missing or extra; after sampling, it was trimmed or added.
    given = difference.against is Against.TEMPLATE and not difference.sampled
    less, more = ("extra", "missing") if given else ("trimmed", "added")
    verb = less if recorded > canonical else more if recorded < canonical else "changed"
    what = f"extra white space {place}" if verb == "extra" else f"white space is {verb} {place}"
    return Reason(f"white space {verb} {place}", what)
