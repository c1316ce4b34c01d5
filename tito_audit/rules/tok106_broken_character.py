"""TOK106: text cannot give these tokens back."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import same_bytes


@cause("TOK106", Severity.ERROR, precedence=10, needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW))
def broken_character(difference: Difference, evidence: Evidence) -> Reason | None:
    """Text cannot give these tokens back.

    ## What it finds
    Tokens whose bytes are not valid UTF-8: a character cut by the end of a completion, or byte tokens that form
    none. Decoding writes U+FFFD in their place.

    ## Why it matters
    These bytes have no text, so whatever passes through text (a chat API, a parser, the template) comes back as
    other tokens. Only ids can carry them.

    ## Example
    An emoji of four bytes, cut after two by `max_tokens`, comes back as the token of `\ufffd`.

    ## Repair
    `splice` puts the sampled ids back from the calls.
    """
    try:
        difference.recorded.data.decode("utf-8")
        broken = False
    except UnicodeDecodeError:
        broken = True
    replaced = b"\xef\xbf\xbd" in difference.canonical.data and b"\xef\xbf\xbd" not in difference.recorded.data
    if same_bytes(difference) or not (broken or replaced):
        return None
    what = "bytes that form no whole character cannot be written as text"
    return Reason("broken character", what)
