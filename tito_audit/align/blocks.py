"""An alignment of two token sequences as columns, one entry a block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.prefix import same_ids


class BlockKind(IntEnum):
    """What became of recorded tokens."""

    SAME = 0  # equal ids, one to one
    MERGE = 1  # several recorded, one canonical, same bytes
    SPLIT = 2  # one recorded, several canonical, same bytes
    RESPLIT = 3  # several to several over the same bytes, or one to another id
    DRIFT = 4  # different bytes on the two sides
    EXTRA = 5  # recorded only
    MISSING = 6  # canonical only


_KINDS = list(BlockKind)
_ON_RECORDED = np.array([kind is not BlockKind.MISSING for kind in BlockKind])
_ON_CANONICAL = np.array([kind is not BlockKind.EXTRA for kind in BlockKind])
"""`[kinds]` bool, whether a block of the kind has tokens on that side"""
_SWAPPED = np.array([0, 2, 1, 3, 4, 6, 5], np.int8)
"""`[kinds]` the kind of a block once its sides are swapped."""
_SAME, _MISSING, _EXTRA = int(BlockKind.SAME), BlockKind.MISSING, BlockKind.EXTRA
SAME_BYTES = frozenset((BlockKind.MERGE, BlockKind.SPLIT, BlockKind.RESPLIT))
"""Kinds that spell the same bytes with other tokens."""
Block: TypeAlias = tuple[BlockKind, int, int, int, int]
"""Kind, recorded start and end, canonical start and end."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A partition of both sequences into blocks; the end of a block is exclusive.

    A SAME block covers a run of equal tokens. Only the constructor checks that ends never decrease and that a
    block is empty only on a side where its kind allows it.
    """

    recorded_end: Offsets
    """`[B]` int64"""
    canonical_end: Offsets
    """`[B]` int64"""
    kind: NDArray[np.int8]
    """`[B]` BlockKind"""

    def __post_init__(self) -> None:
        if not len(self.recorded_end) == len(self.canonical_end) == len(self.kind):
            raise ValueError("the columns of Blocks differ in length")
        recorded, canonical = _lengths(self.recorded_end), _lengths(self.canonical_end)
        wrong = ((recorded > 0) != _ON_RECORDED[self.kind]) | ((canonical > 0) != _ON_CANONICAL[self.kind])
        wrong |= (recorded < 0) | (canonical < 0)
        if wrong.any():
            raise ValueError(f"block {int(wrong.nonzero()[0][0])} is empty on a side its kind needs")

    def swapped(self) -> Blocks:
        """The same partition with its sides swapped."""
        return Blocks(self.canonical_end, self.recorded_end, _SWAPPED[self.kind])

    def lengths(self) -> tuple[Offsets, Offsets]:
        """How many tokens each block has on the recorded and on the canonical side, `[B]` each."""
        return _lengths(self.recorded_end), _lengths(self.canonical_end)

    def differing_blocks(self) -> list[Block]:
        """Every block that is not SAME."""
        return [
            (_KINDS[kind], r, r_end, c, c_end) for kind, r, r_end, c, c_end in self.differing_columns().tolist()
        ]

    def differing_columns(self) -> NDArray[np.int64]:
        """`differing_blocks` as `[D, 5]` int64."""
        where = (self.kind != _SAME).nonzero()[0]
        columns = np.empty((len(where), 5), np.int64)
        columns[:, 0] = self.kind[where]
        columns[:, 1], columns[:, 2] = _starts(self.recorded_end, where), self.recorded_end[where]
        columns[:, 3], columns[:, 4] = _starts(self.canonical_end, where), self.canonical_end[where]
        return columns

    def matched_positions(self) -> tuple[Offsets, Offsets]:
        """Positions of the tokens in SAME blocks, recorded and canonical, `[N]` each."""
        recorded, canonical = self.lengths()
        same = (self.kind == _SAME).nonzero()[0]
        if not len(same):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        counts = recorded[same]
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        starts = (self.recorded_end - recorded)[same], (self.canonical_end - canonical)[same]
        return starts[0].repeat(counts) + within, starts[1].repeat(counts) + within


class BlocksBuilder:
    """Collects blocks in order; they become arrays, and are checked, once."""

    def __init__(self) -> None:
        self._recorded_end: list[int] = []
        self._canonical_end: list[int] = []
        self._kind: list[int] = []

    def add(self, kind: int, recorded: int, canonical: int) -> None:
        """Add a block of this many tokens on each side; none if both are 0. Adjacent SAME blocks become one."""
        if not recorded and not canonical:
            return
        if not recorded:
            kind = _MISSING
        elif not canonical:
            kind = _EXTRA
        before = (self._recorded_end[-1], self._canonical_end[-1]) if self._kind else (0, 0)
        if kind == _SAME and self._kind and self._kind[-1] == _SAME:
            self._recorded_end[-1] += recorded
            self._canonical_end[-1] += canonical
            return
        self._recorded_end.append(before[0] + recorded)
        self._canonical_end.append(before[1] + canonical)
        self._kind.append(int(kind))

    def add_between_ends(
        self, recorded: Ids, canonical: Ids, recorded_end: Offsets, canonical_end: Offsets
    ) -> None:
        """Add a block for each range between two common byte ends.

        `recorded_end[b]` and `canonical_end[b]` are the token positions of the b-th common end.
        """
        recorded_count, canonical_count = _lengths(recorded_end), _lengths(canonical_end)
        same = recorded_count + canonical_count == 2
        same &= recorded[recorded_end - 1] == canonical[canonical_end - 1]
        # Add runs of equal tokens at once, what differs block by block.
        r = c = 0
        for b in [*(~same).nonzero()[0].tolist(), len(same)]:
            last, other = (int(recorded_end[b - 1]), int(canonical_end[b - 1])) if b else (0, 0)
            self.add(_SAME, last - r, other - c)
            if b == len(same):
                return
            r, c = int(recorded_end[b]), int(canonical_end[b])
            size, other_size = r - last, c - other
            kind = BlockKind.RESPLIT if size > 1 or other_size == 1 else BlockKind.SPLIT
            if size > 1 and other_size == 1:
                kind = BlockKind.MERGE
            # Tokens without bytes join the block before them, so several on both sides may still be equal.
            elif size == other_size > 1 and same_ids(recorded[last:r], canonical[other:c]):
                kind = BlockKind.SAME
            self.add(kind, size, other_size)

    def build(self) -> Blocks:
        """The blocks as arrays; ValueError if they are no partition."""
        ends = np.array(self._recorded_end, np.int64), np.array(self._canonical_end, np.int64)
        return Blocks(*ends, np.array(self._kind, np.int8))


def _lengths(end: Offsets) -> Offsets:
    """How many tokens each block has, `[B]`."""
    lengths = end.copy()
    lengths[1:] -= end[:-1]
    return lengths


def _starts(end: Offsets, where: Offsets) -> Offsets:
    """The first token of these blocks, `[N]`."""
    return np.where(where > 0, end[where - 1], 0)
