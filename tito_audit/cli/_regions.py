"""Where two recorded sequences differ: in tokens, loss mask or logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tito_audit.align.runs import gaps, paired_runs
from tito_audit.record.arrays import Ids, Logprobs, Mask

_PAIRED = 8192
"""The most tokens between the first and the last difference to align; more count as one change."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A sequence with its per-token columns."""

    ids: Ids
    loss_mask: Mask | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens `old_start:old_end`, replaced by `new_start:new_end`."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def changed_regions(old: Columns, new: Columns) -> list[Region]:
    """The spans that differ, in order: different tokens, or equal tokens with a different mask or logprob."""
    # If every token could begin a run, a long run of one token (padding) would take quadratic time.
    runs = list(paired_runs(old.ids, new.ids, longest=_PAIRED, frequent_from=0))
    regions = [Region(*gap) for gap in gaps(runs, len(old.ids), len(new.ids))]
    for run in runs:
        regions += _columns_differ(old, new, *run)
    return _joined(sorted(regions, key=lambda region: (region.old_start, region.new_start)))


def _columns_differ(old: Columns, new: Columns, i: int, j: int, size: int) -> Iterator[Region]:
    """Spans of equal tokens with a different mask or logprob."""
    differs = np.zeros(size, np.bool_)
    for before, after in ((old.loss_mask, new.loss_mask), (old.logprobs, new.logprobs)):
        if before is not None and after is not None:
            a, b = before[i : i + size], after[j : j + size]
            both_unknown = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
            differs |= (a != b) & ~both_unknown
        elif before is not after:
            differs |= True
    edges = np.flatnonzero(np.diff(np.concatenate(([False], differs, [False])).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield Region(i + start, i + end, j + start, j + end)


def _joined(regions: list[Region]) -> list[Region]:
    """The regions, with adjacent ones joined."""
    out: list[Region] = []
    for region in regions:
        if out and out[-1].old_end == region.old_start and out[-1].new_end == region.new_start:
            region = Region(out[-1].old_start, region.old_end, out[-1].new_start, region.new_end)
            out.pop()
        out.append(region)
    return out
