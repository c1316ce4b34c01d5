"""Which slides explain what a row shows, by trying all of them on every turn. Knows nothing of the audit.

A slide (km, kl) explains a row when for every turn some end of what was sampled, the turn's last end token in or
out, makes the trained tokens those from start + km to end + km, and puts every logprob between start + kl and
end + kl. A fill that no logprob can be leaves no gap there; among 0.0 a gap is a token that was certain.

Beside slides, gaps explain: sampled tokens left out of the loss, logprobs that were not recorded. A row that lost
at its end what a slide moves out of it shows the same. Where gaps explain a row, its slide is not demanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .observed import Fault, Observed, is_fill
from .source import Chat, Turn

__all__ = ["Explained", "explained"]

REACH = 4
Pair = tuple[int, int]


@dataclass(frozen=True)
class Explained:
    """All that explains a row."""

    slides: frozenset[Pair]
    gaps: bool
    """Whether columns that lie right explain it as well, with tokens left out or logprobs missing."""

    def verdict(self, fault: Fault) -> str:
        """`clean` or `fault`; `open`: clean explains it and more do; `open fault`: several do, clean not."""
        if (0, 0) in self.slides:
            return "clean" if len(self.slides) == 1 else "open"
        if fault.slid:
            assert (fault.mask, fault.logprobs) in self.slides, "the truth explains every row"
            return "open fault" if len(self.slides) > 1 or self.gaps else "fault"
        return "open fault" if self.slides else "fault"


@dataclass(frozen=True)
class _Shown:
    """What the row shows around one turn."""

    turn: Turn
    low: int
    high: int
    trained: frozenset[int]
    filled: frozenset[int]
    """Places with a logprob."""


def explained(chat: Chat, seen: Observed, fill: float | None, low: int, *, reasons: bool = False) -> Explained:
    """Everything that explains what the row shows. Columns begin at `low`; `reasons`: it says why turns ended."""
    trained = {at for at, one in enumerate(seen.mask) if one}
    filled = {at for at, one in enumerate(seen.values) if not is_fill(one, fill)}
    shown = list(_windows(chat, trained, filled, low))
    inside = {at for one in shown for at in range(one.low, one.high)}
    if not (trained <= inside and filled <= inside):
        return Explained(frozenset(), gaps=False)
    exact = [_turn(chat, one, fill != 0.0, reasons=reasons) for one in shown]
    loose = [_turn(chat, one, False, reasons=reasons) for one in shown]
    slides = frozenset.intersection(*exact)
    missing = fill != 0.0 and any(kl == 0 for _, kl in frozenset.intersection(*loose) - slides)
    return Explained(slides, missing or all(_left_out(chat, one, reasons=reasons) for one in shown))


def _windows(chat: Chat, trained: set[int], filled: set[int], low: int) -> Iterator[_Shown]:
    reached = 0
    for turn in chat.turns:
        start, end = max(low, turn.start - REACH), min(len(chat.ids), turn.last + 1 + REACH)
        assert start >= reached, "turns are too close to tell their slides apart"
        reached = end
        here = frozenset(range(start, end))
        yield _Shown(turn, start, end, here & trained, here & filled)


def _turn(chat: Chat, shown: _Shown, exact: bool, *, reasons: bool) -> frozenset[Pair]:
    """The slides that explain one turn."""
    found: set[Pair] = set()
    ways = range(-REACH, REACH + 1)
    for end in _ends(chat, shown.turn, reasons=reasons):
        spans = {slide: _span(shown, end, slide) for slide in ways}
        masks = [slide for slide in ways if shown.trained == spans[slide] or not shown.trained]
        values = [slide for slide in ways if _fits(shown.filled, spans[slide], exact)]
        if not shown.trained and not shown.filled:
            values = list(ways)
        found |= {(mask, value) for mask in masks for value in values}
    return frozenset(found)


def _left_out(chat: Chat, shown: _Shown, *, reasons: bool) -> bool:
    """Whether the turn may be right but for sampled tokens left out, with their logprobs or without."""
    trained, filled = shown.trained, shown.filled
    spans = [_span(shown, end, 0) for end in _ends(chat, shown.turn, reasons=reasons)]
    return any(trained <= span == filled or trained == filled <= span for span in spans)


def _fits(filled: frozenset[int], span: frozenset[int], exact: bool) -> bool:
    return filled == span if exact else filled <= span


def _span(shown: _Shown, end: int, slide: int) -> frozenset[int]:
    start = max(shown.low, shown.turn.start + slide)
    return frozenset(range(start, min(shown.high, end + slide)))


def _ends(chat: Chat, turn: Turn, *, reasons: bool) -> list[int]:
    """Where what was sampled may end."""
    stated = turn.last
    if turn.last >= len(chat.ids) or chat.ids[turn.last] not in chat.model.ends:
        return [turn.last]
    if not reasons:
        return [turn.last, turn.last + 1]
    other = chat.ids[turn.last - 1] in chat.model.ends
    return [stated if turn.reason == "length" or other else stated + 1]
