"""LPR502: logprobs shifted against their tokens."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.logprobs import logprob_shifts
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.reading import assume_flags, describe_slides, shift_in_words
from tito_audit.rule import rule
from tito_audit.rules._words import counted, head
from tito_audit.terminal.words import listed


@rule(
    "LPR502",
    Severity.ERROR,
    headline="{n} with logprobs of other tokens",
    needs=(Needs.ROW_LOGPROBS,),
    silent=Verified.LOGPROBS,
)
def shifted_logprobs(evidence: Evidence) -> Iterator[Hit]:
    """The logprobs of the row belong to other tokens.

    ## What it finds
    A row whose logprobs are those of its calls, but some places early or late. Without calls: a row whose values
    begin and end early or late in the sampled spans, as the fill values (0.0, null, 1.0) around them show, if no
    convention of a right row explains them. Where several slides fit, the finding says that it is undecided. Also
    values that match the calls at no offset. Values are compared to within 0.001, since logs round.

    ## Why it matters
    Each token's importance ratio is then computed from another token's probability. Most ratios stay near 1,
    because most logprobs are near 0, so averages hide it.

    ## Example
    The calls prove that the row's logprobs are one place late:

    ```text
    error LPR502 turn 0 row 10:13
      the logprobs are 1 place late (proven by the calls); each token is weighted by another's
      probability
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!    │
                                                                                    #  #
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0
     logprob  0            0   0   0   0  0          0   0            0         0   0  -0.50
          12 │<|im_end|>│
              ##########
          id  2002
     logprob  -0.25
    ```

    ## Repair
    `realign` moves the column back; `splice` takes the values of the calls.
    """
    row = evidence.rollout.training_row
    if row is None:
        return
    for shift in logprob_shifts(evidence):
        cause = "undecided" if shift.is_undecided else f"shifted by {shift.offset:+d}"
        if shift.against_mask:
            apart = listed([shift_in_words(slide.logprobs) for slide in shift.slides], "or")
            message = (
                f"undecided: the logprobs are {apart} against the mask, and nothing in the row tells which is "
                "off; pass a tokenizer, or log the calls or the messages"
            )
        elif shift.is_undecided:
            ways = describe_slides(shift.slides)
            if shift.may_lack_values:
                ways.append(f"{counted(shift.values, 'value')} under the mask never recorded")
            message = f"undecided: {listed(ways, 'or')}; the row alone cannot tell, so no repair touches it"
            whole = next((slide for slide in shift.slides if slide.whole_row), None)
            if whole is not None:
                message += f"; if you know, state it: {assume_flags(whole)}"
        elif not shift.offset:
            cause, differ = "other values than the calls recorded", "differs" if shift.values == 1 else "differ"
            message = (
                f"{counted(shift.values, 'logprob')} of the row {differ} from what the call recorded for the "
                "same tokens; the importance ratio is not taken against the sampler"
            )
        else:
            proof = "proven by the calls"
            if not shift.by_calls:
                proof = "by where values begin and end in every sampled span"
            where = "" if shift.by_calls or not shift.slides else shift.slides[0].where
            off = f"{shift_in_words(shift.offset)}{where} ({proof})"
            message = f"the logprobs are {off}; each token is weighted by another's probability"
        recorded = head(evidence, row.token_ids[shift.start : shift.end])
        yield Hit(Where.ROW, shift.start, shift.end, message, shift.turn, cause, recorded=recorded)
