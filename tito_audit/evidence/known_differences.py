"""KnownDifferences: the differences of a rollout, without those that an earlier one covers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from tito_audit.evidence.many import GrowingDifferences
from tito_audit.evidence.model import Difference
from tito_audit.record.arrays import Offsets
from tito_audit.record.finding import Where


class _Sequence:
    """The differences in one recorded sequence."""

    def __init__(self, every: GrowingDifferences) -> None:
        self._every = every
        self._numbers = array("q")
        self._sorted: tuple[Sequence[int], Offsets, Offsets] | None = None

    def add(self, number: int) -> None:
        """Add a difference by its number among all."""
        self._numbers.append(number)
        self._sorted = None

    def cover(self, one: Difference) -> bool:
        """Whether one of them covers a difference."""
        if self._sorted is None:
            self._sorted = self._by_start()
        numbers, starts, furthest = self._sorted
        at = int(starts.searchsorted(one.start, "right")) - 1
        while at >= 0 and furthest[at] >= one.end:
            if _covers(self._every[numbers[at]], one):
                return True
            at -= 1
        return False

    def _by_start(self) -> tuple[Sequence[int], Offsets, Offsets]:
        """Their numbers by start, their starts, and the furthest end of each and all before it."""
        starts, ends = self._every.places(self._numbers)
        order = starts.argsort(kind="stable")
        numbers = array("q", np.array(self._numbers, np.int64)[order].tobytes())
        return numbers, starts[order], np.maximum.accumulate(ends[order])


class KnownDifferences:
    """Differences in the order in which they were added."""

    def __init__(self, every: Iterable[Difference]) -> None:
        self._every = GrowingDifferences()
        self._by_sequence: dict[tuple[Where, int | None], _Sequence] = {}
        self._keep(every)

    @property
    def every(self) -> Sequence[Difference]:
        """All of them."""
        return self._every.done()

    def add(self, new: Iterable[Difference]) -> None:
        """Add those that no difference from before covers."""
        self._keep(GrowingDifferences(one for one in new if not self._covered(one)).done())

    def _covered(self, one: Difference) -> bool:
        known = self._by_sequence.get((one.where, one.turn))
        return known is not None and known.cover(one)

    def _keep(self, every: Iterable[Difference]) -> None:
        for one in every:
            number = len(self._every)
            self._every.append(one)
            key = one.where, one.turn
            sequence = self._by_sequence.get(key)
            if sequence is None:
                sequence = self._by_sequence[key] = _Sequence(self._every)
            sequence.add(number)


def _covers(old: Difference, one: Difference) -> bool:
    """Whether a difference of the same sequence covers another.

    One that only spells the same text in other tokens does not cover a difference in text.
    """
    return (
        old.end >= one.end
        and (one.start < one.end or old.start < one.start < old.end or old.start == old.end)
        and (old.recorded.data != old.canonical.data or one.recorded.data == one.canonical.data)
    )
