"""TOK107: the tokenizer normalises the text to other bytes."""

from __future__ import annotations

import unicodedata

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import same_bytes


@cause("TOK107", Severity.ERROR, precedence=20, needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW))
def normalised_text(difference: Difference, evidence: Evidence) -> Reason | None:
    """The tokenizer normalises the text to other bytes.

    ## What it finds
    Recorded tokens whose text the tokenizer changes by Unicode normalisation before it encodes it.

    ## Why it matters
    The bytes themselves change: a decomposed accent comes back composed. Every position after it shifts and the
    sampled ids are gone.

    ## Example
    Sampled `e`+U+0301 comes back as the one character `é` with a tokenizer that applies NFC.

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them; `fork` is the safe way
    where a later prompt was sampled after the other tokens; `mask` takes the stretch out of the loss.
    """
    texts = [side.data.decode("utf-8", "replace") for side in (difference.recorded, difference.canonical)]
    if same_bytes(difference) or texts[0] == texts[1]:
        return None
    for form in ("NFC", "NFKC"):
        if unicodedata.normalize(form, texts[0]) == texts[1]:
            return Reason(f"{form} normalisation", f"{form} changes the text")
    return None
