"""NewLog: new rows written as JSONL, JSON or a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.atomic import draft_of, new_file
from tito_audit.storage.output import PACKED, Compressor
from tito_audit.storage.parquet import parquet_writer
from tito_audit.storage.row import dump_row
from tito_audit.storage.streams import Compression

_BATCH_ROWS = 1024


class NewLog(Protocol):
    """A log being written: `add` rows, then `finish`, which says where to read it before it has its name."""

    def add(self, row: Row) -> None:
        """Write one row."""

    def finish(self) -> Path:
        """Write the end; the path at which the whole log can be read before the block ends."""


def kind_of_name(target: Path) -> tuple[str, Compression]:
    """The kind of file that a name asks for (lines, array or table), and its compression.

    SetupError if there is no suffix, or one of another kind of file.
    """
    suffixes = [suffix.lower() for suffix in target.suffixes[-2:]]
    packed = PACKED.get(suffixes[-1]) if suffixes else None
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
    target: Path, *, overwrite: bool, source: Path | None = None, shapes: ColumnTypes | None = None
) -> Iterator[NewLog]:
    """A new log, which gets its name when the block ends, or never if the block raises.

    `source` is a log that must not be overwritten; `shapes` says what the columns of a table hold.
    """
    kind, compression = kind_of_name(target)
    with new_file(target, overwrite=overwrite, source=source) as out, contextlib.ExitStack() as stack:
        if kind == "table":
            yield _Table(out, shapes or ColumnTypes(), target.suffix.lower())
            return
        compressor = Compressor(out, compression)
        stack.callback(compressor.abandon)
        yield _Text(out, compressor, array=kind == "array")


class _Text:
    """JSONL, or one JSON array with one row per line."""

    def __init__(self, file: BinaryIO, out: Compressor, *, array: bool) -> None:
        self._file = file
        self._out = out
        self._array = array
        self._rows = 0

    def add(self, row: Row) -> None:
        if self._array:
            self._out.write(b",\n" if self._rows else b"[\n")
        self._out.write(dump_row(row))
        if not self._array:
            self._out.write(b"\n")
        self._rows += 1

    def finish(self) -> Path:
        if self._array:
            self._out.write(b"\n]\n" if self._rows else b"[]\n")
        self._out.finish()
        return draft_of(self._file)


class _Buffer:
    """The cells of some rows."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def _is_full(self, row: Row) -> bool:
        """Buffer a row; whether enough have been buffered."""
        cells: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                cells[str(name)] = value.tolist()
            else:
                cells[str(name)] = dump_row(value).decode("utf-8") if _holds_objects(value) else value
        self._rows.append(cells)
        # About how many numbers and characters it holds
        self._size += sum(len(value) if isinstance(value, list | str) else 1 for value in row.values())
        return len(self._rows) >= _BATCH_ROWS or self._size > 4 << 20


class ColumnTypes(_Buffer):
    """The column types of a table, learned from all its rows before the first is written."""

    schema: Any = None

    def learn(self, row: Row) -> None:
        """Take a row into account; SetupError if a column cannot hold both it and earlier rows."""
        if self._is_full(row):
            self.settle()

    def settle(self) -> None:
        """Take the buffered rows into account."""
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
                raise _of_two_types(name, error) from None
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
                raise _of_two_types(field.name, error) from None
        self.schema = schema


def writer_of(out: BinaryIO, schema: Any, suffix: str) -> Any:
    """A writer of tables in the format of the suffix; .arrow is a stream, as for `datasets`."""
    if suffix == ".parquet":
        return parquet_writer(out, schema)
    return (pa.ipc.new_file if suffix == ".feather" else pa.ipc.new_stream)(out, schema)


class _Table(_Buffer):
    """A table in which objects and lists of objects are JSON strings, as is usual for rollouts."""

    def __init__(self, out: BinaryIO, shapes: ColumnTypes, suffix: str) -> None:
        super().__init__()
        shapes.settle()
        self._file = out
        self._schema = shapes.schema if shapes.schema is not None else pa.schema([])
        self._writer = writer_of(out, self._schema, suffix)

    def add(self, row: Row) -> None:
        if self._is_full(row):
            self._write()

    def finish(self) -> Path:
        self._write()
        self._writer.close()
        return draft_of(self._file)

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


def _holds_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple) or not value or isinstance(value[0], int | float | str):
        return False
    return any(map(_holds_objects, value))


def _of_two_types(name: str, error: Exception) -> SetupError:
    return SetupError(
        f"column {name!r} holds values of several types, but a table column has only one ({error}).\n"
        "Write the log as .jsonl."
    )
