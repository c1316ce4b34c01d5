"""Blocks: an alignment of two token sequences as columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Offsets

__all__ = ["BlockKind", "Blocks", "blocks_of_ends", "join_blocks", "one_block"]


class BlockKind(IntEnum):
    """What happened to recorded tokens; the direction is fixed, recorded first."""

    SAME = 0  # equal ids, one to one
    MERGE = 1  # several recorded, one canonical, same bytes
    SPLIT = 2  # one recorded, several canonical, same bytes
    RESPLIT = 3  # several to several over the same bytes, or one to another id
    DRIFT = 4  # other bytes on both sides
    EXTRA = 5  # recorded only
    MISSING = 6  # canonical only


@dataclass(frozen=True, slots=True)
class Blocks:
    """A partition of both sequences into blocks; block b ends at the given positions (exclusive).

    A SAME block covers a run of equal tokens. The constructor checks that ends never fall and that a
    block is empty on no side but those its kind allows; nothing downstream checks again.
    """

    recorded_end: Offsets
    """`[B]` int64"""
    canonical_end: Offsets
    """`[B]` int64"""
    kind: NDArray[np.int8]
    """`[B]` BlockKind"""

    def __post_init__(self) -> None:
        recorded, canonical = self.lengths()
        if not len(self.recorded_end) == len(self.canonical_end) == len(self.kind):
            raise ValueError("the columns of Blocks differ in length")
        both = self.kind <= BlockKind.DRIFT
        wrong = (both & ((recorded < 1) | (canonical < 1))) | (recorded < 0) | (canonical < 0)
        wrong |= (self.kind == BlockKind.EXTRA) & ((canonical != 0) | (recorded < 1))
        wrong |= (self.kind == BlockKind.MISSING) & ((recorded != 0) | (canonical < 1))
        if wrong.any():
            raise ValueError(f"block {int(np.flatnonzero(wrong)[0])} is empty on a side its kind needs")

    def lengths(self) -> tuple[Offsets, Offsets]:
        """Tokens of each block on the recorded and on the canonical side, `[B]` each."""
        return np.diff(self.recorded_end, prepend=0), np.diff(self.canonical_end, prepend=0)

    def differing(self) -> list[tuple[BlockKind, int, int, int, int]]:
        """(kind, recorded start, end, canonical start, end) of every block that is not SAME."""
        where = np.flatnonzero(self.kind != BlockKind.SAME)
        recorded_start = np.concatenate(([0], self.recorded_end[:-1]))
        canonical_start = np.concatenate(([0], self.canonical_end[:-1]))
        return [
            (
                BlockKind(int(self.kind[b])),
                int(recorded_start[b]),
                int(self.recorded_end[b]),
                int(canonical_start[b]),
                int(self.canonical_end[b]),
            )
            for b in where
        ]

    def matched(self) -> tuple[Offsets, Offsets]:
        """Positions of the tokens that stayed themselves, recorded and canonical, `[N]` each."""
        recorded, canonical = self.lengths()
        same = np.flatnonzero(self.kind == BlockKind.SAME)
        if not len(same):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        counts = recorded[same]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = (self.recorded_end - recorded)[same], (self.canonical_end - canonical)[same]
        return np.repeat(starts[0], counts) + within, np.repeat(starts[1], counts) + within


def one_block(kind: BlockKind, recorded: int, canonical: int) -> Blocks:
    """Both sequences as a single block; no block at all when both are empty."""
    if not recorded and not canonical:
        return Blocks(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
    if not recorded:
        kind = BlockKind.MISSING
    elif not canonical:
        kind = BlockKind.EXTRA
    return Blocks(np.array([recorded], np.int64), np.array([canonical], np.int64), np.array([kind], np.int8))


def blocks_of_ends(recorded: Ids, canonical: Ids, recorded_end: Offsets, canonical_end: Offsets) -> Blocks:
    """Blocks between common byte ends, each of its kind, with runs of equal tokens joined to one SAME.

    `recorded_end[b]` and `canonical_end[b]` are the token positions of the b-th common end.
    """
    recorded_count = np.diff(recorded_end, prepend=0)
    canonical_count = np.diff(canonical_end, prepend=0)
    kind = np.full(len(recorded_end), BlockKind.RESPLIT, np.int8)
    kind[(recorded_count > 1) & (canonical_count == 1)] = BlockKind.MERGE
    kind[(recorded_count == 1) & (canonical_count > 1)] = BlockKind.SPLIT
    single = np.flatnonzero((recorded_count == 1) & (canonical_count == 1))
    equal = recorded[recorded_end[single] - 1] == canonical[canonical_end[single] - 1]
    kind[single[equal]] = BlockKind.SAME
    # Tokens of no bytes sit in the block before them, so a block of several may still be all the same.
    for b in np.flatnonzero((recorded_count == canonical_count) & (recorded_count > 1)):
        r, c, n = int(recorded_end[b]), int(canonical_end[b]), int(recorded_count[b])
        if np.array_equal(recorded[r - n : r], canonical[c - n : c]):
            kind[b] = BlockKind.SAME
    last_of_run = np.ones(len(kind), np.bool_)
    last_of_run[:-1] = ~((kind[:-1] == BlockKind.SAME) & (kind[1:] == BlockKind.SAME))
    return Blocks(recorded_end[last_of_run], canonical_end[last_of_run], kind[last_of_run])


def join_blocks(parts: list[Blocks]) -> Blocks:
    """One alignment out of alignments of consecutive stretches; neighbouring SAME blocks become one."""
    parts = [part for part in parts if len(part.kind)]
    if not parts:
        return one_block(BlockKind.SAME, 0, 0)
    recorded, canonical, r, c = [], [], 0, 0
    for part in parts:
        recorded.append(part.recorded_end + r)
        canonical.append(part.canonical_end + c)
        r, c = r + int(part.recorded_end[-1]), c + int(part.canonical_end[-1])
    kind = np.concatenate([part.kind for part in parts])
    last_of_run = np.ones(len(kind), np.bool_)
    last_of_run[:-1] = ~((kind[:-1] == BlockKind.SAME) & (kind[1:] == BlockKind.SAME))
    return Blocks(np.concatenate(recorded)[last_of_run], np.concatenate(canonical)[last_of_run], kind[last_of_run])
