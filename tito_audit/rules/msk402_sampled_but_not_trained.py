"""MSK402: sampled tokens that the loss leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.masks import sampled_turns
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.sft import is_sft
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._masks import judged_mask
from tito_audit.rules._words import counted
from tito_audit.terminal.words import listed


@rule(
    "MSK402",
    Severity.WARNING,
    headline="{n} with sampled tokens left out of the loss",
    needs=(Needs.MASK, Needs.SAMPLED),
    silent=Verified.MASK,
)
def sampled_but_not_trained(evidence: Evidence) -> Iterator[Hit]:
    """Sampled tokens are left out of the loss.

    ## What it finds
    Part of a sampled turn that is not trained: a warning, or a note next to drifted tokens, which a repair may
    have taken out. Whole turns that are not trained: a note, since trainers leave out all turns but the last,
    turns cut by the length limit, or single turns. If every answer of a row lacks up to three first tokens, its
    writer may mean it: one note of the log, or a warning of the log if other rows train these tokens. A mask that
    trains nothing belongs to MSK403, a turn end alone to MSK404.

    ## Why it matters
    Tokens outside the loss get no gradient. A mask that misses the beginning or the end of every answer is the
    sign of an offset in the code that built it, and then other tokens are usually trained instead.

    ## Example
    A token in the middle of the answer is not trained:

    ```text
    warning MSK402 turn 0 row 11:12
      1 sampled token is not trained although the rest of the turn is
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!│<|im_end|>│
                                                                                    =  ^ ==========
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0 2002
    ```

    ## Repair
    `splice` rebuilds the mask of a row with an error from the calls. What only a warning is about may be meant.
    """
    mask = judged_mask(evidence)
    if mask is None:
        return
    turns = sampled_turns(evidence)
    trained = [any(mask.trained[a:b].any() for a, b in spans) for _, spans in turns]
    for number, (turn, spans) in enumerate(turns):
        start, end = spans[0][0], spans[-1][1]
        # A run no longer than its slide misses its turn entirely; that is still not a choice of the trainer.
        if not trained[number] and not (mask.in_slide[start] and end - start <= abs(mask.slide)):
            calls, why = evidence.rollout.turns, "a choice that some trainers make"
            if turn is not None and turn < len(calls) and calls[turn].finish_reason == "length":
                why = "it was cut by the length limit, and some trainers leave such turns out"
            message = f"turn {number + 1} of {len(trained)} is not trained; {why}"
            headline = "{n} with answers left out of the loss" if is_sft(evidence.rollout) else ""
            yield mask.hit(evidence, start, end, message, "turn left out", turn, Severity.NOTE, headline)
            continue
        for begin, stop in spans:
            for first, past in trained_runs(mask.not_trained[begin:stop]):
                start, end = begin + first, begin + past
                tokens, headline = counted(end - start, "sampled token"), ""
                if is_sft(evidence.rollout):
                    tokens = f"{end - start:,} token{'s' * (end - start > 1)} of the assistant"
                    headline = "{n} with parts of answers left out of the loss"
                verb = "is" if end - start == 1 else "are"
                message = f"{tokens} {verb} not trained although the rest of the turn is"
                severity, cause = Severity.WARNING, "part of a turn left out"
                if mask.in_slide[start:end].all():
                    message += f"; {mask.slide_words}"
                    severity, cause = Severity.ERROR, f"slid by {mask.slide:+d}"
                elif mask.readings:
                    message += f"; undecided: {listed(mask.readings, 'or')}"
                    cause = "undecided"
                elif mask.view.drifted[start:end].any():
                    message += "; they touch drifted tokens, which a repair may have taken out of the loss"
                    severity, cause = Severity.NOTE, "left out beside drift"
                yield mask.hit(evidence, start, end, message, cause, turn, severity, headline)
