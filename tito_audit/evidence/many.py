"""Very many differences as columns: each is made only while it is looked at."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Difference, Explained, TextSide
from tito_audit.evidence.stretches import AT_ONCE, MANY, ManyStretches, Stretch
from tito_audit.record.arrays import Offsets
from tito_audit.record.finding import Where

_START, _END, _OTHER, _OTHER_END, _SHARED = 1, 2, 5, 6, 9
_WIDTH = 10
"""The numbers of columns, and how many there are."""


@dataclass(frozen=True, slots=True, eq=False)
class ManyDifferences(Sequence[Difference]):
    """Very many differences, in order; what many have in common is held once."""

    shared: tuple[Difference, ...]
    """Differences like theirs in all but the tokens."""
    columns: NDArray[np.int32]
    """`[N, 10]` kind, start and end in its sequence, recorded start and end and canonical start and end in the
    pieces, how many tokens right before and right after are the same, and the number of what it shares."""

    @classmethod
    def of(cls, shared: Difference, found: ManyStretches) -> ManyDifferences:
        """These stretches as differences like `shared`, at their own places in its sequence."""
        columns = np.zeros((len(found), _WIDTH), np.int32)
        columns[:, :_END] = found.columns[:, :_END]
        columns[:, _END] = found.columns[:, _END]
        columns[:, 3:_SHARED] = found.columns[:, 1:]
        sides = replace(shared.recorded, pieces=found.recorded), replace(shared.canonical, pieces=found.canonical)
        return cls((replace(shared, recorded=sides[0], canonical=sides[1]),), columns)

    def further(self, tokens: int, where: Where | None = None) -> ManyDifferences:
        """The same with this many more tokens before them, or fewer if below 0; with `where`, only those there."""
        columns = self.columns.copy()
        moved = self._shares(lambda one: where is None or one.where is where)
        columns[:, _START : _END + 1] += np.where(moved, tokens, 0)[:, None].astype(np.int32)
        return replace(self, columns=columns)

    def inside(self, start: int, end: int) -> bool:
        """Whether all of them, in one sequence, are about tokens in this range, or between two of them."""
        first, last = self.columns[0], self.columns[-1]
        return bool(start <= first[_START] and start < first[_END] and last[_START] < end)

    def places(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """`[N]` each: the number of its sequence, and its start and end there."""
        numbers: dict[Hashable, int] = {}
        of = np.array([numbers.setdefault((one.where, one.turn), len(numbers)) for one in self.shared], np.int32)
        return of[self.columns[:, _SHARED]], self.columns[:, _START], self.columns[:, _END]

    def part(self, which: slice | NDArray[np.bool_]) -> ManyDifferences:
        """Some of them."""
        return replace(self, columns=self.columns[which])

    def with_shared(self, changed: Mapping[int, Difference]) -> ManyDifferences:
        """The same, where those with these numbers are others at the same place."""
        known, columns = Shared(self.shared), self.columns.copy()
        for number, one in changed.items():
            columns[number, _SHARED] = known.number(one)
        return replace(self, shared=tuple(known.every), columns=columns)

    def _shares(self, like: Callable[[Difference], bool]) -> NDArray[np.bool_]:
        return np.array([like(one) for one in self.shared], np.bool_)[self.columns[:, _SHARED]]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, number: int) -> Difference: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Difference]: ...
    def __getitem__(self, number: int | slice) -> Difference | Sequence[Difference]:
        if isinstance(number, slice):
            return self.part(number)
        return _made(self.shared, self.columns[number].tolist())

    def __iter__(self) -> Iterator[Difference]:
        for first in range(0, len(self.columns), AT_ONCE):
            for row in self.columns[first : first + AT_ONCE].tolist():
                yield _made(self.shared, row)


class Shared:
    """What differences have in common, each once."""

    def __init__(self, known: Iterable[Difference] = ()) -> None:
        self.every: list[Difference] = []
        self._numbers: dict[Hashable, int] = {}
        for one in known:
            self.number(one)

    def number(self, one: Difference) -> int:
        """The number of what a difference shares with others."""
        key = (
            one.against,
            one.where,
            one.turn,
            one.severity,
            one.effect,
            one.sampled,
            one.message_index,
            one.later_turn,
            one.construction,
            id(one.recorded.pieces),
            id(one.canonical.pieces),
        )
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.every)
            self.every.append(one)
        return number


class GrowingDifferences:
    """Differences added one by one: a list while they are few, then columns."""

    def __init__(self, every: Iterable[Difference] = ()) -> None:
        self._few: list[Difference] | None = []
        self._shared = Shared()
        self._columns = array("i")
        self.extend(every)

    def __len__(self) -> int:
        return len(self._columns) // _WIDTH if self._few is None else len(self._few)

    def __getitem__(self, number: int) -> Difference:
        if self._few is not None:
            return self._few[number]
        return _made(self._shared.every, self._columns[number * _WIDTH : (number + 1) * _WIDTH].tolist())

    def extend(self, every: Iterable[Difference]) -> None:
        """Add several."""
        if type(every) is ManyDifferences:
            if self._few is not None:
                self._to_columns()
            numbers = np.array([self._shared.number(one) for one in every.shared], np.int32)
            for first in range(0, len(every), AT_ONCE):
                rows = every.columns[first : first + AT_ONCE].copy()
                rows[:, _SHARED] = numbers[rows[:, _SHARED]]
                self._columns.frombytes(rows.tobytes())
            return
        for one in every:
            self.append(one)

    def append(self, one: Difference) -> None:
        """Add one."""
        if self._few is None:
            self._pack(one)
            return
        self._few.append(one)
        if len(self._few) >= MANY:
            self._to_columns()

    def done(self) -> Sequence[Difference]:
        """All of them: a list, or columns if they are many. No more may be added to columns."""
        if self._few is not None:
            return self._few
        return ManyDifferences(
            tuple(self._shared.every), np.frombuffer(self._columns, np.int32).reshape(-1, _WIDTH)
        )

    def places(self, numbers: Sequence[int]) -> tuple[Offsets, Offsets]:
        """`[N]` each: the start and end of these."""
        if self._few is not None:
            ends = np.array([(self._few[number].start, self._few[number].end) for number in numbers], np.int64)
            return ends[:, 0], ends[:, 1]
        rows = np.frombuffer(self._columns, np.int32).reshape(-1, _WIDTH)
        return rows[numbers, _START].astype(np.int64), rows[numbers, _END].astype(np.int64)

    def _to_columns(self) -> None:
        few, self._few = self._few or [], None
        for one in few:
            self._pack(one)

    def _pack(self, one: Difference) -> None:
        recorded, canonical = one.recorded, one.canonical
        self._columns.extend(
            (
                one.kind,
                one.start,
                one.end,
                recorded.start,
                recorded.end,
                canonical.start,
                canonical.end,
                *one.equal,
                self._shared.number(one),
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class ManyExplained(Sequence[Explained]):
    """The same differences with the rules that own them."""

    differences: ManyDifferences
    reasons: tuple[tuple[str, str, str], ...]
    """Code, cause and what: each once."""
    reason: NDArray[np.int32]
    """`[N]` the number of each one's reason."""

    @classmethod
    def of(
        cls,
        differences: ManyDifferences,
        reasons: Mapping[tuple[str, str, str] | None, int],
        reason: NDArray[np.int32],
    ) -> ManyExplained:
        """Differences with the numbers of their reasons, without those whose reason is None."""
        unknown = reasons.get(None)
        known = tuple(("", "", "") if one is None else one for one in reasons)
        every = cls(differences, known, reason)
        return every if unknown is None else every._part(reason != unknown)

    def __len__(self) -> int:
        return len(self.reason)

    @overload
    def __getitem__(self, number: int) -> Explained: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Explained]: ...
    def __getitem__(self, number: int | slice) -> Explained | Sequence[Explained]:
        if isinstance(number, slice):
            return self._part(number)
        return Explained(self.differences[number], *self.reasons[self.reason[number]])

    def __iter__(self) -> Iterator[Explained]:
        for number, one in enumerate(self.differences):
            yield Explained(one, *self.reasons[self.reason[number]])

    def by_code(self) -> dict[str, ManyExplained]:
        """Those of each rule."""
        codes = [code for code, _, _ in self.reasons]
        return {
            code: part
            for code in dict.fromkeys(codes)
            if len(
                part := self._part(np.isin(self.reason, [at for at, other in enumerate(codes) if other == code]))
            )
        }

    def _part(self, which: slice | NDArray[np.bool_]) -> ManyExplained:
        return replace(self, differences=self.differences.part(which), reason=self.reason[which])


def many_of(found: Sequence[Stretch], made: Callable[[Stretch], Difference]) -> ManyDifferences | None:
    """Stretches as differences, as `made` makes the first, in one sequence; None if they are few."""
    return ManyDifferences.of(made(found[0]), found) if isinstance(found, ManyStretches) else None


def _made(shared: Sequence[Difference], row: Sequence[int]) -> Difference:
    """The difference in a row of columns."""
    kind, start, end, first, last, other, other_end, before, after, number = row
    one = shared[number]
    return Difference(
        one.against,
        BlockKind(kind),
        one.where,
        one.turn,
        start,
        end,
        TextSide(one.recorded.pieces, first, last),
        TextSide(one.canonical.pieces, other, other_end),
        one.severity,
        one.effect,
        one.sampled,
        one.message_index,
        one.later_turn,
        one.construction,
        (before, after),
    )
