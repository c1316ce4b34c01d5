"""What a row can tell of itself, by trying every slide on every answer. Knows nothing of the audit.

Answers are known: from `start` to the last of their end tokens, which the model may have sampled or not. A row may
be right if it trains nothing else, if no other token has a logprob, or all have one, and if, where its fill can be
no logprob, everything that it trains has one. That is all that right writers have in common.

A slide (m, l) explains an answer if, for a number of first tokens left out of the loss, the same in all answers,
the trained tokens are those from start + first + m to an end + m, and those with a logprob lie from start + l, or
start + first + l where the harness wrote the first tokens, to an end + l that is not before the other. Where the
fill can be no logprob they fill that span; else some may be certain. All answers slid, those from one on, or only
one; the others are explained by (0, 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .conventions import Observed
from .observed import REACH, Fault, is_fill
from .source import Chat, Turn

__all__ = ["Decision", "Slide", "decide"]

Pair = tuple[int, int]
First = tuple[int, int]
"""First tokens of an answer out of the loss, and those without a logprob."""
FIRSTS: tuple[First, ...] = tuple((size, out) for size in range(4) for out in sorted({0, size}))


@dataclass(frozen=True)
class Slide:
    """A slide of some answers."""

    mask: int
    logprobs: int
    shape: str = ""
    turn: int = 0


@dataclass(frozen=True)
class Decision:
    """All that the columns of a row allow."""

    stands: bool
    """Whether the row may be right."""
    slides: frozenset[Slide] = frozenset()
    """What explains it if it may not; of slides that show the same only one is here."""
    outcomes: int = 0
    """How many different rows come out when these slides are undone, by what is trained with which logprob."""
    gap: bool = False
    """Whether lost logprobs explain it."""
    either: bool = False
    """Whether it trains all that was given and no token of some answers: too much, or just the wrong answers."""

    def verdict(self, fault: Fault) -> str:
        """`clean`; `open`: a fault that may be none; `fault`; `open fault`: more than one explains it."""
        if fault.kind == "clean":
            assert self.stands, "a right row may be right"
            return "clean"
        if self.stands:
            return "open"
        if fault.slid:
            return "open fault" if self.gap or len(self.slides) != 1 else "fault"
        return "open fault" if self.slides or self.either else "fault"


@dataclass(frozen=True)
class _Shown:
    """What the row shows around one answer."""

    turn: Turn
    window: range
    trained: list[int]
    valued: list[int]
    ends: list[int]
    """Where what was sampled may end."""


def decide(
    chat: Chat, seen: Observed, fill: float | None, low: int, cut: frozenset[int] = frozenset()
) -> Decision:
    """All that explains a row whose columns begin at `low`; of the turns in `cut` it says that they were cut."""
    exact = fill != 0.0
    trained = {at for at, on in enumerate(seen.mask) if on}
    valued = {at for at, value in enumerate(seen.values) if not is_fill(value, fill)}
    everywhere = len(valued) == len(chat.ids) - low
    spans = [
        range(turn.start, turn.end if number in cut else turn.last + 1) for number, turn in enumerate(chat.turns)
    ]
    sampled = {at for span in spans for at in span}
    inside = trained <= sampled and (everywhere or valued <= sampled)
    lost = trained - valued if exact else set()
    if inside and not lost:
        return Decision(stands=True)
    gap, either = inside and bool(lost), _either(chat, trained, sampled, low)
    shown = list(_windows(chat, trained, valued, low, cut))
    windows = {at for answer in shown for at in answer.window}
    if not (trained <= windows and (everywhere or valued <= windows)):
        return Decision(stands=False, outcomes=2 * either, gap=gap, either=either)
    slides, outcomes = _explaining(shown, exact=exact, everywhere=everywhere)
    return Decision(False, slides, outcomes + 2 * either, gap, either)


def _either(chat: Chat, trained: set[int], sampled: set[int], low: int) -> bool:
    context = {at for at in range(low, len(chat.ids)) if chat.ids[at] not in chat.model.ends} - sampled
    # The first tokens of an answer that was out of the loss may have been so in all answers.
    bodies = [range(min(turn.start + 3, turn.end - 2), turn.end - 1) for turn in chat.turns]
    in_loss = [any(at in trained for at in body) for body in bodies]
    return bool(context) and context <= trained and any(in_loss) and not all(in_loss)


def _windows(chat: Chat, trained: set[int], valued: set[int], low: int, cut: frozenset[int]) -> Iterator[_Shown]:
    reached = 0
    for number, turn in enumerate(chat.turns):
        window = range(max(low, turn.start - REACH), min(len(chat.ids), turn.last + 1 + REACH))
        assert window.start >= reached, "turns are too close to tell their slides apart"
        reached = window.stop
        here = [at for at in window if at in trained], [at for at in window if at in valued]
        yield _Shown(turn, window, *here, [turn.end] if number in cut else _ends(chat, turn))


def _ends(chat: Chat, turn: Turn) -> list[int]:
    """Where what was sampled may end: before the end tokens, between two of them, behind them."""
    if turn.last >= len(chat.ids) or chat.ids[turn.last] not in chat.model.ends:
        return [turn.end]
    content = turn.last
    while chat.ids[content - 1] in chat.model.ends:
        content -= 1
    return list(range(content, turn.last + 2))


def _explaining(shown: list[_Shown], *, exact: bool, everywhere: bool) -> tuple[frozenset[Slide], int]:
    """The slides that explain all answers, and how many rows come out of them."""
    slides: dict[tuple[Pair, ...], Slide] = {}
    outcomes: set[tuple[Pair, ...]] = set()
    for first in FIRSTS:
        ways = [_pairs(answer, first, exact=exact, everywhere=everywhere) for answer in shown]
        still = [(0, 0) in pairs for pairs in ways]
        for shape, start, stop in _shapes(len(ways)):
            if not (all(still[:start]) and all(still[stop:])):
                continue
            for mask, move in frozenset.intersection(*ways[start:stop]):
                pairs = [(mask, move) if start <= at < stop else (0, 0) for at in range(len(ways))]
                together = list(zip(shown, pairs, strict=True))
                # The mask of an answer out of the loss shows no slide, nor does a logprob that is not there.
                key = [
                    (bool(way.trained) * at, bool(way.trained or way.valued) * to) for way, (at, to) in together
                ]
                visible = mask if any(at for at, _ in key) else 0
                slides.setdefault(tuple(key), Slide(visible, move, shape, start))
                outcomes.add(tuple(pair for way, pair in together if way.trained))
    return frozenset(slides.values()), len(outcomes)


def _shapes(turns: int) -> Iterator[tuple[str, int, int]]:
    """Which answers may have slid: all, those from one on, only one."""
    yield "", 0, turns
    for turn in range(turns):
        yield "from", turn, turns
        yield "only", turn, turn + 1


def _pairs(answer: _Shown, first: First, *, exact: bool, everywhere: bool) -> frozenset[Pair]:
    """The slides that explain one answer."""
    size, out = first
    start, reach = answer.turn.start, range(-REACH, REACH + 1)
    pairs: set[Pair] = set()
    for mask in reach:
        # The earliest end leaves most to the logprobs.
        fitting = [end for end in answer.ends if _fills(answer.trained, answer, start + size + mask, end + mask)]
        if not fitting and answer.trained:
            continue
        later = [end for end in answer.ends if not answer.trained or end >= fitting[0]]
        for move in reach:
            if everywhere:
                fits = move == 0
            elif exact:
                fits = not (answer.trained or answer.valued) or any(
                    _fills(answer.valued, answer, start + out + move, end + move) for end in later
                )
            else:
                valued = answer.valued
                fits = not valued or (start + out + move <= valued[0] and valued[-1] < later[-1] + move)
            if fits:
                pairs.add((mask, move))
    return frozenset(pairs)


def _fills(places: list[int], answer: _Shown, start: int, end: int) -> bool:
    """Whether the places are all from start to end that the row has."""
    start, end = max(start, answer.window.start), min(end, answer.window.stop)
    if not places:
        return end <= start
    return places[0] == start and places[-1] == end - 1 and len(places) == end - start
