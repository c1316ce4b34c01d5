"""TPL212: tools missing or changed between calls."""

from __future__ import annotations

from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import OTHER_BYTES, Reason, cause
from tito_audit.rules._drift import in_answer, texts_in_context
from tito_audit.ways.recorded_values import find_tools


@cause(
    "TPL212",
    Severity.ERROR,
    headline="{n} with missing or changed tools",
    precedence=58,
    kinds=OTHER_BYTES,
    places=(Where.PROMPT,),
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def tools_missing_or_changed(difference: Difference, evidence: Evidence) -> Reason | None:
    """Tools missing or changed between calls.

    ## What it finds
    Tool definitions in a prompt or row that are not those of the log: none, one too few or too many, a key such as
    `strict` dropped, a different order; and a prompt whose tools are not those of the call before it. If the first
    prompts of a log (up to 16) match exactly without the tools that its rows state, a single finding for the whole
    log says so (`where` is `log`), and the log is audited without them; in a log whose other prompts hold their
    tools, each prompt without them is reported.

    ## Why it matters
    The model chose among the tools it saw. Rendered with others, its answer follows a choice it never had, and
    every logprob after the tools belongs to another context.

    ## Example
    A tool comes in between two calls:

    ```text
    error TPL212 turn 0 prompt at 42
      the tools were changed: the prompt has nothing, turn 1's prompt has '{"'+'type'+'":'+'
      "'+'function'+'",'+' "'+'function' and 17 more tokens; turn 1 saw tokens that turn 0 lacks
      prompt       │": │·{ │}}}⏎│
                    270 759 1137
      next prompt  │": │·{ │}}}⏎│
                    270 759 1137
      prompt       │                                                                      │
      next prompt  │{" │type│": │·" │function│", │·" │function│… 4 tokens …│·" │g │", │·" │
                    299 556  270 268 575      302 268 575                   268 70 302 268
    ```

    ## Repair
    Log the tools that were sent, as they were sent; pass `--tools none` for a log whose prompts hold none. `fork`
    gives one row per unbroken run of calls.
    """
    if difference.against is not Against.NEXT_PROMPT or in_answer(difference):
        return None
    before, after = (find_tools(text) for text in texts_in_context(difference))
    if before == after:
        return None
    word = "added" if not before else "dropped" if not after else "changed"
    return Reason(f"tools {word} between calls", f"the tools were {word}")
