"""TOK103: sampled tokens re-encode with other boundaries."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause("TOK103", Severity.ERROR, precedence=52, needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW))
def resplit_tokens(difference: Difference, evidence: Evidence) -> Reason | None:
    """Sampled tokens re-encode with other boundaries.

    ## What it finds
    Recorded tokens and re-encoded tokens that spell the same bytes with no boundary in common: several for
    several, or one id for another with the same spelling.

    ## Why it matters
    A model samples such tokens all the time, and as long as every later prompt and the training row keep
    them, nothing is wrong: that is a note. It is an error once a later prompt or the training row holds the
    other tokens, since the trainer then learns from ids that nobody sampled, with logprobs of other ids.

    ## Example
    Sampled ` Clim`+`b` comes back as ` Cl`+`imb`.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them; `fork` is the safe way
    where a later prompt was sampled after the other tokens; `mask` takes the stretch out of the loss.
    """
    if difference.kind is not BlockKind.RESPLIT:
        return None
    return Reason("resplit", "the text is split in other places")
