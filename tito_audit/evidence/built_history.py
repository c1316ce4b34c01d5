"""Prompts and rows rendered without the older messages."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Construction
from tito_audit.evidence.unmatched import Candidate, UnmatchedSequence

_TRIED = 4
"""How many later questions are tried as the start of the history."""


def histories(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages from a later question on, the longest history first."""
    messages = sequence.messages
    kept = 1 if messages[0].role in ("system", "developer") else 0
    later = [i for i in range(kept + 1, len(messages)) if messages[i].role == "user"]
    held = [i for i in later if messages[i].text.strip() and messages[i].text.strip() in sequence.text]
    for first in held[:_TRIED]:
        for head in (messages[:kept], messages[: kept + 1]):
            if len(head) >= first:
                continue
            text = sequence.write((*head, *messages[first:]), sequence.rollout.tools)
            if text is not None:
                dropped = first - len(head)
                told = "an older message is" if dropped == 1 else f"{dropped} older messages are"
                yield Candidate(text, Construction("SEQ303", "older messages dropped", f"{told} left out"))
