"""TPL211: the template cannot render the messages."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.rule import rule


@rule("TPL211", Severity.WARNING, needs=(Needs.MESSAGES, Needs.TOKENIZER))
def template_cannot_render(evidence: Evidence) -> Iterator[Hit]:
    """The template cannot render the messages.

    ## What it finds
    Messages that the chat template rejects (roles that do not alternate, missing content), or a template that
    fails, runs too long or writes too much.

    ## Why it matters
    The sampler's prompt cannot have come from this template and these messages, or the log holds other messages
    than were sent. Nothing about this prompt could be checked against the template.

    ## Example
    `Conversation roles must alternate user/assistant/user/assistant`, raised by the template itself.

    ## Repair
    None. Pass the template that was used (`--chat-template`, `--template-arg`), or log the messages that
    were sent.
    """
    for turn, message in evidence.render_errors:
        where = Where.ROW if turn is None else Where.PROMPT
        what = "the conversation" if turn is None else f"turn {turn}'s prompt"
        yield Hit(
            where, 0, 0, f"{what} cannot be rendered: {message}", turn=turn, cause=message.split("\n")[0][:80]
        )
