"""How a template writes the content of a message: unchanged, trimmed, escaped or in an unknown way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer
from tito_audit.templates.probes import TOOLS
from tito_audit.templates.seams import wire

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
_OF_ANSWERS = ("<think>\nShort.\n</think>\n\nSaid.",)
_MARK = "Wqz{} is here."


class Writing(StrEnum):
    """What a template does to a content."""

    AS_IS = "as it is"
    TRIMMED = "trimmed"
    TRIMMED_START = "trimmed at its start"
    TRIMMED_END = "trimmed at its end"
    JSON = "escaped as JSON"
    OTHERWISE = "otherwise"
    """In none of these ways."""


_WAYS: Mapping[Writing, Callable[[str], str]] = {
    Writing.AS_IS: lambda content: content,
    Writing.TRIMMED: str.strip,
    Writing.TRIMMED_START: str.lstrip,
    Writing.TRIMMED_END: str.rstrip,
    Writing.JSON: lambda content: json.dumps(content, ensure_ascii=False)[1:-1],
}


@dataclass(frozen=True, slots=True)
class Content:
    """How the contents of one role are written."""

    role: str
    writing: Writing
    unlike: str | None = None
    """A content written in none of these ways; None if all are."""

    def written(self, content: str) -> str | None:
        """The text that the template writes for a content; None if unknown."""
        way = _WAYS.get(self.writing)
        return way(content) if way is not None else None


@dataclass(frozen=True, slots=True)
class _Trial:
    """One content in one place of a conversation."""

    content: str
    around: tuple[str, str]
    """The text before and after a plain content in its place."""
    text: str | None
    """The conversation with the content; None if the template refuses it."""

    def is_written(self, way: Callable[[str], str]) -> bool:
        """Whether the content is written in this way, and nothing else changed."""
        return self.text == way(self.content).join(self.around)


def contents(renderer: Renderer) -> tuple[Content, ...]:
    """How the template writes the contents of each role that it writes at all."""
    trials: dict[str, list[_Trial]] = {}
    for pattern in _PATTERNS:
        for role, trial in _trials(renderer, pattern):
            trials.setdefault(role, []).append(trial)
    return tuple(_content(role, tried) for role, tried in trials.items())


def _content(role: str, tried: Sequence[_Trial]) -> Content:
    for writing, way in _WAYS.items():
        if all(trial.is_written(way) for trial in tried):
            return Content(role, writing)
    fits = {writing: [trial for trial in tried if not trial.is_written(way)] for writing, way in _WAYS.items()}
    return Content(role, Writing.OTHERWISE, min(fits.values(), key=len)[0].content)


def _trials(renderer: Renderer, pattern: Sequence[str]) -> Iterator[tuple[str, _Trial]]:
    """Every shape of content at every place of a conversation, with its role."""
    plain = [_MARK.format(number) for number in range(len(pattern))]
    base = _written(renderer, pattern, plain)
    if base is None:
        return
    for number, role in enumerate(pattern):
        if role in ("call", "calls") or base.count(plain[number]) != 1:
            continue
        before, _, after = base.partition(plain[number])
        for shape in (*_SHAPES, *(_OF_ANSWERS if role == "assistant" else ())):
            text = _written(renderer, pattern, [*plain[:number], shape, *plain[number + 1 :]])
            yield role, _Trial(shape, (before, after), text)


def _written(renderer: Renderer, pattern: Sequence[str], texts: Sequence[str]) -> str | None:
    messages = as_messages([wire(*one) for one in zip(pattern, texts, strict=True)], "a pattern")
    try:
        return renderer.render(messages, TOOLS if "tool" in pattern else (), add_generation_prompt=False)
    except RenderError:
        return None
