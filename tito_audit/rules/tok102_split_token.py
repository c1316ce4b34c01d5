"""TOK102: one sampled token re-encodes as several."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause(
    "TOK102",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=51,
    kinds=(BlockKind.SPLIT,),
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def split_token(difference: Difference, evidence: Evidence) -> Reason | None:
    """One sampled token re-encodes as several.

    ## What it finds
    A sampled token that becomes two or more tokens when its text is encoded again.

    ## Why it matters
    Models sample such tokens all the time. As long as every later prompt and the training row keep them, nothing
    is wrong, and the finding is a note. It becomes an error once a later prompt or the training row holds the
    re-encoded tokens: the trainer then learns from ids that were never sampled, with logprobs that belong to other
    ids.

    ## Example
    The next prompt holds the re-encoded tokens:

    ```text
    error TOK102 turn 0 completion 0:1
      one token re-encodes as several: sampled '    ', turn 1's prompt has '   '+' '; turn 1 saw the
      re-encoded tokens
      sampled      │····   │4 │<|im_end|>│
                    327     19 2002
      next prompt  │···│·  │4 │<|im_end|>│
                    293 220 19 2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls, and is the safe way where a later turn saw the re-encoded tokens. `mask` takes the span
    out of the loss.
    """
    return Reason("split", "one token re-encodes as several")
