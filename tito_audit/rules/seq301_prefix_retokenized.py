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
    A prompt that spells the same text as the prompt and completion before it, in other tokens. Bytes that
    decoding cannot write count too.

    ## Why it matters
    The sampler continued from tokens that it had not sampled, so the rollout is no single sequence: trained as
    one, some of its tokens were sampled by nobody, and their logprobs belong to other ids.

    ## Example
    Turn 0 sampled ` Skin`+`ny`; turn 1's prompt holds ` Skinny` in its place.

    ## Repair
    `fork` gives one row per unbroken run of calls. Serve token ids instead of text to avoid it.
    """
    yield from broken_prefixes(evidence, by_tokenizer=True)
