"""Blocks: an alignment of two token sequences as columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.prefix import same_ids


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


_SAME, _MISSING, _EXTRA = int(BlockKind.SAME), BlockKind.MISSING, BlockKind.EXTRA
_KINDS = list(BlockKind)
_EQUAL_OR_NOT = np.array([BlockKind.RESPLIT, BlockKind.SAME], np.int8)


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
        return [(_KINDS[kind], r, r_end, c, c_end) for kind, r, r_end, c, c_end in self.columns().tolist()]

    def columns(self) -> NDArray[np.int64]:
        """`[D, 5]` the same as columns."""
        where = (self.kind != _SAME).nonzero()[0]
        columns = np.empty((len(where), 5), np.int64)
        columns[:, 0] = self.kind[where]
        columns[:, 1], columns[:, 2] = _starts(self.recorded_end, where), self.recorded_end[where]
        columns[:, 3], columns[:, 4] = _starts(self.canonical_end, where), self.canonical_end[where]
        return columns

    def matched(self) -> tuple[Offsets, Offsets]:
        """Positions of the tokens in SAME blocks, recorded and canonical, `[N]` each."""
        recorded, canonical = self.lengths()
        same = (self.kind == _SAME).nonzero()[0]
        if not len(same):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        counts = recorded[same]
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        starts = (self.recorded_end - recorded)[same], (self.canonical_end - canonical)[same]
        return starts[0].repeat(counts) + within, starts[1].repeat(counts) + within


class GrowingBlocks:
    """Consecutive alignments as columns: they are joined, and checked, once."""

    def __init__(self) -> None:
        self._parts: list[tuple[Offsets, Offsets, NDArray[np.int8]]] = []
        self._recorded = self._canonical = 0

    def block(self, kind: BlockKind, recorded: int, canonical: int) -> None:
        """Add a block of so many tokens; none when both sides are empty."""
        if not recorded and not canonical:
            return
        if not recorded:
            kind = _MISSING
        elif not canonical:
            kind = _EXTRA
        self.extend(np.array([recorded], np.int64), np.array([canonical], np.int64), np.array([kind], np.int8))

    def between(self, recorded: Ids, canonical: Ids, recorded_end: Offsets, canonical_end: Offsets) -> None:
        """Add the blocks of two sequences between common byte ends.

        `recorded_end[b]` and `canonical_end[b]` are the token positions of the b-th common end.
        """
        recorded_count, canonical_count = _lengths(recorded_end), _lengths(canonical_end)
        same = recorded_count + canonical_count == 2
        same &= recorded[recorded_end - 1] == canonical[canonical_end - 1]
        kind = _EQUAL_OR_NOT[same.view(np.int8)]
        others = (~same).nonzero()[0]
        on_recorded, on_canonical = recorded_count[others], canonical_count[others]
        kind[others[(on_recorded > 1) & (on_canonical == 1)]] = BlockKind.MERGE
        kind[others[(on_recorded == 1) & (on_canonical > 1)]] = BlockKind.SPLIT
        # Tokens without bytes join the block before them, so several on both sides may still be equal.
        for b in others[(on_recorded == on_canonical) & (on_recorded > 1)].tolist():
            r, c, n = int(recorded_end[b]), int(canonical_end[b]), int(recorded_count[b])
            if same_ids(recorded[r - n : r], canonical[c - n : c]):
                kind[b] = _SAME
        self.extend(recorded_end, canonical_end, kind)

    def extend(self, recorded_end: Offsets, canonical_end: Offsets, kind: NDArray[np.int8]) -> None:
        """Add these blocks, whose ends count from the end of those before them."""
        if len(kind):
            recorded_end, canonical_end = recorded_end + self._recorded, canonical_end + self._canonical
            self._recorded, self._canonical = int(recorded_end[-1]), int(canonical_end[-1])
            self._parts.append((recorded_end, canonical_end, kind))

    def done(self) -> Blocks:
        """All of them; adjacent SAME blocks become one."""
        if not self._parts:
            return Blocks(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
        recorded_end, canonical_end, kind = self._parts[0]
        if len(self._parts) > 1:
            ends, others, kinds = zip(*self._parts, strict=True)
            recorded_end, canonical_end = np.concatenate(ends), np.concatenate(others)
            kind = np.concatenate(kinds)
        same = kind == _SAME
        inside = same[:-1] & same[1:]
        if inside.any():
            last = np.append(~inside, True)
            recorded_end, canonical_end, kind = recorded_end[last], canonical_end[last], kind[last]
        return Blocks(recorded_end, canonical_end, kind)


def one_block(kind: BlockKind, recorded: int, canonical: int) -> Blocks:
    """Both sequences as a single block; no block when both are empty."""
    out = GrowingBlocks()
    out.block(kind, recorded, canonical)
    return out.done()


def join_blocks(parts: Iterable[Blocks]) -> Blocks:
    """One alignment made of consecutive alignments; adjacent SAME blocks become one."""
    out = GrowingBlocks()
    for part in parts:
        out.extend(part.recorded_end, part.canonical_end, part.kind)
    return out.done()


def _lengths(end: Offsets) -> Offsets:
    """Tokens of each block, `[B]`."""
    lengths = end.copy()
    lengths[1:] -= end[:-1]
    return lengths


def _starts(end: Offsets, where: Offsets) -> Offsets:
    """The first token of these blocks, `[N]`."""
    return np.where(where > 0, end[where - 1], 0)
