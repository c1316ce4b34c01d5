"""TableOutput: what Parquet and Arrow files have in common when they are written again."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage._arrow_edit import changes_between
from tito_audit.storage._table_edit import Copies, TableEdit
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow


class TableOutput(ABC):
    """A table written again with some rows replaced; everything no change touches passes through as Arrow data.

    Rows come in file order. One batch (a row group or a record batch) is in memory at a time and is written as one
    batch. Nothing is written before the first changed row, so a file without changes stays a byte-for-byte copy.
    """

    def __init__(self, source: Path, out: BinaryIO, edit: TableEdit) -> None:
        self.changed = False
        """Whether any row was changed, forked or dropped."""
        self.not_kept: Sequence[str] = ()
        """What of the source's form the written file does not have, in words; known once it is complete."""
        self._source = source
        self._out = out
        self._edit = edit
        self._rows: dict[int, Copies] = {}
        """The changed rows of the next batch to write, by row of the file."""

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""
        if self.changed:
            self._write_batches_before(raw.index)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one: none drops it, several are a fork."""
        copies = [changes_between(raw.value, row) for row in rows]
        if len(copies) == 1 and not copies[0]:
            self.keep(raw)
            return
        if not self.changed:
            self.changed = True
            self._open()
        self._write_batches_before(raw.index)
        self._take(raw.index, copies)

    def _take(self, index: int, copies: Copies) -> None:
        """Hold the changes of a row until its batch is written."""
        self._rows[index] = copies

    def finish(self, log: Log) -> None:
        """Write the remaining batches; if no row changed, copy the source."""
        if self.changed:
            self._write_batches_before(None)
            self._close()
            return
        with self._source.open("rb") as source:
            shutil.copyfileobj(source, self._out)

    def abandon(self) -> None:  # noqa: B027  most hold nothing
        """Close what is open; nothing more is written."""

    @abstractmethod
    def _open(self) -> None:
        """Open the source and a writer with the same options."""

    @abstractmethod
    def _write_batches_before(self, row: int | None) -> None:
        """Write the batches that end at or before this row of the file; None: all of them."""

    @abstractmethod
    def _close(self) -> None:
        """Write the footer and close the source."""


def unreadable_table(source: Path, what: str, error: Exception) -> StorageError:
    """The error for a part of a table that cannot be read, so that the table cannot be written again."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return StorageError(
        f"{source}: {what} cannot be read ({reason}), so the file cannot be written again with its repairs.\n"
        "The copy is incomplete or damaged; copy it again, or write it again."
    )
