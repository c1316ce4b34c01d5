"""SEQ305: call that belongs to no chain."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._links import link_hit


@rule(
    "SEQ305",
    Severity.WARNING,
    headline="{n} continuing no earlier call",
    needs=(Needs.PROMPTS, Needs.COMPLETIONS, Needs.SEVERAL_CALLS),
    when=Occasion.BROKEN_LINK,
)
def orphan_call(evidence: Evidence) -> Iterator[Hit]:
    """Call that belongs to no chain.

    ## What it finds
    A call whose prompt does not share even its first message with any earlier call, and holds none of its answers.

    ## Why it matters
    It is a sub-agent, another conversation, or a sign of a mixed-up log. In one row with the others it would be
    trained on a context it never had.

    ## Example
    A judge is called in between:

    ```text
    warning SEQ305 turn 1 prompt 4:5
      turn 1: its prompt does not share even its first message with any earlier call
      next prompt  │I │s │·  │4 │·r │ig │h │t │
                    40 82 220 19 364 577 71 83
    ```

    ## Repair
    `fork` gives it a row of its own; `drop` removes the rollout.
    """
    for link in evidence.links:
        if link.kind is LinkKind.ORPHAN:
            yield link_hit(link, evidence, link.detail, "no common history")
