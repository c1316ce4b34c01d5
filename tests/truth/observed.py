"""What a row shows of a conversation once a fault is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .conventions import Observed, Values
from .source import Chat

__all__ = ["REACH", "Fault", "faulty", "is_fill", "region"]

REACH = 4
"""The farthest slide that is considered; this far around an answer nothing else is sampled."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a row."""

    kind: str
    """`clean`, `mask`, `logprobs`, `both`, `inverted`, `roles` or `fill`."""
    mask: int = 0
    logprobs: int = 0
    what: str = ""
    shape: str = ""
    """Which answers slid: nothing for all, `from` one on, `only` one."""

    @property
    def slid(self) -> bool:
        """Whether a slide is all that is wrong."""
        return self.kind in ("mask", "logprobs", "both")

    @property
    def group(self) -> str:
        """The line of the table that counts it."""
        return f"slid {self.shape}".strip() if self.slid else self.kind

    def __str__(self) -> str:
        if self.kind in ("inverted", "clean"):
            return self.kind
        return f"{self.kind} {self.what or f'{self.mask:+d} {self.logprobs:+d}'} {self.shape}".strip()


def is_fill(value: float | None, fill: float | None) -> bool:
    """Whether a value is what the form writes where there is no logprob. A certain token has -0.0, or 0.0."""
    return value is None or (fill == 0.0 and value == 0.0 and math.copysign(1.0, value) > 0)


def region(chat: Chat, fault: Fault, low: int, turn: int) -> range:
    """Where the columns slid; `turn` is the one answer, or the first of those."""
    if not fault.shape:
        return range(low, len(chat.ids))
    start = max(low, chat.turns[turn].start - REACH)
    if fault.shape == "from":
        return range(start, len(chat.ids))
    return range(start, min(len(chat.ids), chat.turns[turn].last + 1 + REACH))


def faulty(chat: Chat, right: Observed, fault: Fault, low: int, size: int, turn: int) -> Observed:
    """The row with a fault in it. Columns begin at `low`; `size` and `turn` say where a fill or a slide lies."""
    mask, values = right.mask, right.values
    if fault.slid:
        places = region(chat, fault, low, turn)
        moved = [bool(trained) for trained in _slid(mask, fault.mask, places, fill=False)]
        return Observed(moved, _slid(values, fault.logprobs, places, fill=None))
    if fault.kind == "inverted":
        return Observed([at >= low and not trained for at, trained in enumerate(mask)], values)
    if fault.kind == "roles":
        return Observed(_by_role(chat, mask, low, assistant=fault.what == "user and assistant"), values)
    if fault.kind == "fill":
        return Observed(mask, _filled(chat, values, fault.what, size, turn))
    return right


def _slid(column: Sequence[float | None], by: int, places: range, *, fill: bool | None) -> Values:
    """The column moved late in these places; what leaves them is lost."""
    moved = list(column)
    for at in places:
        moved[at] = column[at - by] if at - by in places else fill
    return moved


def _by_role(chat: Chat, mask: list[bool], low: int, *, assistant: bool) -> list[bool]:
    trained = list(mask) if assistant else [False] * len(mask)
    for start, end in chat.users:
        trained[start : end + 1] = [True] * (end + 1 - start)
    return [on and at >= low for at, on in enumerate(trained)]


def _filled(chat: Chat, values: Values, where: str, size: int, turn: int) -> Values:
    """The values with so many of one turn gone."""
    span = chat.turns[turn]
    start = {"head": span.start, "tail": span.end - size}.get(where, (span.start + span.end - size) // 2)
    return values[:start] + [None] * size + values[start + size :]
