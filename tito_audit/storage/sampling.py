"""Sample: which rows of a log a sample takes, however the log is split among processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tito_audit.storage.row import RawRow

_EDGE = 256
"""Bytes at the start and end of a row that identify it."""
_SPACE = 1 << 64


class RowSample:
    """The rows of one file that a share takes, and how many were left out so far.

    A text row is identified by its position and by how it begins and ends, a table row by its number and its
    part of the file. So neither the file's name nor rows appended later change the sample, and different files
    lose different rows. A larger share takes the rows of a smaller one and more.
    """

    __slots__ = ("_bound", "last", "left_out")

    def __init__(self, share: float) -> None:
        self.left_out = 0
        """Rows seen and not sampled."""
        self.last = -1
        """The index of the last row seen; -1 before the first."""
        self._bound = int(share * _SPACE)

    def takes(self, index: int, at: int, data: bytes | None, size: int) -> bool:
        """Whether the row with this index, which begins at `at`, is sampled; `data` is None if it is too long."""
        self.last = index
        ends = data[:_EDGE] + data[-_EDGE:] if data is not None else b""
        sampled = _number(b"%d %d %b" % (at, size, ends)) < self._bound
        self.left_out += not sampled
        return sampled

    def among(self, seed: int, first: int, count: int) -> NDArray[np.int64]:
        """`[N]` which of `count` rows are sampled, counted from 0; the first is row `first` of the file.

        Does not count what is left out.
        """
        rows = np.arange(first, first + count, dtype=np.uint64)
        # Consecutive numbers scattered over 64 bits (the finalizer of splitmix64).
        rows = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
        rows = (rows ^ (rows >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        rows = (rows ^ (rows >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        rows ^= rows >> np.uint64(31)
        return (rows < np.uint64(min(self._bound, _SPACE - 1))).nonzero()[0].astype(np.int64)

    def counted(self, rows: Iterable[RawRow], first: int, count: int) -> Iterator[RawRow]:
        """The sampled rows of the `count` rows from row `first` on; the others count as left out."""
        before, passed = self.left_out, 0
        for row in rows:
            self.left_out, self.last = before + row.index - first - passed, row.index
            passed += 1
            yield row
        self.left_out, self.last = before + count - passed, first + count - 1

    def skip(self, index: int, count: int) -> None:
        """Count `count` rows as left out; the last has this index."""
        self.left_out += count
        self.last = index


def seed_of(*what: object) -> int:
    """A 64-bit seed for a part of a file, for `RowSample.among`."""
    return _number(repr(what).encode())


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
