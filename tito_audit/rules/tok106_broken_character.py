"""TOK106: text cannot carry these tokens."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import OTHER_BYTES, Reason, cause


@cause(
    "TOK106",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=10,
    kinds=OTHER_BYTES,
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def broken_character(difference: Difference, evidence: Evidence) -> Reason | None:
    """Text cannot carry these tokens.

    ## What it finds
    Tokens whose bytes are not valid UTF-8: a character cut off at the end of a completion, or byte tokens that
    form no character. Decoding turns them into U+FFFD.

    ## Why it matters
    These bytes have no text form. After a trip through text (a chat API, a parser, the template) they come back as
    different tokens; only ids can carry them.

    ## Example
    The next prompt holds the replacement character:

    ```text
    error TOK106 turn 0 completion 1:2
      these bytes form no whole character, so text cannot carry them: sampled '\\\\xf0\\\\x9f', turn 1's
      prompt has '\\\\xef'+'\\\\xbf'+'\\\\xbd'; turn 1 saw the rewritten tokens
      sampled      │4 │\\xf0\\x9f      │<|im_end|>│
                    19 320            2002
      next prompt  │4 │\\xef│\\xbf│\\xbd│<|im_end|>│
                    19 171  123  121  2002
    ```

    ## Repair
    `splice` puts the sampled ids back from the calls. `fork` gives one row per unbroken run of calls. To avoid it,
    send token ids instead of text.
    """
    try:
        difference.recorded.data.decode("utf-8")
        broken = False
    except UnicodeDecodeError:
        broken = True
    replaced = b"\xef\xbf\xbd" in difference.canonical.data and b"\xef\xbf\xbd" not in difference.recorded.data
    if not (broken or replaced):
        return None
    what = "these bytes form no whole character, so text cannot carry them"
    return Reason("broken character", what)
