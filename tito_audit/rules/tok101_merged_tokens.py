"""TOK101: several sampled tokens re-encode as one."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause("TOK101", Severity.ERROR, precedence=50, needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW))
def merged_tokens(difference: Difference, evidence: Evidence) -> Reason | None:
    """Several sampled tokens re-encode as one.

    ## What it finds
    Two or more recorded tokens that become a single token when their text is encoded again.

    ## Why it matters
    A model samples such tokens all the time, and as long as every later prompt and the training row keep
    them, nothing is wrong: that is a note. It is an error once a later prompt or the training row holds the
    other tokens, since the trainer then learns from ids that nobody sampled, with logprobs of other ids.

    ## Example
    Sampled ` Skin`+`ny` comes back as ` Skinny`.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them; `fork` is the safe way
    where a later prompt was sampled after the other tokens; `mask` takes the stretch out of the loss.
    """
    if difference.kind is not BlockKind.MERGE:
        return None
    return Reason("merge", "sampled tokens re-encode as one")
