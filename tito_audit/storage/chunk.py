"""Chunk: consecutive rows of a log that another process can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tito_audit.storage.lines import ParseRow
from tito_audit.storage.log import unreadable
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import Sample
from tito_audit.storage.streams import Damaged


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of a log."""

    path: Path
    limit: int
    """Maximum bytes of a row."""
    done: int
    """Bytes of the file read once this chunk has been read."""
    share: float | None = field(default=None, kw_only=True)
    """About what share of its rows to sample; None: all."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, numbered from 0; updates `reading`."""
        raise NotImplementedError


class Reading:
    """Iterates over the rows of a chunk, numbered from 0; `size` and `damage` are set once all were read."""

    def __init__(self, chunk: Chunk) -> None:
        self.size = 0
        """How many row numbers the chunk takes up; the next chunk's rows are numbered from there."""
        self.damage: str | None = None
        """Why the file cannot be read past this chunk."""
        self.sample = Sample(chunk.share) if chunk.share is not None else None
        """Counts the rows left out so far; None if all rows are read."""
        self._chunk = chunk

    def __iter__(self) -> Iterator[RawRow]:
        try:
            yield from self._chunk.rows(self)
        except Damaged as damage:
            self.damage = str(damage)
        except OSError as error:
            raise unreadable(self._chunk.path, error) from error


@dataclass(slots=True)
class Pieces(Chunk):
    """Rows as text, without those that a sample leaves out."""

    size: int = 0
    pieces: list[tuple[int, bytes | None, int, bool, int]] = field(default_factory=list)
    """(number, text or None if too long, bytes, complete, how many before it were left out)"""
    parse: ParseRow = parse_row
    left_out: int = 0
    """How many rows were left out in total."""
    last: int = -1
    """The number of the last row, left out or not; -1 if there is none."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows, parsed."""
        for number, data, size, complete, left_out in self.pieces:
            if reading.sample is not None:
                reading.sample.left_out = left_out
            if data is None:
                yield too_long(number, size, self.limit)
            else:
                yield self.parse(number, data, cut_off=not complete)
        reading.size = self.size
        if reading.sample is not None:
            reading.sample.left_out, reading.sample.last = self.left_out, self.last


@dataclass(slots=True)
class Broken(Chunk):
    """No rows: says that the file cannot be read further."""

    damage: str

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Raises Damaged."""
        raise Damaged(self.damage)
        yield
