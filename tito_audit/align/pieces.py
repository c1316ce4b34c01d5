"""A token sequence with its bytes and control tokens, for alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tito_audit.record.arrays import Ids, Mask, Offsets

CONTEXT_BYTES = 4_000
"""The most bytes of context on either side of a token range."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Token ids, where each ends in the bytes, and which are control tokens."""

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

    def has_empty(self) -> bool:
        """Whether a token has no bytes."""
        return len(self.ids) > 0 and (not self.end[0] or True in (self.end[1:] == self.end[:-1]))

    def slice(self, start: int, end: int) -> Pieces:
        """Tokens `start:end` alone."""
        first = int(self.end[start - 1]) if start else 0
        last = int(self.end[end - 1]) if end > start else first
        return Pieces(
            self.ids[start:end], self.end[start:end] - first, self.data[first:last], self.control[start:end]
        )

    def bytes_of(self, start: int, end: int) -> bytes:
        """The bytes of tokens `start:end`."""
        first = int(self.end[start - 1]) if start else 0
        return self.data[first : int(self.end[end - 1])] if end > start else b""

    def split_at_control(self) -> list[tuple[int, int]]:
        """Token ranges: each control token alone, and each stretch of text between two of them."""
        where = self.control.nonzero()[0]
        cuts = sorted({0, len(self.ids), *where.tolist(), *(where + 1).tolist()})
        return list(pairwise(cuts))

    def range_keys(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[bool, bytes]]:
        """For each range of `split_at_control`, whether it is a control token, and its bytes."""
        ends = [0, *self.end[[end - 1 for _, end in ranges]].tolist()] if ranges else [0]
        control = self.control[[start for start, _ in ranges]].tolist() if ranges else []
        return list(zip(control, map(self.data.__getitem__, map(slice, ends, ends[1:])), strict=False))

    def bytes_before(self, start: int, limit: int = CONTEXT_BYTES) -> bytes:
        """Up to `limit` bytes before a token, back to the nearest control token (included)."""
        low = self._tokens_within(start, start, limit)[0]
        at = self.control[low:start].tobytes().rfind(b"\1")
        return self.bytes_of(low + max(at, 0), start)[-limit:]

    def bytes_after(self, end: int, limit: int = CONTEXT_BYTES) -> bytes:
        """Up to `limit` bytes from a token on, through the next control token."""
        high = self._tokens_within(end, end, limit)[1]
        at = self.control[end:high].tobytes().find(b"\1")
        return self.bytes_of(end, end + at + 1 if at >= 0 else high)[:limit]

    def with_context(self, start: int, end: int) -> tuple[Pieces, int]:
        """Tokens `start:end` with their context on both sides, and the index of the first token of that."""
        low, high = self._tokens_within(start, end, CONTEXT_BYTES)
        first = int(self.end[low - 1]) if low else 0
        data = self.data[first : int(self.end[high - 1])] if high > low else b""
        return Pieces(
            self.ids[low:high].copy(), self.end[low:high] - first, data, self.control[low:high].copy()
        ), low

    def _tokens_within(self, start: int, end: int, limit: int) -> tuple[int, int]:
        """The range of tokens that reaches `limit` bytes before `start` and after `end`."""
        first = int(self.end[start - 1]) if start else 0
        last = int(self.end[end - 1]) if end else 0
        low = min(int(self.end.searchsorted(first - limit, side="right")), start)
        return low, min(int(self.end.searchsorted(last + limit)) + 1, len(self.ids))
