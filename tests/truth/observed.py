"""What a row shows of a conversation: which tokens it trains, and which logprob it gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .source import Chat

__all__ = ["Fault", "Observed", "clean", "faulty", "is_fill"]

Values = list[float | None]


@dataclass(frozen=True)
class Observed:
    """A row's columns; None stands for the form's fill."""

    mask: list[bool]
    values: Values


@dataclass(frozen=True)
class Fault:
    """What is wrong with a row."""

    kind: str
    """`clean`, `mask`, `logprobs`, `both`, `inverted`, `roles` or `fill`."""
    mask: int = 0
    logprobs: int = 0
    what: str = ""

    @property
    def slid(self) -> bool:
        """Whether a slide, be it by nothing, is all that is wrong."""
        return self.kind in ("clean", "mask", "logprobs", "both")

    def __str__(self) -> str:
        if self.kind in ("inverted", "clean"):
            return self.kind
        return f"{self.kind} {self.what or f'{self.mask:+d} {self.logprobs:+d}'}"


def is_fill(value: float | None, fill: float | None) -> bool:
    """Whether a value is what the form writes where there is no logprob. A certain token has -0.0, or 0.0."""
    return value is None or (fill == 0.0 and value == 0.0 and math.copysign(1.0, value) > 0)


def clean(chat: Chat, *, certain: bool = False) -> Observed:
    """The row as it should be; `certain` writes 0.0 for the -0.0 of a token that was certain."""
    values: Values = [0.0 if certain and value == 0.0 else value for value in chat.truth]
    return Observed([value is not None for value in chat.truth], values)


def faulty(chat: Chat, right: Observed, fault: Fault, low: int, size: int, turn: int) -> Observed:
    """The row with a fault in it. Columns begin at `low`; `size` and `turn` say where a fill lies."""
    mask, values = right.mask, right.values
    if fault.slid:
        mask = [bool(one) for one in _slid(mask, fault.mask, low, fill=False)]
        return Observed(mask, _slid(values, fault.logprobs, low, fill=None))
    if fault.kind == "inverted":
        return Observed([at >= low and not one for at, one in enumerate(mask)], values)
    if fault.kind == "roles":
        return Observed(_by_role(chat, mask, low, assistant=fault.what == "user and assistant"), values)
    return Observed(mask, _filled(chat, values, fault.what, size, turn))


def _slid(column: Sequence[float | None], places: int, low: int, *, fill: bool | None) -> Values:
    """The column moved late; what leaves an end is lost."""
    size = len(column)
    return [
        column[at - places] if at >= low and low <= at - places < size else (column[at] if at < low else fill)
        for at in range(size)
    ]


def _by_role(chat: Chat, mask: list[bool], low: int, *, assistant: bool) -> list[bool]:
    trained = list(mask) if assistant else [False] * len(mask)
    for start, end in chat.users:
        trained[start : end + 1] = [True] * (end + 1 - start)
    return [one and at >= low for at, one in enumerate(trained)]


def _filled(chat: Chat, values: Values, where: str, size: int, turn: int) -> Values:
    """The values with so many of one turn gone."""
    span = chat.turns[turn]
    start = {"head": span.start, "tail": span.end - size}.get(where, (span.start + span.end - size) // 2)
    return values[:start] + [None] * size + values[start + size :]
