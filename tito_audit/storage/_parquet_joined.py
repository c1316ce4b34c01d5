"""Several column chunks of Parquet written as one, with what the footer says of all their pages."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from tito_audit.storage._parquet_pages import (
    ABOUT,
    BOUNDS,
    DATA,
    DICTIONARY,
    ENCODING_STATS,
    ENCODINGS,
    OFFSETS,
    PATH,
    STATISTICS,
    VALUES,
    Sink,
    read_index,
    start_of,
    write_index,
)
from tito_audit.storage._thrift import I32, I64, LIST, STRUCT, Several, Struct

_FILE_OFFSET, _PLAIN_SIZE, _SIZE, _INDEX, _BLOOM, _BLOOM_SIZE, _SIZES = 2, 6, 7, 10, 14, 15, 16
# Fields of statistics: the old and the new names of the bounds, and whether they are exact.
_NULLS = 3
_LARGEST, _SMALLEST = (1, 5, 7), (2, 6, 8)
_NEW_LARGEST, _NEW_SMALLEST = 5, 6
# Fields of the index of bounds, of that of offsets, and of what the sizes of values are.
_LISTS_OF_BOUNDS, _ORDER, _COUNTS_OF_BOUNDS = (1, 2, 3), 4, (5, 6, 7)
_PAGES, _PAGE_BYTES = 1, 2
_FIRST_ROW = 3
_BYTES, _HISTOGRAMS = 1, (2, 3)
_FLOATS = {"FLOAT": "<f", "DOUBLE": "<d", "Float16": "<e"}


def joined(
    parts: Sequence[tuple[BinaryIO, Struct]], rows: Sequence[int], column: Any, out: Sink, path: Several
) -> Struct:
    """Write the pages of several column chunks as one; all but the first have no dictionary.

    `rows` is how many rows each has, `column` what the schema says of the column. Bloom filters are left out.
    """
    chunks = [chunk.get(ABOUT) for _, chunk in parts]
    new = Struct(dict(chunks[0].fields))
    for number in (_BLOOM, _BLOOM_SIZE, _INDEX):
        new.drop(number)
    moved = []
    for (source, _), chunk in zip(parts, chunks, strict=True):
        if chunk is not chunks[0] and chunk.get(DICTIONARY):
            raise ValueError("a part has a dictionary")
        moved.append(out.at - start_of(chunk))
        out.copy(source, start_of(chunk), chunk.get(_SIZE))
    for number in (DATA, DICTIONARY):
        if chunks[0].get(number):
            new.put(number, I64, chunks[0].get(number) + moved[0])
    encodings = dict.fromkeys(one for chunk in chunks for one in chunk.get(ENCODINGS).values)
    new.put(ENCODINGS, LIST, Several(I32, list(encodings)))
    new.put(PATH, LIST, path)
    for number in (VALUES, _PLAIN_SIZE, _SIZE):
        new.put(number, I64, sum(chunk.get(number) for chunk in chunks))
    for number, merge in ((ENCODING_STATS, _pages), (_SIZES, _sizes)):
        held = [chunk.get(number) for chunk in chunks]
        _put(new, number, None if None in held else merge(held))
    _put(new, STATISTICS, _statistics(chunks, column))
    whole = Struct({_FILE_OFFSET: (I64, 0), ABOUT: (STRUCT, new)})
    for number, index in ((BOUNDS, _bounds(parts)), (OFFSETS, _offsets(parts, moved, rows))):
        if index is not None:
            write_index(whole, number, index, out)
    return whole


def _put(new: Struct, number: int, value: Struct | Several | None) -> None:
    if value is None:
        new.drop(number)
    else:
        new.put(number, STRUCT if isinstance(value, Struct) else LIST, value)


def _pages(held: Sequence[Several]) -> Several:
    """How many pages there are of each type and encoding."""
    counts: dict[tuple[int, int], int] = {}
    for one in (one for several in held for one in several.values):
        kind = one.get(1), one.get(2)
        counts[kind] = counts.get(kind, 0) + one.get(3)
    found = [Struct({1: (I32, page), 2: (I32, code), 3: (I32, count)}) for (page, code), count in counts.items()]
    return Several(STRUCT, found)


def _sizes(held: Sequence[Struct]) -> Struct:
    """The bytes of all values, and how often each level occurs."""
    found = Struct()
    if all(one.get(_BYTES) is not None for one in held):
        found.put(_BYTES, I64, sum(one.get(_BYTES) for one in held))
    for number in _HISTOGRAMS:
        if all(one.get(number) is not None for one in held):
            levels = zip(*(one.get(number).values for one in held), strict=True)
            found.put(number, LIST, Several(I64, [sum(level) for level in levels]))
    return found


def _statistics(chunks: Sequence[Struct], column: Any) -> Struct | None:
    """The number of nulls, and the bounds if every part with values has them and their order is known."""
    held = [chunk.get(STATISTICS) for chunk in chunks]
    if None in held:
        return None
    found = Struct()
    if all(one.get(_NULLS) is not None for one in held):
        found.put(_NULLS, I64, sum(one.get(_NULLS) for one in held))
    pairs = zip(chunks, held, strict=True)
    filled = [one for chunk, one in pairs if one.get(_NULLS) is None or one.get(_NULLS) < chunk.get(VALUES)]
    ordered = _order(column)
    bounded = [one for one in filled if {_NEW_LARGEST, _NEW_SMALLEST} <= set(one.fields)]
    # A part of which every float is NaN has no bounds.
    if not bounded or ordered is None or (len(bounded) < len(filled) and _float_form(column) is None):
        return found
    largest = max(bounded, key=lambda one: ordered(one.get(_NEW_LARGEST)))
    smallest = min(bounded, key=lambda one: ordered(one.get(_NEW_SMALLEST)))
    for one, numbers in ((largest, _LARGEST), (smallest, _SMALLEST)):
        for number in numbers:
            if number in one.fields:
                found.put(number, *one.fields[number])
    return found


def _order(column: Any) -> Callable[[bytes], Any] | None:
    """What orders the values of a column as they are stored; None if that is not known here."""
    about = json.loads(column.logical_type.to_json())
    kind, stored = about.get("Type"), column.physical_type
    if stored in ("INT32", "INT64"):
        signed = kind != "Int" or about.get("isSigned") is not False
        return lambda data: int.from_bytes(data, "little", signed=signed)
    form = _float_form(column)
    if form is not None:
        return lambda data: struct.unpack(form, data)
    if kind == "Decimal":
        return lambda data: int.from_bytes(data, "big", signed=True)
    if stored in ("BOOLEAN", "BYTE_ARRAY") or kind in ("None", "UUID"):
        return bytes
    return None


def _float_form(column: Any) -> str | None:
    """How a float of the column is stored, for `struct`; None if it has other values."""
    return _FLOATS.get(column.physical_type, _FLOATS.get(json.loads(column.logical_type.to_json()).get("Type")))


def _indexes(parts: Sequence[tuple[BinaryIO, Struct]], number: int) -> Iterator[Struct | None]:
    return (read_index(source, chunk, number) for source, chunk in parts)


def _bounds(parts: Sequence[tuple[BinaryIO, Struct]]) -> Struct | None:
    """The bounds of all pages, which claim no order; None if a part has none."""
    held = list(_indexes(parts, BOUNDS))
    if None in held:
        return None
    indexes = [one for one in held if one is not None]
    found = Struct()
    for number in (*_LISTS_OF_BOUNDS, *_COUNTS_OF_BOUNDS):
        lists = [one.get(number) for one in indexes]
        if None not in lists:
            found.put(number, LIST, _chained(lists))
    found.put(_ORDER, I32, 0)
    return found


def _offsets(parts: Sequence[tuple[BinaryIO, Struct]], moved: Sequence[int], rows: Sequence[int]) -> Struct | None:
    """Where all pages are; None if a part does not say."""
    held = list(_indexes(parts, OFFSETS))
    if None in held:
        return None
    indexes, before = [one for one in held if one is not None], 0
    for index, shift, count in zip(indexes, moved, rows, strict=True):
        for page in index.get(_PAGES).values:
            page.put(1, I64, page.get(1) + shift)
            page.put(_FIRST_ROW, I64, page.get(_FIRST_ROW) + before)
        before += count
    found = Struct({_PAGES: (LIST, _chained([one.get(_PAGES) for one in indexes]))})
    sizes = [one.get(_PAGE_BYTES) for one in indexes]
    if None not in sizes:
        found.put(_PAGE_BYTES, LIST, _chained(sizes))
    return found


def _chained(lists: Sequence[Several]) -> Several:
    return Several(lists[0].kind, [value for one in lists for value in one.values])
