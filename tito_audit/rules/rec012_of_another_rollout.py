"""REC012: a training row or messages of another rollout."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.unrelated import TRAINING_ROW
from tito_audit.record.arrays import empty_ids
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._words import head


@rule("REC012", Severity.ERROR, headline="{n} holding parts of another rollout", when=Occasion.OTHER_ROLLOUT)
def of_another_rollout(evidence: Evidence) -> Iterator[Hit]:
    """The training row or the messages are of another rollout.

    ## What it finds
    A training row that trains nothing of what the calls beside it sampled: rows and calls were joined wrongly, or
    the ids are not tokens of this rollout. Ids that are all off by the same number are named as such. Where the
    calls of other rows of the run sampled what these rows train, a finding about the log names them at its end,
    and by how many rows the join is off.

    Messages none of whose answers are in the ids, as a warning: the log contradicts itself.

    An answer of which half is there, or that shares half of its words, is drift and belongs to the TOK and TPL
    rules. What is of another rollout is used for nothing: such a row is not compared with the calls any further,
    and a row beside such messages is read by its own headers.

    ## Why it matters
    The row trains tokens with the rewards, logprobs and masks of another rollout, or tokens that no policy wrote.
    Rewards that were computed from messages of another conversation reward nothing that is trained.

    ## Example
    The row holds the answer of another call:

    ```text
    error REC012 row 10:17
      the training row is not of these calls: nothing that it trains was sampled by the calls beside
      it
      training row │S │kin│ny │·c │at │s │<|im_end|>│
                    50 346 329 278 273 82 2002
    ```

    ## Repair
    None is certain: the log does not say which part is right. Join rows and calls by id again; `drop` moves the
    rollout aside.
    """
    row = evidence.rollout.training_row
    for part in evidence.unrelated:
        start, end = part.span
        recorded = head(evidence, empty_ids() if row is None else row.token_ids[start:end])
        severity = Severity.ERROR if part.part == TRAINING_ROW else Severity.WARNING
        yield Hit(Where.ROW, start, end, part.what, cause=part.cause, severity=severity, recorded=recorded)
