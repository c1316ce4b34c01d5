"""Lines of a byte stream as rows, however long the lines are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import Choice

ParseRow: TypeAlias = Callable[..., RawRow]
"""What reads a row as `parse_row` does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes cut out of a stream."""

    data: bytes | None
    """None when they were over the limit and therefore not held."""
    size: int
    complete: bool = True
    """False for what the file ended in."""
    mark: bytes = b""
    """The byte behind it that separates elements of an array or encloses them."""
    gap: bool = False
    """True for white space that is no element."""


class Between:
    """The bytes between rows, gathered until the next row takes them as its lead."""

    def __init__(self, start: bytes = b"") -> None:
        self._parts = [start]

    def skip(self, part: bytes | None) -> None:
        """Bytes that belong to no row."""
        if part:
            self._parts.append(part)

    def with_text(self, row: RawRow, data: bytes | None) -> RawRow:
        """The row that was read from `data`, with its text and its lead; white space around goes to leads."""
        if data is None:
            return replace(row, lead=self.rest())
        text = data.lstrip()
        self.skip(data[: len(data) - len(text)])
        lead = self.rest()
        inner = text.rstrip()
        self.skip(text[len(inner) :])
        return replace(row, text=inner, lead=lead)

    def rest(self) -> bytes:
        """What no row has taken yet, once."""
        joined = b"".join(self._parts)
        self._parts.clear()
        return joined


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

    def take(self, *, complete: bool = True, mark: bytes = b"") -> Piece:
        """All parts as one piece, and an empty start for the next."""
        data = b"".join(self._parts) if self.size <= self._limit else None
        piece = Piece(data, self.size, complete, mark)
        self._parts.clear()
        self.size = 0
        return piece


def rows_of_lines(
    blocks: Iterable[bytes], limit: int, between: Between | None = None, parse: ParseRow = parse_row
) -> Iterator[RawRow]:
    """One row a line that is not blank; its index is the number of the line, from 0.

    With `between` rows keep their text, and what is left in it at the end follows the last row.
    """
    for index, line in enumerate(cut_lines(blocks, limit)):
        row = None
        if line.data is None:
            row = too_long(index, line.size, limit)
        elif line.data and not line.data.isspace():
            row = parse(index, line.data, cut_off=not line.complete)
        if between is None:
            if row is not None:
                yield row
            continue
        if row is not None:
            yield between.with_text(row, line.data)
        else:
            between.skip(line.data)
        between.skip(b"\n" if line.complete else b"")


def chosen_of_lines(
    blocks: Iterable[bytes], limit: int, choice: Choice, start: int, parse: ParseRow = parse_row
) -> Iterator[RawRow]:
    """The rows of lines that the choice takes, no other parsed; the first line starts at byte `start`."""
    at = start
    for index, line in enumerate(cut_lines(blocks, limit)):
        here, at = at, at + line.size + 1
        if line.data is not None and (not line.data or line.data.isspace()):
            continue
        if choice.takes(index, here, line.data, line.size):
            if line.data is None:
                yield too_long(index, line.size, limit)
            else:
                yield parse(index, line.data, cut_off=not line.complete)


def cut_lines(blocks: Iterable[bytes], limit: int) -> Iterator[Piece]:
    """Each line without its end, blank ones too; one that the file ended in is incomplete."""
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
