"""Pieces: a token sequence with its bytes and control tokens, for alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tito_audit.record.arrays import Ids, Mask, Offsets

AROUND = 4_000
"""The most bytes of the text around a token range."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Token ids, where each ends in their bytes, and which are control tokens."""

    ids: Ids
    """`[N]`"""
    end: Offsets
    """`[N]` byte position after each token; the last is `len(data)`."""
    data: bytes
    """All bytes, control tokens as their literal text."""
    control: Mask
    """`[N]` True for control tokens such as `<|im_end|>`; no text token spans one."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def start(self) -> Offsets:
        """`[N]` byte position before each token."""
        return np.concatenate((np.zeros(1, np.int64), self.end))[:-1]

    def part(self, start: int, end: int) -> Pieces:
        """Tokens `start:end` as pieces of their own."""
        first = int(self.end[start - 1]) if start else 0
        last = int(self.end[end - 1]) if end > start else first
        return Pieces(
            self.ids[start:end], self.end[start:end] - first, self.data[first:last], self.control[start:end]
        )

    def bytes_of(self, start: int, end: int) -> bytes:
        """The bytes of tokens `start:end`."""
        first = int(self.end[start - 1]) if start else 0
        return self.data[first : int(self.end[end - 1])] if end > start else b""

    def units(self) -> list[tuple[int, int]]:
        """Token ranges: each control token alone, and each run of text between two of them."""
        where = self.control.nonzero()[0]
        cuts = sorted({0, len(self.ids), *where.tolist(), *(where + 1).tolist()})
        return list(pairwise(cuts))

    def keys(self, units: Sequence[tuple[int, int]]) -> list[tuple[bool, bytes]]:
        """Whether each unit is a control token, and its bytes."""
        ends = [0, *self.end[[end - 1 for _, end in units]].tolist()] if units else [0]
        control = self.control[[start for start, _ in units]].tolist() if units else []
        return list(zip(control, map(self.data.__getitem__, map(slice, ends, ends[1:])), strict=False))

    def before(self, start: int, limit: int = AROUND) -> bytes:
        """Up to `limit` bytes before a token, back to the nearest control token (included)."""
        low = self._reach(start, start, limit)[0]
        at = self.control[low:start].tobytes().rfind(b"\1")
        return self.bytes_of(low + max(at, 0), start)[-limit:]

    def after(self, end: int, limit: int = AROUND) -> bytes:
        """Up to `limit` bytes from a token on, through the next control token."""
        high = self._reach(end, end, limit)[1]
        at = self.control[end:high].tobytes().find(b"\1")
        return self.bytes_of(end, end + at + 1 if at >= 0 else high)[:limit]

    def near(self, start: int, end: int) -> tuple[Pieces, int]:
        """Tokens `start:end` with all that `before` and `after` look at, and the number of the first of these."""
        low, high = self._reach(start, end, AROUND)
        first = int(self.end[low - 1]) if low else 0
        data = self.data[first : int(self.end[high - 1])] if high > low else b""
        return Pieces(
            self.ids[low:high].copy(), self.end[low:high] - first, data, self.control[low:high].copy()
        ), low

    def _reach(self, start: int, end: int, limit: int) -> tuple[int, int]:
        """The tokens that `limit` bytes before `start` and after `end` lie in."""
        first = int(self.end[start - 1]) if start else 0
        last = int(self.end[end - 1]) if end else 0
        low = min(int(self.end.searchsorted(first - limit, side="right")), start)
        return low, min(int(self.end.searchsorted(last + limit)) + 1, len(self.ids))
