"""RandomAccess: a file whose rows can be read a second time, in any order."""

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
"""The index of a row, and where it is: the byte offset of its line, or its number among the held rows."""

MOST_HELD = 1 << 30
"""Maximum bytes of packed rows in memory, for all files that share a budget."""
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class MemoryBudget:
    """Memory budget for rows of files that cannot be read by offset."""

    left: int = MOST_HELD

    def take(self, size: int, path: Path) -> None:
        """Use some of the budget; StorageError if it is exceeded."""
        self.left -= size
        if self.left < 0:
            raise StorageError(
                f"{path}: its rows take more than {MOST_HELD >> 20:,} MiB of memory, where they have to be kept "
                "to be found by their id.\nWrite it as uncompressed JSONL, of which only line offsets are kept."
            )


class RandomAccess:
    """The rows of one file: of uncompressed JSONL only offsets are kept, other rows are held compressed."""

    def __init__(
        self, path: Path, *, max_row_bytes: int, budget: MemoryBudget | None = None, parse: ParseRow = parse_row
    ) -> None:
        self.path = path
        self._log = open_log(path, max_row_bytes=max_row_bytes)
        self._limit = max_row_bytes
        self._parse = parse
        self._budget = budget or MemoryBudget()
        self._held: list[bytes] = []
        if not path.is_file():
            raise StorageError(
                f"{path}: this is a pipe or a device, which is not read twice; save it to a file first."
            )
        self._in_place = self._log.kind == "lines" and self._log.compression is None

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Every row as `open_log` gives it, with its ticket; iterate once, over all rows."""
        if self._in_place:
            yield from self._lines()
            return
        for raw in self._log:
            packed = zlib.compress(pickle.dumps(raw, pickle.HIGHEST_PROTOCOL), 1)
            self._budget.take(len(packed), self.path)
            self._held.append(packed)
            yield (raw.index, len(self._held) - 1), raw

    def row(self, ticket: Ticket) -> RawRow:
        """The row with this ticket; with its text if it is a line of uncompressed JSONL."""
        if not self._in_place:
            return unpacked(self._held[ticket[1]])
        return line_at(self.path, ticket, self._limit, self._parse)

    def packed(self, ticket: Ticket) -> bytes | None:
        """The row as it is held; None if it is read by offset."""
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
    """A row from `RandomAccess.packed`; the pickle is this process's own and never was in a file."""
    raw: RawRow = pickle.loads(zlib.decompress(data))
    return raw


def line_at(path: Path, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of an uncompressed file, with its text."""
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
