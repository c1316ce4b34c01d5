"""LargeParquetOutput: a Parquet file of large row groups written again, in memory that does not grow with them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from tito_audit.storage._arrow_edit import Change
from tito_audit.storage._changed_rows import ChangedRows
from tito_audit.storage._parquet_footer import MAGIC, Footer
from tito_audit.storage._parquet_form import writer_options
from tito_audit.storage._parquet_joined import joined
from tito_audit.storage._parquet_kept import NotKept
from tito_audit.storage._parquet_pages import Sink, copied, is_external, path_of, sizes
from tito_audit.storage._table_edit import Copies, TableEdit
from tito_audit.storage._table_output import TableOutput, unreadable_table
from tito_audit.storage._thrift import I64, LIST, STRUCT, Several, Struct, written
from tito_audit.storage.log import Log
from tito_audit.storage.parquet import column_batches, decoded_size, open_parquet, parquet_writer
from tito_audit.storage.parquet_output import ParquetOutput
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.streams import Damaged

LARGE = 128 << 20
"""A file with a row group of this size, decoded, is written by LargeParquetOutput."""
_PART = 64 << 20
"""How much of a changed column is encoded at once."""
_PAGE = 1 << 20
"""About the size of a page of long texts."""
_VALUES = 1024
"""The most values that the writer puts into a page before it looks at its size."""
_NULLS = 1 << 20
"""Rows of a new column that are made at once."""
_ABOUT = 32 << 20
"""How much of the footer is kept in memory."""
_NO_HEADER_SIZE = (b"parquet-mr version 1.0", b"parquet-mr version 1.1.", b"parquet-mr version 1.2.")
"""Writers that left the header of a dictionary out of the size of its column chunk."""
_CODECS = {"UNCOMPRESSED": "NONE", "LZ4_RAW": "LZ4"}
# Fields of a row group.
_COLUMNS, _BYTES, _ROWS, _SORTED, _AT, _SIZE, _NUMBER = range(1, 8)
_MOST_NUMBERS = 1 << 15
_TEXT = "BYTE_ARRAY"


def parquet_output(source: Path, out: BinaryIO, added: tuple[str, ...]) -> TableOutput:
    """The output that suits the row groups of a file."""
    if not isinstance(source, RemoteFile) and _has_large_groups(source):
        large = LargeParquetOutput(source, out, added)
        if large.fits():
            return large
    return ParquetOutput(source, out, added)


def _has_large_groups(source: Path) -> bool:
    with open_parquet(source) as file:
        groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
        return any(decoded_size(group) > LARGE for group in groups)


class LargeParquetOutput(TableOutput):
    """A Parquet file with some rows replaced: columns that no change touches are copied as they are stored.

    Changed columns are read, changed and encoded in parts; row groups stay what they are.
    """

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        super().__init__(source, out, TableEdit(source, "a Parquet file", added))
        self._stack = ExitStack()
        self._sink = Sink(out)
        self._waiting = ChangedRows(self._folder())
        self._lost = NotKept()
        self._group = 0
        """The next row group to write."""
        self._rows_written = self._groups_written = 0

    def fits(self) -> bool:
        """Whether the file can be written this way; call it first. StorageError if it cannot be read.

        Not if pyarrow would store a column in another form, or if the file claims an order of its rows.
        """
        import pyarrow as pa
        from pyarrow import parquet

        try:
            self._file = self._stack.enter_context(open_parquet(self._source))
            self._raw = self._stack.enter_context(self._source.open("rb"))
            self._footer = Footer(self._raw)
            self._schema = self._edit.schema(self._file.schema_arrow)
            self._names = self._schema.names
            self._old = len(self._file.schema_arrow)
            self._options = writer_options(self._source, self._file, self._schema, self._edit.added)
            if self._options.pop("sorting_columns") is not None or not self._is_plain():
                self._stack.close()
                return False
            empty = pa.Table.from_batches([], self._schema)
            model = self._stack.enter_context(self._encoded(empty, self._options))
            self._footer.adopt(Footer(model), len(self._names) - self._old)
            self._model = parquet.ParquetFile(model).schema
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise unreadable_table(self._source, "the footer of the Parquet file", error) from error
        ours, theirs = self._file.schema, self._model
        if any(_form(ours.column(at)) != _form(theirs.column(at)) for at in range(len(ours))):
            self._stack.close()
            return False
        return True

    def _is_plain(self) -> bool:
        """Whether columns can be told apart by name, and no time is stored in a form that pyarrow narrows."""
        names, leaves = self._names, range(len(self._file.schema))
        odd = len(set(names)) < len(names) or any("." in name for name in names)
        old = any(self._file.schema.column(at).physical_type == "INT96" for at in leaves)
        return not (odd or old or self._footer.made_by.startswith(_NO_HEADER_SIZE))

    def _take(self, index: int, copies: Copies) -> None:
        self._edit.check_names(self._names, {index: copies})
        self._waiting.add(index, copies)

    def finish(self, log: Log) -> None:
        """Write the remaining row groups; if no row changed, copy the source."""
        with self._stack:
            super().finish(log)

    def abandon(self) -> None:
        """Close what is open; nothing more is written."""
        self._waiting.close()
        self._stack.close()

    def _open(self) -> None:
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)))
        self._groups = self._footer.groups()
        about = tempfile.SpooledTemporaryFile[bytes](_ABOUT, dir=self._folder())
        self._about = self._stack.enter_context(about)
        self._sink.write(MAGIC)

    def _write_batches_before(self, row: int | None) -> None:
        while self._group < len(self._ends) and (row is None or self._ends[self._group] <= row):
            self._write_group()

    def _close(self) -> None:
        start = self._sink.at
        before, after = self._footer.parts(self._rows_written, self._groups_written)
        self._sink.write(before)
        self._sink.copy(cast(BinaryIO, self._about), 0, self._about.tell())
        self._sink.write(after)
        self._sink.write((self._sink.at - start).to_bytes(4, "little") + MAGIC)
        self.not_kept = list(self._lost.words())

    def _write_group(self) -> None:
        """Write the next row group; none if all of its rows are dropped."""
        import pyarrow as pa

        waiting, self._waiting = self._waiting, ChangedRows(self._folder())
        rows = self._file.metadata.row_group(self._group).num_rows
        left = rows + waiting.more
        try:
            group = next(self._groups)
            if left or not rows:
                self._write_columns(group, waiting, rows, left)
        except (pa.ArrowException, Damaged, OSError, ValueError, IndexError, StopIteration) as error:
            what = f"row group {self._group} of the Parquet file"
            raise unreadable_table(self._source, what, error) from error
        finally:
            waiting.close()
        self._group += 1

    def _write_columns(self, group: Struct, waiting: ChangedRows, rows: int, left: int) -> None:
        start, chunks, found = self._sink.at, group.get(_COLUMNS).values, list[Struct]()
        if any(is_external(chunk) for chunk in chunks):
            raise ValueError("pages are in another file")
        first, at = self._ends[self._group] - rows, 0
        touched = waiting.names | set(self._edit.added) if len(waiting) else set()
        for place, leaves in enumerate(self._footer.leaves()):
            name = self._names[place]
            mine = chunks[at : at + leaves]
            if place < self._old and waiting.same_rows and name not in touched:
                found += [copied(self._raw, chunk, self._sink) for chunk in mine]
            else:
                found += self._changed_column(place, mine, at, waiting, first, rows)
                self._lost.compare(mine, found[-len(mine) :] if mine else ())
            at += leaves
        group.put(_COLUMNS, LIST, Several(STRUCT, found))
        group.put(_ROWS, I64, left)
        group.put(_BYTES, I64, sum(sizes(chunk)[0] for chunk in found))
        group.drop(_SORTED)
        if group.get(_AT) is not None:
            group.put(_AT, I64, start)
        if group.get(_SIZE) is not None:
            group.put(_SIZE, I64, sum(sizes(chunk)[1] for chunk in found))
        if group.get(_NUMBER) is not None and self._groups_written < _MOST_NUMBERS:
            group.put(_NUMBER, 4, self._groups_written)
        else:
            group.drop(_NUMBER)
        self._about.write(written(group))
        self._groups_written += 1
        self._rows_written += left

    def _changed_column(
        self, place: int, chunks: Sequence[Struct], leaf: int, waiting: ChangedRows, first: int, rows: int
    ) -> list[Struct]:
        """Write one column of a row group with its changes; `leaf` is its first leaf in the file."""
        options = self._options | self._codecs(leaf, max(len(chunks), 1)) | self._page_form(leaf, len(chunks))
        with ExitStack() as stack:
            parts: list[tuple[BinaryIO, Struct]] = []
            for part in self._parts(place, waiting, first, rows):
                if parts:  # a column chunk has one dictionary
                    options["use_dictionary"] = False
                file = cast(BinaryIO, stack.enter_context(self._encoded(part, options)))
                parts.append((file, next(Footer(file).groups())))
                del part  # the next is read into its place
                _release()
            found = []
            for at in range(len(parts[0][1].get(_COLUMNS).values)):
                mine = [(file, group.get(_COLUMNS).values[at]) for file, group in parts]
                path = path_of(chunks[at] if chunks else mine[0][1])
                if len(parts) == 1:
                    found.append(copied(*mine[0], self._sink, path))
                else:
                    counts = [group.get(_ROWS) for _, group in parts]
                    found.append(joined(mine, counts, self._model.column(leaf + at), self._sink, path))
        return found

    def _parts(self, place: int, waiting: ChangedRows, first: int, rows: int) -> Iterator[Any]:
        """The changed column in tables of about 64 MiB, at least one; only the last may have no rows."""
        import pyarrow as pa

        held: list[Any] = []
        for table in self._read(place, rows):
            held.append(self._edited(table, first, waiting))
            first += len(table)
            if sum(one.nbytes for one in held) > _PART:
                yield from (one for one in (pa.concat_tables(held),) if len(one))
                held = []
        if held or not rows:
            yield pa.concat_tables(held) if held else pa.Table.from_batches([], self._one(place))

    def _read(self, place: int, rows: int) -> Iterator[Any]:
        """One column of the row group as stored; a new column is null."""
        import pyarrow as pa

        if place < self._old:
            for batch in column_batches(self._file, self._group, self._names[place]):
                yield pa.Table.from_batches([batch])
            return
        for start in range(0, rows, _NULLS):
            yield pa.table([pa.nulls(min(rows - start, _NULLS), pa.string())], schema=self._one(place))

    def _edited(self, table: Any, first: int, waiting: ChangedRows) -> Any:
        name = table.column_names[0]
        changed: dict[int, Copies] = {}
        for row, copies in waiting.between(first, first + len(table)):
            changed[row] = [[change for change in copy if _column(change) == name] for copy in copies]
        return self._edit.table(table, first, changed).select([name])

    def _one(self, place: int) -> Any:
        import pyarrow as pa

        return pa.schema([self._schema.field(place)])

    def _encoded(self, table: Any, options: dict[str, Any]) -> IO[bytes]:
        """A file with one row group."""
        file = tempfile.TemporaryFile(dir=self._folder())  # noqa: SIM115  for the caller to close
        with parquet_writer(cast(BinaryIO, file), table.schema, **options) as writer:
            writer.write_table(table, row_group_size=max(len(table), 1))
        return file

    def _codecs(self, leaf: int, leaves: int) -> dict[str, Any]:
        """The compression of a column in this row group."""
        about = self._file.metadata.row_group(self._group)
        codecs = [about.column(at).compression for at in range(about.num_columns)]
        usual = Counter(codecs).most_common(1)[0][0]
        mine = (*codecs, *[usual] * (len(self._names) - self._old))
        paths = range(leaf, leaf + leaves)
        return {"compression": {self._model.column(at).path: _CODECS.get(mine[at], mine[at]) for at in paths}}

    def _page_form(self, leaf: int, leaves: int) -> dict[str, Any]:
        """How many values go into a page at least: few if they are long texts."""
        group = self._file.metadata.row_group(self._group)
        stored = [group.column(at) for at in range(leaf, leaf + leaves)]
        each = [
            one.total_uncompressed_size // max(one.num_values, 1) for one in stored if one.physical_type == _TEXT
        ]
        return {"write_batch_size": min(max(_PAGE // max(*each, 1, 1), 1), _VALUES)}

    def _folder(self) -> str | None:
        """Where large temporary files go: beside the file that is written."""
        name = getattr(self._out, "name", None)
        return str(Path(name).parent) if isinstance(name, str) and Path(name).is_file() else None


def _release() -> None:
    """Give memory that Arrow no longer needs back to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _form(column: Any) -> tuple[Any, ...]:
    """How values of a column are stored."""
    levels = column.max_definition_level, column.max_repetition_level
    return (*levels, column.physical_type, column.length, str(column.logical_type))


def _column(change: Change) -> str:
    return str(change.path[0])
