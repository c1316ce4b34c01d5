"""Very many differences of one sequence as columns: each is made only while it is looked at."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.blocks import BlockKind, Blocks
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.differences import Stretch, stretches
from tito_audit.evidence.model import CONTEXT_TOKENS, Difference, Explained, TextSide
from tito_audit.evidence.narrowed import narrowed
from tito_audit.record.arrays import Ids, Offsets

MANY = 1_000
"""From this many differing blocks of one sequence on, their differences are columns."""
_AT_ONCE = 1 << 14
"""How many differences are made of columns at a time."""

Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ManyDifferences(Sequence[Difference]):
    """Differences that share all but their tokens, in order."""

    shared: Difference
    """What all of them have in common; its tokens are not theirs."""
    recorded: Pieces
    canonical: Pieces
    columns: NDArray[np.int32]
    """`[N, 7]` kind, recorded start and end, canonical start and end, and how many tokens right before and right
    after are the same."""
    moved: int = 0
    """How many tokens of the sequence come before the recorded pieces."""

    @classmethod
    def of(cls, shared: Difference, recorded: Pieces, canonical: Pieces, blocks: Blocks) -> ManyDifferences:
        """The differences of all blocks that are not SAME."""
        rows = blocks.columns()
        if (rows[:, 0] == BlockKind.DRIFT).any():
            rows = _narrowed(rows, recorded, canonical)
        before, after = _equal(rows, recorded.ids, canonical.ids)
        columns = np.column_stack((rows, before, after)).astype(np.int32)
        return cls(shared, recorded, canonical, columns)

    def further(self, tokens: int) -> ManyDifferences:
        """The same in a sequence with this many more tokens before them, or fewer if below 0."""
        return replace(self, moved=self.moved + tokens)

    def inside(self, start: int, end: int) -> bool:
        """Whether all of them are about tokens in this range of the recorded pieces, or between two of them."""
        first, last = self.columns[0], self.columns[-1]
        return bool(start <= first[1] and start < first[2] and last[1] < end)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, number: int) -> Difference: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Difference]: ...
    def __getitem__(self, number: int | slice) -> Difference | Sequence[Difference]:
        if isinstance(number, slice):
            return replace(self, columns=self.columns[number])
        return self._made(*self.columns[number].tolist())

    def __iter__(self) -> Iterator[Difference]:
        for first in range(0, len(self.columns), _AT_ONCE):
            for row in self.columns[first : first + _AT_ONCE].tolist():
                yield self._made(*row)

    def _made(self, kind: int, start: int, end: int, other: int, other_end: int, *equal: int) -> Difference:
        one, moved = self.shared, self.moved
        recorded, canonical = TextSide(self.recorded, start, end), TextSide(self.canonical, other, other_end)
        return Difference(
            one.against,
            BlockKind(kind),
            one.where,
            one.turn,
            start + moved,
            end + moved,
            recorded,
            canonical,
            one.severity,
            one.effect,
            one.sampled,
            one.message_index,
            equal=(equal[0], equal[1]),
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
        part = replace(self.differences, columns=self.differences.columns[which])
        return replace(self, differences=part, reason=self.reason[which])


def many_of(
    recorded: Pieces, canonical: Pieces, blocks: Blocks, made: Callable[[Stretch], Difference]
) -> ManyDifferences | None:
    """The differences of all blocks that are not SAME, as `made` makes each; None if they are few."""
    differing = blocks.kind != BlockKind.SAME
    if int(differing.sum()) < MANY:
        return None
    some = slice(int(differing.argmax()) + 1)
    shown = Blocks(blocks.recorded_end[some], blocks.canonical_end[some], blocks.kind[some])
    return ManyDifferences.of(made(stretches(recorded, canonical, shown)[0]), recorded, canonical, blocks)


def _narrowed(rows: Columns, recorded: Pieces, canonical: Pieces) -> Columns:
    """The parts of all blocks that differ."""
    parts = array("q")
    for first in range(0, len(rows), _AT_ONCE):
        for kind, *place in rows[first : first + _AT_ONCE].tolist():
            for part in narrowed((BlockKind(kind), *place), recorded, canonical):
                parts.extend(part)
    return np.frombuffer(parts, np.int64).reshape(-1, 5)


def _equal(rows: Columns, recorded: Ids, canonical: Ids) -> tuple[Offsets, Offsets]:
    """`[N]` each: how many tokens right before and right after are the same on both sides."""
    _, start, end, other, other_end = rows.T
    return (
        _run(recorded, start - 1, canonical, other - 1, -1),
        _run(recorded, end, canonical, other_end, 1),
    )


def _run(recorded: Ids, at: Offsets, canonical: Ids, other: Offsets, step: int) -> Offsets:
    """`[N]` how many tokens from a place on are the same, at most as many as a finding shows."""
    found, still = np.zeros(len(at), np.int64), np.ones(len(at), np.bool_)
    for far in range(0, CONTEXT_TOKENS * step, step):
        here, there = at + far, other + far
        still &= (here >= 0) & (there >= 0) & (here < len(recorded)) & (there < len(canonical))
        still &= recorded.take(here, mode="clip") == canonical.take(there, mode="clip")
        found += still
    return found
