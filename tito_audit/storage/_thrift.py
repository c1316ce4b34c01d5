"""Thrift's compact protocol, in which Parquet writes its footer and page headers, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
_WHOLE = (I16, I32, I64)
_DEEPEST = 64


@dataclass(slots=True)
class Struct:
    """The fields of a struct by their numbers: each with its type and value, in order."""

    fields: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def get(self, number: int, default: Any = None) -> Any:
        """The value of a field."""
        return self.fields[number][1] if number in self.fields else default

    def put(self, number: int, kind: int, value: Any) -> None:
        """Set a field."""
        self.fields[number] = kind, value

    def drop(self, number: int) -> None:
        """Remove a field, if it is there."""
        self.fields.pop(number, None)


@dataclass(slots=True)
class Several:
    """A list of values of one type."""

    kind: int
    values: list[Any]


class Reader:
    """Reads values from bytes; ValueError or IndexError where they are not in the protocol."""

    def __init__(self, data: bytes | memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    def struct(self, deep: int = 0) -> Struct:
        """The struct that starts here."""
        if deep > _DEEPEST:
            raise ValueError("nested too deeply")
        found, number = Struct(), 0
        while True:
            head = self.data[self.at]
            self.at += 1
            kind = head & 0x0F
            if kind == STOP:
                return found
            number = number + (head >> 4) if head >> 4 else self._signed()
            found.fields[number] = kind, (kind == TRUE if kind in (TRUE, FALSE) else self.value(kind, deep))

    def list_head(self) -> tuple[int, int]:
        """The type and the number of values of the list that starts here."""
        head = self.data[self.at]
        self.at += 1
        return head & 0x0F, (head >> 4 if head >> 4 != 15 else self.varint())

    def value(self, kind: int, deep: int = 0) -> Any:
        """The value of a type that starts here."""
        if kind in _WHOLE:
            return self._signed()
        if kind == STRUCT:
            return self.struct(deep + 1)
        if kind == BINARY:
            return self._bytes(self.varint())
        if kind in (LIST, SET):
            inner, size = self.list_head()
            return Several(inner, [self._entry(inner, deep) for _ in range(size)])
        if kind == BYTE:
            return self._bytes(1)
        if kind == DOUBLE:
            return self._bytes(8)
        raise ValueError(f"a value of type {kind}")

    def varint(self) -> int:
        """An unsigned number."""
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    def _entry(self, kind: int, deep: int) -> Any:
        # In lists a truth value is a byte.
        return self._bytes(1) if kind in (TRUE, FALSE) else self.value(kind, deep)

    def _signed(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def _bytes(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ValueError("the data ends early")
        found = bytes(self.data[self.at : end])
        self.at = end
        return found


def written(value: Any, kind: int = STRUCT) -> bytes:
    """A value as bytes."""
    out = bytearray()
    _write(out, kind, value)
    return bytes(out)


def list_head(kind: int, size: int) -> bytes:
    """What precedes the values of a list."""
    return bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + _varint(size)


def field_head(before: int, number: int, kind: int) -> bytes:
    """What precedes the value of a field; `before` is the number of the field before it, or 0."""
    step = number - before
    return bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _varint(_zigzag(number))


def _write(out: bytearray, kind: int, value: Any) -> None:
    if kind in _WHOLE:
        out += _varint(_zigzag(value))
    elif kind == STRUCT:
        before = 0
        for number in sorted(value.fields):
            inner, held = value.fields[number]
            inner = (TRUE if held else FALSE) if inner in (TRUE, FALSE) else inner
            out += field_head(before, number, inner)
            if inner not in (TRUE, FALSE):
                _write(out, inner, held)
            before = number
        out.append(STOP)
    elif kind == BINARY:
        out += _varint(len(value))
        out += value
    elif kind in (LIST, SET):
        out += list_head(value.kind, len(value.values))
        for entry in value.values:
            _write(out, value.kind, entry)
    else:  # bytes as they were read
        out += value


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
