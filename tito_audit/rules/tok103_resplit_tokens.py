"""TOK103: sampled tokens re-encode with different boundaries."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause(
    "TOK103",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=52,
    kinds=(BlockKind.RESPLIT,),
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def resplit_tokens(difference: Difference, evidence: Evidence) -> Reason | None:
    """Sampled tokens re-encode with different boundaries.

    ## What it finds
    Sampled tokens that re-encode as the same text with no token boundary in common: several tokens for several
    others, or one id for another with the same spelling.

    ## Why it matters
    Models sample such tokens all the time. As long as every later prompt and the training row keep them, nothing
    is wrong, and the finding is a note. It becomes an error once a later prompt or the training row holds the
    re-encoded tokens: the trainer then learns from ids that were never sampled, with logprobs that belong to other
    ids.

    ## Example
    The next prompt holds the re-encoded tokens:

    ```text
    error TOK103 turn 0 completion 0:2
      the text is split in different places: sampled 'ur'+'ning', turn 1's prompt has 'urn'+'ing';
      turn 1 saw the re-encoded tokens
      sampled      │ur │ning│<|im_end|>│
                    377 718  2002
      next prompt  │urn│ing │<|im_end|>│
                    489 304  2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls, and is the safe way where a later turn saw the re-encoded tokens. `mask` takes the span
    out of the loss.
    """
    return Reason("resplit", "the text is split in different places")
