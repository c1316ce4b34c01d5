"""A text divided into spans: every character gets a kind and a message."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from tito_audit.render.sentinels import SpanKind

_Label: TypeAlias = tuple[SpanKind, int | None]


class Span(NamedTuple):
    """A half-open range `[start, end)` of the text, in characters."""

    start: int
    end: int
    kind: SpanKind
    message_index: int | None
    """The message it belongs to; None for scaffold between messages, and where unknown."""
    role: str | None
    """The role of that message."""


class SpanBuilder:
    """Collects the kind and message of each range of a text; where ranges overlap, the last one wins."""

    def __init__(self, size: int, roles: list[str | None]) -> None:
        self._size = size
        self._roles = roles
        self._labelled: list[tuple[int, int, _Label, bool]] = []

    def put(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label a range."""
        if start < end:
            self._labelled.append((start, end, (kind, index), False))

    def fill(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label the parts of a range that have no label yet."""
        if start < end:
            self._labelled.append((start, end, (kind, index), True))

    def spans(self, unlabelled: SpanKind) -> tuple[Span, ...]:
        """The spans in order, with adjacent ranges of equal label merged; `unlabelled` is the kind of all other
        text."""
        if not self._size:
            return ()
        edges = {0, self._size}
        for start, end, _, _ in self._labelled:
            edges.add(start)
            edges.add(end)
        order = sorted(edges)
        numbers = {edge: number for number, edge in enumerate(order)}
        labels: list[_Label | None] = [None] * (len(order) - 1)  # of each range between two edges
        for start, end, label, only_free in self._labelled:
            for number in range(numbers[start], numbers[end]):
                if not only_free or labels[number] is None:
                    labels[number] = label
        out: list[Span] = []
        here: _Label | None = None
        start = 0
        for edge, own in zip(order, labels, strict=False):
            label = own or (unlabelled, None)
            if label != here:
                if here is not None:
                    out.append(self._span(start, edge, here))
                start, here = edge, label
        return (*out, self._span(start, self._size, here or (unlabelled, None)))

    def _span(self, start: int, end: int, label: _Label) -> Span:
        kind, index = label
        return Span(start, end, kind, index, None if index is None else self._roles[index])


def common_start(text: str, other: str) -> int:
    """How many characters two texts share at the start, found in a few comparisons."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the first of these tokens is in `text[start:stop]`, as `(start, end)`; None if there is none."""
    match = _pattern(tokens).search(text, start, stop) if tokens else None
    return match.span() if match else None


def last_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the last of these tokens is in `text[start:stop]`, as `(start, end)`; None if there is none."""
    matches = _pattern(tokens).finditer(text, start, stop) if tokens else ()
    return max((match.span() for match in matches), default=None)


@lru_cache(maxsize=16)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
