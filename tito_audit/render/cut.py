"""A text being cut into spans: every character gets a kind and a message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tito_audit.render.marks import SpanKind

__all__ = ["Cut", "Span", "common_start", "first_of", "last_of"]

_KINDS = list(SpanKind)
_FREE = -1


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open stretch `[start, end)` of the text, in characters."""

    start: int
    end: int
    kind: SpanKind
    message_index: int | None
    """The message it belongs to; None for scaffold between messages and where nothing is known."""
    role: str | None
    """The role of that message."""


class Cut:
    """Which kind and message each character has, `[characters]` int32; what is put last counts."""

    def __init__(self, size: int, roles: list[str | None]) -> None:
        self._labels = np.full(size, _FREE, np.int32)
        self._roles = roles

    def put(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Name a stretch."""
        self._labels[start:end] = self._label(kind, index)

    def fill(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Name what has no name yet in a stretch."""
        stretch = self._labels[start:end]
        stretch[stretch == _FREE] = self._label(kind, index)

    def _label(self, kind: SpanKind, index: int | None) -> int:
        return (0 if index is None else index + 1) * len(_KINDS) + _KINDS.index(kind)

    def spans(self, nameless: SpanKind) -> tuple[Span, ...]:
        """The stretches of one kind and message, in order; `nameless` is the kind of all others."""
        self.fill(0, len(self._labels), nameless, None)
        edges = np.flatnonzero(np.diff(self._labels)) + 1
        bounds = [0, *edges.tolist(), len(self._labels)]
        out: list[Span] = []
        for start, end in pairwise(bounds):
            if start < end:
                message, kind = divmod(int(self._labels[start]), len(_KINDS))
                index = message - 1 if message else None
                out.append(Span(start, end, _KINDS[kind], index, None if index is None else self._roles[index]))
        return tuple(out)


def common_start(text: str, other: str) -> int:
    """How many characters two texts share at their start."""
    shared = min(len(text), len(other))
    return next((n for n in range(shared) if text[n] != other[n]), shared)


def first_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the first of these tokens lies in a stretch of the text, `(start, end)`."""
    match = _pattern(tokens).search(text, start, stop) if tokens else None
    return match.span() if match else None


def last_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the last of these tokens lies in a stretch of the text, `(start, end)`."""
    matches = _pattern(tokens).finditer(text, start, stop) if tokens else ()
    return max((match.span() for match in matches), default=None)


@lru_cache(maxsize=16)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
