"""KnownDifferences: the differences of a rollout, without those that an earlier one covers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

from tito_audit.evidence.model import Difference
from tito_audit.record.finding import Where


@dataclass(slots=True)
class _Sequence:
    """The differences in one recorded sequence."""

    held: list[Difference] = field(default_factory=list)
    """By start, if sorted."""
    furthest: list[int] = field(default_factory=list)
    """The furthest end of each and all before it; [] if not sorted."""

    def add(self, one: Difference) -> None:
        self.held.append(one)
        self.furthest = []

    def cover(self, one: Difference) -> bool:
        """Whether one of them covers a difference."""
        if not self.furthest:
            self.held.sort(key=attrgetter("start"))
            self.furthest = list(accumulate((old.end for old in self.held), max))
        at = bisect_right(self.held, one.start, key=attrgetter("start")) - 1
        while at >= 0 and self.furthest[at] >= one.end:
            if _covers(self.held[at], one):
                return True
            at -= 1
        return False


class KnownDifferences:
    """Differences in the order in which they were added."""

    def __init__(self, every: Iterable[Difference]) -> None:
        self.every: list[Difference] = []
        self._by_sequence: dict[tuple[Where, int | None], _Sequence] = {}
        self._keep(every)

    def add(self, new: Iterable[Difference]) -> None:
        """Add those that no difference from before covers."""
        self._keep([one for one in new if not self._covered(one)])

    def _covered(self, one: Difference) -> bool:
        known = self._by_sequence.get((one.where, one.turn))
        return known is not None and known.cover(one)

    def _keep(self, every: Iterable[Difference]) -> None:
        for one in every:
            self.every.append(one)
            self._by_sequence.setdefault((one.where, one.turn), _Sequence()).add(one)


def _covers(old: Difference, one: Difference) -> bool:
    """Whether a difference of the same sequence covers another.

    One that only spells the same text in other tokens does not cover a difference in text.
    """
    return (
        old.end >= one.end
        and (one.start < one.end or old.start < one.start < old.end or old.start == old.end)
        and (old.recorded.data != old.canonical.data or one.recorded.data == one.canonical.data)
    )
