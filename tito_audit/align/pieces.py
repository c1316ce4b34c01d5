"""Pieces: a token sequence with its bytes and control tokens, for alignment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tito_audit.record.arrays import Ids, Mask, Offsets


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
        edges = {0, len(self.ids)}
        where = np.flatnonzero(self.control)
        edges.update(where.tolist())
        edges.update((where + 1).tolist())
        cuts = sorted(edges)
        return list(pairwise(cuts))

    def around(self, start: int, end: int, limit: int = 4000) -> tuple[bytes, bytes]:
        """Up to `limit` bytes before and after a token range, to the nearest control token (included)."""
        before = self.control[:start].tobytes().rfind(b"\1")
        after = self.control[end:].tobytes().find(b"\1")
        first = max(before, 0)
        last = end + after + 1 if after >= 0 else len(self.ids)
        return self.bytes_of(first, start)[-limit:], self.bytes_of(end, last)[:limit]
