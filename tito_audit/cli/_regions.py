"""Where two recorded sequences differ, in tokens, in the loss mask and in logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, Mask

__all__ = ["Beside", "Region", "changed_regions"]

_PAIRED = 8192
"""Tokens between the first and the last difference that are paired one by one; more count as one change."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A sequence with what stands beside each of its tokens."""

    ids: Ids
    loss_mask: Mask | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """Tokens `old_start:old_end` in place of which stand `new_start:new_end`."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def changed_regions(old: Beside, new: Beside) -> list[Region]:
    """The stretches that differ, in order: other tokens, or the same with another mask or logprob."""
    regions: list[Region] = []
    old_at = new_at = 0
    for i, j, size in [*_matching(old.ids, new.ids), (len(old.ids), len(new.ids), 0)]:
        if i > old_at or j > new_at:
            regions.append(Region(old_at, i, new_at, j))
        regions += _beside(old, new, i, j, size)
        old_at, new_at = i + size, j + size
    return _joined(regions)


def _matching(old: Ids, new: Ids) -> Iterator[tuple[int, int, int]]:
    """Equal stretches as (start in old, start in new, length)."""
    size = min(len(old), len(new))
    head = _same(old[:size], new[:size])
    tail = min(_same(old[len(old) - size :][::-1], new[len(new) - size :][::-1]), size - head)
    yield 0, 0, head
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(a) and len(b) and max(len(a), len(b)) <= _PAIRED:
        # With autojunk off, a long stretch of one token (padding) would take quadratic time.
        for i, j, n in SequenceMatcher(None, a.tolist(), b.tolist()).get_matching_blocks():
            yield head + i, head + j, n
    yield len(old) - tail, len(new) - tail, tail


def _same(one: Ids, other: Ids) -> int:
    """How many leading tokens are equal."""
    unequal = np.flatnonzero(one != other)
    return int(unequal[0]) if len(unequal) else len(one)


def _beside(old: Beside, new: Beside, i: int, j: int, size: int) -> Iterator[Region]:
    """Stretches of equal tokens that have another mask or logprob."""
    differs = np.zeros(size, np.bool_)
    for one, other in ((old.loss_mask, new.loss_mask), (old.logprobs, new.logprobs)):
        if one is not None and other is not None:
            a, b = one[i : i + size], other[j : j + size]
            both_unknown = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
            differs |= (a != b) & ~both_unknown
        elif one is not other:
            differs |= True
    edges = np.flatnonzero(np.diff(np.concatenate(([False], differs, [False])).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield Region(i + start, i + end, j + start, j + end)


def _joined(regions: list[Region]) -> list[Region]:
    """Regions that touch, as one."""
    out: list[Region] = []
    for one in regions:
        if out and out[-1].old_end == one.old_start and out[-1].new_end == one.new_start:
            one = Region(out[-1].old_start, one.old_end, out[-1].new_start, one.new_end)
            out.pop()
        out.append(one)
    return out
