"""RandomAccess: a file whose rows can be read a second time, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.lines import ParseRow, cut_lines
from tito_audit.storage.log import Log, open_log, unreadable
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.spool import Spool, row_bytes, row_of, unpacked

Ticket = tuple[int, int]
"""The index of a row, and where it is: the byte offset of its line, or where it begins in the spool."""

_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"


class RandomAccess:
    """The rows of one file: lines of uncompressed JSONL are read in place, other rows are kept in a spool."""

    def __init__(
        self, path: Path, *, max_row_bytes: int, spool: Spool | None = None, parse: ParseRow = parse_row
    ) -> None:
        self.path = path
        if not path.is_file():
            raise StorageError(
                f"{path}: this is a pipe or a device, which is not read twice; save it to a file first."
            )
        self._log = open_log(path, max_row_bytes=max_row_bytes)
        self._limit = max_row_bytes
        self._parse = parse
        self._spool = spool or Spool()
        self.in_place = self._log.kind == "lines" and self._log.compression is None

    @property
    def log(self) -> Log:
        """The file, read from its start to its end."""
        return self._log

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Every row as `open_log` gives it, with its ticket; iterate once, over all rows."""
        if self.in_place:
            yield from self._lines()
            return
        self._log.keep_text, self._log.parse = self._log.kind == "lines", self._parse
        for raw in self._log:
            yield (raw.index, self._spool.add(row_bytes(raw))), raw

    def row(self, ticket: Ticket, parse: ParseRow | None = None) -> RawRow:
        """The row with this ticket; with its text if it is a line of JSONL."""
        if not self.in_place:
            return row_of(unpacked(self._spool.packed(ticket[1])), parse or self._parse)
        try:
            with self.path.open("rb") as file:
                return line_at(file, ticket, self._limit, parse or self._parse)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def packed(self, ticket: Ticket) -> bytes | None:
        """The row as it is in the spool; None if it is read in place."""
        return None if self.in_place else self._spool.packed(ticket[1])

    def _lines(self) -> Iterator[tuple[Ticket, RawRow]]:
        try:
            with self.path.open("rb") as file:
                start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
                file.seek(start)
                for index, line in enumerate(cut_lines(iter(lambda: file.read(_BLOCK), b""), self._limit)):
                    at, start = start, start + line.size + 1
                    self._log.position = at
                    if line.data is None:
                        yield (index, at), too_long(index, line.size, self._limit)
                    elif line.data and not line.data.isspace():
                        yield (index, at), self._parse(index, line.data, cut_off=not line.complete)
        except OSError as error:
            raise unreadable(self.path, error) from error


def line_at(file: BinaryIO, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of an uncompressed file, with its text."""
    index, at = ticket
    file.seek(at)
    data = file.readline(limit + 2)
    line = data.removesuffix(b"\n")
    if len(line) > limit:
        return too_long(index, len(line), limit)
    return replace(parse(index, line, cut_off=line is data), text=line.strip())
