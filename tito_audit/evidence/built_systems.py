"""Prompts rendered with a system prompt other than the messages', or with theirs in another place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tito_audit.evidence.model import Construction
from tito_audit.evidence.unmatched import Candidate, UnmatchedSequence
from tito_audit.record.message import Message, as_message

_PROBE = "titoauditprobe"
_ANCHOR = 48
"""How many characters after a system prompt are used to find its end in recorded text."""


def holds_system(text: str) -> bool:
    """Whether a text contains a system or developer header."""
    return re.search(r"(^|[>\n|])\s*(system|developer)\b", text) is not None or "<<SYS>>" in text


def systems(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered with another system prompt, with none, or with it in another place."""
    first = sequence.messages[0]
    if first.role in ("system", "developer"):
        yield from _other_than(first.text, sequence)
        return
    assert sequence.canonical is not None
    bare = _without_default(sequence, sequence.canonical)
    if bare is not None:
        yield _candidate(bare, "default system prompt missing", "the default system prompt is missing")
    yield from _found(sequence, sequence.messages, "system prompt not in the messages", "is not in the messages")


def _other_than(system: str, sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered with something other than their own system prompt."""
    rest = sequence.messages[1:]
    text = sequence.write(rest, sequence.rollout.tools)
    bare = _without_default(sequence, text) if text is not None else None
    if text is not None and bare is not None:
        cause = "default system prompt in place of the log's"
        yield _candidate(text, cause, "the template's default replaces the system prompt")
    without = bare or text
    if without is not None:
        yield _candidate(without, "system prompt missing", "a system prompt is missing")
        yield from _own_turn(sequence, without, system)
    yield from _folded(sequence, rest, system)
    yield from _found(sequence, rest, "another system prompt", "is not the one in the messages")


def _folded(sequence: UnmatchedSequence, rest: tuple[Message, ...], system: str) -> Iterator[Candidate]:
    """The system prompt at the start of the first user message."""
    if not rest or rest[0].role != "user" or not isinstance(rest[0].content, str):
        return
    for between in ("\n\n", "\n", " "):
        content = f"{system}{between}{rest[0].content}"
        folded = replace(rest[0], content=content, wire={**rest[0].wire, "content": content})
        text = sequence.write((folded, *rest[1:]), sequence.rollout.tools)
        if text is None:
            return
        cause = "system prompt folded into the first user message"
        for one in (_without_default(sequence, text), text):
            if one is not None:
                yield _candidate(one, cause, "the system prompt is in the first user message")


def _own_turn(sequence: UnmatchedSequence, without: str, system: str) -> Iterator[Candidate]:
    """The system prompt as a turn of its own, where the template folds it into the first user turn."""
    assert sequence.canonical is not None
    start, at = _user_header(sequence, without)
    if start is None or holds_system(sequence.canonical[: max(sequence.canonical.find(sequence.question), 0)]):
        return
    header = without[start:at]
    close = without[at + len(sequence.question) :]
    again = close.find(header[: max(header.lower().find("user"), 1)])
    if again < 0 or "user" not in header:
        return
    turn = header.replace("user", "system") + system.strip() + close[:again]
    cause = "system prompt as a turn of its own"
    yield _candidate(without[:start] + turn + without[start:], cause, "the system prompt has a turn of its own")


def _found(sequence: UnmatchedSequence, rest: tuple[Message, ...], cause: str, what: str) -> Iterator[Candidate]:
    """The messages with the system prompt that the recorded text holds where the template writes one."""
    probe = sequence.write((_system(_PROBE), *rest), sequence.rollout.tools)
    if probe is None or probe.count(_PROBE) != 1:
        return
    before, after = probe.split(_PROBE)
    end = sequence.text.find(after[:_ANCHOR], len(before))
    if not sequence.text.startswith(before) or end <= len(before):
        return
    held = sequence.text[len(before) : end]
    assert sequence.reference.renderer is not None
    if any(one in held for one in sequence.reference.renderer.control_texts if one):
        return  # control tokens: not the text of a message
    text = sequence.write((_system(held), *rest), sequence.rollout.tools)
    if text is not None:
        yield _candidate(text, cause, f"the system prompt {what}")


def _without_default(sequence: UnmatchedSequence, text: str) -> str | None:
    """A text rendered without a system message, with the template's default system prompt cut out too."""
    if sequence.rollout.tools:
        return None  # the tools are written there
    start, _ = _user_header(sequence, text)
    if start is None or not holds_system(text[:start]):
        return None
    kept = text[start:]
    return kept if sequence.bos and kept.startswith(sequence.bos) else sequence.bos + kept


def _user_header(sequence: UnmatchedSequence, text: str) -> tuple[int | None, int]:
    """Where the header of the first user message begins, and where its text begins."""
    at = text.find(sequence.question) if sequence.question else -1
    word = text.lower().rfind("user", 0, max(at, 0))
    assert sequence.reference.renderer is not None
    if at < 0 or word < 0:
        return None, at
    starts = (text.rfind(one, 0, word + len(one)) for one in sequence.reference.renderer.control_texts if one)
    start = max(starts, default=-1)
    return (start if start >= 0 else None), at


def _system(text: str) -> Message:
    return as_message({"role": "system", "content": text}, "system")


def _candidate(text: str, cause: str, what: str) -> Candidate:
    return Candidate(text, Construction("TPL206", cause, what))
