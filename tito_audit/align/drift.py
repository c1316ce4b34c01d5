"""Alignment of two token sequences, whether their bytes agree or not."""

from __future__ import annotations

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks, GrowingBlocks, one_block
from tito_audit.align.boundaries import add_cuts
from tito_audit.align.opcodes import opcodes
from tito_audit.align.pieces import Pieces
from tito_audit.align.prefix import common_byte_prefix, same_ids
from tito_audit.align.runs import Run, equal_runs
from tito_audit.record.arrays import Offsets

_REFINE_LIMIT = 1500
"""The most tokens on a side; `difflib` is quadratic, so a longer gap stays one block."""
_REFINE_RUN = 12
"""Equal tokens in a row that split a drifted gap; fewer would pair by chance."""


def align(recorded: Pieces, canonical: Pieces, *, open_end: bool = False) -> Blocks:
    """The blocks of two token sequences, a partition of both.

    `open_end` says that the canonical side continues past the end of the recorded side (a later prompt against
    what was seen before it), so drift at the end must not extend over the continuation.

    Identical sequences are one SAME block. Equal bytes are paired where tokens end. Otherwise both are cut at
    control tokens and the pieces paired in order; in pieces that differ, what lies between common start and common
    end is DRIFT, EXTRA or MISSING.
    """
    if same_ids(recorded.ids, canonical.ids):
        return one_block(BlockKind.SAME, len(recorded), len(canonical))
    out = GrowingBlocks()
    if recorded.data == canonical.data:
        add_cuts(out, recorded, canonical)
        return out.done()
    if open_end and canonical.data.startswith(recorded.data):
        head = int(canonical.end.searchsorted(len(recorded.data), side="right"))
        if head and canonical.end[head - 1] == len(recorded.data):
            add_cuts(out, recorded, canonical.part(0, head))
            out.block(BlockKind.MISSING, 0, len(canonical) - head)
            return out.done()
    left, right = recorded.units(), canonical.units()
    for tag, i1, i2, j1, j2 in opcodes(recorded.keys(left), canonical.keys(right)):
        place = left[i1][0] if i2 > i1 else 0, left[i2 - 1][1] if i2 > i1 else 0
        other = right[j1][0] if j2 > j1 else 0, right[j2 - 1][1] if j2 > j1 else 0
        if tag == "equal":
            _add_equal(out, recorded, place, canonical, other)
            continue
        a, b = recorded.part(*place), canonical.part(*other)
        if open_end and tag == "replace" and i2 == len(left) and j2 == len(right):
            head = _head(b, int(a.control.sum())) if canonical.control.any() else min(len(a), len(b))
            _add_trimmed(out, a, b.part(0, head))
            out.block(BlockKind.MISSING, 0, len(b) - head)
        else:
            _add_trimmed(out, a, b)
    return out.done()


def _head(pieces: Pieces, controls: int) -> int:
    """How many tokens there are through this many control tokens, or before the first if `controls` is 0."""
    where = pieces.control.nonzero()[0]
    if controls == 0:
        return int(where[0]) if len(where) else len(pieces)
    return int(where[controls - 1]) + 1 if len(where) >= controls else len(pieces)


def _add_equal(out: GrowingBlocks, a: Pieces, place: tuple[int, int], b: Pieces, other: tuple[int, int]) -> None:
    """Add the blocks of two ranges with equal bytes."""
    if same_ids(a.ids[slice(*place)], b.ids[slice(*other)]):
        out.block(BlockKind.SAME, place[1] - place[0], other[1] - other[0])
    else:
        add_cuts(out, a.part(*place), b.part(*other))


def _add_trimmed(out: GrowingBlocks, a: Pieces, b: Pieces) -> None:
    """Add the blocks of two pieces: common start and end paired, the rest refined."""
    if a.data == b.data:
        add_cuts(out, a, b)
        return
    i, j = _cut(a.end, b.end, common_byte_prefix(a.data, b.data))
    _add_equal(out, a, (0, i), b, (0, j))
    rest_a, rest_b = a.part(i, len(a)), b.part(j, len(b))
    # The same from the end: how many tokens of each side lie after the first common cut.
    length = common_byte_prefix(rest_a.data[::-1], rest_b.data[::-1])
    m, n = _cut(_from_back(rest_a), _from_back(rest_b), length)
    x, y = len(rest_a) - m, len(rest_b) - n
    _add_refined(out, rest_a.part(0, x), rest_b.part(0, y))
    _add_equal(out, rest_a, (x, x + m), rest_b, (y, y + n))


def _from_back(pieces: Pieces) -> Offsets:
    """Byte positions of token starts, counted from the end, last token first."""
    size = len(pieces.data)
    back = np.empty(len(pieces.end), np.int64)
    back[:-1] = size - pieces.end[-2::-1]
    back[-1:] = size
    return back


def _cut(a: Offsets, b: Offsets, length: int) -> tuple[int, int]:
    """How many tokens of each side end at or before the last common cut within `length` bytes."""
    a, b = a[: a.searchsorted(length, side="right")], b[: b.searchsorted(length, side="right")]
    cuts = np.zeros(length + 1, np.bool_)
    cuts[a] = True
    common = cuts[b].nonzero()[0]
    if not len(common):
        return 0, 0
    last = b[common[-1]]
    return int(a.searchsorted(last, side="right")), int(b.searchsorted(last, side="right"))


def _add_refined(out: GrowingBlocks, a: Pieces, b: Pieces) -> None:
    """Add the blocks of a drifted gap, split at long runs of equal tokens unless it is too long."""
    if not len(a) or not len(b) or max(len(a), len(b)) > _REFINE_LIMIT:
        out.block(BlockKind.DRIFT, len(a), len(b))
        return
    i = j = 0
    runs = [run for run in equal_runs(a.ids, b.ids) if run.size >= _REFINE_RUN]
    for start, other, size in [*runs, Run(len(a), len(b), 0)]:
        # Between two equal runs: paired where the bytes agree, else one DRIFT block.
        gap, other_gap = a.part(i, start), b.part(j, other)
        if gap.data == other_gap.data:
            add_cuts(out, gap, other_gap)
        else:
            out.block(BlockKind.DRIFT, len(gap), len(other_gap))
        out.block(BlockKind.SAME, size, size)
        i, j = start + size, other + size
