"""TOK105: a control token is spelled out in text, or dropped from it."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import control_ids, same_bytes


@cause(
    "TOK105",
    Severity.ERROR,
    headline="{n} with control tokens spelled as text",
    precedence=30,
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def control_token_in_text(difference: Difference, evidence: Evidence) -> Reason | None:
    """A control token is spelled out in text, or dropped from it.

    ## What it finds
    Ordinary tokens that spell a control token and re-encode as that one token; a control token where the other
    side has ordinary ones; and a control token sampled inside an answer that decoding drops.

    ## Why it matters
    Text that becomes a control token can end a turn, open a role or forge a system message once it is encoded
    again. A dropped control token is a sampled action that the trainer never sees.

    ## Example
    The next prompt holds the control token that the text spells:

    ```text
    error TOK105 turn 0 completion 1:8
      text spells out a control token: sampled '<'+'|'+'im'+'_'+'start'+'|'+'>', turn 1's prompt has
      '<|im_start|>'; turn 1 saw the re-encoded tokens
      sampled      │4 │< │| │im │_ │start│| │> │<|im_end|>│
                    19 27 91 393 62 1477  91 29 2002
      next prompt  │4 │<|im_start|>            │<|im_end|>│
                    19 2001                     2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them, `fork` gives one row per
    unbroken run of calls. To avoid it, encode untrusted text with control tokens disabled.
    """
    recorded, same = control_ids(difference.recorded), same_bytes(difference)
    if not (same or (recorded and difference.sampled)):
        return None
    canonical = control_ids(difference.canonical)
    if same and recorded != canonical:
        what = "text spells out a control token" if canonical else "a control token re-encodes as ordinary text"
        return Reason("control token spelled in text", what)
    if not (difference.sampled and recorded and not canonical) or evidence.vocabulary is None:
        return None
    inner = [i for i in recorded if i not in evidence.end_ids]
    if not inner:
        return None
    plain = b"".join(
        evidence.vocabulary.token_bytes(int(i)) for i in difference.recorded.ids if int(i) not in inner
    )
    if plain.strip() != difference.canonical.data.strip():
        return None
    what = "a control token sampled inside the answer is dropped from its text"
    return Reason("control token dropped", what)
