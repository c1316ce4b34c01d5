"""SEQ303: history rewritten, truncated or compacted."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._drift import hits_of_known_causes
from tito_audit.rules._links import link_hit


@rule(
    "SEQ303",
    Severity.WARNING,
    headline="{n} with a rewritten history",
    needs=(Needs.PROMPTS | Needs.ROW, Needs.HISTORY),
    when=Occasion.BROKEN_LINK,
)
def history_rewritten(evidence: Evidence) -> Iterator[Hit]:
    """History rewritten, truncated or compacted.

    ## What it finds
    A prompt whose messages are not those of the call before it: a summary that replaces turns, a window that
    dropped the oldest turns, an edited message, another system prompt. The prompts themselves decide, with or
    without messages in the log: text that was given to the model is missing, added or changed, in more than white
    space. Also a prompt or row that is exactly what the template writes without the older messages.

    ## Why it matters
    Whether intended or not, from here on the rollout is several training rows. Trained as one, it puts a
    completion after a context it never had.

    ## Example
    A summary replaces the first turn:

    ```text
    warning SEQ303 turn 1 prompt 15:16
      turn 1's prompt departs from turn 0 at token 15: the history was changed (user text changed)
      previous call│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │<|im_end|>│
                    314 257 198 17 2002       198 2001         1620      198 19 2002
      next prompt  │us │er │⏎  │S │um │m │ar │y │: │·  │4                                 │
                    314 257 198 50 324 76 291 88 25 220 19
    ```

    ## Repair
    `fork` gives one row per unbroken run of calls.
    """
    reported = set()
    for link in evidence.links:
        if link.kind is LinkKind.REWRITTEN:
            reported.add(link.turn)
            yield link_hit(link, evidence, f"the history was changed ({link.detail})", link.detail)
    yield from (hit for hit in hits_of_known_causes(evidence, "SEQ303") if hit.turn not in reported)
