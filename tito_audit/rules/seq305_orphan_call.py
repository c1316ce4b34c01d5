"""SEQ305: call that belongs to no chain."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import link_hit


@rule("SEQ305", Severity.WARNING, needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS))
def orphan_call(evidence: Evidence) -> Iterator[Hit]:
    """Call that belongs to no chain.

    ## What it finds
    A call whose prompt does not share even its first message with any earlier call.

    ## Why it matters
    It is a sub-agent, another conversation or a mixed-up log. In one row with the others it would be trained after
    a context that it never had.

    ## Example
    Turn 3's prompt is that of a judge model.

    ## Repair
    `fork` gives it a row of its own; `drop` removes the rollout.
    """
    for link in evidence.links:
        if link.kind is LinkKind.ORPHAN:
            yield link_hit(link, evidence, link.detail, "no common history")
