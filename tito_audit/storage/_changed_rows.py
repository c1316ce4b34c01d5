"""ChangedRows: the changes of rows that wait to be written, on disk if they are many."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import IO, Any

from tito_audit.storage._table_edit import Copies

_HELD = 16 << 20
"""How many bytes of changes are kept in memory."""


class ChangedRows:
    """The changed rows of one row group, in the order of the file; `folder` is where they go if they are many."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self.names: set[str] = set()
        """The columns that a row changes."""
        self.same_rows = True
        """Whether each row is written as one row."""
        self.more = 0
        """How many rows more there are once they are written."""
        self._rows = array("q")
        self._held: dict[int, bytes] = {}
        self._bytes = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, copies: Copies) -> None:
        """Add the changes of the next row."""
        self.same_rows &= len(copies) == 1
        self.more += len(copies) - 1
        self.names.update(str(change.path[0]) for copy in copies for change in copy)
        # A copy: the values of a row are views that would keep all rows read with it in memory.
        data = pickle.dumps(copies, pickle.HIGHEST_PROTOCOL)
        self._rows.append(row)
        self._held[row] = data
        self._bytes += len(data)
        if self._bytes > _HELD:
            self._spill()

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Copies]]:
        """The changes of these rows of the file."""
        first, last = bisect_left(self._rows, start), bisect_left(self._rows, stop)
        for row in self._rows[first:last]:
            yield row, pickle.loads(self._data(row))  # this object wrote it

    def close(self) -> None:
        """Remove what is on disk."""
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by `close`
        at = self._file.seek(0, 2)
        for row, data in self._held.items():
            self._file.write(data)
            self._places[row] = at, len(data)
            at += len(data)
        self._held.clear()
        self._bytes = 0

    def _data(self, row: int) -> Any:
        if row in self._held:
            return self._held[row]
        assert self._file is not None
        at, size = self._places[row]
        self._file.seek(at)
        return self._file.read(size)
