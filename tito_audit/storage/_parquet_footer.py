"""The footer of a Parquet file as it is stored, with its row groups read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from tito_audit.storage._thrift import (
    I64,
    LIST,
    STOP,
    STRUCT,
    Reader,
    Several,
    Struct,
    field_head,
    list_head,
    written,
)

MAGIC = b"PAR1"
# Fields of the footer and of what it holds.
_SCHEMA, _ROWS, _GROUPS, _PAIRS, _MADE_BY, _ORDERS = 2, 3, 4, 5, 6, 7
_CHILDREN = 5
_ARROW_SCHEMA = b"ARROW:schema"


class Footer:
    """What the end of a file says; ValueError or IndexError if it cannot be read.

    The row groups stay as bytes: a file may have a million of them.
    """

    def __init__(self, file: IO[bytes]) -> None:
        file.seek(-8, 2)
        end = file.tell()
        tail = file.read(8)
        size = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or size > end:
            raise ValueError("it does not end like a Parquet file")
        file.seek(end - size)
        self.start = end - size
        """Where the footer begins: all pages are before it."""
        self._data = file.read(size)
        self._groups = 0
        self._whole = self._read()

    @property
    def elements(self) -> list[Struct]:
        """The nodes of the schema, depth first."""
        return list(self._whole.get(_SCHEMA).values)

    @property
    def made_by(self) -> bytes:
        """What wrote the file."""
        return bytes(self._whole.get(_MADE_BY, b""))

    def leaves(self) -> list[int]:
        """How many leaves each column has."""
        elements, at, counts = self.elements, 1, list[int]()
        while at < len(elements):
            left, leaves = 1, 0
            while left:
                children = elements[at].get(_CHILDREN, 0)
                left += children - 1
                leaves += not children
                at += 1
            counts.append(leaves)
        return counts

    def groups(self) -> Iterator[Struct]:
        """The row groups, read as they are taken."""
        reader = Reader(self._data, self._groups)
        _, size = reader.list_head()
        for _ in range(size):
            yield reader.struct()

    def adopt(self, other: Footer, added: int) -> None:
        """Take the last `added` columns and the Arrow schema of another footer."""
        root = self.elements[0]
        if added:
            nodes = self._whole.get(_SCHEMA)
            nodes.values += other.elements[-added:]
            root.put(_CHILDREN, 5, root.get(_CHILDREN) + added)
            if self._whole.get(_ORDERS) is not None and other._whole.get(_ORDERS) is not None:
                self._whole.get(_ORDERS).values += other._whole.get(_ORDERS).values[-added:]
        theirs = {pair.get(1): pair for pair in other._pairs()}
        if _ARROW_SCHEMA in theirs:
            ours = theirs[_ARROW_SCHEMA]
            mine = [ours if pair.get(1) == _ARROW_SCHEMA else pair for pair in self._pairs()]
            if mine:
                self._whole.put(_PAIRS, LIST, Several(STRUCT, mine))

    def parts(self, rows: int, groups: int) -> tuple[bytes, bytes]:
        """What comes before and after the row groups in a footer of so many rows and row groups."""
        self._whole.put(_ROWS, I64, rows)
        before, after = Struct(), Struct()
        for number, (kind, value) in self._whole.fields.items():
            if number != _GROUPS:
                (before if number < _GROUPS else after).put(number, kind, value)
        head = written(before)[:-1] + field_head(_ROWS, _GROUPS, LIST) + list_head(STRUCT, groups)
        rest, last = bytearray(), _GROUPS
        for number in sorted(after.fields):
            one = Struct({number: after.fields[number]})
            body = written(one)
            own = len(field_head(0, number, after.fields[number][0]))
            rest += field_head(last, number, after.fields[number][0]) + body[own:-1]
            last = number
        return head, bytes(rest) + bytes([STOP])

    def _pairs(self) -> list[Struct]:
        pairs = self._whole.get(_PAIRS)
        return [] if pairs is None else list(pairs.values)

    def _read(self) -> Struct:
        """The footer without its row groups."""
        reader, found, number = Reader(self._data), Struct(), 0
        while True:
            head = self._data[reader.at]
            if head & 0x0F == STOP:
                return found
            step = head >> 4
            reader.at += 1
            number = number + step if step else reader.value(I64)
            kind = head & 0x0F
            if number == _GROUPS:
                self._groups = reader.at
                _, size = reader.list_head()
                for _ in range(size):
                    reader.struct()
            else:
                found.put(number, kind, kind == 1 if kind in (1, 2) else reader.value(kind))
