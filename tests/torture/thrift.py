"""Thrift's compact protocol, as far as Parquet needs it: structs as dicts by field number."""

from __future__ import annotations

import struct
from typing import Any

Struct = dict[int, Any]


def read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    """The struct at a position, and the position after it."""
    found: Struct = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return found, at
        step, kind = head >> 4, head & 15
        if step:
            number += step
        else:
            number, at = _zigzag(data, at)
        found[number], at = (kind == 1, at) if kind in (1, 2) else _value(data, at, kind)


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a truth value inside a list
        return data[at] == 1, at + 1
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 7:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in (9, 10):
        head, at = data[at], at + 1
        size = head >> 4
        if size == 15:
            size, at = _varint(data, at)
        values = []
        for _ in range(size):
            value, at = _value(data, at, head & 15)
            values.append(value)
        return values, at
    if kind == 12:
        return read_struct(data, at)
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


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
