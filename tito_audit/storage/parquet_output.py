"""ParquetOutput: a Parquet file written again with some of its rows changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage._parquet_footer import Footer
from tito_audit.storage._parquet_form import has_lost_times, writer_options
from tito_audit.storage._parquet_kept import not_kept, own_metadata
from tito_audit.storage._table_edit import TableEdit
from tito_audit.storage._table_output import TableOutput
from tito_audit.storage.parquet import parquet_writer


class ParquetOutput(TableOutput):
    """A Parquet file with some rows replaced, row group by row group."""

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        super().__init__(source, out, TableEdit(source, "a Parquet file", added))
        self._file: Any = None
        self._writer: Any = None
        self._claims: Sequence[Any] = ()
        """The sort order that the footer claims."""
        self._ends: list[int] = []
        """Where each row group ends, in rows of the file."""
        self._group = 0
        """The next row group to write."""
        self._written: list[Any] = []
        """The footer of the written file, once it is complete."""

    def _open(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(self._source)
            schema = self._edit.schema(self._file.schema_arrow)
            options = writer_options(self._source, self._file, schema, self._edit.added)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise self._unreadable("the footer", error) from error
        self._claims = options["sorting_columns"] or ()
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._writer = parquet_writer(self._out, schema, metadata_collector=self._written, **options)

    def _write_batches_before(self, row: int | None) -> None:
        while self._group < len(self._ends) and (row is None or self._ends[self._group] <= row):
            self._write_group()

    def _close(self) -> None:
        if hasattr(self._writer, "add_key_value_metadata"):  # not in the oldest supported pyarrow
            self._writer.add_key_value_metadata(own_metadata(self._file))
        self._writer.close()
        with self._source.open("rb") as source:
            elements = Footer(source).elements
        self.not_kept = list(not_kept(self._file.metadata, self._written[0], elements))
        self._file.close()

    def _write_group(self) -> None:
        """Write the next row group; none if all of its rows are dropped."""
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
            try:
                self._writer.write_table(_from_their_start(result), row_group_size=max(len(result), 1))
            except pa.ArrowNotImplementedError as error:
                raise StorageError(
                    f"{self._source}: row group {self._group} cannot be written again ({error}).\n"
                    "Write the log as JSONL, or with columns of plainer types."
                ) from error
        self._group += 1
        self._rows = {}

    def _check_order(self, table: Any) -> None:
        """Raise StorageError if a change breaks the sort order that the footer claims: readers rely on it."""
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
            # Nulls get a sort key of their own, as pyarrow versions differ in how to place them.
            columns |= {f"null {name}": table[name].is_null().cast("int8"), name: table[name]}
            keys.append((f"null {name}", "descending" if claim.nulls_first else "ascending"))
            keys.append((name, "descending" if claim.descending else "ascending"))
        order = compute.sort_indices(pa.table(columns), sort_keys=keys)
        if order.to_pylist() != list(range(len(table))):
            raise StorageError(
                f"{self._source}: row group {self._group}: the footer says that rows are sorted by "
                f"{', '.join(names)}, and after the repair they would not be.\n"
                "A reader that trusts the footer would miss rows. Write the log without sorting columns."
            )

    def _unreadable(self, what: str, error: Exception) -> StorageError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StorageError(
            f"{self._source}: {what} of the Parquet file cannot be read ({reason}), so the file cannot be written "
            "again with its repairs.\nThe copy is incomplete or damaged; copy it again, or write it again."
        )


def _from_their_start(table: Any) -> Any:
    """The table with views in objects copied where they are part of a longer array: pyarrow cannot write those."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        chunks = table.column(place).chunks
        if "_view" in str(field.type) and any(chunk.offset for chunk in chunks):
            copies = [pa.concat_arrays([chunk.slice(0, 0), chunk]) for chunk in chunks]
            table = table.set_column(place, field, pa.chunked_array(copies, type=field.type))
    return table
