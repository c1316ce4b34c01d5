"""TOK102: one sampled token re-encodes as several."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause("TOK102", Severity.ERROR, precedence=51, needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW))
def split_token(difference: Difference, evidence: Evidence) -> Reason | None:
    """One sampled token re-encodes as several.

    ## What it finds
    A recorded token that becomes two or more tokens when its text is encoded again.

    ## Why it matters
    A model samples such tokens all the time, and as long as every later prompt and the training row keep
    them, nothing is wrong: that is a note. It is an error once a later prompt or the training row holds the
    other tokens, since the trainer then learns from ids that nobody sampled, with logprobs of other ids.

    ## Example
    Sampled `,J` comes back as `,`+`J`, because the pre-tokenizer splits after the comma.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them; `fork` is the safe way
    where a later prompt was sampled after the other tokens; `mask` takes the stretch out of the loss.
    """
    if difference.kind is not BlockKind.SPLIT:
        return None
    return Reason("split", "a sampled token re-encodes as several")
