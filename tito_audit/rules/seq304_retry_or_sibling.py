"""SEQ304: retry or sibling of an earlier call."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import link_hit


@rule(
    "SEQ304",
    Severity.NOTE,
    headline="{n} retrying or branching off an earlier call",
    needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS),
    when=Occasion.BROKEN_LINK,
)
def retry_or_sibling(evidence: Evidence) -> Iterator[Hit]:
    """Retry or sibling of an earlier call.

    ## What it finds
    A call with the same prompt as an earlier call, or one that continues a call which another call continues too.
    A prompt that holds the other call's answer in another form, or behind other messages, is no branch.

    ## Why it matters
    Harmless where each branch is a row of its own. Trained as one sequence, the shared prefix is trained once per
    branch.

    ## Example
    The same prompt is sampled twice:

    ```text
    note SEQ304 turn 1 prompt at 10
      turn 1: the same prompt as turn 0
    ```

    ## Repair
    `fork` gives each branch a row of its own and trains a shared turn once.
    """
    for link in evidence.links:
        if link.kind in (LinkKind.RETRY, LinkKind.SIBLING):
            yield link_hit(link, evidence, link.detail, link.kind.value)
