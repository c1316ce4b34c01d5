"""TOK107: the tokenizer normalises the text to different bytes."""

from __future__ import annotations

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.differences import find_normal_form
from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause


@cause(
    "TOK107",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=20,
    kinds=(BlockKind.DRIFT,),
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def normalised_text(difference: Difference, evidence: Evidence) -> Reason | None:
    """The tokenizer normalises the text to different bytes.

    ## What it finds
    Tokens whose text the tokenizer changes by Unicode normalisation before encoding it. And a set for SFT in which
    no text has a space, which is a warning of the log: a trainer that loads the tokenizer as another class can
    drop them.

    ## Why it matters
    The bytes themselves change: a decomposed accent comes back composed. The sampled ids are gone, and every
    position after them shifts.

    ## Example
    The next prompt holds the composed character:

    ```text
    error TOK107 turn 0 completion 0:3
      NFC changes the text: sampled 'e'+'\\\\xcc'+'\\\\x81', turn 1's prompt has 'é'; turn 1 saw the
      rewritten tokens
      sampled      │e │\\xcc│\\x81│<|im_end|>│
                    68 136  223  2002
      next prompt  │é           │<|im_end|>│
                    378          2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls, and is the safe way where a later turn saw the re-encoded tokens. `mask` takes the span
    out of the loss.
    """
    form = find_normal_form(difference.recorded.data, difference.canonical.data)
    return None if form is None else Reason(f"{form} normalisation", f"{form} changes the text")
