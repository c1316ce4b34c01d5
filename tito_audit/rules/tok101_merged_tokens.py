"""TOK101: several sampled tokens re-encode as one."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause(
    "TOK101",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=50,
    kinds=(BlockKind.MERGE,),
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def merged_tokens(difference: Difference, evidence: Evidence) -> Reason | None:
    """Several sampled tokens re-encode as one.

    ## What it finds
    Two or more sampled tokens that become one token when their text is encoded again.

    ## Why it matters
    Models sample such tokens all the time. As long as every later prompt and the training row keep them, nothing
    is wrong, and the finding is a note. It becomes an error once a later prompt or the training row holds the
    re-encoded tokens: the trainer then learns from ids that were never sampled, with logprobs that belong to other
    ids.

    ## Example
    The next prompt holds the re-encoded tokens:

    ```text
    error TOK101 turn 0 completion 1:3
      several tokens re-encode as one: sampled ' answ'+'er', turn 1's prompt has ' answer'; turn 1
      saw the re-encoded tokens
      sampled      │The│·answ│er │<|im_end|>│
                    322 434   257 2002
      next prompt  │The│·answer  │<|im_end|>│
                    322 492       2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls, and is the safe way where a later turn saw the re-encoded tokens. `mask` takes the span
    out of the loss.
    """
    return Reason("merge", "several tokens re-encode as one")
