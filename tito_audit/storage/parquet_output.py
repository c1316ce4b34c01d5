"""ParquetOutput: a Parquet file written again with some of its rows changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage._arrow_edit import Change, changes_between, edited, is_text, misfits
from tito_audit.storage._parquet_form import has_lost_times, writer_options
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow

__all__ = ["ParquetOutput"]

_Copies = list[list[Change]]
"""What becomes of one row: the changes of each row that is written for it."""


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
        self._added = added
        """Text columns that a row may have though the source has not."""
        self._file: Any = None
        self._writer: Any = None
        self._claims: Sequence[Any] = ()
        """The sort order that the footer states."""
        self._ends: list[int] = []
        """Where each row group ends, in rows of the file."""
        self._group = 0
        """The first row group that is not written yet."""
        self._rows: dict[int, _Copies] = {}
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
            options = writer_options(self._source, self._file, self._added)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._unreadable("the footer", error) from error
        self._claims = options["sorting_columns"] or ()
        schema = self._file.schema_arrow
        for name in self._added:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
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
        first = self._ends[self._group] - len(table)
        self._check_names(table.column_names)
        for name in self._added:
            if name not in table.column_names:
                table = table.append_column(pa.field(name, pa.string()), pa.nulls(len(table), pa.string()))
        columns = [self._column(table, place, first) for place in range(table.num_columns)]
        result = pa.table(columns, schema=table.schema)
        self._check_order(result)
        if len(result) or not len(table):
            self._writer.write_table(result, row_group_size=max(len(result), 1))
        self._group += 1
        self._rows = {}

    def _column(self, table: Any, place: int, first: int) -> Any:
        """One column of a row group: what it was, with the values of changed rows put between."""
        import pyarrow as pa

        field, column = table.schema.field(place), table.column(place)
        # Of several columns with one name a row shows the last.
        shown = place == table.schema.get_all_field_indices(field.name)[-1]
        rows = {row: [_below(field.name, copy) if shown else [] for copy in self._rows[row]] for row in self._rows}
        if all(copies == [[]] for copies in rows.values()):
            return column
        pieces, start = [], 0
        for row, copies in rows.items():
            pieces += column.slice(start, row - first - start).chunks
            start = row - first + 1
            for changes in copies:
                same = column.slice(start - 1, 1).chunks
                pieces += [self._value(field, column, row, start - 1, changes)] if changes else same
        pieces += column.slice(start).chunks
        joined = pa.chunked_array(pieces, column.type)
        # The writer gives up on dictionaries where they differ from piece to piece.
        return joined.unify_dictionaries() if pa.types.is_dictionary(column.type) else joined

    def _value(self, field: Any, column: Any, row: int, place: int, changes: list[Change]) -> Any:
        """The new value of one row in one column, as an Arrow array of length 1."""
        if field.name in self._added and is_text(field.type):
            changes = [Change(change.path, change.old, _as_text(change.new)) for change in changes]
        try:
            return edited(field, column, place, changes)
        except misfits() as error:
            raise StorageError(
                f"{self._source}: row {row}, column {field.name!r}: what the repair puts there does not fit the "
                f"column's type {_shortened(field.type)} ({error}).\n"
                "The types of a Parquet file are kept, so the repaired file cannot be written. Write the log "
                "with a type that can hold the value, or as JSONL, or leave the repair out."
            ) from error

    def _check_names(self, names: Sequence[str]) -> None:
        known = {*names, *self._added}
        for row, copies in self._rows.items():
            unknown = [change.path[0] for copy in copies for change in copy if change.path[0] not in known]
            if unknown:
                raise StorageError(
                    f"{self._source}: row {row}: the repair puts a column {unknown[0]!r} into the row, which the "
                    "file has not.\nThe columns of a Parquet file are kept, so it cannot be written repaired. "
                    "Write the log with that column, or as JSONL, or leave the repair out."
                )

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


def _below(name: str, changes: Sequence[Change]) -> list[Change]:
    """The changes of one column, with paths that start inside its value."""
    return [Change(change.path[1:], change.old, change.new) for change in changes if change.path[0] == name]


def _as_text(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


def _shortened(kind: Any) -> str:
    text = str(kind)
    return text if len(text) <= 80 else f"{text[:77]}..."
