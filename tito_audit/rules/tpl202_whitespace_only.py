"""TPL202: only white space differs."""

from __future__ import annotations

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import bare, in_answer, same_bytes, sentence


@cause("TPL202", Severity.ERROR, precedence=75, needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS))
def whitespace_only(difference: Difference, evidence: Evidence) -> Reason | None:
    """Only white space differs.

    ## What it finds
    A difference in which both sides are equal once white space is taken out: a trimmed answer, a scaffold
    newline too many or too few.

    ## Why it matters
    White space is tokens: a trimmed newline or a missing one after the turn end makes every later prompt break
    its prefix, and a template that lacks it was never what the model was trained with.

    ## Example
    Sampled `done.\\n`; the next prompt holds `done.`, since the template trims contents.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls, `mask` takes the stretch out of the loss.
    """
    if same_bytes(difference) or bare(difference.recorded.data) != bare(difference.canonical.data):
        return None
    recorded, canonical = (len(side.data) for side in (difference.recorded, difference.canonical))
    place = "in an answer" if in_answer(difference) else "in the scaffold"
    # A prompt against the template lacks or has too much; what came after sampling took away or added.
    given = difference.against is Against.TEMPLATE and not difference.sampled
    less, more = ("extra", "missing") if given else ("trimmed", "added")
    verb = less if recorded > canonical else more if recorded < canonical else "changed"
    what = f"extra white space {place}" if verb == "extra" else f"white space is {verb} {place}"
    return Reason(f"white space {verb} {place}", sentence(difference, evidence, what))
