"""Prefixes of sequences by hash: each known prefix has a number and the number of a shorter prefix."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.chains.links import AT_ONCE

Hashes = NDArray[np.uint64]
MASK = (1 << 64) - 1
_OFFSET = np.uint64(0xD1B54A32D192ED03)
_FULL = 0.7
_GROWTH = 1.5


class Rolling:
    """Hashes of all prefixes of a sequence of integers.

    Each position has its own factor, so no pattern of ids makes two sequences collide.
    """

    def __init__(self) -> None:
        self._factors = _factors(1 << 12)

    def prefixes(self, values: NDArray[np.integer], salt: int) -> Hashes:
        """`[N+1]` The hash of the first n values, for each n."""
        hash_at = np.empty(len(values) + 1, np.uint64)
        hash_at[0] = salt
        terms = self._terms(values, 0)
        terms[:1] += np.uint64(salt)
        np.cumsum(terms, out=hash_at[1:])
        return hash_at

    def extended(self, hash_: int, length: int, values: NDArray[np.integer]) -> int:
        """The hash of a sequence with this hash and length, followed by these values."""
        return (hash_ + int(self._terms(values, length).sum())) & MASK

    def _terms(self, values: NDArray[np.integer], at: int) -> Hashes:
        end = at + len(values)
        if end > len(self._factors):
            self._factors = _factors(2 * end)
        terms = values.astype(np.uint64)
        terms += _OFFSET
        terms *= HASH_BASE
        terms ^= terms >> np.uint64(32)
        terms *= self._factors[at:end]
        return terms


def _factors(count: int) -> Hashes:
    """`[count]` Odd factors that look random (splitmix64)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * HASH_BASE
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def hash_of(data: bytes) -> int:
    """A 64-bit hash of bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class Numbers:
    """Hashes and their numbers, 1, 2, 3, …, in about 15 bytes each: a hash table with open addressing."""

    def __init__(self) -> None:
        self.hashes = array("Q", [0])
        """The hash of each number; 0 is no number."""
        self._slots = array("I", bytes(4 * 64))

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return len(self.hashes) * 8 + len(self._slots) * 4

    def find(self, hash_: int) -> int:
        """The number of a hash; 0 if it has none."""
        hashes, slots = self.hashes, self._slots
        size = len(slots)
        at = ((hash_ >> 32) * size) >> 32
        while number := slots[at]:
            if hashes[number] == hash_:
                return number
            at = at + 1 if at + 1 < size else 0
        return 0

    def add(self, hash_: int) -> int:
        """The number of a hash, added if new."""
        if (known := self.find(hash_)) != 0:
            return known
        if len(self.hashes) > _FULL * len(self._slots):
            self._grow()
        number, slots = len(self.hashes), self._slots
        self.hashes.append(hash_)
        size = len(slots)
        at = ((hash_ >> 32) * size) >> 32
        while slots[at]:
            at = at + 1 if at + 1 < size else 0
        slots[at] = number
        return number

    def find_all(self, hashes: Hashes) -> NDArray[np.uint32]:
        """`[N]` The number of each hash; 0 where it has none."""
        slots, hashes_held = np.frombuffer(self._slots, np.uint32), np.frombuffer(self.hashes, np.uint64)
        numbers = np.zeros(len(hashes), np.uint32)
        for start in range(0, len(hashes), AT_ONCE):
            pending = np.arange(start, min(start + AT_ONCE, len(hashes)))
            at = _home(hashes[pending], len(slots))
            while len(pending):
                number = slots[at]
                hit = hashes_held[number] == hashes[pending]
                numbers[pending[hit]] = number[hit]
                further = ~hit & (number != 0)
                pending, at = pending[further], (at[further] + 1) % len(slots)
        return numbers

    def _grow(self) -> None:
        slots = np.zeros(int(_GROWTH * len(self._slots)), np.uint32)
        hashes = np.frombuffer(self.hashes, np.uint64)
        for start in range(1, len(hashes), AT_ONCE):
            stop = min(start + AT_ONCE, len(hashes))
            pending, at = np.arange(start, stop, dtype=np.uint32), _home(hashes[start:stop], len(slots))
            while len(pending):
                free = slots[at] == 0
                slots[at[free]] = pending[free]
                lost = slots[at] != pending
                pending, at = pending[lost], (at[lost] + 1) % len(slots)
        self._slots = array("I")
        self._slots.frombytes(slots.data.cast("B"))


def _home(hashes: Hashes, size: int) -> NDArray[np.int64]:
    """`[N]` The first slot searched in a table of this size."""
    return (((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


class Trie:
    """Prefixes, each with the longest shorter prefix known when it was added."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.parents = array("I", [0])
        """`parents[n] < n`"""

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.numbers.nbytes + 4 * len(self.parents)

    def add(self, hash_: int, parent: int) -> int:
        """The number of a prefix; if it is new, `parent` is the number of the prefix before it."""
        number = self.numbers.add(hash_)
        if number == len(self.parents):
            self.parents.append(parent)
        return number

    def add_path(self, longest_first: Iterable[int]) -> int:
        """The number of the longest of these prefixes of one sequence; new prefixes are added.

        All prefixes of a known prefix are known, so only the new part of a long history is processed.
        """
        new, parent = [], 0
        for hash_ in longest_first:
            parent = self.numbers.find(hash_)
            if parent:
                break
            new.append(hash_)
        for hash_ in reversed(new):
            parent = self.add(hash_, parent)
        return parent
