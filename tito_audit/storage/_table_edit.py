"""TableOutput: a table written again with some of its rows changed; TableEdit: what that does to its columns."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage._arrow_edit import Change, changes_between, conversion_errors, edited, is_text
from tito_audit.storage.arrow import ArrowFile, open_arrow
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow
from tito_audit.storage.streams import Damaged

Copies = list[list[Change]]
"""The changes of each row that is written instead of one: [] drops it, several are a fork."""


class TableEdit:
    """Changes rows of one file; everything no change touches passes through as Arrow data."""

    def __init__(self, source: Path, what: str, added: tuple[str, ...]) -> None:
        self.added = added
        """Text columns that a row may have although the source does not."""
        self._source = source
        self._what = what
        """The kind of file, in words."""

    def schema(self, schema: Any) -> Any:
        """The schema with the added columns."""
        for name in self.added:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return schema

    def table(self, table: Any, first: int, changed: Mapping[int, Copies]) -> Any:
        """The table with rows changed, forked and dropped; its first row is row `first` of the file."""
        self.check_names(table.column_names, changed)
        for name in self.added:
            if name not in table.column_names:
                table = table.append_column(pa.field(name, pa.string()), pa.nulls(len(table), pa.string()))
        columns = [self._column(table, place, first, changed) for place in range(table.num_columns)]
        return pa.table(columns, schema=table.schema)

    def _column(self, table: Any, place: int, first: int, changed: Mapping[int, Copies]) -> Any:
        """One column, with the values of changed rows spliced in."""
        field, column = table.schema.field(place), table.column(place)
        # If several columns share a name, a row shows the last.
        shown = place == table.schema.get_all_field_indices(field.name)[-1]
        rows = {row: [below(field.name, copy) if shown else [] for copy in changed[row]] for row in changed}
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
        # The writer drops dictionary encoding if pieces have different dictionaries.
        return joined.unify_dictionaries() if pa.types.is_dictionary(column.type) else joined

    def _value(self, field: Any, column: Any, row: int, place: int, changes: list[Change]) -> Any:
        """The new value of one row in one column, as an Arrow array of length 1."""
        if field.name in self.added and is_text(field.type):
            changes = [Change(change.path, change.old, as_text(change.new)) for change in changes]
        try:
            return edited(field, column, place, changes)
        except conversion_errors() as error:
            kind = str(field.type)
            kind = kind if len(kind) <= 80 else f"{kind[:77]}..."
            raise StorageError(
                f"{self._source}: row {row}, column {field.name!r}: the repaired value does not fit the "
                f"column's type {kind} ({error}).\n"
                f"The types of {self._what} are kept, so the repaired file cannot be written. Write the log "
                "with a type that can hold the value, or as JSONL, or leave the repair out."
            ) from error

    def check_names(self, names: Sequence[str], changed: Mapping[int, Copies]) -> None:
        """StorageError if a change is of a column that is not among these."""
        columns = {*names, *self.added}
        for row, copies in changed.items():
            unknown = [change.path[0] for copy in copies for change in copy if change.path[0] not in columns]
            if unknown:
                raise StorageError(
                    f"{self._source}: row {row}: the repair adds a column {unknown[0]!r} that the file does not "
                    f"have.\nThe columns of {self._what} are kept, so the repaired file cannot be written. "
                    "Write the log with that column, or as JSONL, or leave the repair out."
                )


def below(name: str, changes: Sequence[Change]) -> list[Change]:
    """The changes of one column, with paths relative to its value."""
    return [Change(change.path[1:], change.old, change.new) for change in changes if change.path[0] == name]


def as_text(value: Any) -> Any:
    """An object as JSON; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


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
        self._rows[raw.index] = copies

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


def unwritable(source: Path, why: str) -> StorageError:
    """The error for a part of a table that cannot be read, so that the table cannot be written again."""
    return StorageError(
        f"{source}: {why}, so the file cannot be written again with its repairs.\n"
        "The copy is incomplete or damaged; copy it again, or write it again."
    )


class ArrowOutput(TableOutput):
    """An Arrow file with some rows replaced, in the format of the source (stream, or with a footer)."""

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        super().__init__(source, out, TableEdit(source, "an Arrow file", added))
        self._file: ArrowFile | None = None
        self._batches: Iterator[tuple[Any, Any, float]] = iter(())
        self._next: tuple[Any, Any] | None = None
        """The next record batch to write and its metadata; None after the last."""
        self._first = 0
        """The first row of that record batch, counted in the file."""
        self._writer: Any = None
        self._dictionaries: dict[int, Any] = {}
        """By column: the dictionary written so far (format with a footer only), as an array without rows."""

    def _open(self) -> None:
        self._file = file = open_arrow(self._source)
        self._batches = file.batches()
        options = file.options()
        schema = self._edit.schema(file.schema)
        # A Python file: pyarrow would still write to one of its own when dropped unfinished.
        if file.has_footer:
            more = {} if file.metadata is None else {"metadata": file.metadata}
            self._writer = pa.ipc.new_file(self._out, schema, options=options, **more)
        else:
            self._writer = pa.ipc.new_stream(self._out, schema, options=options)
        self._advance()

    def _write_batches_before(self, row: int | None) -> None:
        while self._next is not None and (row is None or self._first + self._next[0].num_rows <= row):
            self._first += self._write_edited(*self._next)
            self._rows = {}
            self._advance()

    def _close(self) -> None:
        self._writer.close()
        if self._file is not None:
            self._file.close()

    def _advance(self) -> None:
        self._next = None  # the next is read into its place
        try:
            batch = next(self._batches, None)
        except Damaged as damage:
            raise unwritable(self._source, str(damage)) from None
        self._next = batch[:2] if batch is not None else None

    def _write_edited(self, batch: Any, metadata: Any) -> int:
        """Write a record batch with its changes, of which nothing is held afterwards; its number of rows."""
        table = self._edit.table(pa.Table.from_batches([batch]), self._first, self._rows)
        if len(table) or not batch.num_rows:
            columns = [self._told_apart(place, column) for place, column in enumerate(table.columns)]
            # One record batch, or several if one array cannot hold it.
            parts = pa.table(columns, schema=table.schema).combine_chunks().to_batches()
            for part in parts or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
                self._writer.write_batch(part, metadata)
        return int(batch.num_rows)

    def _told_apart(self, place: int, column: Any) -> Any:
        """The column, its dictionary continued from earlier batches: the format with a footer allows only one."""
        if self._file is None or not self._file.has_footer or not _has_dictionary(column.type):
            return column
        before = self._dictionaries.get(place)
        chunks = column.chunks if before is None else [before, *column.chunks]
        if not chunks:
            return column
        column = pa.chunked_array(chunks, column.type).unify_dictionaries().combine_chunks()
        column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        self._dictionaries[place] = column.chunk(0).slice(0, 0)
        return column


def _has_dictionary(kind: Any) -> bool:
    """Whether a type, or a part of it, is dictionary-encoded."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
