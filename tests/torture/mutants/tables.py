"""Parquet, Arrow and Feather files: types, layouts, codecs, footers, damage."""

from __future__ import annotations

import decimal
import io
import json
from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from tests.torture.attack import Mutant
from tests.torture.mutants.bytes_ import damaged
from tests.torture.mutants.structure import Raw, changed_rows
from tests.torture.sources import Source

__all__ = ["MUTATORS", "table_of"]

CODECS = ("NONE", "SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI")
_FAULTS = (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError, KeyError)


def _plain_value(value: Any) -> Any:
    """A value that Arrow may take."""
    if isinstance(value, Raw):
        return value[:100]
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {str(_plain_value(key)): _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def table_of(rows: list[Any]) -> pa.Table:
    """Rows as a table; a column that has no one type holds JSON text."""
    objects = [row if isinstance(row, dict) else {"value": row} for row in map(_plain_value, rows)]
    names = list(dict.fromkeys(name for row in objects for name in row))
    columns = []
    for name in names:
        values = [row.get(name) for row in objects]
        try:
            columns.append(pa.array(values))
        except _FAULTS:
            columns.append(pa.array([json.dumps(cell, default=str) for cell in values]))
    return (
        pa.table(dict(zip(names, columns, strict=True))) if names else pa.table({"nothing": pa.nulls(len(rows))})
    )


def _rows(dice: Random, source: Source) -> tuple[pa.Table, str]:
    if dice.random() < 0.6:
        return table_of(source.rows(dice)), source.name
    rows, names = changed_rows(dice, source)
    return table_of(rows), f"{names} in {source.name}"


def _saved(dice: Random, table: pa.Table, change: str) -> Mutant:
    """The table as a file of any kind that can hold it."""
    for kind in dice.sample(("parquet", "parquet", "parquet", "arrow", "stream", "feather"), 6):
        buffer = io.BytesIO()
        try:
            if kind == "parquet":
                pq.write_table(table, buffer, **_options(dice, table))
                return Mutant("log.parquet", buffer.getvalue(), change)
            if kind == "feather":
                pyarrow.feather.write_feather(
                    table, buffer, compression=dice.choice(("lz4", "zstd", "uncompressed"))
                )
                return Mutant("log.feather", buffer.getvalue(), change)
            opens = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            codec = dice.choice((None, "lz4", "zstd"))
            with opens(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
                out.write_table(table, max_chunksize=dice.choice((1, 2, 1000)))
            return Mutant("log.arrow", buffer.getvalue(), change)
        except _FAULTS:
            continue
    return Mutant("log.parquet", b"PAR1PAR1", "nothing that a file could hold")


def _options(dice: Random, table: pa.Table) -> dict[str, Any]:
    """Any options of a Parquet file."""
    options: dict[str, Any] = {
        "compression": dice.choice(CODECS),
        "row_group_size": dice.choice((1, 1, 2, 100)),
        "use_dictionary": dice.random() < 0.5,
        "version": dice.choice(("1.0", "2.4", "2.6")),
        "data_page_version": dice.choice(("1.0", "2.0")),
        "write_statistics": dice.random() < 0.5,
        "store_schema": dice.random() < 0.7,
        "data_page_size": dice.choice((10, 1000, 2**20)),
        "write_page_index": dice.random() < 0.3,
        "write_page_checksum": dice.random() < 0.3,
    }
    if dice.random() < 0.4:
        options["compression"] = {name: dice.choice(CODECS) for name in table.column_names}
    if dice.random() < 0.1:
        options |= {"use_dictionary": False, "column_encoding": "PLAIN"}
    return options


def _any(dice: Random, source: Source) -> Mutant:
    """Any layout of a table."""
    return _saved(dice, *_rows(dice, source))


def _retyped(kind: pa.DataType, dice: Random) -> pa.DataType:
    """A type that may hold the same values."""
    if pa.types.is_string(kind):
        return dice.choice(
            (
                pa.large_string(),
                pa.string_view(),
                pa.binary(),
                pa.large_binary(),
                pa.binary_view(),
                pa.dictionary(pa.int32(), pa.string()),
                pa.dictionary(pa.int8(), pa.string()),
            )
        )
    if pa.types.is_integer(kind):
        return dice.choice((
            pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(),
            pa.float32(), pa.float64(), pa.decimal128(30, 2), pa.decimal256(60, 5), pa.timestamp("ns"),
            pa.timestamp("s", "UTC"), pa.date32(), pa.time64("us"), pa.duration("ms"), pa.string(), pa.bool_(),
            pa.dictionary(pa.int16(), pa.int64()),
        ))  # fmt: skip
    if pa.types.is_floating(kind):
        return dice.choice(
            (pa.float16(), pa.float32(), pa.decimal128(38, 10), pa.string(), pa.int64(), pa.bool_())
        )
    if pa.types.is_list(kind):
        inner = _retyped(kind.value_type, dice) if dice.random() < 0.6 else kind.value_type
        make = dice.choice(
            (pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda item: pa.list_(item, 3))
        )
        return make(inner)
    if pa.types.is_struct(kind):
        fields = [(part.name, _retyped(part.type, dice) if dice.random() < 0.4 else part.type) for part in kind]
        return pa.struct(fields)
    if pa.types.is_boolean(kind):
        return dice.choice((pa.int8(), pa.uint8(), pa.string(), pa.float32()))
    return dice.choice((pa.null(), pa.string(), pa.int32()))


def _types(dice: Random, source: Source) -> Mutant:
    """Columns of other types that hold the same."""
    table, change = _rows(dice, source)
    for name in dice.sample(table.column_names, min(table.num_columns, dice.choice((1, 2, 5, 20)))):
        at = table.column_names.index(name)
        kind = _retyped(table.schema.field(at).type, dice)
        column = _cast(table.column(at), kind)
        if column is not None:
            table = table.set_column(at, pa.field(name, kind), column)
    return _saved(dice, table, f"{change}, of other types")


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """The column as another type; None where there is no way."""
    for cast in (
        lambda: column.cast(kind, safe=False),
        lambda: pa.chunked_array([pa.array(column.to_pylist(), kind)]),
    ):
        try:
            cells = cast()
            cells.validate(full=True)  # what is wrong in memory would end the process that writes it
            return cells
        except _FAULTS:
            continue
    return None


def _odd_column(dice: Random, size: int) -> tuple[str, pa.Array]:
    """A column that no log has."""
    columns: tuple[Callable[[], pa.Array], ...] = (
        lambda: pa.nulls(size),
        lambda: pa.array([decimal.Decimal("1.50")] * size),
        lambda: pa.array([b"\xff\x00"] * size),
        lambda: pa.array([datetime(2024, 1, 1)] * size),
        lambda: pa.array([[("a", 1), ("a", 2)]] * size, pa.map_(pa.string(), pa.int64())),
        lambda: pa.StructArray.from_arrays([pa.array([1] * size), pa.array([2] * size)], names=["a", "a"]),
        lambda: pa.StructArray.from_arrays([pa.array(["x"] * size)], names=[""]),
        lambda: pa.array([{}] * size, pa.struct([])),
        lambda: pa.array([[[[1]]]] * size),
        lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * size, pa.binary(16))),
        lambda: pa.array([float("nan")] * size, pa.float16()),
        lambda: pa.array([2**63 + 5] * size, pa.uint64()),
        lambda: pa.array(["x" * 70_000] * size, pa.large_string()),
        lambda: pa.array([-(2**40)] * size, pa.duration("s")),
        lambda: pa.array([-(2**62)] * size, pa.timestamp("s")),
        lambda: pa.array([2**60] * size, pa.timestamp("ns", "Europe/Nowhere")),
        lambda: pa.DictionaryArray.from_arrays(pa.array([None] * size, pa.int8()), pa.array(["a"])),
        lambda: pa.array([(1, 2, 3)] * size, pa.month_day_nano_interval()),
    )
    ids = ("odd", "tokens", "prompt_ids", "messages", "", "loss_mask")
    names = (*ids, "tito_audit", "a.b", "\x1b[31m", "\0", "🔥")
    return dice.choice(names), dice.choice(columns)()


def _columns(dice: Random, source: Source) -> Mutant:
    """Columns twice, without a name, of odd types, in another order, or none."""
    table, change = _rows(dice, source)
    for _ in range(dice.choice((1, 1, 2, 3))):
        way, at = dice.randrange(6), dice.randrange(max(1, table.num_columns))
        if way < 3:
            try:
                table = table.append_column(*_odd_column(dice, table.num_rows))
            except _FAULTS:
                continue
        elif way == 3 and table.num_columns:
            table = table.append_column(table.schema.field(at), table.column(at))
        elif way == 4 and table.num_columns:
            _, odd = _odd_column(dice, table.num_rows)
            table = table.set_column(at, table.column_names[at], odd)
        elif table.num_columns:
            table = table.select(dice.sample(range(table.num_columns), dice.randrange(table.num_columns + 1)))
    return _saved(dice, table, f"{change}, with odd columns")


def _layout(dice: Random, source: Source) -> Mutant:
    """Row groups without rows, many row groups, metadata of a schema, slices."""
    table, change = _rows(dice, source)
    metadata = {
        dice.choice((b"huggingface", b"pandas", b"ARROW:schema", b"k")): dice.choice((b"{}", b"\xff", b"x" * 999))
    }
    if dice.random() < 0.6:
        table = table.replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    try:
        with pq.ParquetWriter(buffer, table.schema, compression=dice.choice(CODECS)) as out:
            for _ in range(dice.choice((1, 2, 5))):
                part = table.slice(dice.randrange(table.num_rows + 1), dice.choice((0, 1, 5)))
                out.write_table(part) if part.num_rows else out.write_batch(
                    pa.RecordBatch.from_pylist([], table.schema)
                )
    except _FAULTS:
        return _saved(dice, table, change)
    return Mutant("log.parquet", buffer.getvalue(), f"{change}, in odd row groups")


def _damaged(dice: Random, source: Source) -> Mutant:
    """Damage in pages or in the footer, where statistics, types and offsets are."""
    mutant = _saved(dice, *_rows(dice, source))
    data = mutant.data
    footer = int.from_bytes(data[-8:-4], "little") + 8 if mutant.name == "log.parquet" else len(data) // 2
    cut = max(0, len(data) - min(footer, len(data)))
    where = dice.randrange(4)
    if where == 0:
        data = damaged(dice, data[:cut]) + data[cut:]
    elif where == 1:
        data = data[:cut] + _flipped(dice, data[cut:])
    elif where == 2:
        data = _flipped(dice, data)
    else:
        data = dice.choice(
            (
                data[:-1],
                data[4:],
                data[:-8],
                data[:-4] + b"PARE",
                b"PARE" + data[4:-4] + b"PARE",
                data[:-8] + b"\xff\xff\xff\x7fPAR1",
                data * 2,
                data[: len(data) // 2],
            )
        )
    return Mutant(mutant.name, data, f"{mutant.made}, damaged")


def _flipped(dice: Random, data: bytes) -> bytes:
    """The same number of bytes, a few of them others."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        if changed:
            changed[dice.randrange(len(changed))] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
    return bytes(changed)


MUTATORS = {_any: 3, _types: 7, _columns: 4, _layout: 3, _damaged: 6}
