"""SEQ301: prefix broken by re-tokenization."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import broken_prefixes


@rule("SEQ301", Severity.ERROR, needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS))
def prefix_retokenized(evidence: Evidence) -> Iterator[Hit]:
    """Prefix broken by re-tokenization.

    ## What it finds
    A prompt that spells the same text as the prompt and completion before it, in other tokens. This includes bytes
    that decoding cannot write.

    ## Why it matters
    The sampler continued from tokens that it had not sampled, so the rollout is not a single sequence: trained as
    one, it holds tokens that were never sampled, and their logprobs belong to other ids.

    ## Example
    Turn 0 sampled ` Skin`+`ny`; turn 1's prompt holds ` Skinny` in its place.

    ## Repair
    `fork` gives one row per unbroken run of calls. To avoid it, send token ids instead of text.
    """
    yield from broken_prefixes(evidence, by_tokenizer=True)
