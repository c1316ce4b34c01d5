"""Marks the texts of messages with private-use characters, to find them in what the template writes.

Each text gets its own pair of characters from the two private planes of Unicode, inside its outer white space,
since templates trim. Marks change what some templates do, so a result counts only if removing the marks leaves
exactly what the template writes without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from tito_audit.render.renderer import Chat

_FIRST = 0xF0000
_PLANE = 0xFFFE  # the last two code points of a plane are not characters
_MAX_PAIRS = _PLANE  # how many pairs both planes hold together
_MARK = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_OPEN, _CLOSE = "<think>", "</think>"
_SPACE = re.compile(r"\s*")


class SpanKind(StrEnum):
    """What a part of a rendered text is."""

    SCAFFOLD = "scaffold"  # written by the template
    CONTENT = "content"  # the body of a message
    REASONING = "reasoning"  # the reasoning of an assistant message
    TOOL_CALL = "tool_call"  # its tool calls, with the text that wraps them
    GENERATION_PROMPT = "generation_prompt"  # what opens an assistant message
    TURN_END = "turn_end"  # the control token that closes one
    UNKNOWN = "unknown"  # the template rewrites too much


@dataclass(frozen=True, slots=True)
class Marking:
    """Which texts to mark; templates that test how a text begins tolerate fewer marks."""

    assistant_only: bool
    tool_calls: bool


class MarkedText(NamedTuple):
    """Where a marked text is in the rendered text."""

    start: int
    end: int
    kind: SpanKind
    message_index: int


class _Marker:
    """Hands out pairs of marks; remembers the message and kind of each."""

    def __init__(self) -> None:
        self.owners: list[tuple[int, SpanKind]] = []

    def mark_text(self, text: str, index: int, kind: SpanKind) -> str:
        """The text with a new pair of marks inside its outer white space; blank text is unchanged."""
        body = text.strip()
        if not body:
            return text
        number = len(self.owners)
        self.owners.append((index, kind))
        marked = f"{_mark_character(2 * number)}{body}{_mark_character(2 * number + 1)}"
        if len(body) == len(text):
            return marked
        at = len(text) - len(text.lstrip())
        return f"{text[:at]}{marked}{text[at + len(body) :]}"

    def mark_texts_in(self, value: Any, index: int, kind: SpanKind) -> Any:
        """A JSON value with every text marked, except keys."""
        if isinstance(value, str):
            return self.mark_text(value, index, kind)
        if isinstance(value, dict):
            return {key: self.mark_texts_in(item, index, kind) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_texts_in(item, index, kind) for item in value]
        return value


def mark(chat: Chat, marking: Marking, answers: Collection[int]) -> tuple[Chat, list[tuple[int, SpanKind]]]:
    """The messages with marks, and the message and kind of each pair; `answers` are the sampled messages."""
    marker = _Marker()
    out = list(chat)
    for index, message in enumerate(chat):
        if marking.assistant_only and index not in answers:
            continue
        message = out[index] = dict(message)
        # In each message first the reasoning is marked, then the content, then the tool calls.
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            # The reasoning is there under several names, and the template may read any.
            marked = marker.mark_text(reasoning, index, SpanKind.REASONING)
            names = ("reasoning_content", "thinking", "reasoning")
            message |= {name: marked for name in names if message.get(name) == reasoning}
        content = message.get("content")
        if isinstance(content, str) and index in answers and _CLOSE in content:
            # Two pairs, since templates cut contents after the reasoning
            start = content.find(_OPEN) + len(_OPEN)
            if start < len(_OPEN) or content.find(_CLOSE, start) < 0:
                start = 0
            end = content.find(_CLOSE, start)
            space = _SPACE.match(content, end + len(_CLOSE))
            assert space is not None
            thought = marker.mark_text(content[start:end], index, SpanKind.REASONING)
            rest = marker.mark_text(content[space.end() :], index, SpanKind.CONTENT)
            message["content"] = f"{content[:start]}{thought}{content[end : space.end()]}{rest}"
        elif isinstance(content, str):
            message["content"] = marker.mark_text(content, index, SpanKind.CONTENT)
        elif isinstance(content, list):
            message["content"] = [
                {**part, "text": marker.mark_text(part["text"], index, SpanKind.CONTENT)}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        if marking.tool_calls and isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_mark_call(call, index, marker) for call in message["tool_calls"]]
    return out, marker.owners


def _mark_call(call: Any, index: int, marker: _Marker) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mark_call(call["function"], index, marker)}
    named = {key: call[key] for key in ("name", "arguments") if key in call}
    return {**call, **marker.mark_texts_in(named, index, SpanKind.TOOL_CALL)}


def has_marks(text: str) -> bool:
    """Whether a text holds characters that are used as marks."""
    if text.isascii():
        return False
    data = text.encode("utf-8", "surrogatepass")  # characters of these planes begin with one of two bytes
    return (b"\xf3" in data or b"\xf4" in data) and _MARK.search(text) is not None


def unmark(text: str, owners: list[tuple[int, SpanKind]], wanted: str) -> list[MarkedText] | None:
    """What the marks in a text enclose, in order.

    None if the marks of a pair are not next to each other, or if the text without marks is not `wanted`.
    """
    pieces: list[str] = []
    enclosed: list[MarkedText] = []
    at = length = 0
    opened: tuple[int, int] | None = None
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    places = np.flatnonzero(codes >= _FIRST)
    for position, code in zip(places.tolist(), (codes[places] - _FIRST).tolist(), strict=True):
        if code & 0xFFFF >= _PLANE:
            continue
        number = code if code < _PLANE else code - 2
        pieces.append(text[at:position])
        length += position - at
        at = position + 1
        if number % 2 == 0 and opened is None:
            opened = number, length
        elif opened is not None and number == opened[0] + 1:
            index, kind = owners[number // 2]
            enclosed.append(MarkedText(opened[1], length, kind, index))
            opened = None
        else:
            return None
    pieces.append(text[at:])
    return enclosed if opened is None and "".join(pieces) == wanted else None


def _mark_character(number: int) -> str:
    if number >= 2 * _MAX_PAIRS:
        raise OverflowError("more texts than there are marks")
    return chr(_FIRST + number if number < _PLANE else _FIRST + number + 2)
