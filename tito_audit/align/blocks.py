"""Blocks: an alignment of two token sequences as columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.prefix import same_ids
from tito_audit.record.arrays import Ids, Offsets


class BlockKind(IntEnum):
    """What happened to recorded tokens, always seen from the recorded side."""

    SAME = 0  # equal ids, one to one
    MERGE = 1  # several recorded, one canonical, same bytes
    SPLIT = 2  # one recorded, several canonical, same bytes
    RESPLIT = 3  # several to several over the same bytes, or one to another id
    DRIFT = 4  # different bytes on the two sides
    EXTRA = 5  # recorded only
    MISSING = 6  # canonical only


_ON_RECORDED = np.array([kind is not BlockKind.MISSING for kind in BlockKind])
_ON_CANONICAL = np.array([kind is not BlockKind.EXTRA for kind in BlockKind])
"""`[kinds]` Whether a block of the kind has tokens on that side."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A partition of both sequences into blocks; block b ends at the given positions (exclusive).

    A SAME block covers a run of equal tokens. The constructor checks that ends never decrease and that a block is
    empty only on a side where its kind allows it; nothing checks again later.
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

    def lengths(self) -> tuple[Offsets, Offsets]:
        """How many tokens each block has on the recorded and on the canonical side, `[B]` each."""
        return _lengths(self.recorded_end), _lengths(self.canonical_end)

    def differing(self) -> list[tuple[BlockKind, int, int, int, int]]:
        """(kind, recorded start, end, canonical start, end) of every block that is not SAME."""
        return [(BlockKind(kind), r, r_end, c, c_end) for kind, r, r_end, c, c_end in self.columns().tolist()]

    def columns(self) -> NDArray[np.int64]:
        """`[D, 5]` the same as columns."""
        where = (self.kind != BlockKind.SAME).nonzero()[0]
        columns = (
            self.kind[where],
            _starts(self.recorded_end, where),
            self.recorded_end[where],
            _starts(self.canonical_end, where),
            self.canonical_end[where],
        )
        return np.column_stack(columns).astype(np.int64, copy=False)

    def matched(self) -> tuple[Offsets, Offsets]:
        """Positions of the tokens in SAME blocks, recorded and canonical, `[N]` each."""
        recorded, canonical = self.lengths()
        same = (self.kind == BlockKind.SAME).nonzero()[0]
        if not len(same):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        counts = recorded[same]
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        starts = (self.recorded_end - recorded)[same], (self.canonical_end - canonical)[same]
        return starts[0].repeat(counts) + within, starts[1].repeat(counts) + within


def one_block(kind: BlockKind, recorded: int, canonical: int) -> Blocks:
    """Both sequences as a single block; no block when both are empty."""
    if not recorded and not canonical:
        return Blocks(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
    if not recorded:
        kind = BlockKind.MISSING
    elif not canonical:
        kind = BlockKind.EXTRA
    return Blocks(np.array([recorded], np.int64), np.array([canonical], np.int64), np.array([kind], np.int8))


def blocks_of_ends(recorded: Ids, canonical: Ids, recorded_end: Offsets, canonical_end: Offsets) -> Blocks:
    """The blocks between common byte ends, with runs of equal tokens joined into one SAME block.

    `recorded_end[b]` and `canonical_end[b]` are the token positions of the b-th common end.
    """
    recorded_count, canonical_count = _lengths(recorded_end), _lengths(canonical_end)
    same = recorded_count + canonical_count == 2
    same &= recorded[recorded_end - 1] == canonical[canonical_end - 1]
    kind = np.where(same, np.int8(BlockKind.SAME), np.int8(BlockKind.RESPLIT))
    others = (~same).nonzero()[0]
    on_recorded, on_canonical = recorded_count[others], canonical_count[others]
    kind[others[(on_recorded > 1) & (on_canonical == 1)]] = BlockKind.MERGE
    kind[others[(on_recorded == 1) & (on_canonical > 1)]] = BlockKind.SPLIT
    # Tokens without bytes join the block before them, so several on both sides may still be equal.
    for b in others[(on_recorded == on_canonical) & (on_recorded > 1)].tolist():
        r, c, n = int(recorded_end[b]), int(canonical_end[b]), int(recorded_count[b])
        if same_ids(recorded[r - n : r], canonical[c - n : c]):
            kind[b] = BlockKind.SAME
    return _joined(recorded_end, canonical_end, kind)


def join_blocks(parts: list[Blocks]) -> Blocks:
    """One alignment made of consecutive alignments; adjacent SAME blocks become one."""
    parts = [part for part in parts if len(part.kind)]
    if not parts:
        return one_block(BlockKind.SAME, 0, 0)
    recorded, canonical, r, c = [], [], 0, 0
    for part in parts:
        recorded.append(part.recorded_end + r)
        canonical.append(part.canonical_end + c)
        r, c = r + int(part.recorded_end[-1]), c + int(part.canonical_end[-1])
    if len(parts) == 1:
        return parts[0]
    kind = np.concatenate([part.kind for part in parts])
    return _joined(np.concatenate(recorded), np.concatenate(canonical), kind)


def _joined(recorded_end: Offsets, canonical_end: Offsets, kind: NDArray[np.int8]) -> Blocks:
    """Blocks of these columns, adjacent SAME blocks joined."""
    same = kind == BlockKind.SAME
    last_of_run = np.ones(len(kind), np.bool_)
    last_of_run[:-1] = ~(same[:-1] & same[1:])
    return Blocks(recorded_end[last_of_run], canonical_end[last_of_run], kind[last_of_run])


def _lengths(end: Offsets) -> Offsets:
    """Tokens of each block, `[B]`."""
    lengths = end.copy()
    lengths[1:] -= end[:-1]
    return lengths


def _starts(end: Offsets, where: Offsets) -> Offsets:
    """The first token of these blocks, `[N]`."""
    return np.where(where > 0, end[where - 1], 0)
