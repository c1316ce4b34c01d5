"""Prompts and rows written without the older messages."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.evidence.model import Built
from tito_audit.evidence.scene import Building, Scene

__all__ = ["histories"]

_TRIED = 4


def histories(scene: Scene) -> Iterator[Building]:
    """The messages without those in front of a later question, the longest history first."""
    messages = scene.messages
    kept = 1 if messages[0].role in ("system", "developer") else 0
    later = [i for i in range(kept + 1, len(messages)) if messages[i].role == "user"]
    held = [i for i in later if messages[i].text.strip() and messages[i].text.strip() in scene.text]
    for first in held[:_TRIED]:
        for head in (messages[:kept], messages[: kept + 1]):
            if len(head) >= first:
                continue
            text = scene.write((*head, *messages[first:]), scene.rollout.tools)
            if text is not None:
                number = first - len(head)
                told = "an older message is" if number == 1 else f"{number} older messages are"
                yield Building(text, Built("SEQ303", "older messages dropped", f"{told} left out"))
