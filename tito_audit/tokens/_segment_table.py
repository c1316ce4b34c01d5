"""Sets of short token sequences, looked up many at a time and compared exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Mask, Offsets

__all__ = ["KeySet", "Keys", "pack"]

Keys = NDArray[np.uint64]
"""Sequences of one to three tokens, 21 bits each, `[N]` uint64; never 0."""

LARGEST = (1 << 21) - 2
"""The largest id that fits a key."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SMALLEST_BITS = 14


class KeySet:
    """A set of keys: open addressing, at most half full. Emptied when it would hold more than `most`."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.most = most
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget every key."""
        self._allot(_SMALLEST_BITS)

    def holds(self, keys: Keys) -> Mask:
        """`[N]` True for the keys that are in the set."""
        at = self._home(keys)
        there = self._slots.take(at)
        found: Mask = there == keys
        pending = np.flatnonzero(~found & (there != 0))
        while len(pending):
            at[pending] = (at[pending] + 1) & self._last
            there = self._slots[at[pending]]
            hit = there == keys[pending]
            found[pending[hit]] = True
            pending = pending[~hit & (there != 0)]
        return found

    def add(self, keys: Keys) -> None:
        """Put keys in, each of which is new and there once."""
        if self._count + len(keys) > self.most:
            self.clear()
            keys = keys[: self.most]
        bits = self._bits
        while 2 * (self._count + len(keys)) > 1 << bits:
            bits += 1
        if bits > self._bits:
            old = self._slots[self._slots != 0]
            self._allot(bits)
            self._put(old)
        self._put(keys)

    def _put(self, keys: Keys) -> None:
        self._count += len(keys)
        at = self._home(keys)
        while len(keys):
            free = self._slots[at] == 0
            self._slots[at[free]] = keys[free]
            lost = self._slots[at] != keys  # to another key for the same slot
            keys, at = keys[lost], (at[lost] + 1) & self._last

    def _home(self, keys: Keys) -> Offsets:
        """The slot in which each key is looked for first."""
        mixed = keys * _MIX
        mixed >>= np.uint64(64 - self._bits)
        return mixed.view(np.int64)

    def _allot(self, bits: int) -> None:
        self._bits, self._last, self._count = bits, (1 << bits) - 1, 0
        self._slots: Keys = np.zeros(1 << bits, np.uint64)


def pack(ids: Ids, starts: Offsets, lengths: Offsets) -> Keys:
    """The key of each sequence of two or three tokens, `[N]`; ids must be from 0 to `LARGEST`."""
    keys: Keys = (ids.take(starts).astype(np.uint64) + np.uint64(1)) << np.uint64(42)
    keys |= (ids.take(starts + 1).astype(np.uint64) + np.uint64(1)) << np.uint64(21)
    three = np.flatnonzero(lengths == 3)
    keys[three] |= ids.take(starts[three] + 2).astype(np.uint64) + np.uint64(1)
    return keys
