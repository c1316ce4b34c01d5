"""RowsAgain: rows of a file of which each can be read once more, in any order."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.storage.lines import ParseRow, cut_lines
from tito_audit.storage.log import open_log, unreadable
from tito_audit.storage.row import RawRow, parse_row, too_long

Ticket = tuple[int, int]
"""The index of a row, and where it is: the byte at which its line starts, or its number among those held."""

MOST_HELD = 1 << 30
"""Bytes of packed rows that are held in memory, of all files that are shared out of one room."""
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Room:
    """Memory for rows of files that cannot be read by place."""

    left: int = MOST_HELD

    def take(self, size: int, path: Path) -> None:
        """Use some of it; StorageError when there is not enough."""
        self.left -= size
        if self.left < 0:
            raise StorageError(
                f"{path}: its rows take more than {MOST_HELD >> 20:,} MiB of memory, where they have to be held "
                "to be found by their id.\nWrite it as plain JSONL, of which only the places of lines are held."
            )


class RowsAgain:
    """The rows of one file. Of plain JSONL places are kept; rows of any other kind are held, packed."""

    def __init__(
        self, path: Path, *, max_row_bytes: int, room: Room | None = None, parse: ParseRow = parse_row
    ) -> None:
        self.path = path
        self._log = open_log(path, max_row_bytes=max_row_bytes)
        self._limit = max_row_bytes
        self._parse = parse
        self._room = room or Room()
        self._held: list[bytes] = []
        if not path.is_file():
            raise StorageError(
                f"{path}: this is a pipe or a device, which is not read twice; save it to a file first."
            )
        self._in_place = self._log.kind == "lines" and self._log.compression is None

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Every row as `open_log` gives it, with its ticket; to be used once, from the first row to the last."""
        if self._in_place:
            yield from self._lines()
            return
        for raw in self._log:
            packed = zlib.compress(pickle.dumps(raw, pickle.HIGHEST_PROTOCOL), 1)
            self._room.take(len(packed), self.path)
            self._held.append(packed)
            yield (raw.index, len(self._held) - 1), raw

    def row(self, ticket: Ticket) -> RawRow:
        """The row that was given out with this ticket; with its text where it is a line of plain JSONL."""
        if not self._in_place:
            return unpacked(self._held[ticket[1]])
        return line_at(self.path, ticket, self._limit, self._parse)

    def packed(self, ticket: Ticket) -> bytes | None:
        """The row as it is held; None where it is read by place."""
        return None if self._in_place else self._held[ticket[1]]

    def _lines(self) -> Iterator[tuple[Ticket, RawRow]]:
        try:
            with self.path.open("rb") as file:
                start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
                file.seek(start)
                for index, line in enumerate(cut_lines(iter(lambda: file.read(_BLOCK), b""), self._limit)):
                    at, start = start, start + line.size + 1
                    if line.data is None:
                        yield (index, at), too_long(index, line.size, self._limit)
                    elif line.data and not line.data.isspace():
                        yield (index, at), self._parse(index, line.data, cut_off=not line.complete)
        except OSError as error:
            raise unreadable(self.path, error) from error


def unpacked(data: bytes) -> RawRow:
    """A row that `RowsAgain.packed` gave; bytes of this process only, which never were in a file."""
    raw: RawRow = pickle.loads(zlib.decompress(data))
    return raw


def line_at(path: Path, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of a plain file, with its text."""
    index, at = ticket
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.readline(limit + 2)
    except OSError as error:
        raise unreadable(path, error) from error
    line = data.removesuffix(b"\n")
    if len(line) > limit:
        return too_long(index, len(line), limit)
    return replace(parse(index, line, cut_off=line is data), text=line.strip())
