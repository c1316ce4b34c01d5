"""REC009: sampled tokens that the rows of a run train more than once."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.trainings import retraining_hit
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule(
    "REC009",
    Severity.ERROR,
    of_log=True,
    headline="{n} trained more than once, or never",
    when=Occasion.TRAINED_AGAIN,
)
def trained_more_than_once(evidence: Evidence) -> Iterator[Hit]:
    """Sampled tokens are trained more than once, or never.

    ## What it finds
    All rows of a run, in all of its files, are compared with each other once they have been read. A row is
    reported if it trains tokens that another row trains first: its history (one row per step, each with the whole
    conversation in the loss), a prefix that it shares with other branches, or all of its tokens (a row or a call
    that was logged twice). The shortest row keeps its tokens; among equally short rows, the first.

    Samples of one prompt may agree by chance. An independent sample repeats tokens with the probability that they
    had, so the same tokens after the same context are one sampling event only if their logprobs add up to -30 or
    less and do not clearly differ, if the server gave both the same id, or if most rows of the log continue the
    row before them. Where there are no logprobs and nothing else proves it, a note says that it is undecided.
    Greedy samples are always the same, whatever their logprobs say: leave REC009 out there (`--ignore REC009`).

    In a run that has the calls beside the training rows, a note names each call that no row trains, provided that
    rows train most calls of that log. Calls alone count as trained: each becomes a training row.

    ## Why it matters
    The loss is a sum over trained tokens. What is trained twice counts twice, and in a conversation with one row
    per step the first answer counts once for each later step: long conversations drown out short ones, and the
    policy moves farther than the advantage says. What is never trained was sampled in vain.

    ## Example
    An answer that another row of the run trains first:

    ```text
    error REC009 row 10:13
      row 0 trains it first
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!│<|im_end|>│
                                                                                    #  # ##########
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0 2002
          13 │⏎  │<|im_start|>│us │er │⏎  │3 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │9 │
                                                                                        =
          id  198 2001         314 257 198 18 2002       198 2001         1620      198 24
          25 │<|im_end|>│
              ==========
          id  2002
    ```

    ## Repair
    `once` takes the repeated tokens out of the loss; it only runs when named (`--with once`). A call has no mask:
    leave its row out.
    """
    mask = None if evidence.rollout.training_row is None else evidence.rollout.training_row.loss_mask
    for hit in evidence.trained_again:
        if hit.turn is not None or (mask is not None and any(mask[start:end].any() for start, end in hit.runs)):
            yield retraining_hit(hit)
