"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.row import RawRow
from tito_audit.storage.sampling import Choice, seed_of
from tito_audit.storage.streams import Damaged
from tito_audit.storage.table_rows import BATCH_BYTES, BATCH_ROWS, chosen_of_batch, first_line, rows_of_batch


def rows_of_parquet(
    path: Path, limit: int, only: int | None = None, choice: Choice | None = None
) -> Iterator[tuple[RawRow, float]]:
    """Each row with the share of the file's rows that were read up to it, from 0 to 1.

    With `only`, that row alone, with `choice` those that it takes; row groups without them are not read.
    """
    with open_parquet(path) as file:
        if only is not None:
            yield from ((row, 1.0) for row in _one_row(file, only, limit))
            return
        total = max(file.metadata.num_rows, 1)
        index = 0
        for group in range(file.num_row_groups):
            if choice is not None:
                for row in chosen_of_group(file, group, index, index, limit, choice):
                    yield row, (row.index + 1) / total
                index += file.metadata.row_group(group).num_rows
                continue
            for batch in batches_of(file, group):
                for row in rows_of_batch(batch, range(index, index + batch.num_rows), limit):
                    yield row, (row.index + 1) / total
                index += batch.num_rows


def _one_row(file: Any, wanted: int, limit: int) -> Iterator[RawRow]:
    index = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if index <= wanted < index + rows:
            for batch in batches_of(file, group):
                if wanted < index + batch.num_rows:
                    yield from rows_of_batch(batch.slice(wanted - index, 1), [wanted], limit)
                    return
                index += batch.num_rows
        index += rows


def open_parquet(path: Path) -> Any:
    """The file as pyarrow reads it; StorageError when it cannot be opened."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(
            f"{path}: a Parquet file whose footer cannot be read ({first_line(error)}).\n"
            "The copy is incomplete, or the writer was stopped before it closed the file; write it again."
        ) from None


def parquet_writer(out: BinaryIO, schema: Any, **options: Any) -> Any:
    """A ParquetWriter that, when dropped unfinished, leaves the file alone: it may be closed by then."""
    from pyarrow import parquet

    class Writer(parquet.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
        def __del__(self) -> None:
            pass

    return Writer(out, schema, **options)


def batches_of(file: Any, group: int, *, threads: bool = True) -> Iterator[Any]:
    """One row group in batches of about 32 MiB; raises Damaged where it breaks."""
    import pyarrow as pa

    about = file.metadata.row_group(group)
    each = about.total_byte_size // max(about.num_rows, 1) + 1
    rows = min(max(BATCH_BYTES // each, 1), BATCH_ROWS)
    batches = file.iter_batches(batch_size=rows, row_groups=[group], use_threads=threads)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Damaged(f"row group {group} of the Parquet file cannot be read ({first_line(error)})") from None
        if batch is None:
            return
        yield batch


def chosen_of_group(
    file: Any, group: int, first: int, row: int, limit: int, choice: Choice, *, threads: bool = True
) -> Iterator[RawRow]:
    """The rows of a row group that the choice takes, numbered from `first`; the first is row `row` of the file."""
    about = file.metadata.row_group(group)
    seed = seed_of_group(about)
    if not len(choice.among(seed, row, about.num_rows)):
        choice.skip(first + about.num_rows - 1, about.num_rows)
        return
    done = 0
    for batch in batches_of(file, group, threads=threads):
        taken = choice.among(seed, row + done, batch.num_rows)
        yield from chosen_of_batch(batch, taken, first + done, limit, choice)
        done += batch.num_rows


def seed_of_group(about: Any) -> int:
    """What tells a row group from others, of any file: how large its columns are as they are stored."""
    return seed_of(about.num_rows, *(about.column(i).total_compressed_size for i in range(about.num_columns)))
