"""TPL213: a template that writes earlier turns again in another way."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Hit, Severity
from tito_audit.rule import rule


@rule("TPL213", Severity.NOTE)
def not_append_only(evidence: Evidence) -> Iterator[Hit]:
    """The template is not append-only for messages of the log.

    ## What it finds
    Before the audit, the first conversations of a log with several answers (up to 8) are rendered up to their
    first answers and up to their last one. If an earlier text is not the start of the later one, the template
    writes history in another way than it was: it strips reasoning, moves the system prompt, or closes the last
    turn otherwise. One note for the log names the first such place. A pipe cannot be read twice, so it is not
    looked at.

    ## Why it matters
    Each call then breaks the prefix of the one before it (SEQ302): the tokens that were sampled are not those that
    later prompts hold, prefix caches miss, and a conversation is no single training row.

    ## Example
    ```text
    the template is not append-only for 8 of the first 8 conversations: after the answer in message 1 of row 0 it
    writes '<think>\\nTwo and two.\\n</think>\\n\\n4', and in a later prompt '4<|im_end|>\\n'; `tito-audit template
    Qwen/Qwen3-8B` says where it breaks, and which argument would keep it
    ```

    ## Repair
    None for the log. Sample with a template that keeps history (`tito-audit template --training FILE` writes one
    where it can), or keep token ids from call to call.
    """
    return iter(())
