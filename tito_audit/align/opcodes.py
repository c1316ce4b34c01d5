"""Which units of two sequences are equal, as opcodes of `difflib`, in bounded time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby, pairwise
from operator import eq
from typing import TypeAlias

Opcode: TypeAlias = tuple[str, int, int, int, int]
Match: TypeAlias = tuple[int, int, int]
"""Where an equal run starts on either side, and its length."""

_STEPS = 10_000_000
"""Pairs of equal units that are looked at: about a second. `difflib` alone takes quadratic time or worse where
units repeat, as they do in every long chat."""


def opcodes(left: Sequence[Hashable], right: Sequence[Hashable], steps: int = _STEPS) -> Iterator[Opcode]:
    """The opcodes of `difflib`; where these take too long, those between units that both sides hold once.

    Where units differ only at equal places, and none of those is on the other side as well, every equal run lies
    between two of these places on both sides. `difflib` then pairs each run with itself, and so does this.
    """
    changed = [place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
    apart = {left[place] for place in changed}.isdisjoint(right)
    if not (len(left) == len(right) and apart and {right[place] for place in changed}.isdisjoint(left)):
        yield from _around(_matches(left, right, steps), len(left), len(right))
        return
    at = 0
    for same, run in groupby(map(eq, left, right)):
        end = at + len(list(run))
        yield "equal" if same else "replace", at, end, at, end
        at = end


def _around(matches: list[Match], left: int, right: int) -> Iterator[Opcode]:
    """The opcodes of equal runs, in order."""
    i = j = 0
    for start, other, size in [*_joined(matches), (left, right, 0)]:
        if i < start or j < other:
            tag = "replace" if i < start and j < other else "delete" if i < start else "insert"
            yield tag, i, start, j, other
        i, j = start + size, other + size
        if size:
            yield "equal", start, i, other, j


def _joined(matches: list[Match]) -> Iterator[Match]:
    """Equal runs with those that touch made one."""
    i = j = size = 0
    for start, other, more in sorted(matches):
        if (i + size, j + size) == (start, other):
            size += more
            continue
        if size:
            yield i, j, size
        i, j, size = start, other, more
    if size:
        yield i, j, size


def _matches(left: Sequence[Hashable], right: Sequence[Hashable], steps: int) -> list[Match]:
    """The equal runs of two sequences."""
    found, _ = _longest_first(left, right, steps)
    if found is not None:
        return found
    matches: list[Match] = []
    anchors = [(-1, -1), *_anchors(left, right), (len(left), len(right))]
    for (a, b), (next_a, next_b) in pairwise(anchors):
        one, other = left[a + 1 : next_a], right[b + 1 : next_b]
        inner, steps = _longest_first(one, other, steps)
        inner = _ends(one, other) if inner is None else inner
        matches += [(a + 1 + i, b + 1 + j, size) for i, j, size in inner]
        matches += [(next_a, next_b, 1)] if next_a < len(left) else []
    return matches


def _longest_first(
    left: Sequence[Hashable], right: Sequence[Hashable], steps: int
) -> tuple[list[Match] | None, int]:
    """The matching blocks of `difflib`, None if they take more steps; and how many steps remain."""
    many = Counter(right)
    costs = [0, *accumulate([many.get(unit, 0) + 1 for unit in left])]
    matcher = SequenceMatcher(None, left, right, autojunk=False) if costs[-1] <= steps else None
    found: list[Match] = []
    pending, remaining = [(0, len(left), 0, len(right))], steps
    while pending:
        start, end, other, other_end = pending.pop()
        remaining -= costs[end] - costs[start]
        if remaining < 0 or matcher is None:
            # What did not suffice here is not tried again there.
            return None, steps if matcher is None else steps // 2
        i, j, size = matcher.find_longest_match(start, end, other, other_end)
        if size:
            found.append((i, j, size))
            pending += [(start, i, other, j)] if start < i and other < j else []
            pending += [(i + size, end, j + size, other_end)] if i + size < end and j + size < other_end else []
    return found, remaining


def _anchors(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The places of units that each side holds once, as many as are in the same order on both sides."""
    once, places = _unique(left), _unique(right)
    pairs = [(place, places[unit]) for unit, place in once.items() if unit in places]
    lasts: list[int] = []
    tops: list[int] = []
    before: list[int] = []
    for at, (_, other) in enumerate(pairs):
        pile = bisect_left(lasts, other)
        before.append(tops[pile - 1] if pile else -1)
        lasts[pile : pile + 1] = [other]
        tops[pile : pile + 1] = [at]
    chain, at = [], tops[-1] if tops else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _unique(units: Sequence[Hashable]) -> dict[Hashable, int]:
    """The place of each unit that is there once, in order."""
    many = Counter(units)
    return {unit: place for place, unit in enumerate(units) if many[unit] == 1}


def _ends(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[Match]:
    """The common start and the common end."""
    shorter = min(len(left), len(right))
    start = next((at for at in range(shorter) if left[at] != right[at]), shorter)
    rest = shorter - start
    end = next((at for at in range(rest) if left[-1 - at] != right[-1 - at]), rest)
    return [(0, 0, start), (len(left) - end, len(right) - end, end)]
