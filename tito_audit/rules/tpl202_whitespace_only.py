"""TPL202: only white space differs."""

from __future__ import annotations

from tito_audit.evidence.history_edits import unspaced
from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity
from tito_audit.rule import OTHER_BYTES, Reason, cause
from tito_audit.rules._drift import in_answer


@cause(
    "TPL202",
    Severity.ERROR,
    headline="{n} with whitespace changed by the template",
    precedence=75,
    kinds=OTHER_BYTES,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def whitespace_only(difference: Difference, evidence: Evidence) -> Reason | None:
    """Only white space differs.

    ## What it finds
    A difference in white space alone: a trimmed answer, or a newline too many or too few in the scaffold.

    ## Why it matters
    White space is tokens too. A newline that is trimmed from an answer, or missing after a turn end, breaks the
    prefix of every later prompt and puts the model off the template it was trained with.

    ## Example
    The next prompt holds the answer without its last newline:

    ```text
    error TPL202 turn 0 completion 2:3
      white space is trimmed in an answer: sampled '.\\n', turn 1's prompt has '.'; turn 1 saw the
      rewritten tokens
      sampled      │d │one│.⏎ │<|im_end|>│
                    67 528 388 2002
      next prompt  │d │one│.  │<|im_end|>│
                    67 528 13  2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    if unspaced(difference.recorded.data) != unspaced(difference.canonical.data):
        return None
    recorded, canonical = (len(side.data) for side in (difference.recorded, difference.canonical))
    place = "in an answer" if in_answer(difference) else "in the scaffold"
    # Before sampling, white space is missing or extra; after sampling, it was trimmed or added.
    by_template = difference.against is Against.TEMPLATE and not difference.sampled
    less, more = ("extra", "missing") if by_template else ("trimmed", "added")
    verb = less if recorded > canonical else more if recorded < canonical else "changed"
    what = f"extra white space {place}" if verb == "extra" else f"white space is {verb} {place}"
    return Reason(f"white space {verb} {place}", what)
