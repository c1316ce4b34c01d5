"""Why a call does not continue an earlier one, in words for the user."""

from __future__ import annotations

from collections.abc import Sequence

from tito_audit.record.message import Message
from tito_audit.render.span_builder import common_start
from tito_audit.sessions.index import Departure
from tito_audit.sessions.model import Fork, ForkReason

_BEFORE, _AFTER, _QUOTED = 24, 48, 60


def departed(messages: Sequence[Message], keys: Sequence[bytes], departure: Departure) -> Fork:
    """The fork of a client that changed the history or left part of it out."""
    at, answer = departure.at, departure.held
    call = f"call {answer.node.call_id}"
    if departure.reasoning:
        texts = _two(messages[at].reasoning, answer.sent[at].reasoning)
        return Fork(ForkReason.EDITED, f"message {at} has other reasoning than it had: {texts}", at)
    later = answer.keys[at + 1 :]
    if keys[at] in later:
        left_out = later.index(keys[at]) + 1
        what = f"messages {at} to {at + left_out - 1} are" if left_out > 1 else f"message {at} is"
        return Fork(ForkReason.SHORTENED, f"{what} left out of the history that {call} had", at)
    return Fork(
        ForkReason.EDITED,
        f"message {at} differs from the one that {call} had: {_two(_said(messages[at]), _said(answer.sent[at]))}",
        at,
    )


def new_conversation(messages: Sequence[Message]) -> Fork:
    """The fork of a call whose history has no answer of this session."""
    answers = sum(message.sampled for message in messages)
    if answers == 0:
        detail = "the history holds no answer"
    elif answers == 1:
        detail = "the answer in the history was not given in this session"
    else:
        detail = f"none of the {answers} answers in the history was given in this session"
    return Fork(ForkReason.NEW_CONVERSATION, detail)


def left_memory() -> Fork:
    """The fork of a client that comes back to a session that left memory."""
    return Fork(ForkReason.LEFT_MEMORY, "the answers of this session left memory; they are in the log")


def rewrites(before: str, after: str, when: str, message: int | None) -> Fork:
    """The fork of a template that writes the history differently; both texts, from a little before they part."""
    at = common_start(before, after)
    texts = " became ".join(_quoted(text[max(at - _BEFORE, 0) : at + _AFTER]) for text in (before, after))
    return Fork(
        ForkReason.TEMPLATE_REWRITES, f"the template writes the history differently {when}: {texts}", message
    )


def leaves_out(parts: Sequence[str], message: int | None) -> Fork:
    """The fork of a template that never writes a part of the answer."""
    what = " and ".join(parts)
    return Fork(ForkReason.TEMPLATE_REWRITES, f"the template leaves the answer's {what} out", message)


def _two(sent: str | None, stored: str | None) -> str:
    """Two texts, from a little before they part."""
    sent, stored = sent or "", stored or ""
    at = max(common_start(sent, stored) - _BEFORE, 0)
    return f"{_quoted(sent[at:])}, not {_quoted(stored[at:])}"


def _said(message: Message) -> str:
    """A message as one text."""
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([f"{message.role}:", *filter(None, [message.text]), *calls])


def _quoted(text: str) -> str:
    """A text in quotes, shortened."""
    return repr(text if len(text) <= _QUOTED + 12 else f"{text[:_QUOTED]}…")
