"""REC007: a log written with another tokenizer or chat template."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule(
    "REC007",
    Severity.ERROR,
    of_log=True,
    headline="{n} written with another tokenizer or chat template",
    when=Occasion.NEVER,
)
def another_tokenizer(evidence: Evidence) -> Iterator[Hit]:
    """The log was written with another tokenizer or chat template.

    ## What it finds
    Before the audit, the first rows of a log (up to 16 that hold ids) are compared with the tokenizer and the chat
    template. The tokenizer does not fit if logged texts are missing from what the ids decode to and encoding those
    texts again does not give the ids back; if most rows hold ids past the end of the vocabulary; or if a token
    that the template writes occurs in the rows only in pieces. The template does not fit if messages open with
    other control tokens than those it writes. Anything in between is not reported. The check needs a log: a single
    rollout gives it nothing to compare.

    The finding is about the whole log (`where` is `log`) and comes before all others. Rules that would only repeat
    it in every row are held back and counted as skipped; those that compare ids with ids still run. A log from a
    pipe is not checked, as it cannot be read twice. `--ignore REC007` audits the log as if it fitted.

    ## Why it matters
    With the wrong tokenizer every text reads as nonsense and every difference gets a false cause. Such a log is
    not repaired either: the repair would replace what was sampled with what the wrong tokenizer writes.

    ## Example
    A log of one tokenizer, audited with another:

    ```text
    error REC007 the whole log
      0 of 16 logged texts are found in what the ids decode to and encoding that text again gives 63
      % of the ids back: this log was not written with the tokenizer toy_metaspace; pass the
      tokenizer of the model that sampled it (-t NAME); `tito-audit identify run.jsonl` tries those
      on this machine
    ```

    ## Repair
    None is needed: nothing is wrong with the rows. Pass the tokenizer (`-t`) or the chat template
    (`--chat-template`) that the log was written with.
    """
    return iter(())
