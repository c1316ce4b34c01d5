"""What a template writes between two messages, as text and token ids, and how it writes contents.

A gateway that joins sampled ids with the text of new messages relies on three things: this text is the same after
any message, its ids are, and no token reaches across its ends. A content may be written unchanged, trimmed,
escaped or in an unknown way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tito_audit.render.renderer import Renderer
from tito_audit.templates.append_only import sampled_text, turn_ends
from tito_audit.templates.probes import TOOLS, Probe, assistant, make_probe, tool_call
from tito_audit.tokens.tokenizer import Tokenizer

CONTENTS = ("Aqz{} is here.", "{}Bqy", "x = {}\n  1")
"""Three shapes of contents; the index of the message makes each unique."""
EDGES = ("a", "word", ".", "?", ")", '"', "}", "\n", "\n\n", " ", "  ", "\t", "7", "é", "東", "</think>", "```")
"""Ends of contents that a token may merge with the text after them."""
_BEGINNINGS = ("a", "The", " a", "\n", "\n\n", "  ", "7", '"', "{", "<", "#", "-", "é", "東", "```", ".")
_START, _ANSWER, _CALL, _OPENED = "start", "assistant", "tool call", "answer"
PATTERNS: tuple[tuple[str, ...], ...] = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "call", "tool", "assistant", "user"),
    ("user", "call", "tool", "call", "tool", "user"),
    ("user", "calls", "tool", "tool", "assistant", "user"),
    ("system", "user", "call", "tool", "tool"),
    ("user", "assistant", "system", "user"),
)


@dataclass(frozen=True, slots=True)
class Seam:
    """The text between two messages; after an answer, from the end of what was sampled."""

    left: str
    """Who spoke: a role, `tool call` for an answer with a call, `start` for the beginning of the prompt."""
    right: str
    """Who speaks next: a role, or `answer` for the generation prompt."""
    texts: tuple[str, ...]
    """Every text that was seen there; just one if it is fixed."""
    seen: int = 0
    """How often the pair occurred in the conversations tried."""
    ids: tuple[int, ...] | None = None
    """The ids of a fixed text encoded alone; None without a tokenizer."""
    merges_before: tuple[str, ...] = ()
    """Ends of the content before it that merge with it into one token."""
    merges_after: tuple[str, ...] = ()
    """Beginnings of the content after it that merge with it."""

    @property
    def is_fixed(self) -> bool:
        """Whether the text was the same each time."""
        return len(self.texts) == 1


def find_seams(
    renderer: Renderer,
    tokenizer: Tokenizer | None,
    patterns: Sequence[Sequence[str]] = PATTERNS,
    contents: Sequence[str] = CONTENTS,
) -> tuple[Seam, ...]:
    """The text between each pair of messages that occurs in these patterns."""
    by_pair: dict[tuple[str, str], dict[str, int]] = {}
    ends = turn_ends(renderer)
    for pattern in patterns:
        for form in contents:
            for left, right, text in _texts_between(renderer, pattern, form, ends):
                counts = by_pair.setdefault((left, right), {})
                counts[text] = counts.get(text, 0) + 1
    seams: list[Seam] = []
    for (left, right), counts in by_pair.items():
        seam = Seam(left, right, tuple(counts), sum(counts.values()))
        if tokenizer is not None and seam.is_fixed:
            text, ids = seam.texts[0], _encode(tokenizer, seam.texts[0])
            edges = () if left.startswith((_START, _ANSWER, _CALL)) else EDGES  # a control token ends those
            before = (end for end in edges if _encode(tokenizer, end + text) != _encode(tokenizer, end) + ids)
            after = (
                begin
                for begin in _BEGINNINGS
                if _encode(tokenizer, text + begin) != ids + _encode(tokenizer, begin)
            )
            seam = replace(seam, ids=ids, merges_before=tuple(before), merges_after=tuple(after))
        seams.append(seam)
    return tuple(seams)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text).tolist())


def _texts_between(
    renderer: Renderer, pattern: Sequence[str], form: str, ends: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """(left, right, text) for each pair of neighbours in a conversation, and for the generation prompts."""
    contents = [form.format(number) for number in range(len(pattern))]
    conversation = pattern_probe(pattern, contents)
    with_tools = " with tools" if conversation.tools else ""
    closed = conversation.try_render(renderer, opens=False)
    if closed is None:
        return
    at, left = 0, _START + with_tools
    for number, role in enumerate(pattern):
        start = closed.find(contents[number], at)
        if start < 0 or closed.count(contents[number]) != 1:
            return
        if role not in ("assistant", "call", "calls"):
            if number or "system" not in pattern[1:]:  # a later one may be moved to the front
                yield left, role, closed[at:start]
            at, left = start + len(contents[number]), role + (with_tools if role == "system" else "")
            continue
        prompt = conversation.try_render(renderer, number)
        written = conversation.try_render(renderer, number + 1, opens=False)
        if prompt is None or written is None or not written.startswith(prompt):
            return
        if prompt[:at] == closed[:at]:
            yield left, _OPENED, prompt[at:]
        seen = prompt + sampled_text(written, prompt, ends)[0]
        at = len(seen)
        if not closed.startswith(seen):  # the answer was rewritten: go on after the next end token
            begin = start + len(contents[number])
            places = [place + len(end) for end in ends if end and (place := closed.find(end, begin)) >= 0]
            if not places:
                return
            at = min(places)
        left = _ANSWER if role == "assistant" else _CALL
    opened = conversation.try_render(renderer)
    if opened is not None and opened[:at] == closed[:at]:
        yield left, _OPENED, opened[at:]


def pattern_probe(pattern: Sequence[str], contents: Sequence[str]) -> Probe:
    """A probe with these roles and contents; `call` and `calls` are answers with one and two tool calls."""
    calls = [tool_call('{"city": "Oslo"}', 1), tool_call('{"city": "Rome"}', 2)]
    messages: list[dict[str, Any]] = []
    for role, content in zip(pattern, contents, strict=True):
        if role in ("call", "calls"):
            messages.append(assistant(content, None, *calls[: 2 if role == "calls" else 1]))
        else:
            of_tool = {"tool_call_id": "call00001", "name": "get_weather"} if role == "tool" else {}
            messages.append({"role": role, "content": content, **of_tool})
    return make_probe("a pattern", messages, TOOLS if "tool" in pattern else ())


_PATTERNS: tuple[tuple[str, ...], ...] = (
    ("system", "user", "assistant", "user"),
    ("user", "call", "tool", "assistant", "user"),
    ("user", "calls", "tool", "tool", "user"),
)
_SHAPES = (
    "  two spaces before, one after ",
    "\n\nlines around it\n",
    "a tab\there",
    'some "quotes", a \\ and <b>&\'',
    '{"a": [1, 2.0], "b": null}',
    "Café in 東京 🌤️",
    "two  spaces\n\n\nand lines",
    "",
)


class Writing(StrEnum):
    """What a template does to a content."""

    AS_IS = "as it is"
    TRIMMED = "trimmed"
    TRIMMED_START = "trimmed at its start"
    TRIMMED_END = "trimmed at its end"
    JSON = "escaped as JSON"
    OTHERWISE = "otherwise"
    """In none of these ways."""


_WRITERS: Mapping[Writing, Callable[[str], str]] = {
    Writing.AS_IS: lambda content: content,
    Writing.TRIMMED: str.strip,
    Writing.TRIMMED_START: str.lstrip,
    Writing.TRIMMED_END: str.rstrip,
    Writing.JSON: lambda content: json.dumps(content, ensure_ascii=False)[1:-1],
}


@dataclass(frozen=True, slots=True)
class RoleContent:
    """How a template writes the contents of one role."""

    role: str
    writing: Writing
    unlike: str | None = None
    """A content that is written in none of these ways; None if there is none."""

    def write(self, content: str) -> str | None:
        """What the template writes for a content; None if unknown."""
        way = _WRITERS.get(self.writing)
        return way(content) if way is not None else None


def find_contents(renderer: Renderer) -> tuple[RoleContent, ...]:
    """How the template writes the contents of each role that it writes at all."""
    # By role: a content, the text around a plain content in its place, and the rendered conversation with it
    trials: dict[str, list[tuple[str, tuple[str, str], str | None]]] = {}
    for pattern in _PATTERNS:
        plain = [f"Wqz{number} is here." for number in range(len(pattern))]
        base = pattern_probe(pattern, plain).try_render(renderer, opens=False)
        if base is None:
            continue
        for number, role in enumerate(pattern):
            if role in ("call", "calls") or base.count(plain[number]) != 1:
                continue
            before, _, after = base.partition(plain[number])
            for shape in (*_SHAPES, *(("<think>\nShort.\n</think>\n\nSaid.",) if role == "assistant" else ())):
                chat = pattern_probe(pattern, [*plain[:number], shape, *plain[number + 1 :]])
                text = chat.try_render(renderer, opens=False)
                trials.setdefault(role, []).append((shape, (before, after), text))
    contents: list[RoleContent] = []
    for role, tried in trials.items():
        # The contents that each way fails for; if all fail, show one of the way that fits most.
        others = {
            writing: [content for content, around, text in tried if text != way(content).join(around)]
            for writing, way in _WRITERS.items()
        }
        exact = next((writing for writing, unlike in others.items() if not unlike), None)
        unlike = None if exact is not None else min(others.values(), key=len)[0]
        contents.append(RoleContent(role, exact or Writing.OTHERWISE, unlike))
    return tuple(contents)
