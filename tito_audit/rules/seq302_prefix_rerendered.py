"""SEQ302: prefix broken by the template."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import broken_prefixes


@rule(
    "SEQ302",
    Severity.ERROR,
    headline="{n} re-rendered as other text",
    needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS),
    when=Occasion.BROKEN_LINK,
)
def prefix_rerendered(evidence: Evidence) -> Iterator[Hit]:
    """Prefix broken by the template.

    ## What it finds
    A prompt that does not start with the prompt and completion before it, because the template writes the same
    messages as different text; the cause says how. Also an answer that differs for no known reason (TPL299).
    Without a tokenizer, any broken prefix.

    ## Why it matters
    The sampler continued from a history that is not what it had sampled. Trained as one sequence, the row holds
    tokens that were never sampled; split up, one rollout becomes many rows.

    ## Example
    The template trims the answer:

    ```text
    error SEQ302 turn 1 prompt 12:13
      turn 1's prompt departs from turn 0 at token 12: same messages, other text (white space
      trimmed in an answer)
      sampled      │⏎  │d │one│.⏎ │<|im_end|>│
                    198 67 528 388 2002
      next prompt  │⏎  │d │one│.  │<|im_end|>│
                    198 67 528 13  2002
    ```

    ## Repair
    `fork` gives one row per unbroken run of calls. An append-only template avoids it.
    """
    yield from broken_prefixes(evidence, by_tokenizer=False)
