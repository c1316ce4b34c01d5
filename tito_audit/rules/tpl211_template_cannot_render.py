"""TPL211: the template cannot render the messages."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Occasion
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule


@rule(
    "TPL211",
    Severity.WARNING,
    headline="{n} that the template cannot render",
    needs=(Needs.MESSAGES, Needs.TOKENIZER, Needs.TEMPLATE),
    when=Occasion.UNRENDERED,
)
def template_cannot_render(evidence: Evidence) -> Iterator[Hit]:
    """The template cannot render the messages.

    ## What it finds
    Messages that the chat template rejects (roles that do not alternate, missing content), or a template that
    fails, runs too long or writes too much.

    ## Why it matters
    Either the prompt was not made by this template, or the log holds other messages than were sent. Nothing about
    the prompt could be checked against the template.

    ## Example
    A role that the template does not know:

    ```text
    warning TPL211 turn 0 prompt at 0
      turn 0's prompt cannot be rendered: chat template, line 54: No such role: critic
    ```

    ## Repair
    None for this log: pass the template that was used (`--chat-template`, `--template-arg`), or log the messages
    that were sent.
    """
    for turn, message in evidence.render_errors:
        where = Where.ROW if turn is None else Where.PROMPT
        what = "the conversation" if turn is None else f"turn {turn}'s prompt"
        cause = message.split("\n")[0][:80]
        yield Hit(where, 0, 0, f"{what} cannot be rendered: {message}", turn=turn, cause=cause)
