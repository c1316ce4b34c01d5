"""Rows of a Parquet file, by pyarrow."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.sampling import Sample, seed_of
from tito_audit.storage.streams import Damaged
from tito_audit.storage.table_rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    first_line,
    refuse_same_names,
    rows_of_batch,
    sampled_of_batch,
)

REMOTE_BATCH_BYTES = 1 << 20
"""How much of a table that is fetched is turned into rows at once."""
_PAGES = 1 << 16
"""How much of a column chunk of a remote file is asked for first."""
_GAP = 1 << 16
"""Bytes between two column chunks that are fetched with them rather than in another request."""
_LARGE = 1 << 20
"""Binary columns of a remote file from this stored size on are large."""
_WHOLE = 16 << 20
"""A file whose column chunks are all of at most this size is read a column chunk at a time, others in pieces."""
_READ_AHEAD = 1 << 20
"""The size of such a piece."""
_TOGETHER = 4 << 20
"""How much of small column chunks is fetched at once."""


def rows_of_parquet(
    path: Path, limit: int, only: int | None = None, sample: Sample | None = None, *, quick: bool = False
) -> Iterator[tuple[RawRow, float]]:
    """Each row with the share of the rows read up to it, from 0 to 1.

    With `only`, that row alone; with `sample`, the sampled rows. Row groups without any of them are not read.
    `quick` is explained at `open_parquet`.
    """
    with open_parquet(path, quick=quick) as file:
        total = max(file.metadata.num_rows, 1)
        index = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if only is not None and not index <= only < index + size:
                index += size
                continue
            if sample is not None:
                for row in sampled_of_group(file, group, index, index, limit, sample):
                    yield row, (row.index + 1) / total
                index += size
                continue
            for batch in batches_of(file, group):
                if only is None:
                    for row in rows_of_batch(batch, range(index, index + batch.num_rows), limit):
                        yield row, (row.index + 1) / total
                elif only < index + batch.num_rows:
                    yield from ((row, 1.0) for row in rows_of_batch(batch.slice(only - index, 1), [only], limit))
                    return
                index += batch.num_rows


def open_parquet(path: Path, *, quick: bool = False) -> Any:
    """The open file; StorageError if it cannot be opened, or if two of its columns have the same name.

    With `quick`, large binary columns of a remote file, which no format looks into, are not fetched: each of their
    values is b"".
    """
    try:
        if isinstance(path, RemoteFile):
            file = _open_remote(path, quick)
        else:
            file = pa.parquet.ParquetFile(path)
            refuse_damaged(file.metadata, path.stat().st_size)
            # Where a column chunk is large, none is held whole.
            if any(chunk.total_compressed_size > _WHOLE for chunk in column_chunks(file)):
                file.close()
                file = pa.parquet.ParquetFile(
                    path, metadata=file.metadata, buffer_size=_READ_AHEAD, pre_buffer=False
                )
        schema = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(
            f"{path}: a Parquet file whose footer cannot be read ({first_line(error)}).\n"
            "The copy is incomplete, or the writer was stopped before it closed the file; write it again."
        ) from None
    refuse_same_names(path, schema)
    return file


NOT_READ = "no page is read"


class _NoPages(io.RawIOBase):
    """A file of a size whose bytes cannot be read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise OSError(NOT_READ)


def without_pages(metadata: Any, size: int, *, ahead: bool = False) -> Any:
    """A file of so many bytes with this footer, of which no page can be read: that is an OSError with `NOT_READ`.

    Before that, pyarrow's reader raises for what its accessors of a column chunk would end the process. `ahead`:
    it asks for pages before it looks at their codecs.
    """
    return pa.parquet.ParquetFile(
        _NoPages(size), metadata=metadata, pre_buffer=ahead, buffer_size=0 if ahead else _PAGES
    )


def refuse_damaged(metadata: Any, size: int) -> None:
    """Raise an Arrow error, OSError or ValueError if what a footer says of a column chunk is damaged."""
    file = without_pages(metadata, size, ahead=True)
    try:
        file.read_row_groups(range(metadata.num_row_groups), use_threads=False)
    except NotImplementedError:
        return  # a type that cannot be read, which is told where its rows are
    except OSError as error:
        if NOT_READ not in str(error):
            raise


def _open_remote(path: RemoteFile, quick: bool) -> Any:
    """The open file; of a row group it fetches the pages that are read, page by page."""
    source = path.open("rb", 0)
    file = pa.parquet.ParquetFile(source, buffer_size=_PAGES, pre_buffer=False)
    refuse_damaged(file.metadata, source.seek(0, os.SEEK_END))
    file.remote_source = source
    file.left_out = _large_binary(file) if quick else frozenset()
    return file


def _large_binary(file: Any) -> frozenset[str]:
    """The large columns of binary values, none of which is null."""
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    names = file.schema_arrow.names
    stored = {column.path: column.physical_type for column in map(file.schema.column, range(len(file.schema)))}
    large = set()
    for field in file.schema_arrow:
        if any(kind(field.type) for kind in kinds) and names.count(field.name) == 1:
            chunks = [chunk for chunk in column_chunks(file) if chunk.path_in_schema == field.name]
            # Asking for statistics of another type than the column's would end the process.
            typed = all(chunk.is_stats_set and chunk.physical_type == stored[field.name] for chunk in chunks)
            whole = not field.nullable or (typed and not any(chunk.statistics.null_count != 0 for chunk in chunks))
            if whole and sum(chunk.total_compressed_size for chunk in chunks) >= _LARGE:
                large.add(field.name)
    # One column is read for sure, which says how many rows there are.
    return frozenset(large) if len(large) < len(names) else frozenset()


def column_chunks(file: Any) -> Iterator[Any]:
    """Every column chunk."""
    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        yield from (about.column(number) for number in range(about.num_columns))


def _ranges(chunks: Iterable[Any]) -> list[tuple[int, int]]:
    """Where column chunks are in the file; small ones next to each other are one range."""
    ranges = []
    for chunk in chunks:
        first = chunk.data_page_offset
        if chunk.has_dictionary_page:
            first = min(first, chunk.dictionary_page_offset)
        ranges.append((first, first + chunk.total_compressed_size))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= _GAP and stop - joined[-1][0] <= _TOGETHER:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def parquet_writer(out: BinaryIO, schema: Any, **options: Any) -> Any:
    """A ParquetWriter that, when dropped unfinished, leaves the file alone: it may be closed by then."""

    class Writer(pa.parquet.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
        def __del__(self) -> None:
            pass

    return Writer(out, schema, **options)


def batches_of(file: Any, group: int, *, threads: bool = True) -> Iterator[Any]:
    """One row group in batches of about 32 MiB; raises Damaged if it cannot be read.

    Those of a remote file are smaller, as its first rows are wanted soon; columns left out have empty values.
    """
    about, left_out = file.metadata.row_group(group), getattr(file, "left_out", frozenset[str]())
    remote = hasattr(file, "remote_source")
    if remote:
        chunks = map(about.column, range(about.num_columns))
        file.remote_source.expect(_ranges(chunk for chunk in chunks if chunk.path_in_schema not in left_out))
    each = decoded_size(about) // max(about.num_rows, 1) + 1
    rows = int(min(max((REMOTE_BATCH_BYTES if remote else BATCH_BYTES) // each, 1), BATCH_ROWS))
    columns = [name for name in file.schema_arrow.names if name not in left_out] if left_out else None
    batches = file.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=threads)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Damaged(f"row group {group} of the Parquet file cannot be read ({first_line(error)})") from None
        if batch is None:
            return
        for number, field in enumerate(file.schema_arrow if left_out else ()):
            if field.name in left_out:
                empty = pa.array([b""] * batch.num_rows, pa.binary())
                batch = batch.add_column(number, pa.field(field.name, pa.binary(), field.nullable), empty)
        yield batch


def decoded_size(about: Any) -> int:
    """About how many bytes a row group takes once it is read: repeated ids are stored in far fewer than eight."""
    columns = (about.column(number) for number in range(about.num_columns))
    return sum(max(int(chunk.total_uncompressed_size), 8 * int(chunk.num_values)) for chunk in columns)


def sampled_of_group(
    file: Any, group: int, first: int, row: int, limit: int, sample: Sample, *, threads: bool = True
) -> Iterator[RawRow]:
    """The sampled rows of a row group, numbered from `first`; the group starts at row `row` of the file."""
    about = file.metadata.row_group(group)
    seed = seed_of_group(about)
    if not len(sample.among(seed, row, about.num_rows)):
        sample.skip(first + about.num_rows - 1, about.num_rows)
        return
    done = 0
    for batch in batches_of(file, group, threads=threads):
        chosen = sample.among(seed, row + done, batch.num_rows)
        yield from sampled_of_batch(batch, chosen, first + done, limit, sample)
        done += batch.num_rows


def seed_of_group(about: Any) -> int:
    """A seed that identifies a row group by the stored sizes of its columns."""
    return seed_of(about.num_rows, *(about.column(i).total_compressed_size for i in range(about.num_columns)))
