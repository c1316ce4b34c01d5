"""Lines of a byte stream as rows, however long the lines are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tito_audit.storage.row import RawRow, parse_row, too_long

__all__ = ["Gathered", "Piece", "rows_of_lines"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes cut out of a stream."""

    data: bytes | None
    """None when they were over the limit and therefore not held."""
    size: int
    complete: bool = True
    """False for what the file ended in."""


class Gathered:
    """Parts of one piece, held only while they fit the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """One more part; past the limit only its size is kept."""
        self.size += len(part)
        if self.size <= self._limit:
            self._parts.append(part)
        else:
            self._parts.clear()

    def take(self, *, complete: bool = True) -> Piece:
        """All parts as one piece, and an empty start for the next."""
        data = b"".join(self._parts) if self.size <= self._limit else None
        piece = Piece(data, self.size, complete)
        self._parts.clear()
        self.size = 0
        return piece


def rows_of_lines(blocks: Iterable[bytes], limit: int) -> Iterator[RawRow]:
    """One row a line that is not blank; its index is the number of the line, from 0."""
    for index, line in enumerate(_lines(blocks, limit)):
        if line.data is None:
            yield too_long(index, line.size, limit)
        elif line.data and not line.data.isspace():
            yield parse_row(index, line.data, cut_off=not line.complete)


def _lines(blocks: Iterable[bytes], limit: int) -> Iterator[Piece]:
    gathered = Gathered(limit)
    for block in blocks:
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            gathered.add(block[start:end])
            yield gathered.take()
            start = end + 1
        gathered.add(block[start:])
    if gathered.size:
        yield gathered.take(complete=False)
