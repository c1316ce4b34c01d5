"""What two sequences begin and end with in common."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
_FIRST_BLOCK, _LARGEST_BLOCK = 64, 1 << 16
"""Entries compared at once: few at first, for sequences that differ early, and never more than fit in a cache."""


def common_prefix(a: Array, b: Array) -> int:
    """How many entries two arrays of integers start with in common.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    at, size, shorter = 0, _FIRST_BLOCK, min(len(a), len(b))
    while at < shorter:
        end = min(at + size, shorter)
        unequal = a[at:end] != b[at:end]
        first = int(unequal.argmax())
        if unequal[first]:
            return at + first
        at, size = end, min(4 * size, _LARGEST_BLOCK)
    return shorter


def common_ends(a: Array, b: Array) -> tuple[int, int]:
    """How many entries two arrays start with in common, and how many of the rest they end with in common.

    >>> common_ends(np.array([1, 2, 2, 3]), np.array([1, 2, 3]))
    (2, 1)
    """
    head = common_prefix(a, b)
    return head, common_prefix(a[head:][::-1], b[head:][::-1])


def starts_with(ids: Array, prefix: Array) -> bool:
    """Whether an array of integers starts with all of another."""
    if len(prefix) > len(ids):
        return False
    if ids.dtype != prefix.dtype or len(prefix) > _LARGEST_BLOCK:
        return common_prefix(ids, prefix) == len(prefix)
    return ids[: len(prefix)].tobytes() == prefix.tobytes()


def same_ids(a: Array, b: Array) -> bool:
    """Whether two arrays of integers are equal.

    >>> same_ids(np.array([1, 2]), np.array([1, 2, 3]))
    False
    """
    if len(a) != len(b):
        return False
    if a.dtype != b.dtype or len(a) > _LARGEST_BLOCK:
        return common_prefix(a, b) == len(a)
    return a.tobytes() == b.tobytes()


def common_byte_prefix(a: bytes, b: bytes) -> int:
    """How many bytes two strings start with in common."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return common_prefix(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))
