"""ArrowOutput: an Arrow IPC file written again with some of its rows changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage._table_edit import TableEdit
from tito_audit.storage._table_output import TableOutput
from tito_audit.storage.arrow import ArrowFile, open_arrow
from tito_audit.storage.streams import Damaged


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
        import pyarrow as pa

        self._file = file = open_arrow(self._source)
        self._batches = file.batches()
        options = file.form.options(deltas=file.has_footer)
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
            self._write_batch()

    def _close(self) -> None:
        self._writer.close()
        if self._file is not None:
            self._file.close()

    def _advance(self) -> None:
        self._next = None  # the next is read into its place
        try:
            found = next(self._batches, None)
        except Damaged as damage:
            raise StorageError(
                f"{self._source}: {damage}, so the file cannot be written again with its repairs.\n"
                "The copy is incomplete or damaged; copy it again, or write it again."
            ) from None
        self._next = found[:2] if found is not None else None

    def _write_batch(self) -> None:
        """Write the next record batch; none if all of its rows are dropped."""
        if self._next is not None:
            self._first += self._written(*self._next)
            self._rows = {}
            self._advance()

    def _written(self, batch: Any, metadata: Any) -> int:
        """Write a record batch with its changes; how many rows of the source it has."""
        import pyarrow as pa

        table = self._edit.table(pa.Table.from_batches([batch]), self._first, self._rows)
        for written in self._in_one(table) if len(table) or not batch.num_rows else ():
            self._writer.write_batch(written, metadata)
        return int(batch.num_rows)

    def _in_one(self, table: Any) -> list[Any]:
        """The table as one record batch, or as several if one array cannot hold it."""
        import pyarrow as pa

        columns = [self._told_apart(place, column) for place, column in enumerate(table.columns)]
        whole = pa.table(columns, schema=table.schema).combine_chunks()
        return whole.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]

    def _told_apart(self, place: int, column: Any) -> Any:
        """The column, its dictionary continued from earlier batches: the format with a footer allows only one."""
        import pyarrow as pa

        if self._file is None or not self._file.has_footer or not _has_dictionary(column.type):
            return column
        known = self._dictionaries.get(place)
        chunks = column.chunks if known is None else [known, *column.chunks]
        if not chunks:
            return column
        column = pa.chunked_array(chunks, column.type).unify_dictionaries().combine_chunks()
        column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        self._dictionaries[place] = column.chunk(0).slice(0, 0)
        return column


def _has_dictionary(kind: Any) -> bool:
    """Whether a type, or a part of it, is dictionary-encoded."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
