"""SEQ303: history rewritten, truncated or compacted."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._drift import built_hits
from tito_audit.rules._links import link_hit


@rule("SEQ303", Severity.WARNING, needs=(Needs.PROMPTS | Needs.ROW, Needs.SEVERAL_CALLS | Needs.RENDERING))
def history_rewritten(evidence: Evidence) -> Iterator[Hit]:
    """History rewritten, truncated or compacted.

    ## What it finds
    A prompt whose messages are not those of the call before it: a summary in place of turns, a window that dropped
    the oldest turns, an edited message. Also a prompt or row that is exactly what the template writes without the
    older messages.

    ## Why it matters
    On purpose or not, from here on the rollout is several training rows. Trained as one, it puts a completion
    after a context that it never had.

    ## Example
    Turn 7's prompt starts with a summary of turns 0 to 6.

    ## Repair
    `fork` gives one row per unbroken run of calls.
    """
    reported = set()
    for link in evidence.links:
        if link.kind is LinkKind.REWRITTEN:
            reported.add(link.turn)
            yield link_hit(link, evidence, f"the history itself was changed ({link.detail})", link.detail)
    yield from (hit for hit in built_hits(evidence, "SEQ303") if hit.turn not in reported)
