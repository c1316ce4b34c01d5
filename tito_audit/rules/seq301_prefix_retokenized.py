"""SEQ301: prefix broken by re-tokenization."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import broken_prefixes


@rule(
    "SEQ301",
    Severity.ERROR,
    headline="{n} re-tokenized",
    needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS),
    when=Occasion.BROKEN_LINK,
)
def prefix_retokenized(evidence: Evidence) -> Iterator[Hit]:
    """Prefix broken by re-tokenization.

    ## What it finds
    A prompt that spells the same text as the prompt and completion before it, in different tokens. Bytes that text
    cannot carry count as well.

    ## Why it matters
    The sampler continued from tokens it had not sampled, so the rollout is not one sequence. Trained as one, it
    holds tokens that were never sampled, with logprobs that belong to other ids.

    ## Example
    The next prompt merges two sampled tokens:

    ```text
    error SEQ301 turn 1 prompt 11:12
      turn 1's prompt departs from turn 0 at token 11: same text, other ids (merge)
      sampled      │assistant│⏎  │The│·answ│er │<|im_end|>│
                    1620      198 322 434   257 2002
      next prompt  │assistant│⏎  │The│·answer  │<|im_end|>│
                    1620      198 322 492       2002
    ```

    ## Repair
    `fork` gives one row per unbroken run of calls. To avoid it, send token ids instead of text.
    """
    yield from broken_prefixes(evidence, by_tokenizer=True)
