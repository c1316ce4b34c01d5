"""Rows as Parquet and Arrow files in odd forms, with passengers of every type."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.torture.thrift import Typed, read_typed, written

_MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("ids", pa.list_(pa.int32())),
        pa.field("at", pa.timestamp("ns", "UTC")),
        pa.field("extra", pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])),
    ]
)
PASSENGERS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a", None, "ü", ""]),
    "large_text": (pa.large_string(), ["a", None, "b", "c"]),
    "text_view": (pa.string_view(), ["a", None, "b" * 40, "c"]),
    "binary_view": (pa.binary_view(), [b"a", None, b"b" * 40, b"\xff"]),
    "large_bytes": (pa.large_binary(), [b"a", None, b"b" * 40, b"\xff"]),
    "word": (pa.dictionary(pa.int32(), pa.string()), ["x", None, "y", "x"]),
    "short_word": (pa.dictionary(pa.int8(), pa.string()), ["x", None, "y", "x"]),
    "ordered_word": (pa.dictionary(pa.int16(), pa.string(), ordered=True), ["x", None, "y", "x"]),
    "flag": (pa.bool_(), [True, None, False, True]),
    "tiny": (pa.int8(), [1, None, -128, 127]),
    "small": (pa.uint8(), [255, None, 0, 1]),
    "middle": (pa.uint16(), [65535, None, 0, 1]),
    "unsigned": (pa.uint32(), [2**32 - 1, None, 0, 1]),
    "big": (pa.uint64(), [2**64 - 1, None, 0, 1]),
    "whole": (pa.int64(), [2**63 - 1, None, -(2**63), 9007199254740993]),
    "half": (pa.float16(), [np.float16(1.5), None, np.float16("nan"), np.float16(0)]),
    "single": (pa.float32(), [0.1, None, math.nan, -math.inf]),
    "double": (pa.float64(), [-0.0, None, math.nan, 5e-324]),
    "money": (pa.decimal128(12, 3), [Decimal("1.250"), None, Decimal("-3"), Decimal(0)]),
    "much_money": (pa.decimal256(50, 3), [Decimal("1.250"), None, Decimal(10) ** 40, Decimal(0)]),
    "little_money": (pa.decimal128(5, 2), [Decimal("1.25"), None, Decimal("-3"), Decimal(0)]),
    "bytes": (pa.binary(), [b"\xff\0", None, b"", b"a"]),
    "digest": (pa.binary(2), [b"ab", None, b"cd", b"\xff\0"]),
    "nothing": (pa.null(), [None] * 4),
    "day": (pa.date32(), [1, None, -5, 20000]),
    "long_day": (pa.date64(), [86_400_000, None, 0, -86_400_000]),
    "second_of_day": (pa.time32("s"), [1, None, 86_399, 0]),
    "clock": (pa.time64("ns"), [1, None, 86_399_999_999_999, 0]),
    "seconds": (pa.timestamp("s"), [1, None, 10**9, -1]),
    "millis": (pa.timestamp("ms", "+05:30"), [1, None, 10**12, -1]),
    "moment": (pa.timestamp("ns"), [1, None, 10**18 + 7, -1]),
    "zoned": (pa.timestamp("us", "Europe/Berlin"), [1, None, 10**15, -1]),
    "odd_zone": (pa.timestamp("us", "Not/AZone"), [1, None, 10**15, -1]),
    "far": (pa.timestamp("us"), [2**62, None, -(2**62), 0]),
    "lasted": (pa.duration("ns"), [1, None, 2, 3]),
    "passed_ids": (pa.list_(pa.int64()), [[1, 2, 3], None, [], [4, None]]),
    "large_ids": (pa.large_list(pa.int32()), [[1, 2, 3], None, [], [4, None]]),
    "view_ids": (pa.list_view(pa.int32()), [[1, 2, 3], None, [], [4, None]]),
    "pair": (pa.list_(pa.float32(), 2), [[1, 2], None, [3, None], [math.nan, 4]]),
    "values": (pa.list_(pa.float64()), [[math.nan, 1.0], None, [], [0.5, math.nan, -0.0]]),
    "words": (pa.list_(pa.dictionary(pa.int32(), pa.string())), [["x", "y"], None, [], ["x", None]]),
    "grid": (pa.list_(pa.list_(pa.int32())), [[[1], [], None], None, [], [[2, 3]]]),
    "counts": (pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", None)], None, [], [("a", 1), ("a", 2)]]),
    "maps": (pa.list_(pa.map_(pa.string(), pa.list_(pa.int8()))), [[[("a", [1])]], None, [], [None, []]]),
    "times": (pa.list_(pa.timestamp("ns")), [[1, 2], None, [], [None, 3]]),
    "spoken": (
        pa.list_(_MESSAGE),
        [
            [{"role": "user", "ids": None, "at": 1, "extra": None}],
            None,
            [],
            [{"role": "bot", "ids": [], "at": 7, "extra": {"a": None, "b": ["x", None]}}],
        ],
    ),
    "sure": (pa.int32(), [1, 2, 3, 4]),
    "sure_text": (pa.string(), ["a", "b", "", "c"]),
}
EXTENSIONS = {
    "uuid": (lambda: pa.uuid(), pa.binary(16), [b"0123456789abcdef", None, b"\0" * 16, b"\xff" * 16]),
    "opaque": (lambda: pa.opaque(pa.int32(), "kind", "vendor"), pa.int32(), [1, None, 2, 3]),
    "truth": (lambda: pa.bool8(), pa.int8(), [1, None, 0, 1]),
    "json": (lambda: pa.json_(pa.string()), pa.string(), ['{"a":  1}', None, "[]", "1.0"]),
    "tensor": (
        lambda: pa.fixed_shape_tensor(pa.float32(), [2]),
        pa.list_(pa.float32(), 2),
        [[1, 2], None, [3, 4], [5, 6]],
    ),
}
_CODECS = ("NONE", "SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4")
_ENCODED = {
    "passed_ids.list.element": ("DELTA_BINARY_PACKED", "PLAIN"),
    "text": ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"),
    "double": ("BYTE_STREAM_SPLIT", "PLAIN"),
    "whole": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "flag": ("RLE", "PLAIN"),
}


def table_of(rows: Sequence[Any], rng: random.Random) -> pa.Table | None:
    """The rows as a table with passengers; None where they do not fit one type a column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        columns = [pa.array([row.get(name) for row in rows]) for name in names]
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None
    fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
    for place, (field, column) in enumerate(zip(fields, columns, strict=True)):
        other = _other_type(field.type, rng)
        try:
            columns[place] = column.cast(other)
            fields[place] = pa.field(field.name, other)
        except (pa.ArrowException, NotImplementedError):
            pass
    for name in rng.sample(sorted(PASSENGERS), rng.randrange(12)):
        kind, values = PASSENGERS[name]
        if name in names:
            continue
        start = rng.randrange(4)
        cells = [values[(start + number) % 4] for number in range(len(rows))]
        where = rng.randrange(len(fields) + 1)
        about = {"note": name} if rng.random() < 0.2 else None
        fields.insert(where, pa.field(name, kind, nullable=not name.startswith("sure"), metadata=about))
        columns.insert(where, pa.array(cells, kind))
    for name in rng.sample(sorted(EXTENSIONS), rng.choice((0, 0, 1, 2))):
        make, storage, values = EXTENSIONS[name]
        try:
            kind = make()
        except AttributeError:  # an older pyarrow
            continue
        cells = pa.array([values[number % 4] for number in range(len(rows))], storage)
        fields.append(pa.field(name, kind))
        columns.append(pa.ExtensionArray.from_storage(kind, cells))
    metadata = rng.choice(
        (None, {"huggingface": json.dumps({"info": {}}), "own": "x"}, {b"\xff": b"\0\xfe", "": ""})
    )
    try:
        table = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=metadata))
        table.validate(full=True)
    except pa.ArrowException:  # pyarrow does not cast every list of objects without a fault
        return None
    return table


def _other_type(kind: Any, rng: random.Random) -> Any:
    """The same values in another type that frameworks write."""
    if pa.types.is_list(kind):
        inner = _other_type(kind.value_type, rng)
        name = rng.choice(("item", "element", "array"))
        maker = rng.choice((pa.list_, pa.list_, pa.large_list))
        return maker(pa.field(name, inner, nullable=True))
    if pa.types.is_int64(kind):
        return rng.choice((kind, kind, pa.int32(), pa.uint32()))
    if pa.types.is_float64(kind):
        return rng.choice((kind, kind, pa.float32()))
    if pa.types.is_string(kind):
        return rng.choice((kind, kind, pa.large_string(), pa.dictionary(pa.int32(), pa.string())))
    return kind


def parquet_log(table: pa.Table, path: Path, rng: random.Random) -> bool:
    """Write the table as Parquet; False where pyarrow refuses these options."""
    leaves = [] if rng.random() < 0.5 else _leaves(table)
    codec: Any = rng.choice(_CODECS)
    if leaves:
        codec = {leaf: rng.choice(_CODECS) for leaf in leaves}
    dictionary: Any = rng.choice((True, False))
    if leaves and rng.random() < 0.7:
        dictionary = [leaf for leaf in leaves if rng.random() < 0.5]
    encoded = {}
    if dictionary is False or isinstance(dictionary, list):
        encoded = {
            leaf: rng.choice(kinds)
            for leaf, kinds in _ENCODED.items()
            if leaf in (leaves or _leaves(table)) and not (isinstance(dictionary, list) and leaf in dictionary)
        }
    statistics: Any = rng.choice((True, True, False))
    if leaves and rng.random() < 0.5:
        statistics = [leaf for leaf in leaves if rng.random() < 0.5]
    options: dict[str, Any] = {
        "compression": codec,
        "use_dictionary": dictionary,
        "column_encoding": encoded or None,
        "write_statistics": statistics,
        "version": rng.choice(("1.0", "2.4", "2.6", "2.6")),
        "data_page_version": rng.choice(("1.0", "2.0")),
        "write_page_index": rng.random() < 0.3,
        "write_page_checksum": rng.random() < 0.3,
        "store_schema": rng.random() < 0.8,
        "use_compliant_nested_type": rng.random() < 0.5,
    }
    if rng.random() < 0.2 and leaves:
        options["bloom_filter_options"] = {rng.choice(leaves): True}
    if rng.random() < 0.1:
        options["use_deprecated_int96_timestamps"] = True
    if rng.random() < 0.1 and len(table) > 1:
        half = rng.randrange(1, len(table))
        try:
            return joined_parquet(
                path, [table.slice(0, half), table.slice(half)], [rng.choice(_CODECS) for _ in range(2)]
            )
        except (pa.ArrowException, NotImplementedError, RuntimeError):
            return False
    groups = _groups(len(table), rng)
    for attempt in (options, {name: value for name, value in options.items() if name != "bloom_filter_options"}):
        try:
            with pq.ParquetWriter(path, table.schema, **attempt) as writer:
                at = 0
                for size in groups:
                    writer.write_table(table.slice(at, size), row_group_size=max(size, 1))
                    at += size
                if rng.random() < 0.2:
                    writer.add_key_value_metadata({"after": "all"})
            return True
        except (pa.ArrowException, TypeError, NotImplementedError, OSError, ValueError):
            path.unlink(missing_ok=True)
    return False


def joined_parquet(path: Path, tables: Sequence[pa.Table], codecs: Sequence[str]) -> bool:
    """Write tables of one schema as one file, each with its codec, as tools that merge files byte by byte do."""
    body, groups, rows = b"", [], 0
    for table, codec in zip(tables, codecs, strict=True):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=codec)
        data = sink.getvalue().to_pybytes()
        size = int.from_bytes(data[-8:-4], "little")
        footer, _ = read_typed(data[-8 - size : -8], 0)
        groups += [_moved(group, len(body)) for group in footer[4][1][1]]
        body += data[: -8 - size]
        rows += len(table)
    footer[3], footer[4] = (6, rows), (9, (12, groups))
    end = written(footer)
    path.write_bytes(body + end + len(end).to_bytes(4, "little") + b"PAR1")
    return True


def _moved(group: Typed, by: int) -> Typed:
    """A row group whose bytes are further back in the file; without its index."""
    chunks = []
    for chunk in group[1][1][1]:
        about = {number: value for number, value in chunk[3][1].items() if number not in (14, 15)}
        about |= {number: (6, about[number][1] + by) for number in (9, 10, 11) if number in about}
        rest = {number: value for number, value in chunk.items() if number not in (4, 5, 6, 7)}
        chunks.append({**rest, 2: (6, chunk[2][1] + by if chunk[2][1] else 0), 3: (12, about)})
    rest = {number: value for number, value in group.items() if number != 7}
    moved = {5: (6, group[5][1] + by)} if 5 in group else {}
    return {**rest, 1: (9, (12, chunks)), **moved}


def _leaves(table: pa.Table) -> list[str]:
    try:
        sink = pa.BufferOutputStream()
        pq.write_table(table.slice(0, 0), sink)
        schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    except (pa.ArrowException, NotImplementedError):
        return []
    return [schema.column(i).path for i in range(len(schema))]


def _groups(count: int, rng: random.Random) -> list[int]:
    """Row counts of row groups or batches; some are empty."""
    sizes = []
    while count:
        size = rng.choice((0, 1, 2, 3, count))
        size = min(size, count)
        sizes.append(size)
        count -= size
    return sizes + [0] * rng.choice((0, 0, 1))


def arrow_log(table: pa.Table, path: Path, rng: random.Random) -> bool:
    """Write the table as an Arrow file or stream; False where pyarrow refuses these options."""
    codec = rng.choice((None, None, "lz4", "zstd"))
    old = codec is None and rng.random() < 0.3  # what pyarrow compresses in the older version it cannot read
    options = pa.ipc.IpcWriteOptions(
        compression=codec,
        emit_dictionary_deltas=rng.random() < 0.5,
        unify_dictionaries=path.suffix != ".arrows",
        metadata_version=pa.ipc.MetadataVersion.V4 if old else pa.ipc.MetadataVersion.V5,
    )
    make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    try:
        with path.open("wb") as out, make(out, table.schema, options=options) as writer:
            at = 0
            for size in _groups(len(table), rng):
                part = table.slice(at, size).combine_chunks()
                for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
                    about = {"batch": str(at)} if rng.random() < 0.2 else None
                    writer.write_batch(batch, about)
                at += size
    except (pa.ArrowException, NotImplementedError, ValueError, TypeError):
        path.unlink(missing_ok=True)
        return False
    return True
