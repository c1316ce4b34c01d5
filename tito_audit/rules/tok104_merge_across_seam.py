"""TOK104: the first sampled token merges with the end of the prompt."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.roles import GENERATION_PROMPT
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import SAME_BYTES, Reason, cause


@cause(
    "TOK104",
    Severity.ERROR,
    headline="{n} re-tokenized",
    precedence=40,
    kinds=SAME_BYTES,
    places=(Where.COMPLETION, Where.ROW),
    needs=(Needs.TOKENIZER, Needs.COMPLETIONS | Needs.ROW),
)
def merge_across_seam(difference: Difference, evidence: Evidence) -> Reason | None:
    """The first sampled token merges with the end of the prompt.

    ## What it finds
    Tokens on both sides of the seam between prompt and completion that become different tokens when their text is
    encoded in one piece.

    ## Why it matters
    The sampler continued after the prompt's last token; an encoder that is given the whole text merges the two
    tokens into one. In every later prompt the seam is then in another place, and every position after it shifts.

    ## Example
    The next prompt holds both newlines as one token:

    ```text
    error TOK104 turn 0 completion 0:1
      the end of the prompt and the start of the completion are encoded together: sampled '\\n'+'\\n',
      turn 1's prompt has '\\n\\n'; turn 1 saw the re-encoded tokens
      sampled      │⏎  │⏎  │
                    198 198
      next prompt  │⏎⏎     │
                    284
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls, and is the safe way where a later turn saw the re-encoded tokens. `mask` takes the span
    out of the loss.
    """
    first, last = difference.start, difference.end - 1
    if difference.where is Where.COMPLETION:
        crosses = first == 0 and len(difference.recorded.ids) > difference.end
    elif evidence.row is not None and first < last:
        # From a generation prompt of the row into the answer.
        sampled, roles = evidence.row.sampled, evidence.row.roles
        crosses = bool(sampled[last] and not sampled[first]) and roles[first] == GENERATION_PROMPT
    else:
        crosses = False
    if not crosses:
        return None
    what = "the end of the prompt and the start of the completion are encoded together"
    return Reason("merge across the seam", what)
