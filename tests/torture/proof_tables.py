"""What a repaired Parquet or Arrow file lost: form, schema and values, read with pyarrow and from the footer."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.torture.proof_named import Change, Named
from tests.torture.thrift import Struct, read_struct

_OURS = "tito_audit"
_CODECS = ("NONE", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
_ENCODINGS = {
    0: "PLAIN",
    2: "DICTIONARY",
    5: "DELTA_BINARY",
    6: "DELTA_LENGTH",
    7: "DELTA_BYTES",
    8: "DICTIONARY",
    9: "SPLIT",
}
_LEVELS = (3, 4)
"""RLE and BIT_PACKED: the encodings of levels, which every column has; of booleans also values."""
_PAGE_V2, _PAGE_DICTIONARY = 3, 2
_SHOWN = 60


# Parquet


def lost_in_parquet(original: Path, repaired: Path, named: Named) -> list[str]:
    """What a Parquet file lost."""
    if original.read_bytes() == repaired.read_bytes():
        return []
    losses = list(_form(original.read_bytes(), repaired.read_bytes(), named))
    old, new = pq.ParquetFile(original), pq.ParquetFile(repaired)
    losses += _schema(old.schema_arrow, new.schema_arrow, named)
    if losses and old.schema_arrow.names != [
        name for name in new.schema_arrow.names if name in old.schema_arrow.names
    ]:
        return losses
    first, place = 0, 0
    for number in range(old.num_row_groups):
        size = old.metadata.row_group(number).num_rows
        into = _into(first, size, named)
        if sum(into) or not size:
            table = old.read_row_group(number)
            if place >= new.num_row_groups or new.metadata.row_group(place).num_rows != sum(into):
                return [*losses, f"row group {number}: its {sum(into)} rows are not one row group"]
            losses += _values(table, new.read_row_group(place), first, into, named)
            place += 1
        first += size
    if place != new.num_row_groups:
        losses.append(f"row groups: {place} became {new.num_row_groups}")
    return losses


def _footer(data: bytes) -> Struct:
    size = struct.unpack("<I", data[-8:-4])[0]
    return read_struct(data[-8 - size : -8], 0)[0]


def _form(before: bytes, after: bytes, named: Named) -> Iterator[str]:
    old, new = _footer(before), _footer(after)
    if old[1] != new[1]:
        yield f"format version: {old[1]} became {new[1]}"
    added = int(
        bool(named.rows)
        and _OURS.encode() not in [field[4] for field in old[2]]
        and new[2][-1][4] == _OURS.encode()
    )
    elements = [dict(field) for field in new[2]]
    elements[0][5] = elements[0].get(5, 0) - added
    if added:
        elements.pop()
    for was, now in zip(old[2], elements, strict=False):
        if was.get(10) is not None and was.get(10) == now.get(10):
            now = {
                **now,
                6: was.get(6),
            }  # the older of two types is written to agree with the newer, which readers follow
            was = {**was, 6: was.get(6)}
        if was != now and not _noticed(named, "type and name"):
            yield f"schema: {was} became {now}"
    if len(old[2]) != len(elements):
        yield f"schema: {len(old[2])} elements became {len(elements)}"
    keys = [{pair[1]: pair.get(2) for pair in footer.get(5, ())} for footer in (old, new)]
    for key, value in keys[0].items():
        if key == b"ARROW:schema":
            if key not in keys[1]:
                yield "metadata: the Arrow schema is gone"
        elif keys[1].get(key) != value:
            yield f"metadata: {key!r} became {keys[1].get(key)!r}"
    for key in set(keys[1]) - set(keys[0]):
        yield f"metadata: {key!r} was not there"
    first = place = 0
    for number, group in enumerate(old[4]):
        rows = sum(_into(first, group[3], named)) or not group[3]
        if rows and place < len(new[4]):
            yield from (
                f"row group {number}: {loss}" for loss in _group(group, new[4][place], before, after, named)
            )
        place += bool(rows)
        first += group[3]


def _group(old: Struct, new: Struct, before: bytes, after: bytes, named: Named) -> Iterator[str]:
    if old.get(4) != new.get(4):
        yield f"sorting columns: {old.get(4)} became {new.get(4)}"
    chunks = {tuple(chunk[3][3]): chunk for chunk in new[1]}
    for chunk in old[1]:
        about = chunk[3]
        other = chunks.get(tuple(about[3]))
        name = b".".join(about[3]).decode("utf-8", "replace")
        if other is None:
            yield f"{name}: the column is gone"
            continue
        pairs = (
            ("codec", _CODECS[about[4]], _CODECS[other[3][4]]),
            ("page index", 6 in chunk or 4 in chunk, 6 in other or 4 in other),
            ("bloom filter", 14 in about, 14 in other[3]),
            ("statistics", 12 in about, 12 in other[3]),
            ("size statistics", 16 in about, 16 in other[3]) if 16 in about else ("", 0, 0),
            ("metadata of the column chunk", about.get(8), other[3].get(8)),
        )
        for what, was, now in pairs:
            if was != now and not _noticed(named, what):
                yield f"{name}: {what}: {was} became {now}"
        if not about[5]:
            continue
        was, now = _pages(before, chunk), _pages(after, other)
        for what in was:
            if was[what] != now[what] and not _noticed(named, what):
                yield f"{name}: {what}: {was[what]} became {now[what]}"


def _noticed(named: Named, what: str) -> bool:
    return what in named.notices


def _pages(data: bytes, chunk: Struct) -> dict[str, Any]:
    """How the pages of a column chunk are written."""
    about = chunk[3]
    at = min(about[field] for field in (9, 11) if about.get(field))
    end, versions, checked, encodings, read = at + about[7], set(), set(), set(), 0
    while at < end and read < about[5]:
        head, at = read_struct(data, at)
        at += head[3]
        if head[1] == _PAGE_DICTIONARY:
            encodings.add("DICTIONARY")
            continue
        body = head.get(5) or head.get(8)
        if body is None:
            break
        read += body[1]
        versions.add(2 if head[1] == _PAGE_V2 else 1)
        checked.add(4 in head)
        kind = body[2] if 5 in head else body[4]
        encodings.add(_ENCODINGS.get(kind, f"encoding {kind}"))
    # Where a dictionary grew too large the writer goes on without it; how large that is, no footer says.
    if "DICTIONARY" in encodings:
        encodings = {"DICTIONARY"}
    return {"page version": versions, "page checksums": checked, "encoding": encodings}


# Arrow


def lost_in_arrow(before: bytes, after: bytes, named: Named) -> list[str]:
    """What an Arrow file or stream lost."""
    if before == after:
        return []
    if (before[:6] == b"ARROW1") != (after[:6] == b"ARROW1"):
        return ["an Arrow file became a stream, or the other way round"]
    losses = []
    was, form = _messages(before), _messages(after)
    if was is not None and form != set() and was != form:
        losses.append(f"form of the record batches: {was} became {form}")
    (schema, batches, more), (other, others, now) = _batches(before), _batches(after)
    losses += _schema(schema, other, named)
    if more != now:
        losses.append(f"metadata of the file: {more} became {now}")
    first = place = 0
    for number, (batch, metadata) in enumerate(batches):
        into = _into(first, batch.num_rows, named)
        if sum(into) or not batch.num_rows:
            if place >= len(others) or others[place][0].num_rows != sum(into):
                return [*losses, f"record batch {number}: its {sum(into)} rows are not one batch"]
            if others[place][1] != metadata:
                losses.append(f"record batch {number}: metadata {metadata} became {others[place][1]}")
            tables = (pa.Table.from_batches([each]) for each in (batch, others[place][0]))
            losses += _values(*tables, first, into, named)
            place += 1
        first += batch.num_rows
    if place != len(others):
        losses.append(f"record batches: {place} became {len(others)}")
    return losses


def _batches(data: bytes) -> tuple[Any, list[Any], Any]:
    if data[:6] == b"ARROW1":
        with pa.ipc.open_file(pa.py_buffer(data)) as file:
            read = getattr(file, "get_batch_with_custom_metadata", None)
            batches = [
                tuple(read(i)) if read else (file.get_batch(i), None) for i in range(file.num_record_batches)
            ]
            return file.schema, batches, getattr(file, "metadata", None)
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        schema, batches = stream.schema, []
        while True:
            try:
                batches.append(tuple(stream.read_next_batch_with_custom_metadata()))
            except StopIteration:
                return schema, batches, None


def _messages(data: bytes) -> set[tuple[int, str]] | None:
    """The metadata version and codec of the record batches; None for a damaged file that only its footer opens."""
    start = 8 if data[:6] == b"ARROW1" else 0
    forms = set()
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data[start:])):
            if message.type == "record batch":
                forms.add((int(message.metadata_version), _codec(bytes(message.metadata))))
    except (OSError, pa.ArrowException):
        if start:
            return None
        raise
    return forms


def _codec(data: bytes) -> str:
    """The codec in the header of a record batch, a flatbuffer."""

    def position(table: int, number: int) -> int:
        fields = table - struct.unpack_from("<i", data, table)[0]
        size = struct.unpack_from("<H", data, fields)[0]
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", data, fields + slot)[0] if slot < size else 0
        return table + offset if offset else 0

    def follow(at: int) -> int:
        return at + struct.unpack_from("<I", data, at)[0] if at else 0

    batch = follow(position(follow(0) or struct.unpack_from("<I", data, 0)[0], 2))
    packed = follow(position(batch, 3)) if batch else 0
    if not packed:
        return "none"
    at = position(packed, 0)
    return ("lz4", "zstd")[data[at] if at else 0]


# Schema and values


def _schema(old: Any, new: Any, named: Named) -> Iterator[str]:
    if named.rows and _OURS not in old.names and new.names[-1:] == [_OURS]:
        new = new.remove(len(new.names) - 1)
    if old.names != new.names:
        yield f"columns: {old.names} became {new.names}"
        return
    if (old.metadata or {}) != (new.metadata or {}):
        yield f"schema metadata: {old.metadata} became {new.metadata}"
    for was, now in zip(old, new, strict=True):
        if not was.equals(now, check_metadata=True):
            yield f"{was.name}: {was} {was.metadata} became {now} {now.metadata}"


def _into(first: int, size: int, named: Named) -> list[int]:
    changes = (named.of(row) for row in range(first, first + size))
    return [1 if change is None else change.into for change in changes]


def _values(old: Any, new: Any, first: int, into: Sequence[int], named: Named) -> Iterator[str]:
    for place, name in enumerate(old.schema.names):
        was, now = old.column(place), new.column(place)
        if all(count == 1 for count in into) and _alike(was, now):
            continue
        at = 0
        for number, count in enumerate(into):
            change = named.of(first + number)
            value = plain(was[number])
            for copy in range(at, at + count):
                for loss in differences(value, plain(now[copy]), name, change):
                    yield f"row {first + number}: {loss}"
            at += count
    if _OURS in new.schema.names and _OURS not in old.schema.names:
        yield from _unnamed(new.column(_OURS), first, into, named)


def _unnamed(column: Any, first: int, into: Sequence[int], named: Named) -> Iterator[str]:
    """Where the column that a repair adds says something of a row that no repair names."""
    at = 0
    for number, count in enumerate(into):
        change = named.of(first + number)
        if (change is None or not change.allows(_OURS)) and column.slice(at, count).null_count != count:
            yield f"row {first + number}: no repair names it, and {_OURS} has a value"
        at += count


def _alike(old: Any, new: Any) -> bool:
    """Whether columns hold the same values; False where only a closer look tells (NaN, -0)."""
    try:
        if pa.types.is_floating(old.type) or "float" in str(old.type) or "double" in str(old.type):
            return False
        return bool(old.equals(new))
    except (pa.ArrowException, NotImplementedError):
        return False


def plain(value: Any) -> Any:
    """An Arrow value as plain Python, exactly: times as counts, floats as their bits, objects as pairs."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.ExtensionScalar):
        return plain(value.value)
    if isinstance(value, pa.DictionaryScalar):
        return plain(value.value)
    if isinstance(value, pa.MapScalar):
        return (
            [[plain(pair) for pair in entry.values()] for entry in value.values]
            if value.values is not None
            else None
        )
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar) or (
        hasattr(value, "values") and pa.types.is_nested(value.type) and not pa.types.is_struct(value.type)
    ):
        return [plain(entry) for entry in value.values]
    if isinstance(value, pa.StructScalar):
        return Fields((value.type.field(i).name, plain(value[i])) for i in range(value.type.num_fields))
    if pa.types.is_temporal(value.type) and not pa.types.is_interval(value.type):
        return value.value
    if pa.types.is_floating(value.type):
        number = value.as_py()
        return Bits(struct.pack("<d", float(number)))
    if isinstance(value, pa.StringScalar):
        # What is damaged in the file is no UTF-8.
        return value.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
    return value.as_py()


class Bits(bytes):
    """A float by its bits."""

    def __repr__(self) -> str:
        return repr(struct.unpack("<d", self)[0])


class Fields(list[tuple[str, Any]]):
    """The fields of an object, in order."""


def differences(old: Any, new: Any, place: str, change: Change | None) -> Iterator[str]:
    """Where values differ outside of what is named."""
    if type(old) is type(new) and old == new:
        return
    if change is not None and change.allows(place):
        return
    if isinstance(old, Fields) and isinstance(new, Fields) and [k for k, _ in old] == [k for k, _ in new]:
        for (name, a), (_, b) in zip(old, new, strict=True):
            yield from differences(a, b, f"{place}.{name}", change)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for a, b in zip(old, new, strict=True):
            yield from differences(a, b, f"{place}[]", change)
    else:
        yield f"{place}: no repair names it, and {str(old)[:_SHOWN]} became {str(new)[:_SHOWN]}"
