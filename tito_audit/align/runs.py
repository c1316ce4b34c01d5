"""Equal runs: tokens in a row that two sequences share, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tito_audit.record.prefix import common_ends, same_ids

Array: TypeAlias = NDArray[Any]
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
"""An odd number whose powers spread over 64 bits; hashes only pick candidates, which are then compared."""


class Run(NamedTuple):
    """Tokens that are the same in two sequences."""

    start: int
    """Where they start in the first sequence."""
    other: int
    """Where they start in the second."""
    size: int


class Gap(NamedTuple):
    """Tokens `start:end` of the first sequence outside every run, and the second's between the same runs."""

    start: int
    end: int
    other: int
    other_end: int


def equal_runs(a: Array, b: Array, *, frequent_from: int | None = None) -> list[Run]:
    """The runs that `difflib` pairs, in order.

    Takes quadratic time. Where `b` has at least `frequent_from` tokens (200 or more), tokens that make up over a
    hundredth of it start no run, which bounds the time; None: every token may start one.
    """
    frequent_apart = frequent_from is not None and len(b) >= frequent_from
    matcher = SequenceMatcher(None, a.tolist(), b.tolist(), autojunk=frequent_apart)
    return [Run(*block) for block in matcher.get_matching_blocks()[:-1]]


def paired_runs(
    a: Array, b: Array, *, longest: int | None = None, frequent_from: int | None = None
) -> Iterator[Run]:
    """The common start, the equal runs after it, and the common end, in order.

    If more than `longest` tokens of a side lie between start and end, none of those are paired.
    """
    head, tail = common_ends(a, b)
    inside, other_inside = a[head : len(a) - tail], b[head : len(b) - tail]
    if head:
        yield Run(0, 0, head)
    if longest is None or max(len(inside), len(other_inside)) <= longest:
        for start, other, size in equal_runs(inside, other_inside, frequent_from=frequent_from):
            yield Run(head + start, head + other, size)
    if tail:
        yield Run(len(a) - tail, len(b) - tail, tail)


def gaps(runs: Iterable[Run], length: int, other_length: int) -> Iterator[Gap]:
    """The gaps before, between and after the runs of two sequences, in order; none is empty on both sides."""
    at = other_at = 0
    for start, other, size in [*runs, Run(length, other_length, 0)]:
        if at < start or other_at < other:
            yield Gap(at, start, other_at, other)
        at, other_at = start + size, other + size


def nearest_run(a: Array, b: Array, size: int) -> Run | None:
    """The nearest run of `size` equal tokens, however far away; `difflib` would take quadratic time.

    None where there is none, and in the rare case that the nearest equal hashes are of different tokens.
    """
    if min(len(a), len(b)) < size:
        return None
    powers = np.cumprod(np.full(size, HASH_BASE))
    in_a, in_b = (sliding_window_view(ids.astype(np.uint64), size) @ powers for ids in (a, b))
    _, starts, others = np.intersect1d(in_a, in_b, return_indices=True)
    if not len(starts):
        return None
    nearest = int(np.argmin(starts + others))
    run = Run(int(starts[nearest]), int(others[nearest]), size)
    met = same_ids(a[run.start : run.start + size], b[run.other : run.other + size])
    return run if met else None
