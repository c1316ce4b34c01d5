"""Differences from stretches: what each did to training, and in which completion it lies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.stretches import Stretch
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Turn


@dataclass(frozen=True, slots=True)
class Region:
    """A completion inside a longer recorded sequence."""

    turn: int
    start: int
    end: int


def difference(
    stretch: Stretch,
    against: Against,
    severity: Severity,
    effect: str,
    *,
    regions: tuple[Region, ...],
    turn: int | None,
    where: Where = Where.PROMPT,
    turns: Sequence[Turn] = (),
    later_turn: int | None = None,
) -> Difference:
    """A stretch as a difference, placed in the completion that it touches, else in `where` of `turn`.

    A stretch that begins before a completion and ends inside it counts as the completion's, from token 0 on.
    """
    region = region_of(stretch, regions)
    start, end = stretch.start, stretch.end
    index = None
    if region is not None:
        start, end = max(start - region.start, 0), min(end, region.end) - region.start
        where, turn = Where.COMPLETION, region.turn
        index = turns[region.turn].message_index if turns else None
    return Difference(
        against,
        stretch.kind,
        where,
        turn,
        start,
        end,
        stretch.recorded,
        stretch.canonical,
        severity,
        effect,
        sampled=region is not None,
        message_index=index,
        later_turn=later_turn,
        equal=stretch.equal,
    )


def region_of(stretch: Stretch, regions: Sequence[Region]) -> Region | None:
    """The first of these completions, in order, that a stretch touches; an empty one belongs to one that starts or
    continues there."""
    at = bisect_right(regions, stretch.start, key=attrgetter("end"))
    if at == len(regions):
        return None
    region = regions[at]
    touches = region.start < stretch.end or region.start <= stretch.start == stretch.end
    return region if touches else None


# Each difference once: what a later prompt and the training row both show is one difference.


def each_once(differences: Iterable[Difference]) -> list[Difference]:
    """The differences without those that are at the place of an earlier one and show the same tokens instead.

    The earlier one takes over their effect.
    """
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        old = first.setdefault(_key(difference), difference)
        if difference.effect != old.effect:
            effect = f"{old.effect}; {difference.effect}"
            first[_key(difference)] = replace(old, effect=effect, severity=max(old.severity, difference.severity))
    return list(first.values())


def first_of_each(differences: Iterable[Difference]) -> list[Difference]:
    """The same, where the earlier one stays as it is."""
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        first.setdefault(_key(difference), difference)
    return list(first.values())


def _key(difference: Difference) -> tuple[object, ...]:
    place = difference.where, difference.turn, difference.start, difference.end
    return *place, difference.canonical.ids.tobytes()
