"""REC001: a row that cannot be read as a rollout."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC001", Severity.ERROR, headline="{n} that cannot be read", when=Occasion.NEVER)
def unreadable_row(evidence: Evidence) -> Iterator[Hit]:
    """The row cannot be read.

    ## What it finds
    Rows that are not JSON, that name a key twice in one object, that fit no format, or that fit one but make no
    sense: ids that are not integers, a mask that is text, a negative prompt length. Such a row never becomes a
    rollout, so the finding is made while reading, and this check has nothing left to do. A row with a text that
    the tokenizer cannot encode, or not within its limits, has this finding too, with the cause "the tokenizer
    cannot encode it"; what needs no tokenizer is checked all the same.

    ## Why it matters
    A trainer that skips such rows loses data silently; one that does not skip them crashes. Their tokens were not
    checked: a row that could not be read is not a clean row.

    ## Example
    A row with a string among its token ids:

    ```text
    {"token_ids": [17, 19, "0"], "loss_mask": [0, 1, 1]}
    error REC001
      column 'token_ids' holds a string at position 2, not a token id
    ```

    ## Repair
    None: whatever wrote the row has to write it again. `drop` moves it to the quarantine file.
    """
    return iter(())
