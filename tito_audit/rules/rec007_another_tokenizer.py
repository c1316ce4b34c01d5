"""REC007: a log that another tokenizer or chat template wrote."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC007", Severity.ERROR)
def another_tokenizer(evidence: Evidence) -> Iterator[Hit]:
    """The log was written with another tokenizer or chat template.

    ## What it finds
    Before anything else the first rows of a log (up to 16 that hold ids) are held against the tokenizer and the
    chat template. The tokenizer does not fit where logged texts are not found in what the ids decode to and
    encoding that text again does not give the ids back, where most rows hold ids past the end of the vocabulary,
    or where a token that the template writes stands in the rows in pieces only. The template does not fit where
    the control tokens that open messages are others than those it writes. Between what fits and what does not
    lies much that is neither, and of that nothing is said: this check of a single rollout has nothing to look at.

    The finding is of the log (`where` is `log`) and comes before all others. Rules that would only repeat it in
    every row are held back and counted as skipped; those that compare ids with ids still run. A pipe cannot be
    read twice and is not asked. `--ignore REC007` audits the log as if it fitted.

    ## Why it matters
    With another tokenizer every text reads as nonsense and every difference has a cause that is none. Nor is
    such a log repaired with it: what the wrong tokenizer writes would take the place of what was sampled.

    ## Example
    ```text
    0 of 14 logged texts are found in what the ids decode to, 31% of the ids lie outside the vocabulary and
    encoding that text again gives 57% of the ids back: this log was not written with the tokenizer smollm2;
    the log names its tokenizer 'qwen2.5-coder'; pass the tokenizer of the model that sampled it (-t NAME)
    ```

    ## Repair
    None: nothing is wrong with the rows. Pass the tokenizer (`-t`) or the chat template (`--chat-template`) that
    the log was written with.
    """
    return iter(())
