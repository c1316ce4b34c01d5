"""REC009: sampled tokens that the rows of a run train more than once."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.trainings import hit_again
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC009", Severity.ERROR)
def trained_more_than_once(evidence: Evidence) -> Iterator[Hit]:
    """Sampled tokens are trained more than once, or never.

    ## What it finds
    All rows of a run, in all of its files, are compared with each other once they were read. A row is reported if
    it trains tokens that another row trains first: its history (one row a step, each with the whole conversation
    in the loss), a prefix that it shares with other branches, or all of its tokens (a row or a call that was
    logged twice). The shortest row keeps its tokens, of equal ones the first.

    Samples of one prompt may agree by chance. An independent sample repeats tokens with the probability that they
    had, so the same tokens after the same context are one sampling event only if their logprobs add up to -30 or
    less and do not clearly differ, if the server gave both the same id, or if most rows of the log continue the
    row before them. Where there are no logprobs and nothing else proves it, a note says that it is undecided.
    Greedy samples are always the same, whatever their logprobs say: leave REC009 out there (`--ignore REC009`).

    In a run that has the calls beside the training rows, a note names each call that no row trains, provided that
    rows train most calls of that log. Calls alone count as trained: each becomes a training row.

    ## Why it matters
    The loss is a sum over trained tokens. What is trained twice counts twice, and in a conversation with one row a
    step the first answer counts once for each later step: long conversations drown out short ones, and the policy
    moves farther than the advantage says. What is never trained was sampled in vain.

    ## Example
    ```text
    row 3  system user | answer 1 |                        trains answer 1
    row 4  system user | answer 1 | tool | answer 2 |      trains answer 2, and answer 1 again
    ```

    ## Repair
    `once` takes the second trainings out of the loss; it runs when it is named (`--with once`). A call has no
    mask: leave its row out.
    """
    mask = None if evidence.rollout.training_row is None else evidence.rollout.training_row.loss_mask
    for said in evidence.trained_again:
        if said.turn is not None or (mask is not None and any(mask[start:end].any() for start, end in said.runs)):
            yield hit_again(said)
