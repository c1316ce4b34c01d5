"""Equal bytes: two ways of cutting one string, paired where their ends agree."""

from __future__ import annotations

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks, blocks_of_ends, one_block
from tito_audit.align.pieces import Pieces

__all__ = ["align_cuts"]


def align_cuts(recorded: Pieces, canonical: Pieces) -> Blocks:
    """Blocks between the byte ends that both sequences have. Both must spell the same bytes.

    [he, llo] against [hello] gives one MERGE block. A token of no bytes joins the block before it, at
    the very start the one after.
    """
    if not recorded.data:
        same = np.array_equal(recorded.ids, canonical.ids)
        kind = BlockKind.SAME if same else BlockKind.RESPLIT
        return one_block(kind, len(recorded), len(canonical))
    common = np.intersect1d(recorded.end, canonical.end)
    common = common[common > 0]
    return blocks_of_ends(
        recorded.ids,
        canonical.ids,
        np.searchsorted(recorded.end, common, side="right"),
        np.searchsorted(canonical.end, common, side="right"),
    )
