"""RandomAccess: a file whose rows can be read again, in any order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.log import open_log, readable
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.spool import CUT_OFF, Spool, entry_of, row_bytes, row_of, unpacked
from tito_audit.storage.streams import ParseRow, cut_lines

Ticket = tuple[int, int]
"""The index of a row, and where it is: the byte offset of its line, or where it begins in the spool."""

_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"


class RowBatch:
    """Consecutive rows that any process can read."""

    __slots__ = ()

    def rows(self, parse: ParseRow) -> Iterator[tuple[int | bytes, RawRow | None]]:
        """Each row with the byte offset of its line, or with its entry for the spool; None for a blank line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InPlace(RowBatch):
    """The lines of an uncompressed file between two places at which lines start."""

    path: Path
    start: int
    stop: int
    limit: int

    def rows(self, parse: ParseRow) -> Iterator[tuple[int, RawRow | None]]:
        """Each line with its byte offset, numbered from 0 in the batch; None for a blank one."""
        start = self.start
        with readable(self.path), self.path.open("rb") as file:
            file.seek(start)
            blocks = (file.read(min(_BLOCK, self.stop - place)) for place in range(start, self.stop, _BLOCK))
            for index, line in enumerate(cut_lines(blocks, self.limit)):
                at, start = start, start + line.size + 1
                yield at, None if line.blank else line.row(index, self.limit, parse)


@dataclass(frozen=True, slots=True)
class SpooledRows(RowBatch):
    """Rows of a file that cannot be read in place, each as `row_bytes` packs it."""

    each: list[bytes]

    def rows(self, parse: ParseRow) -> Iterator[tuple[bytes, RawRow]]:
        """Each row with its entry for the spool, numbered as in the file."""
        for data in self.each:
            yield entry_of(data), row_of(data, parse)


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
        self.parse = parse
        self._spool = spool or Spool()
        # A remote row is fetched once, however often it is read.
        local = not isinstance(path, RemoteFile)
        self.in_place = local and self._log.kind == "lines" and self._log.compression is None

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Every row as `open_log` gives it, with its ticket; iterate once, over all rows."""
        first = 0
        for batch in self.batches(_BLOCK):
            lines = 0
            for place, raw in batch.rows(self.parse):
                if isinstance(place, int):
                    lines += 1
                if raw is not None:
                    at = place if isinstance(place, int) else self.keep(place)
                    yield (first + raw.index, at), replace(raw, index=first + raw.index) if first else raw
            first += lines

    def batches(self, size: int) -> Iterator[RowBatch]:
        """All rows in batches of about `size` bytes, which any process can read; those in a spool go to `keep`."""
        with readable(self.path):
            if not self.in_place:
                self._log.keep_text = self._log.kind == "lines"
                # The text is parsed later.
                self._log.parse = lambda index, data, cut_off=False: RawRow(index, CUT_OFF if cut_off else {})
                rows: list[bytes] = []
                total = 0
                for raw in self._log:
                    rows.append(row_bytes(raw))
                    total += len(rows[-1])
                    if total >= size:
                        yield SpooledRows(rows)
                        rows, total = [], 0
                if rows:
                    yield SpooledRows(rows)
                return
            with self.path.open("rb") as file:
                start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
                end = file.seek(0, 2)
                while start < end:
                    # To the start of the first line after so many bytes
                    stop = start + size - 1
                    file.seek(stop)
                    while (block := file.read(_BLOCK)) and b"\n" not in block:
                        stop += len(block)
                    stop = min(stop + block.find(b"\n") + 1, end)
                    yield InPlace(self.path, start, stop, self._limit)
                    start = stop

    def keep(self, entry: bytes) -> int:
        """Keep the entry of a row of `SpooledRows`; returns where it is."""
        return self._spool.append(entry)

    def row(self, ticket: Ticket, parse: ParseRow | None = None) -> RawRow:
        """The row with this ticket; with its text if it is a line of JSONL."""
        if not self.in_place:
            return row_of(unpacked(self._spool.packed(ticket[1])), parse or self.parse)
        with readable(self.path), self.path.open("rb") as file:
            return line_at(file, ticket, self._limit, parse or self.parse)

    def packed(self, ticket: Ticket) -> bytes | None:
        """The row as it is in the spool; None if it is read in place."""
        return None if self.in_place else self._spool.packed(ticket[1])


def line_at(file: BinaryIO, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of an uncompressed file, with its text."""
    index, at = ticket
    file.seek(at)
    data = file.readline(min(limit + 2, sys.maxsize))
    line = data.removesuffix(b"\n")
    if len(line) > limit:
        return too_long(index, len(line), limit)
    return replace(parse(index, line, cut_off=line is data), text=line.strip())
