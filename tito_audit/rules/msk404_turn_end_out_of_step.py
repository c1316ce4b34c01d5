"""MSK404: a turn end that is sampled and not trained, or trained and not sampled."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.sft import is_sft
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule
from tito_audit.rules._masks import JudgedMask, judged_mask

_NOT_TAUGHT = "the end of an answer is not trained although the row trains it; the model is not taught to stop"
_UNTRAINED = "the end of a turn was sampled but is not trained; the model gets no credit for stopping"


@rule(
    "MSK404",
    Severity.WARNING,
    headline="{n} with a turn end sampled but not trained, or the reverse",
    needs=(Needs.MASK, Needs.SAMPLED),
    silent=Verified.MASK,
)
def turn_end_out_of_step(evidence: Evidence) -> Iterator[Hit]:
    """A turn end is sampled and not trained, or trained and not sampled.

    ## What it finds
    The end token of a trained turn that the model sampled and the mask leaves out although the row trains other
    ends (warning). An end token in the loss that the call did not sample: the template or a framework appended it,
    usually after an answer that the length limit cut (error). If a row trains no end at all, its writer may mean
    it: one note of the log, or a warning of the log if other rows train theirs. If a set for SFT trains no end,
    that is a warning of the log, however many turns it has.

    ## Why it matters
    A model whose sampled ends are never trained gets no credit for stopping and learns to run on. An appended end
    in the loss has no logprob of its own and teaches the model to stop where it did not.

    ## Example
    The turn end that a framework appended after the length limit is trained:

    ```text
    error MSK404 turn 0 row 12:13
      the end of a turn is trained but was not sampled: the length limit cut the answer and the end
      was appended
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!│<|im_end|>│
                                                                                    =  = ##########
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0 2002
    ```

    ## Repair
    `mask` takes an appended end out of the loss, `splice` rebuilds the mask of a row with an error from the calls.
    """
    mask = judged_mask(evidence)
    if mask is None:
        return
    for position in mask.end_not_trained.nonzero()[0].tolist():
        message = _NOT_TAUGHT if is_sft(evidence.rollout) else _UNTRAINED
        yield _hit(evidence, mask, position, position, message, "sampled, not trained", Severity.WARNING)
    for position in mask.end_not_sampled.nonzero()[0].tolist():
        turn, calls = int(mask.view.turn[position - 1]), evidence.rollout.turns
        why = "it was appended to the answer and carries no logprob of its own"
        if 0 <= turn < len(calls) and calls[turn].finish_reason == "length":
            why = "the length limit cut the answer and the end was appended"
        message = f"the end of a turn is trained but was not sampled: {why}"
        yield _hit(evidence, mask, position, position - 1, message, "trained, not sampled", Severity.ERROR)


def _hit(
    evidence: Evidence, mask: JudgedMask, position: int, answer: int, message: str, cause: str, severity: Severity
) -> Hit:
    """The finding for a turn end; `answer` is a token of its turn."""
    turn = int(mask.view.turn[answer])
    headline = "{n} with an answer's end left out of the loss" if is_sft(evidence.rollout) else ""
    return mask.hit(
        evidence, position, position + 1, message, cause, turn if turn >= 0 else None, severity, headline
    )
