"""TPL213: a template that rewrites earlier turns."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule(
    "TPL213",
    Severity.NOTE,
    of_log=True,
    headline="{n} rendered by a template that is not append-only",
    when=Occasion.NEVER,
)
def not_append_only(evidence: Evidence) -> Iterator[Hit]:
    """The template rewrites earlier turns of this log.

    ## What it finds
    Before the audit, the first conversations of a log with several answers (up to 8) are rendered up to their
    first answers and up to their last one. If an earlier text is not a prefix of the later one, the template is
    not append-only: it strips reasoning, moves the system prompt, or closes the last turn differently. One note
    for the log names the first such place. A log from a pipe is not checked, as it cannot be read twice.

    ## Why it matters
    Each call then breaks the prefix of the one before it (SEQ302): later prompts do not hold the tokens that were
    sampled, prefix caches miss, and a conversation cannot be a single training row.

    ## Example
    A template that strips old reasoning:

    ```text
    note TPL213 the whole log
      the template is not append-only for 2 of the first 2 conversations: rendered up to the answer
      in message 1 of row 0 it writes '<think>\\n2+2 is 4\\n</think>\\n\\nIt is 4<|im_e', but in a later
      prompt 'It is 4<|im_end|>\\n<|im_start|>user\\n3+3?<'; `tito-audit template toy_bpe` shows where
      it breaks and which argument would prevent that
    ```

    ## Repair
    None for this log: sample with a template that keeps history (`tito-audit template --training FILE` writes one
    where it can), or pass token ids from call to call.
    """
    return iter(())
