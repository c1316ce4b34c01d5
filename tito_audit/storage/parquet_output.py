"""ParquetOutput: a Parquet file written again with some of its rows changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage._arrow_edit import changes_between
from tito_audit.storage._parquet_form import has_lost_times, writer_options
from tito_audit.storage._table_edit import Copies, TableEdit
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow

__all__ = ["ParquetOutput"]


class ParquetOutput:
    """The rows of a Parquet file with some replaced; all that no change touches goes through as Arrow data.

    Rows come in file order. One row group is held at a time, and it is written as one row group. Nothing is
    written before the first row that changes, so that a file without one stays a copy of its bytes.
    """

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        self.changed = False
        """Whether a row was replaced by another one, by several or by none."""
        self._source = source
        self._out = out
        self._edit = TableEdit(source, "a Parquet file", added)
        self._file: Any = None
        self._writer: Any = None
        self._claims: Sequence[Any] = ()
        """The sort order that the footer states."""
        self._ends: list[int] = []
        """Where each row group ends, in rows of the file."""
        self._group = 0
        """The first row group that is not written yet."""
        self._rows: dict[int, Copies] = {}
        """The changed rows of that group."""

    def keep(self, raw: RawRow) -> None:
        """A row that stays as it is."""
        if self.changed:
            self._write_groups_before(raw.index)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """A row in whose place others are written: none leaves it out, several are a fork."""
        copies = [changes_between(raw.value, row) for row in rows]
        if len(copies) == 1 and not copies[0]:
            self.keep(raw)
            return
        if not self.changed:
            self.changed = True
            self._open()
        self._write_groups_before(raw.index)
        self._rows[raw.index] = copies

    def finish(self, log: Log) -> None:
        """Write what is left; without a changed row, the bytes of the source."""
        if not self.changed:
            with self._source.open("rb") as source:
                shutil.copyfileobj(source, self._out)
            return
        while self._group < len(self._ends):
            self._write_group()
        self._writer.close()
        self._file.close()

    def _open(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        class Writer(parquet.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
            """A writer that, given up halfway, does not try to end a file that may be closed by then."""

            def __del__(self) -> None:
                pass

        try:
            self._file = parquet.ParquetFile(self._source)
            options = writer_options(self._source, self._file, self._edit.added)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._unreadable("the footer", error) from error
        self._claims = options["sorting_columns"] or ()
        schema = self._file.schema_arrow
        schema = self._edit.schema(schema)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._writer = Writer(self._out, schema, **options)

    def _write_groups_before(self, row: int) -> None:
        while self._group < len(self._ends) and self._ends[self._group] <= row:
            self._write_group()

    def _write_group(self) -> None:
        """Write the first row group that is left; one in which every row is left out has no successor."""
        import pyarrow as pa

        try:
            table = self._file.read_row_group(self._group)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._unreadable(f"row group {self._group}", error) from error
        if has_lost_times(self._source, self._file, self._group):
            raise StorageError(
                f"{self._source}: row group {self._group} holds times (INT96) outside the years 1677 to 2262.\n"
                "They would be written as other times, so the repaired file is not written. "
                "Write the log with times as INT64, or as JSONL."
            )
        result = self._edit.table(table, self._ends[self._group] - len(table), self._rows)
        self._check_order(result)
        if len(result) or not len(table):
            self._writer.write_table(result, row_group_size=max(len(result), 1))
        self._group += 1
        self._rows = {}

    def _check_order(self, table: Any) -> None:
        """StorageError when a change breaks the order that the file says its rows have: readers rely on it."""
        import pyarrow as pa
        from pyarrow import compute

        paths = [(claim, self._file.schema.column(claim.column_index).path) for claim in self._claims]
        claimed = list(takewhile(lambda pair: pair[1] in table.column_names, paths))
        changed = {change.path[0] for copies in self._rows.values() for copy in copies for change in copy}
        names = [name for _, name in claimed]
        if changed.isdisjoint(names):
            return
        columns: dict[str, Any] = {}
        keys = []
        for claim, name in claimed:
            # A key of its own says where nulls go; how to ask for it differs from one pyarrow to the next.
            columns |= {f"null {name}": table[name].is_null().cast("int8"), name: table[name]}
            keys.append((f"null {name}", "descending" if claim.nulls_first else "ascending"))
            keys.append((name, "descending" if claim.descending else "ascending"))
        order = compute.sort_indices(pa.table(columns), sort_keys=keys)
        if order.to_pylist() != list(range(len(table))):
            raise StorageError(
                f"{self._source}: row group {self._group}: the footer says that rows are sorted by "
                f"{', '.join(names)}, and the repair changes these values so that they are not.\n"
                "A reader that trusts the footer would miss rows. Write the log without sorting columns."
            )

    def _unreadable(self, what: str, error: Exception) -> StorageError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StorageError(
            f"{self._source}: {what} of the Parquet file cannot be read ({reason}), so the file cannot be written "
            "again with its repairs.\nThe copy is incomplete or damaged; copy it again, or write it again."
        )
