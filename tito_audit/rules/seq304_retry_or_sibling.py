"""SEQ304: retry or sibling of the same prompt."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import link_hit


@rule("SEQ304", Severity.NOTE, needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS))
def retry_or_sibling(evidence: Evidence) -> Iterator[Hit]:
    """Retry or sibling of the same prompt.

    ## What it finds
    A call with the prompt of an earlier call, or one that continues a call which another already continues.

    ## Why it matters
    Harmless where each branch is a row of its own. Trained as one sequence, the shared prefix is trained once for
    every branch.

    ## Example
    Turn 2 asks again with turn 1's prompt after a failed parse.

    ## Repair
    `fork` gives each branch a row and trains a shared turn once.
    """
    for link in evidence.links:
        if link.kind in (LinkKind.RETRY, LinkKind.SIBLING):
            yield link_hit(link, evidence, link.detail, link.kind.value)
