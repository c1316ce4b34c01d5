"""REC007: a log written with another tokenizer or chat template."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("REC007", Severity.ERROR)
def another_tokenizer(evidence: Evidence) -> Iterator[Hit]:
    """The log was written with another tokenizer or chat template.

    ## What it finds
    Before the audit, the first rows of a log (up to 16 that hold ids) are compared with the tokenizer and the chat
    template. The tokenizer does not fit if logged texts are missing from what the ids decode to and encoding those
    texts again does not give the ids back; if most rows hold ids past the end of the vocabulary; or if a token
    that the template writes occurs in the rows only in pieces. The template does not fit if messages open with
    other control tokens than those it writes. Anything in between is not reported. The
    check is of the log: for a single rollout there is nothing to compare.

    The finding belongs to the log (`where` is `log`) and comes before all others. Rules that would only repeat it
    in every row are held back and counted as skipped; those that compare ids with ids still run. A pipe cannot be
    read twice, so it is not checked. `--ignore REC007` audits the log as if it fitted.

    ## Why it matters
    With the wrong tokenizer every text reads as nonsense and every difference gets a false cause. Such a log is
    not repaired either: the repair would replace what was sampled by what the wrong tokenizer writes.

    ## Example
    ```text
    0 of 14 logged texts are found in what the ids decode to, 31% of the ids lie outside the vocabulary and
    encoding that text again gives 57% of the ids back: this log was not written with the tokenizer smollm2;
    the log names its tokenizer 'qwen2.5-coder'; pass the tokenizer of the model that sampled it (-t NAME);
    `tito-audit identify run.jsonl` tries those on this machine
    ```

    ## Repair
    None: nothing is wrong with the rows. Pass the tokenizer (`-t`) or the chat template (`--chat-template`) that
    the log was written with.
    """
    return iter(())
