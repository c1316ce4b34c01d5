"""A chunk: some rows of a log that follow one another, as another process can read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tito_audit.storage.lines import ParseRow
from tito_audit.storage.log import unreadable
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import Choice
from tito_audit.storage.streams import Damaged


@dataclass(slots=True)
class Chunk:
    """Some rows of a log that follow one another."""

    path: Path
    limit: int
    """Bytes of a row at most."""
    done: int
    """How many bytes of the file have been read once this chunk is."""
    share: float | None = field(default=None, kw_only=True)
    """About how much of its rows is given; None: all."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, numbered from 0; what there is to say beside them goes into `reading`."""
        raise NotImplementedError


class Reading:
    """The rows of a chunk, numbered from 0; `size` and `damage` are set once all were read."""

    def __init__(self, chunk: Chunk) -> None:
        self.size = 0
        """How far the numbers of the next chunk's rows are from those of this one's."""
        self.damage: str | None = None
        """Why the file cannot be read past this chunk."""
        self.choice = Choice(chunk.share) if chunk.share is not None else None
        """How many of its rows were left out so far; None where all are given."""
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
    """Rows as text; those that a share leaves out are not there."""

    size: int = 0
    pieces: list[tuple[int, bytes | None, int, bool, int]] = field(default_factory=list)
    """Number, text (None: too long), bytes, complete, how many before it were left out."""
    parse: ParseRow = parse_row
    left_out: int = 0
    """How many rows were left out in all."""
    last: int = -1
    """The number of the last row, left out or not; -1 for none."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows, parsed."""
        for number, data, size, complete, left_out in self.pieces:
            if reading.choice is not None:
                reading.choice.left_out = left_out
            if data is None:
                yield too_long(number, size, self.limit)
            else:
                yield self.parse(number, data, cut_off=not complete)
        reading.size = self.size
        if reading.choice is not None:
            reading.choice.left_out, reading.choice.last = self.left_out, self.last


@dataclass(slots=True)
class Broken(Chunk):
    """Nothing but the news that the file cannot be read further."""

    damage: str

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """No rows."""
        raise Damaged(self.damage)
        yield
