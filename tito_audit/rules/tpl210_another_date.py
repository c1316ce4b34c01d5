"""TPL210: the date in the prompt."""

from __future__ import annotations

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import OTHER_BYTES, Reason, cause
from tito_audit.ways.recorded_values import differing_dates


@cause(
    "TPL210",
    Severity.ERROR,
    headline="{n} rendered on another date",
    precedence=55,
    kinds=OTHER_BYTES,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def another_date(difference: Difference, evidence: Evidence) -> Reason | None:
    """The prompt was written on a different date.

    ## What it finds
    A template that writes the date (`strftime_now`), and a prompt or row with a different date than it writes now,
    or a prompt with a different date than the call before it. If the first prompts of a log (up to 16) hold other
    dates and match exactly when rendered on those, a single finding for the whole log says so (`where` is `log`),
    and the log is audited with them. `--ignore TPL210` audits it on today's date.

    ## Why it matters
    A prompt that is rendered again on another day is another prompt: tokens before every answer change, and with
    them the context of every logprob. A conversation that runs past midnight breaks its own prefix.

    ## Example
    A prompt from another day:

    ```text
    warning TPL210 turn 0 prompt 5:15
      the prompt was written on 1999-07-26: the prompt has '2'+'6'+' '+'J'+'ul'+' '+'1'+'9' and 2
      more tokens, the template writes '0'+'2'+' M'+'ay'+' '+'2'+'0'+'3' and 1 more token; the
      sampler was given tokens that the template does not write for these messages
      prompt       │yst │em │⏎  │2 │6 │·  │J │ul │·  │1 │9 │9 │9 │<|im_end|>│⏎  │<|im_start|>│
                    1132 316 198 17 21 220 41 376 220 16 24 24 24 2002       198 2001
      template     │yst │em │⏎  │0 │2 │·M │ay │·  │2 │0 │3 │1    │<|im_end|>│⏎  │<|im_start|>│
                    1132 316 198 15 17 468 343 220 17 15 18 16    2002       198 2001
    ```

    ## Repair
    None is needed: pass the date on which the log was written (`--clock 2024-07-26`), or `--clock recorded` where
    it differs from row to row. A trainer that renders the messages again needs the same date.
    """
    if not evidence.date_formats:
        return None
    dates = differing_dates(difference.recorded, difference.canonical, evidence.date_formats)
    if dates is None:
        return None
    return Reason("another date", f"the date is {dates[0]} here and {dates[1]} there")
