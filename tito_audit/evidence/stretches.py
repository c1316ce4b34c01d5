"""Stretches: where two aligned sequences differ, very many of them as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.blocks import BlockKind, Blocks
from tito_audit.align.pieces import AROUND, Pieces
from tito_audit.evidence.model import CONTEXT_TOKENS, TextSide
from tito_audit.evidence.narrowed import narrowed
from tito_audit.record.arrays import Ids, Offsets

MANY = 1_000
"""From this many differences of one sequence on, they are columns."""
AT_ONCE = 1 << 12
"""How many rows of columns are made objects at a time."""
_SAME = int(BlockKind.SAME)
_WINDOW = 4 * AROUND
"""About how many bytes the text around one difference takes."""

Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """One block that is not SAME, with both sides' tokens and text."""

    kind: BlockKind
    start: int
    end: int
    """Half-open in the recorded pieces."""
    canonical_start: int
    canonical_end: int
    recorded: TextSide
    canonical: TextSide
    equal: tuple[int, int]
    """How many tokens right before and right after it are the same in both, at most `CONTEXT_TOKENS`."""

    @property
    def key(self) -> tuple[int, int, bytes]:
        """The same for one difference found twice in a recorded sequence."""
        return self.start, self.end, self.canonical.ids.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class ManyStretches(Sequence[Stretch]):
    """Very many stretches, in order: each is made only while it is looked at."""

    recorded: Pieces
    canonical: Pieces
    columns: NDArray[np.int32]
    """`[N, 7]` kind, recorded start and end, canonical start and end, and how many tokens right before and right
    after are the same."""

    @classmethod
    def of(cls, recorded: Pieces, canonical: Pieces, blocks: Blocks) -> ManyStretches:
        """The tokens that differ in all blocks that are not SAME."""
        rows = blocks.columns()
        if (rows[:, 0] == BlockKind.DRIFT).any():
            # The parts of all blocks that differ.
            parts = array("q")
            for first in range(0, len(rows), AT_ONCE):
                for kind, *place in rows[first : first + AT_ONCE].tolist():
                    for part in narrowed((BlockKind(kind), *place), recorded, canonical):
                        parts.extend(part)
            rows = np.frombuffer(parts, np.int64).reshape(-1, 5)
        columns = np.empty((len(rows), 7), np.int32)
        columns[:, :5] = rows
        columns[:, 5], columns[:, 6] = _equal(rows, recorded.ids, canonical.ids)
        return cls(recorded, canonical, columns)

    def before(self, tokens: int) -> ManyStretches:
        """Those that begin before this recorded token."""
        return self.part(self.columns[:, 1] < tokens)

    def part(self, which: slice | NDArray[np.bool_]) -> ManyStretches:
        """Some of them."""
        return replace(self, columns=self.columns[which])

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, number: int) -> Stretch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Stretch]: ...
    def __getitem__(self, number: int | slice) -> Stretch | Sequence[Stretch]:
        if isinstance(number, slice):
            return self.part(number)
        return self._made(*self.columns[number].tolist())

    def __iter__(self) -> Iterator[Stretch]:
        for first in range(0, len(self.columns), AT_ONCE):
            for row in self.columns[first : first + AT_ONCE].tolist():
                yield self._made(*row)

    def _made(
        self, kind: int, start: int, end: int, other: int, other_end: int, before: int, after: int
    ) -> Stretch:
        sides = TextSide(self.recorded, start, end), TextSide(self.canonical, other, other_end)
        return Stretch(BlockKind(kind), start, end, other, other_end, *sides, (before, after))


def stretches(recorded: Pieces, canonical: Pieces, blocks: Blocks) -> Sequence[Stretch]:
    """The tokens that differ in every block that is not SAME, in order."""
    if np.count_nonzero(blocks.kind != _SAME) >= MANY:
        return ManyStretches.of(recorded, canonical, blocks)
    differing = blocks.differing()
    few = len(differing) * _WINDOW < len(recorded.data)
    return [
        Stretch(
            kind,
            start,
            end,
            c_start,
            c_end,
            _side(recorded, start, end, few),
            _side(canonical, c_start, c_end, few),
            equal_around(recorded.ids, (start, end), canonical.ids, (c_start, c_end)),
        )
        for block in differing
        for kind, start, end, c_start, c_end in narrowed(block, recorded, canonical)
    ]


def starting_before(found: Sequence[Stretch], tokens: int) -> Sequence[Stretch]:
    """Those that begin before this recorded token."""
    if isinstance(found, ManyStretches):
        return found.before(tokens)
    return [one for one in found if one.start < tokens]


def equal_around(
    recorded: Ids, stretch: tuple[int, int], canonical: Ids, other: tuple[int, int]
) -> tuple[int, int]:
    """How many tokens right before and right after two ranges are the same in both sequences."""
    (start, end), (c_start, c_end) = stretch, other
    before = after = 0
    for size in range(1, min(CONTEXT_TOKENS, start, c_start) + 1):
        if recorded[start - size] != canonical[c_start - size]:
            break
        before = size
    for at in range(min(CONTEXT_TOKENS, len(recorded) - end, len(canonical) - c_end)):
        if recorded[end + at] != canonical[c_end + at]:
            break
        after = at + 1
    return before, after


def _side(pieces: Pieces, start: int, end: int, few: bool) -> TextSide:
    """One side of a difference. Of few differences each keeps its own text; many share the whole sequence."""
    if not few:
        return TextSide(pieces, start, end)
    near, low = pieces.near(start, end)
    return TextSide(near, start - low, end - low)


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
