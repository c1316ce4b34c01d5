"""new_log: new rows written as JSONL, a JSON array or a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.atomic import draft_path, new_file
from tito_audit.storage.output import COMPRESSION_SUFFIXES, Compressor
from tito_audit.storage.parquet import parquet_writer
from tito_audit.storage.row import dump_row
from tito_audit.storage.streams import Compression

_BATCH_ROWS = 1024


class NewLog(Protocol):
    """A log that is being written: `add` its rows, then `finish` it."""

    def add(self, row: Row) -> None:
        """Write one row."""

    def finish(self) -> Path:
        """Write the end; returns where the whole log can be read before it has its name."""


def output_kind(target: Path) -> tuple[str, Compression]:
    """Kind (lines, array or table) and compression of the file that a name asks for by its suffix.

    SetupError if the suffix is of no kind that is written.
    """
    suffixes = [suffix.lower() for suffix in target.suffixes[-2:]]
    packed = COMPRESSION_SUFFIXES.get(suffixes[-1]) if suffixes else None
    last = suffixes[-1] if suffixes and packed is None else suffixes[-2] if len(suffixes) > 1 else ""
    if last in {".jsonl", ".ndjson"}:
        return "lines", packed
    if last == ".json":
        return "array", packed
    if last in {".parquet", ".arrow", ".arrows", ".feather"} and packed is None:
        return "table", None
    raise SetupError(
        f"{target}: the suffix decides what is written, and this is not a suffix that can be written.\n"
        "Name it .jsonl, .ndjson or .json, plus .gz or .zst to compress it, .parquet, .arrow, or .feather."
    )


@contextmanager
def new_log(
    target: Path, *, overwrite: bool, source: Path | None = None, column_types: ColumnTypes | None = None
) -> Iterator[NewLog]:
    """A new log, which gets its name when the block ends, or never if the block raises.

    `source` is a log that must not be overwritten; a table needs the `column_types` of all its rows.
    """
    kind, compression = output_kind(target)
    with new_file(target, overwrite=overwrite, source=source) as out, contextlib.ExitStack() as stack:
        if kind == "table":
            yield _TableLog(out, column_types or ColumnTypes(), target.suffix.lower())
            return
        compressor = Compressor(out, compression)
        stack.callback(compressor.abandon)
        yield _TextLog(out, compressor, kind == "array")


@dataclass
class _TextLog:
    """Writes JSONL, or a JSON array with a row per line."""

    file: BinaryIO
    out: Compressor
    array: bool
    rows: int = 0

    def add(self, row: Row) -> None:
        if self.array:
            self.out.write(b",\n" if self.rows else b"[\n")
        self.out.write(dump_row(row))
        if not self.array:
            self.out.write(b"\n")
        self.rows += 1

    def finish(self) -> Path:
        if self.array:
            self.out.write(b"\n]\n" if self.rows else b"[]\n")
        self.out.finish()
        return draft_path(self.file)


class _RowBuffer:
    """Buffers rows as cells of a table: objects, and lists of them, become JSON text, as is usual for rollouts."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def _buffer_row(self, row: Row) -> bool:
        """Buffer a row; returns whether the buffer is full."""
        cells: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                cells[str(name)] = value.tolist()
            else:
                cells[str(name)] = dump_row(value).decode("utf-8") if _has_objects(value) else value
        self._rows.append(cells)
        # About the numbers and characters in it.
        self._size += sum(len(value) if isinstance(value, list | str) else 1 for value in row.values())
        return len(self._rows) >= _BATCH_ROWS or self._size > 4 << 20


class ColumnTypes(_RowBuffer):
    """The column types of a table, learned from all its rows before any is written."""

    schema: Any = None

    def learn(self, row: Row) -> None:
        """Widen the types for a row; SetupError if no type of Arrow fits a column in all rows."""
        if self._buffer_row(row):
            self.unify_buffered()

    def unify_buffered(self) -> None:
        """Widen the types for the buffered rows, which empties the buffer."""
        if not self._rows:
            return
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        fields = []
        for name in names:
            try:
                fields.append(pa.field(name, pa.array([row.get(name) for row in self._rows]).type))
            except UnicodeEncodeError:
                raise SetupError(
                    f"column {name!r} holds half a surrogate pair, as of a character cut in two, and a table has "
                    "no place for it.\nWrite the log as .jsonl."
                ) from None
            except (pa.ArrowException, OverflowError) as error:
                raise _mixed_types_error(name, error) from None
        self._rows, self._size = [], 0
        schema = self.schema if self.schema is not None else pa.schema([])
        for field in fields:
            at = schema.get_field_index(field.name)
            if at < 0:
                schema = schema.append(field)
                continue
            both = [pa.schema([schema.field(at)]), pa.schema([field])]
            try:
                schema = schema.set(at, pa.unify_schemas(both, promote_options="permissive").field(0))
            except pa.ArrowException as error:
                raise _mixed_types_error(field.name, error) from None
        self.schema = schema


def table_writer(out: BinaryIO, schema: Any, suffix: str) -> Any:
    """A writer of tables for a suffix; .arrow is a stream, as for `datasets`."""
    if suffix == ".parquet":
        return parquet_writer(out, schema)
    return (pa.ipc.new_file if suffix == ".feather" else pa.ipc.new_stream)(out, schema)


class _TableLog(_RowBuffer):
    def __init__(self, out: BinaryIO, column_types: ColumnTypes, suffix: str) -> None:
        super().__init__()
        column_types.unify_buffered()
        self._file = out
        self._schema = column_types.schema if column_types.schema is not None else pa.schema([])
        self._writer = table_writer(out, self._schema, suffix)

    def add(self, row: Row) -> None:
        if self._buffer_row(row):
            self._write()

    def finish(self) -> Path:
        self._write()
        self._writer.close()
        return draft_path(self._file)

    def _write(self) -> None:
        if self._rows:
            try:
                self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            except (pa.ArrowException, OverflowError) as error:
                raise StorageError(
                    f"the log has changed since it was first read ({error}), so nothing was written. "
                    "Convert it once nothing writes to it any more."
                ) from None
        self._rows, self._size = [], 0


def _has_objects(value: Any) -> bool:
    """Whether a value is an object, or a list with one at any depth."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple) or not value or isinstance(value[0], int | float | str):
        return False
    return any(map(_has_objects, value))


def _mixed_types_error(name: str, error: Exception) -> SetupError:
    return SetupError(
        f"column {name!r} holds values of several types, but a table column has only one ({error}).\n"
        "Write the log as .jsonl."
    )
