"""REC001: a row that cannot be read as a rollout."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC001", Severity.ERROR)
def unreadable_row(evidence: Evidence) -> Iterator[Hit]:
    """The row cannot be read.

    ## What it finds
    Rows that are no JSON, that fit no format, or that fit one and make no sense: ids that are no integers,
    a mask that is a text, a negative prompt length. Such a row never becomes a rollout, so the finding is
    made while reading; this check itself has nothing left to look at.

    ## Why it matters
    A trainer that skips such rows loses data silently, one that does not stops. Nothing is said about
    their tokens: a row that was not read was not found clean.

    ## Example
    ```text
    {"token_ids": [1, 2, "3"], "loss_mask": [0, 1, 1]}
                         ^ a string, not a token id
    ```

    ## Repair
    None: the row has to be written again by what made it. `drop` moves it to the quarantine file.
    """
    return iter(())
