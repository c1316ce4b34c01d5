"""Prompts written with another system prompt than the messages hold, or with it in another place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tito_audit.evidence.model import Built
from tito_audit.evidence.scene import Building, Scene
from tito_audit.record.message import Message, as_message

__all__ = ["holds_system", "systems"]

_PROBE = "titoauditprobe"
_ANCHOR = 48
"""Characters behind a system prompt by which its end is found in recorded text."""


def holds_system(text: str) -> bool:
    """Whether a system or developer header stands in a text."""
    return re.search(r"(^|[>\n|])\s*(system|developer)\b", text) is not None or "<<SYS>>" in text


def systems(scene: Scene) -> Iterator[Building]:
    """The messages with another system prompt, with none, or with it in another place."""
    first = scene.messages[0]
    if first.role in ("system", "developer"):
        yield from _other_than(first.text, scene)
        return
    assert scene.canonical is not None
    bare = _without_default(scene, scene.canonical)
    if bare is not None:
        yield _building(bare, "default system prompt missing", "the default system prompt is missing")
    yield from _found(scene, scene.messages, "system prompt not in the messages", "is not in the messages")


def _other_than(system: str, scene: Scene) -> Iterator[Building]:
    """What may stand in place of the messages' own system prompt."""
    rest = scene.messages[1:]
    text = scene.write(rest, scene.rollout.tools)
    bare = _without_default(scene, text) if text is not None else None
    if text is not None and bare is not None:
        cause = "default system prompt in place of the log's"
        yield _building(text, cause, "the template's default stands in place of the system prompt")
    without = bare or text
    if without is not None:
        yield _building(without, "system prompt missing", "a system prompt is missing")
        yield from _own_turn(scene, without, system)
    yield from _folded(scene, rest, system)
    yield from _found(scene, rest, "another system prompt", "is another one than in the messages")


def _folded(scene: Scene, rest: tuple[Message, ...], system: str) -> Iterator[Building]:
    """The system prompt at the head of the first user's message."""
    if not rest or rest[0].role != "user" or not isinstance(rest[0].content, str):
        return
    for between in ("\n\n", "\n", " "):
        content = f"{system}{between}{rest[0].content}"
        told = replace(rest[0], content=content, wire={**rest[0].wire, "content": content})
        text = scene.write((told, *rest[1:]), scene.rollout.tools)
        if text is None:
            return
        cause = "system prompt folded into the first user message"
        for one in (_without_default(scene, text), text):
            if one is not None:
                yield _building(one, cause, "the system prompt stands in the first user message")


def _own_turn(scene: Scene, without: str, system: str) -> Iterator[Building]:
    """The system prompt as a turn of its own, where the template folds it into the first user's."""
    assert scene.canonical is not None
    start, at = _user_header(scene, without)
    if start is None or holds_system(scene.canonical[: max(scene.canonical.find(scene.question), 0)]):
        return
    header = without[start:at]
    close = without[at + len(scene.question) :]
    again = close.find(header[: max(header.lower().find("user"), 1)])
    if again < 0 or "user" not in header:
        return
    turn = header.replace("user", "system") + system.strip() + close[:again]
    cause = "system prompt as a turn of its own"
    yield _building(without[:start] + turn + without[start:], cause, "the system prompt has a turn of its own")


def _found(scene: Scene, rest: tuple[Message, ...], cause: str, what: str) -> Iterator[Building]:
    """The system prompt that the recorded text holds where the template would write one."""
    probe = scene.write((_system(_PROBE), *rest), scene.rollout.tools)
    if probe is None or probe.count(_PROBE) != 1:
        return
    before, after = probe.split(_PROBE)
    end = scene.text.find(after[:_ANCHOR], len(before))
    if not scene.text.startswith(before) or end <= len(before):
        return
    held = scene.text[len(before) : end]
    assert scene.reference.renderer is not None
    if any(one in held for one in scene.reference.renderer.control_texts if one):
        return  # no text of a message
    text = scene.write((_system(held), *rest), scene.rollout.tools)
    if text is not None:
        yield _building(text, cause, f"the system prompt {what}")


def _without_default(scene: Scene, text: str) -> str | None:
    """A text of messages without a system prompt, and without the one that the template wrote instead."""
    if scene.rollout.tools:
        return None  # what stands there are the tools
    start, _ = _user_header(scene, text)
    if start is None or not holds_system(text[:start]):
        return None
    kept = text[start:]
    return kept if scene.bos and kept.startswith(scene.bos) else scene.bos + kept


def _user_header(scene: Scene, text: str) -> tuple[int | None, int]:
    """Where the header of the first user's message begins and where its text does."""
    at = text.find(scene.question) if scene.question else -1
    word = text.lower().rfind("user", 0, max(at, 0))
    assert scene.reference.renderer is not None
    if at < 0 or word < 0:
        return None, at
    starts = (text.rfind(one, 0, word + len(one)) for one in scene.reference.renderer.control_texts if one)
    start = max(starts, default=-1)
    return (start if start >= 0 else None), at


def _system(text: str) -> Message:
    return as_message({"role": "system", "content": text}, "system")


def _building(text: str, cause: str, what: str) -> Building:
    return Building(text, Built("TPL206", cause, what))
