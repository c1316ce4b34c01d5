"""MSK403: a loss mask that is inverted, all zeros or all ones."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.masks import WholeMask, whole_mask
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.sft import CUT, is_sft, sft_facts
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule
from tito_audit.rules._words import counted


@rule(
    "MSK403",
    Severity.ERROR,
    headline="{n} with an inverted or constant loss mask",
    needs=(Needs.MASK,),
    silent=Verified.MASK,
)
def mask_wrong_as_a_whole(evidence: Evidence) -> Iterator[Hit]:
    """The loss mask is inverted, all zeros or all ones.

    ## What it finds
    A mask that trains exactly what was given and leaves out what was sampled; one that trains every token although
    the row starts with a prompt; and one that trains nothing (a warning: some trainers empty the mask of a rollout
    they want to skip). MSK401, MSK402 and MSK404 then report nothing for the row.

    In a set for SFT, a row that trains every token is a warning, as some trainers do so by default. That no row
    trains anything is an error of the log, and rows that end before an answer begins are a warning of the log.

    ## Why it matters
    An inverted mask trains the model to imitate its users and tools, never itself. A full mask trains it on both.
    An empty one costs a forward pass and trains nothing.

    ## Example
    An inverted mask:

    ```text
    error MSK403 row 0:13
      the mask is inverted: it trains every token that was given and none that was sampled
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!│<|im_end|>│
              ============ ==  ==  =   =  ========== =   ============ ========= =
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0 2002
    ```

    ## Repair
    `splice` rebuilds the mask from the calls.
    """
    wrong, row = whole_mask(evidence), evidence.rollout.training_row
    if wrong is None or row is None:
        return
    length = len(row.token_ids)
    message = {
        WholeMask.NOTHING: f"none of {counted(length, 'token')} is trained; the row costs a forward pass "
        "and teaches nothing, unless it was emptied on purpose",
        WholeMask.EVERYTHING: f"all of {counted(length, 'token')} are trained, the prompt included; the loss "
        "teaches the model to write what it was given",
        WholeMask.INVERTED: "the mask is inverted: it trains every token that was given and none that was sampled",
    }[wrong]
    severity = Severity.WARNING if wrong is WholeMask.NOTHING else None
    if not is_sft(evidence.rollout):
        yield Hit(Where.ROW, 0, length, message, cause=wrong.value, severity=severity)
        return
    cut = wrong is WholeMask.NOTHING and sft_facts(evidence).get(CUT)
    message, headline = {
        WholeMask.NOTHING: (
            f"none of {counted(length, 'token')} is trained"
            + (": the row ends before an answer begins" if cut else ""),
            "{n} in which nothing is trained",
        ),
        WholeMask.EVERYTHING: (
            f"all of {counted(length, 'token')} are trained, the prompt included; right only if the loss is meant "
            "to cover prompts",
            "{n} with the prompt in the loss",
        ),
        WholeMask.INVERTED: (
            "the mask is inverted: it trains every token that the assistant did not write and none that it wrote",
            "{n} with an inverted loss mask",
        ),
    }[wrong]
    severity = None if wrong is WholeMask.INVERTED else Severity.WARNING
    cause = "cut before the answer" if cut else wrong.value
    yield Hit(Where.ROW, 0, length, message, cause=cause, severity=severity, headline=headline)
