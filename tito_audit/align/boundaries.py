"""Two tokenizations of the same bytes, paired where tokens end at the same byte."""

from __future__ import annotations

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks, GrowingBlocks
from tito_audit.align.pieces import Pieces
from tito_audit.align.prefix import same_ids
from tito_audit.record.arrays import Offsets


def align_cuts(recorded: Pieces, canonical: Pieces) -> Blocks:
    """Blocks between the byte ends that both sequences have. Both must spell the same bytes.

    [he, llo] against [hello] gives one MERGE block. A token without bytes joins the block before it, or the block
    after it at the very start.
    """
    out = GrowingBlocks()
    add_cuts(out, recorded, canonical)
    return out.done()


def add_cuts(out: GrowingBlocks, recorded: Pieces, canonical: Pieces) -> None:
    """Add the same blocks to an alignment of what precedes them."""
    if same_ids(recorded.ids, canonical.ids):
        out.block(BlockKind.SAME, len(recorded.ids), len(canonical.ids))
    elif not recorded.data:
        out.block(BlockKind.RESPLIT, len(recorded.ids), len(canonical.ids))
    else:
        size = len(recorded.data)
        ends = _shared(recorded.end, canonical.end, size), _shared(canonical.end, recorded.end, size)
        out.between(recorded.ids, canonical.ids, *ends)


def _shared(mine: Offsets, theirs: Offsets, size: int) -> Offsets:
    """How many of `mine` end at or before each byte end above 0 that both have; `[B]` int64, ascending.

    `mine` and `theirs` never decrease and end at `size`.
    """
    ends = np.zeros(size + 1, np.bool_)
    ends[theirs] = True
    ends[0] = False
    shared = ends[mine]
    shared[:-1] &= mine[1:] != mine[:-1]  # the last of several tokens that end at one byte
    return shared.nonzero()[0] + 1
