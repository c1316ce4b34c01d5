"""How a Parquet file was written: the options for writing another one like it."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from tito_audit.storage._parquet_checks import check_forms

_SPECIAL = {"BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
"""Encodings chosen for a column; PLAIN is the fallback of any, RLE the encoding of levels."""
_PAGE_V2 = 3
_MOST_MICROSECONDS = (2**63 - 1) // 1000
"""Distance from 1970 that a 64-bit count of nanoseconds can hold."""
_HEADER_BYTES = 64
_LIST = re.compile(r"\.list\.([^.]+)")
_CODECS = {
    "UNCOMPRESSED": "NONE",
    **{name: name for name in ("SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4")},
    "LZ4_RAW": "LZ4",
}
"""Codecs as pyarrow reads and writes them."""
_FALSE_POSITIVES = 0.05
"""What share of false positives bloom filters are made for, if nothing says otherwise."""


def writer_options(path: Path, file: Any, schema: Any, added: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `pyarrow.parquet.ParquetWriter` that reproduce what the footer and the first page show.

    They do not show compression levels and page sizes, which are left to the writer. `schema` is what will be
    written: the file's, with `added` columns. ValueError or IndexError for a damaged footer.
    """
    check_forms(path, file.schema)
    chunks = [chunk for group in _groups(file) for chunk in _chunks(group)]
    version_2, checksum = _page_form(path, chunks)
    options: dict[str, Any] = {
        "version": _format_version(file),
        "data_page_version": "2.0" if version_2 else "1.0",
        "write_page_checksum": checksum,
        "write_page_index": any(chunk.has_column_index or chunk.has_offset_index for chunk in chunks),
        "store_schema": b"ARROW:schema" in (file.metadata.metadata or {}),
        # Else list entries keep the names in the schema, which was read from the file.
        "use_compliant_nested_type": _names_of_entries(file) == {"element"},
        "use_deprecated_int96_timestamps": _stores_int96(file),
        "sorting_columns": _sorting_columns(file),
    }
    kinds = [_logical(file.schema.column(i)) for i in range(len(file.schema))]
    # The oldest supported pyarrow has neither option and writes every time of day as UTC.
    whole = any(kind == "Decimal" and physical[:3] == "INT" for kind, physical, _ in kinds)
    in_utc = any(kind == "Time" and about.get("isAdjustedToUTC") for kind, _, about in kinds)
    options |= {"store_decimal_as_integer": whole, "write_time_adjusted_to_utc": in_utc}
    if chunks:
        places = _paths_as_written(schema, _known(options), file)
        options |= _column_options(chunks, places, added)
    return _known(options)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this version of pyarrow has."""
    from pyarrow.parquet import ParquetWriter

    names = signature(ParquetWriter.__init__).parameters
    return {name: value for name, value in options.items() if name in names}


def _names_of_entries(file: Any) -> set[str]:
    """What the file calls the entries of its lists."""
    paths = (file.schema.column(i).path for i in range(len(file.schema)))
    return {name for path in paths for name in _LIST.findall(path)}


def _paths_as_written(schema: Any, options: dict[str, Any], file: Any) -> dict[str, str]:
    """By path of a column in the file: its path once the schema is written, where entries may have other names."""
    from pyarrow import parquet

    with io.BytesIO() as out:
        parquet.ParquetWriter(out, schema, **options).close()
        written = parquet.read_metadata(out).schema
    return {file.schema.column(i).path: written.column(i).path for i in range(len(file.schema))}


def _groups(file: Any) -> Iterator[Any]:
    return (file.metadata.row_group(i) for i in range(file.num_row_groups))


def _chunks(group: Any) -> Iterator[Any]:
    return (group.column(i) for i in range(group.num_columns))


def _column_options(chunks: list[Any], places: dict[str, str], added: tuple[str, ...]) -> dict[str, Any]:
    """Compression, encoding, statistics and bloom filter of each column, over all row groups.

    `places` has the path of each column in the file to write.
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
            filters[path] = {"ndv": _distinct(chunk.bloom_filter_length), "fpp": _FALSE_POSITIVES}
    codecs = {path: of_path.most_common(1)[0][0] for path, of_path in sizes.items()}
    usual = Counter(codecs.values()).most_common(1)[0][0]
    dictionary = [path for path, names in encodings.items() if any("DICTIONARY" in name for name in names)]
    others = {
        path: min(names & _SPECIAL)
        for path, names in encodings.items()
        if path not in dictionary and names & _SPECIAL
    }
    others |= {path: "PLAIN" if "PLAIN" in encodings[path] else "RLE" for path in truths}
    return {
        "compression": codecs | {name: codecs.get(name, usual) for name in added},
        "use_dictionary": [*dictionary, *(name for name in added if name not in codecs)] if dictionary else False,
        "column_encoding": others or None,
        "write_statistics": [*measured, *added] if len(measured) < len(codecs) and measured else bool(measured),
        "bloom_filter_options": filters or None,
    }


def _distinct(size: int) -> int:
    """For how many distinct values a writer makes a bloom filter of about so many bytes."""
    return max(int(-8 * size * math.log(1 - _FALSE_POSITIVES ** (1 / 8)) / 8), 1)


def _format_version(file: Any) -> str:
    """The format version; the footer does not distinguish 2.4 from 2.6, which are alike for what was read."""
    return "1.0" if file.metadata.format_version == "1.0" else "2.6"


def _stores_int96(file: Any) -> bool:
    """Whether every time is INT96; a file that mixes both is written with INT64, with the same Arrow type."""
    kinds = [_logical(file.schema.column(i)) for i in range(len(file.schema))]
    old = any(physical == "INT96" for _, physical, _ in kinds)
    return old and not any(kind == "Timestamp" for kind, _, _ in kinds)


def has_lost_times(path: Path, file: Any, group: int) -> bool:
    """Whether a row group holds INT96 times outside the years 1677 to 2262, which Arrow reads as other times."""
    from pyarrow import parquet

    paths = [
        file.schema.column(i).path
        for i in range(len(file.schema))
        if _logical(file.schema.column(i))[1] == "INT96"
    ]
    if not paths:
        return False
    with parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as coarse:
        table = coarse.read_row_group(group, columns=paths)
    chunks = (chunk for column in table.columns for chunk in column.chunks)
    counts = [times.cast("int64").drop_null().to_numpy() for chunk in chunks for times in _times(chunk)]
    return any((abs(count) > _MOST_MICROSECONDS).any() for count in counts)


def _times(array: Any) -> Iterator[Any]:
    """The timestamps in an Arrow array, at any depth."""
    import pyarrow as pa

    if pa.types.is_timestamp(array.type):
        yield array
    elif pa.types.is_map(array.type):
        yield from _times(array.keys)
        yield from _times(array.items)
    elif pa.types.is_struct(array.type):
        for part in array.flatten():
            yield from _times(part)
    elif pa.types.is_nested(array.type):
        yield from _times(array.flatten())


def _logical(column: Any) -> tuple[str, str, dict[str, Any]]:
    """Logical type, physical type and details of the logical type of a column."""
    about = json.loads(column.logical_type.to_json())
    return str(about.get("Type")), str(column.physical_type), about


def _sorting_columns(file: Any) -> Any:
    """The sort order that every row group claims; None if they claim none or differ."""
    claims = {tuple(group.sorting_columns) for group in _groups(file)}
    return next(iter(claims)) or None if len(claims) == 1 else None


def _page_form(path: Path, chunks: list[Any]) -> tuple[bool, bool]:
    """Whether data pages are of version 2, and whether pages have a checksum, according to the first page.

    The header is in Thrift's compact protocol: page type, two sizes, then the checksum if there is one. A byte
    precedes each: the step from the last field number (high half) and the type (low half).
    """
    first = next((chunk for chunk in chunks if chunk.num_values), None)
    if first is None:
        return False, False
    with path.open("rb") as raw:
        raw.seek(first.data_page_offset)
        header = raw.read(_HEADER_BYTES)
    values: list[int] = []
    at = 0
    while len(values) < 4 and header[at : at + 1] == b"\x15":
        value, at = _varint(header, at + 1)
        values.append(value >> 1)
    return values[:1] == [_PAGE_V2], len(values) == 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            break
    return value, at
