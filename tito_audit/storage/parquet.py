"""Parquet files: rows read, and files written again in the storage format that their footers show."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage._store import RemoteStatus
from tito_audit.storage.remote import RangedFile, RemoteFile
from tito_audit.storage.row import block_seed
from tito_audit.storage.streams import Damage
from tito_audit.storage.table_edit import TableOutput, unwritable_error
from tito_audit.storage.table_rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    ArrowRows,
    Block,
    first_line,
    refuse_duplicate_names,
)
from tito_audit.terminal.words import listed

_FIRST_PAGE_BYTES = 1 << 16
"""Bytes of a column chunk of a remote file that are fetched first."""


def open_parquet(path: Path, *, skip_binary: bool = False) -> Any:
    """The open file; StorageError if it cannot be opened, or if two of its columns have the same name.

    With `skip_binary`, large binary columns of a remote file, which no format looks into, are not fetched: each of
    their values is b"".
    """
    try:
        if isinstance(path, RemoteFile):  # pages are fetched one by one, as they are read
            source = path.open("rb", 0)
            file = pa.parquet.ParquetFile(source, buffer_size=_FIRST_PAGE_BYTES, pre_buffer=False)
            refuse_damaged_footer(file.metadata, source.seek(0, os.SEEK_END))
            file.remote_source = source
            file.left_out = _large_binary_columns(file) if skip_binary else frozenset()
        else:
            file = pa.parquet.ParquetFile(path)
            refuse_damaged_footer(file.metadata, path.stat().st_size)
            # Large column chunks are not held whole.
            if any(chunk.total_compressed_size > 16 << 20 for chunk in column_chunks(file)):
                file.close()
                file = pa.parquet.ParquetFile(path, metadata=file.metadata, buffer_size=1 << 20, pre_buffer=False)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(
            f"{path}: a Parquet file whose footer cannot be read ({first_line(error)}).\n"
            "The copy is incomplete, or the writer was stopped before it closed the file; write it again."
        ) from None
    refuse_duplicate_names(path, schema)
    return file


_NOT_READ = "no page is read"


def refuse_damaged_footer(metadata: Any, size: int, *, codecs: bool = False) -> None:
    """Raise an Arrow error, OSError or ValueError if a footer describes column chunks that cannot be.

    pyarrow's accessors of such a chunk would end the process; its reader raises before it reads the first page,
    and here there is none to read. `codecs`: also if a codec does not exist, group by group.
    """

    def read(start: int, stop: int) -> bytes:
        raise OSError(_NOT_READ)

    source = RangedFile("", RemoteStatus(size), read)
    # A reader that reads ahead asks for pages before it looks at codecs.
    ahead = {} if codecs else {"pre_buffer": True, "buffer_size": 0}
    file = pa.parquet.ParquetFile(
        source, metadata=metadata, **{"pre_buffer": False, "buffer_size": _FIRST_PAGE_BYTES, **ahead}
    )
    every = range(metadata.num_row_groups)
    for groups in ([group] for group in every) if codecs else [every]:
        try:
            file.read_row_groups(groups, use_threads=False)
        except NotImplementedError:
            if codecs:
                raise
            return  # a type that cannot be read, which is said with its rows
        except OSError as error:
            if _NOT_READ not in str(error):
                raise


def _large_binary_columns(file: Any) -> frozenset[str]:
    """Names of large columns of binary values without null; not all columns of the file."""
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    names = file.schema_arrow.names
    stored = {column.path: column.physical_type for column in map(file.schema.column, range(len(file.schema)))}
    large = set()
    for field in file.schema_arrow:
        if any(kind(field.type) for kind in kinds) and names.count(field.name) == 1:
            chunks = [chunk for chunk in column_chunks(file) if chunk.path_in_schema == field.name]
            # Reading statistics of another type than the column's would end the process.
            typed = all(chunk.is_stats_set and chunk.physical_type == stored[field.name] for chunk in chunks)
            whole = not field.nullable or (typed and not any(chunk.statistics.null_count != 0 for chunk in chunks))
            if whole and sum(chunk.total_compressed_size for chunk in chunks) >= 1 << 20:
                large.add(field.name)
    # One column has to be read, for the number of rows.
    return frozenset(large) if len(large) < len(names) else frozenset()


def column_chunks(file: Any) -> Iterator[Any]:
    """Every column chunk of a file, group by group."""
    for group in range(file.num_row_groups):
        yield from group_chunks(file.metadata.row_group(group))


def group_chunks(row_group: Any) -> Iterator[Any]:
    """The column chunks of a row group."""
    return (row_group.column(number) for number in range(row_group.num_columns))


def parquet_writer(out: BinaryIO, schema: Any, **options: Any) -> Any:
    """A ParquetWriter that leaves its file alone when it is dropped unfinished: the file may be closed by then."""

    class UnclosedWriter(pa.parquet.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
        def __del__(self) -> None:
            pass

    return UnclosedWriter(out, schema, **options)


def read_batches(file: Any, group: int, *, threads: bool = True) -> Iterator[Any]:
    """A row group in batches of about 32 MiB; Damage if it cannot be read.

    Batches of a remote file are smaller, as its first rows are wanted soon. Columns that `open_parquet` leaves out
    have empty values.
    """
    row_group, left_out = file.metadata.row_group(group), getattr(file, "left_out", frozenset[str]())
    remote = hasattr(file, "remote_source")
    if remote:
        ranges = []
        for chunk in group_chunks(row_group):
            if chunk.path_in_schema in left_out:
                continue
            first = chunk.data_page_offset
            if chunk.has_dictionary_page:
                first = min(first, chunk.dictionary_page_offset)
            ranges.append((first, first + chunk.total_compressed_size))
        joined: list[tuple[int, int]] = []  # neighbouring small column chunks are one range
        for start, stop in sorted(ranges):
            if joined and start - joined[-1][1] <= 1 << 16 and stop - joined[-1][0] <= 4 << 20:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        file.remote_source.expect_ranges(joined)
    each = decoded_size(row_group) // max(row_group.num_rows, 1) + 1
    rows = int(min(max((1 << 20 if remote else BATCH_BYTES) // each, 1), BATCH_ROWS))
    columns = [name for name in file.schema_arrow.names if name not in left_out] if left_out else None
    batches = file.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=threads)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Damage(f"row group {group} of the Parquet file cannot be read ({first_line(error)})") from None
        if batch is None:
            return
        for number, field in enumerate(file.schema_arrow if left_out else ()):
            if field.name in left_out:
                empty = pa.array([b""] * batch.num_rows, pa.binary())
                batch = batch.add_column(number, pa.field(field.name, pa.binary(), field.nullable), empty)
        yield batch


def decoded_size(row_group: Any) -> int:
    """About the bytes of a row group in memory: an id takes eight, and often far fewer in the file."""
    chunks = group_chunks(row_group)
    return sum(max(int(chunk.total_uncompressed_size), 8 * int(chunk.num_values)) for chunk in chunks)


def row_group_blocks(file: Any, groups: range, first: int = 0, *, threads: bool = True) -> Iterator[Block]:
    """Row groups as blocks, the first from row `first` of the file on; they are read when they are wanted."""
    total = max(file.metadata.num_rows, 1)
    for group in groups:
        row_group = file.metadata.row_group(group)
        count, stop = row_group.num_rows, first + row_group.num_rows
        sizes = (chunk.total_compressed_size for chunk in group_chunks(row_group))
        contents = map(ArrowRows.of, read_batches(file, group, threads=threads))
        yield Block(first, count, contents, block_seed(count, *sizes), first / total, stop / total)
        first = stop


LARGE_GROUP = 128 << 20
"""Bytes in memory of a row group at most; larger ones are written as several."""
_CHOSEN_ENCODINGS = {"BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
"""Encodings that somebody chose for a column."""
_COMMON_ENCODINGS = {"RLE", "BIT_PACKED", "PLAIN"}
"""Encodings that any column may have: RLE and BIT_PACKED for levels, PLAIN as the fallback."""
_MOST_MICROSECONDS = (2**63 - 1) // 1000
"""Microseconds from 1970 that 64-bit nanoseconds can hold."""
_CODECS = {
    "UNCOMPRESSED": "NONE",
    **{name: name for name in ("SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4")},
    "LZ4_RAW": "LZ4",
}
"""What pyarrow's writer calls the codecs in footers."""
_FALSE_POSITIVES = 0.05
"""The usual rate of false positives of bloom filters, which footers do not say."""
_MOST_NAMES = 3
"""Columns that a message names at most."""
_SCHEMA = b"ARROW:schema"


class ParquetOutput(TableOutput):
    """Writes a Parquet file again with some rows replaced, group by group; large row groups become several."""

    what = "a Parquet file"

    def _batch_writer(self) -> Generator[int, None, None]:
        try:
            file = open_parquet(self._source)
            schema = self._edit.edit_schema(file.schema_arrow)
            options = writer_options(self._source, file, schema, self._edit.added)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            why = f"the footer of the Parquet file cannot be read ({first_line(error)})"
            raise unwritable_error(self._source, why) from error
        written: list[Any] = []
        writer = parquet_writer(self._out, schema, metadata_collector=written, **options)
        claims, first = options["sorting_columns"] or (), 0
        try:
            for group in range(file.num_row_groups):
                row_group = file.metadata.row_group(group)
                parts = max(-(-decoded_size(row_group) // LARGE_GROUP), 1)
                size = max(-(-row_group.num_rows // parts), 1)
                end = first + row_group.num_rows
                stops = [min(start + size, end) for start in range(first, max(end, first + 1), size)]
                tables = self._read_tables(file, group, size)
                for stop in stops:
                    yield stop
                    self._write_group(writer, file, group, next(tables), first, claims)
                    first = stop
            metadata = {name: text for name, text in (file.metadata.metadata or {}).items() if name != _SCHEMA}
            if hasattr(writer, "add_key_value_metadata"):  # not in the oldest supported pyarrow
                writer.add_key_value_metadata(metadata)
            writer.close()
            self.lost_features = list(lost_features(file.metadata, written[0]))
        finally:
            file.close(force=True)

    def _write_group(
        self, writer: Any, file: Any, group: int, table: Any, first: int, claims: Sequence[Any]
    ) -> None:
        """Write a row group with its changes, unless all of its rows are dropped.

        StorageError if a change breaks the sort order that the footer claims, on which readers rely.
        """
        result = self._edit.edit_table(table, first, self._rows)
        paths = [(claim, file.schema.column(claim.column_index).path) for claim in claims]
        claimed = list(takewhile(lambda pair: pair[1] in result.column_names, paths))
        changed = {change.path[0] for copies in self._rows.values() for copy in copies for change in copy}
        names = [name for _, name in claimed]
        if not changed.isdisjoint(names):
            columns: dict[str, Any] = {}
            keys = []
            for claim, name in claimed:
                # A key of their own for nulls, which versions of pyarrow place differently.
                columns |= {f"null {name}": result[name].is_null().cast("int8"), name: result[name]}
                keys.append((f"null {name}", "descending" if claim.nulls_first else "ascending"))
                keys.append((name, "descending" if claim.descending else "ascending"))
            order = pa.compute.sort_indices(pa.table(columns), sort_keys=keys)
            if order.to_pylist() != list(range(len(result))):
                raise StorageError(
                    f"{self._source}: row group {group}: the footer says that rows are sorted by "
                    f"{', '.join(names)}, and after the repair they would not be.\n"
                    "A reader that trusts the footer would miss rows. Write the log without sorting columns."
                )
        if not len(result) and len(table):
            return
        try:
            for place, field in enumerate(result.schema):
                chunks = result.column(place).chunks
                # pyarrow cannot write views in objects that are slices.
                if "_view" in str(field.type) and any(chunk.offset for chunk in chunks):
                    copies = [pa.concat_arrays([chunk.slice(0, 0), chunk]) for chunk in chunks]
                    result = result.set_column(place, field, pa.chunked_array(copies, type=field.type))
            writer.write_table(result, row_group_size=max(len(result), 1))
        except pa.ArrowNotImplementedError as error:
            raise StorageError(
                f"{self._source}: row group {group} cannot be written again ({error}).\n"
                "Write the log as JSONL, or with columns of plainer types."
            ) from error

    def _read_tables(self, file: Any, group: int, size: int) -> Iterator[Any]:
        """A row group in tables of `size` rows; StorageError if it cannot be read, or not be written."""
        count = file.metadata.row_group(group).num_rows
        try:
            waiting = file.read_row_group(group) if count <= size else file.schema_arrow.empty_table()
            batches = read_batches(file, group) if count > size else iter(())
            columns = map(file.schema.column, range(len(file.schema)))
            if paths := [column.path for column in columns if column.physical_type == "INT96"]:
                with (
                    self._source.open("rb") as source,
                    pa.parquet.ParquetFile(source, coerce_int96_timestamp_unit="us") as coarse,
                ):
                    parts = coarse.iter_batches(row_groups=[group], columns=paths)
                    if any(_has_distant_times(column) for part in parts for column in part.columns):
                        raise StorageError(
                            f"{self._source}: row group {group} holds times (INT96) outside the years 1677 to "
                            "2262.\nThey would be written as other times, so the repaired file is not written. "
                            "Write the log with times as INT64, or as JSONL."
                        )
            for start in range(0, max(count, 1), size):
                while len(waiting) < min(size, count - start):
                    waiting = pa.concat_tables([waiting, pa.Table.from_batches([next(batches)])])
                yield waiting.slice(0, size).unify_dictionaries() if count > size else waiting
                waiting = waiting.slice(size)
        except Damage as damage:
            raise unwritable_error(self._source, str(damage)) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            why = f"row group {group} of the Parquet file cannot be read ({first_line(error)})"
            raise unwritable_error(self._source, why) from error


def writer_options(path: Path, file: Any, schema: Any, added: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `pyarrow.parquet.ParquetWriter` that reproduce the storage format of a file.

    Footer and pages do not show compression levels and page sizes. `schema` is what will be written: that of the
    file with the `added` columns. ValueError or IndexError for a damaged footer.
    """
    refuse_damaged_footer(file.metadata, path.stat().st_size, codecs=True)
    chunks = list(column_chunks(file))
    columns = [file.schema.column(place) for place in range(len(file.schema))]
    paths, stored = [column.path for column in columns], [str(column.physical_type) for column in columns]
    for number, chunk in enumerate(chunks):  # pyarrow reads columns by position
        if (own := chunk.path_in_schema) != (name := paths[number % len(paths)]):
            group = number // len(paths)
            raise ValueError(f"row group {group}: {own!r} is at the place of the column {name!r}")
    logical = [json.loads(column.logical_type.to_json()) for column in columns]
    kinds = [str(kind.get("Type")) for kind in logical]
    orders = {tuple(file.metadata.row_group(group).sorting_columns) for group in range(file.num_row_groups)}
    version_2, checksum = _parse_page_header(path, chunks)
    options: dict[str, Any] = {
        # The footer does not tell 2.4 from 2.6, which are alike for what was read.
        "version": "1.0" if file.metadata.format_version == "1.0" else "2.6",
        "data_page_version": "2.0" if version_2 else "1.0",
        "write_page_checksum": checksum,
        "write_page_index": any(chunk.has_column_index or chunk.has_offset_index for chunk in chunks),
        "store_schema": b"ARROW:schema" in (file.metadata.metadata or {}),
        # If not, entries of lists keep the names that they have in the schema.
        "use_compliant_nested_type": {name for path in paths for name in re.findall(r"\.list\.([^.]+)", path)}
        == {"element"},
        # A file with both INT96 and INT64 times gets only INT64, of the same Arrow type.
        "use_deprecated_int96_timestamps": "INT96" in stored and "Timestamp" not in kinds,
        "sorting_columns": next(iter(orders)) or None if len(orders) == 1 else None,
    }
    # The oldest supported pyarrow lacks both options, and writes every time of day as UTC.
    whole = ("Decimal", "INT") in ((kind, physical[:3]) for kind, physical in zip(kinds, stored, strict=True))
    in_utc = any(kind.get("isAdjustedToUTC") for kind in logical if kind.get("Type") == "Time")
    options |= {"store_decimal_as_integer": whole, "write_time_adjusted_to_utc": in_utc}
    if chunks:
        with io.BytesIO() as out:  # the writer may rename the entries of lists
            pa.parquet.ParquetWriter(out, schema, **_supported_options(options)).close()
            written = pa.parquet.read_metadata(out).schema
        places = {path: written.column(place).path for place, path in enumerate(paths)}
        options |= _column_options(chunks, places, added)
    return _supported_options(options)


def _supported_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that this version of pyarrow has."""
    names = signature(pa.parquet.ParquetWriter.__init__).parameters
    return {name: value for name, value in options.items() if name in names}


def _column_options(chunks: list[Any], places: dict[str, str], added: tuple[str, ...]) -> dict[str, Any]:
    """The writer's arguments for compression, encoding, statistics and bloom filters of each column.

    `places` maps the path of each column to its path in the file that will be written.
    """
    sizes: dict[str, Counter[str]] = {}
    encodings: dict[str, set[str]] = {}
    measured: set[str] = set()
    filters: dict[str, dict[str, float]] = {}
    truths: set[str] = set()
    for chunk in chunks:
        path = places[chunk.path_in_schema]
        codec = _CODECS.get(chunk.compression)
        sizes.setdefault(path, Counter())[codec or "NONE"] += chunk.total_uncompressed_size if codec else -1
        encodings.setdefault(path, set()).update(chunk.encodings if chunk.num_values else ())
        if chunk.is_stats_set:
            measured.add(path)
        if chunk.physical_type == "BOOLEAN" and chunk.num_values:
            truths.add(path)
        if getattr(chunk, "bloom_filter_length", None):
            # A filter of this size is made for about so many distinct values.
            values = int(-chunk.bloom_filter_length * math.log(1 - _FALSE_POSITIVES ** (1 / 8)))
            filters[path] = {"ndv": max(values, 1), "fpp": _FALSE_POSITIVES}
    codecs = {path: of_path.most_common(1)[0][0] for path, of_path in sizes.items()}
    usual = Counter(codecs.values()).most_common(1)[0][0]
    dictionary = [path for path, names in encodings.items() if any("DICTIONARY" in name for name in names)]
    others = {
        path: min(names & _CHOSEN_ENCODINGS)
        for path, names in encodings.items()
        if path not in dictionary and names & _CHOSEN_ENCODINGS
    }
    others |= {path: "PLAIN" if "PLAIN" in encodings[path] else "RLE" for path in truths}
    return {
        "compression": codecs | {name: codecs.get(name, usual) for name in added},
        "use_dictionary": [*dictionary, *(name for name in added if name not in codecs)] if dictionary else False,
        "column_encoding": others or None,
        "write_statistics": [*measured, *added] if len(measured) < len(codecs) and measured else bool(measured),
        "bloom_filter_options": filters or None,
    }


def _has_distant_times(array: Any) -> bool:
    """Whether an Arrow array of times in microseconds has some that Arrow reads as other times in nanoseconds."""
    if pa.types.is_timestamp(array.type):
        return bool((abs(array.cast("int64").drop_null().to_numpy()) > _MOST_MICROSECONDS).any())
    if pa.types.is_map(array.type):
        return _has_distant_times(array.keys) or _has_distant_times(array.items)
    if pa.types.is_struct(array.type):
        return any(map(_has_distant_times, array.flatten()))
    return pa.types.is_nested(array.type) and _has_distant_times(array.flatten())


def _parse_page_header(path: Path, chunks: list[Any]) -> tuple[bool, bool]:
    """Whether data pages have version 2, and whether they have checksums, as the first page of a file shows.

    Its header, in Thrift's compact protocol, has the page type (3: version 2), two sizes, and maybe a checksum. A
    byte precedes each: the step from the last field number (high half) and the type (low half).
    """
    first = next((chunk for chunk in chunks if chunk.num_values), None)
    if first is None:
        return False, False
    with path.open("rb") as raw:
        raw.seek(first.data_page_offset)
        header = raw.read(64)
    values: list[int] = []
    data = iter(header)
    while len(values) < 4 and next(data, None) == 0x15:
        value = shift = 0
        for byte in data:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        values.append(value >> 1)
    return values[:1] == [3], len(values) == 4


def lost_features(old: Any, new: Any) -> Iterator[str]:
    """The features that the footer `old` shows and `new` does not, in words; `new` may have more columns."""
    lost: dict[str, list[str]] = {}
    for place in range(old.num_columns):
        name = old.schema.column(place).path
        if str(old.schema.column(place)) != str(new.schema.column(place)):
            lost.setdefault("type and name", []).append(name)
        if new.num_row_groups:
            form = _storage_features(new, place)
            for what, values in _storage_features(old, place).items():
                if values - form[what]:
                    lost.setdefault(what, []).append(name)
    for what, names in lost.items():
        more = [f"{len(names) - _MOST_NAMES:,} more"] if len(names) > _MOST_NAMES else []
        yield f"{what} of {listed([*names[:_MOST_NAMES], *more])}"
    metadata = {key: value for key, value in (old.metadata or {}).items() if key != _SCHEMA}
    gone = [key for key, value in metadata.items() if new.metadata.get(key) != value]
    if gone:
        yield f"metadata {listed([repr(key.decode('utf-8', 'replace')) for key in gone])}"


def _storage_features(metadata: Any, place: int) -> dict[str, set[Any]]:
    """How a column is stored, over all row groups with values."""
    groups = (metadata.row_group(group).column(place) for group in range(metadata.num_row_groups))
    chunks = [chunk for chunk in groups if chunk.num_values]
    encodings = {name for chunk in chunks for name in chunk.encodings}
    return {
        "codec": {chunk.compression for chunk in chunks},
        "encoding": {"DICTIONARY" if "DICTIONARY" in name else name for name in encodings} - _COMMON_ENCODINGS,
        "statistics": {True for chunk in chunks if chunk.is_stats_set},
        "page index": {True for chunk in chunks if chunk.has_column_index or chunk.has_offset_index},
        "bloom filter": {True for chunk in chunks if getattr(chunk, "bloom_filter_length", None)},
    }
