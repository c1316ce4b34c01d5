"""Thrift's compact protocol, as far as Parquet needs it: structs as dicts by field number."""

from __future__ import annotations

import struct
from typing import Any

Struct = dict[int, Any]
Typed = dict[int, tuple[int, Any]]
"""A struct whose values come with their types, to be written again."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_WHOLE, _LISTS = (4, 5, 6), (9, 10)


def read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    """The struct at a position, and the position after it."""
    fields, at = read_typed(data, at)
    return _plain(fields, _STRUCT), at


def read_typed(data: bytes, at: int) -> tuple[Typed, int]:
    """The struct at a position with the types of its values, and the position after it."""
    fields: Typed = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        step, kind = head >> 4, head & 15
        if step:
            number += step
        else:
            number, at = _zigzag(data, at)
        value, at = (kind == _TRUE, at) if kind in (_TRUE, _FALSE) else _value(data, at, kind)
        fields[number] = kind, value


def written(fields: Typed) -> bytes:
    """A typed struct as bytes."""
    parts, last = [], 0
    for number in sorted(fields):
        kind, value = fields[number]
        step = number - last
        parts.append(bytes([(step << 4) | kind]) if 0 < step < 16 else bytes([kind]) + _varint_of(number << 1))
        if kind not in (_TRUE, _FALSE):
            parts.append(_written(kind, value))
        last = number
    return b"".join(parts) + b"\0"


def _written(kind: int, value: Any) -> bytes:
    if kind in (_TRUE, _FALSE, _BYTE):
        return bytes([value])
    if kind in _WHOLE:
        return _varint_of((value << 1) ^ (value >> 63))
    if kind == _DOUBLE:
        return struct.pack("<d", value)
    if kind == _BINARY:
        return _varint_of(len(value)) + bytes(value)
    if kind in _LISTS:
        inner, values = value
        size = (
            bytes([(len(values) << 4) | inner])
            if len(values) < 15
            else bytes([0xF0 | inner]) + _varint_of(len(values))
        )
        return size + b"".join(_written(inner, item) for item in values)
    return written(value)


def _plain(value: Any, kind: int) -> Any:
    if kind == _STRUCT:
        return {number: _plain(item, its) for number, (its, item) in value.items()}
    if kind in _LISTS:
        return [_plain(item, value[0]) for item in value[1]]
    return value


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):  # inside a list
        return data[at] == 1, at + 1
    if kind == _BYTE:
        return data[at], at + 1
    if kind in _WHOLE:
        return _zigzag(data, at)
    if kind == _DOUBLE:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == _BINARY:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in _LISTS:
        head, at = data[at], at + 1
        size = head >> 4
        if size == 15:
            size, at = _varint(data, at)
        values = []
        for _ in range(size):
            value, at = _value(data, at, head & 15)
            values.append(value)
        return (head & 15, values), at
    if kind == _STRUCT:
        return read_typed(data, at)
    raise ValueError(f"type {kind} is not in a Parquet file")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _varint_of(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
