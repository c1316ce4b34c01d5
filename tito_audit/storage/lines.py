"""Rows from the lines of a byte stream, however long the lines are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import Sample

ParseRow: TypeAlias = Callable[..., RawRow]
"""Reads a row, as `parse_row` does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes cut out of a stream."""

    data: bytes | None
    """None if the piece was over the limit and not kept."""
    size: int
    complete: bool = True
    """False if the file ended inside the piece."""
    mark: bytes = b""
    """The byte after it: the comma or bracket of an array."""
    gap: bool = False
    """True for white space between elements."""


class Between:
    """The bytes between rows, collected until the next row takes them as its lead."""

    def __init__(self, start: bytes = b"") -> None:
        self._parts = [start]

    def skip(self, part: bytes | None) -> None:
        """Add bytes that belong to no row."""
        if part:
            self._parts.append(part)

    def with_text(self, row: RawRow, data: bytes | None) -> RawRow:
        """The row read from `data`, with its text and lead; surrounding white space goes into leads."""
        if data is None:
            return replace(row, lead=self.rest())
        text = data.lstrip()
        self.skip(data[: len(data) - len(text)])
        lead = self.rest()
        inner = text.rstrip()
        self.skip(text[len(inner) :])
        return replace(row, text=inner, lead=lead)

    def rest(self) -> bytes:
        """The bytes that no row has taken yet; empties the buffer."""
        joined = b"".join(self._parts)
        self._parts.clear()
        return joined


class PieceBuffer:
    """The parts of one piece, kept only while they fit the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """Add a part; past the limit only the size is counted."""
        self.size += len(part)
        if self.size <= self._limit:
            self._parts.append(part)
        else:
            self._parts.clear()

    def take(self, *, complete: bool = True, mark: bytes = b"") -> Piece:
        """All parts as one piece; starts the next one empty."""
        data = b"".join(self._parts) if self.size <= self._limit else None
        piece = Piece(data, self.size, complete, mark)
        self._parts.clear()
        self.size = 0
        return piece


def rows_of_lines(
    blocks: Iterable[bytes], limit: int, between: Between | None = None, parse: ParseRow = parse_row
) -> Iterator[RawRow]:
    """A row for each line that is not blank; its index is the line number, from 0.

    With `between`, rows keep their text, and what remains in it at the end is the tail of the file.
    """
    index = -1
    for line in cut_lines(blocks, limit):
        index += 1
        row = None
        if line.data is None:
            row = too_long(index, line.size, limit)
        elif line.data and not line.data.isspace():
            row = parse(index, line.data, cut_off=not line.complete)
        if between is None:
            # A long line would be held for as long as its row is audited; `enumerate` would hold it too.
            del line
            if row is not None:
                yield row
            continue
        if row is not None:
            yield between.with_text(row, line.data)
        else:
            between.skip(line.data)
        between.skip(b"\n" if line.complete else b"")


def sampled_lines(
    blocks: Iterable[bytes], limit: int, sample: Sample, start: int, parse: ParseRow = parse_row
) -> Iterator[RawRow]:
    """The rows of the sampled lines; other lines are not parsed. The first line starts at byte `start`."""
    at = start
    for index, line in enumerate(cut_lines(blocks, limit)):
        here, at = at, at + line.size + 1
        if line.data is not None and (not line.data or line.data.isspace()):
            continue
        if sample.takes(index, here, line.data, line.size):
            if line.data is None:
                yield too_long(index, line.size, limit)
            else:
                yield parse(index, line.data, cut_off=not line.complete)


def cut_lines(blocks: Iterable[bytes], limit: int) -> Iterator[Piece]:
    """Each line without its end, blank ones included; a last line without a line end is incomplete."""
    gathered = PieceBuffer(limit)
    for block in blocks:
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            gathered.add(block[start:end])
            yield gathered.take()
            start = end + 1
        gathered.add(block[start:])
    if gathered.size:
        yield gathered.take(complete=False)
