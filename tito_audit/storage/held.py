"""Content: rows that a program holds in memory, read in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.format import Row
from tito_audit.record.edits import ABSENT
from tito_audit.storage.plain import MISSING, NotPlain, plain_row, plain_value
from tito_audit.storage.row import RawRow, not_an_object
from tito_audit.storage.table_rows import plain_values, rows_of_batch, take_rows

Kind: TypeAlias = Literal["objects", "frame"]
"""Objects, as in JSON, or a table with typed columns."""

_WEIGHED = 32
"""How many rows show how large the others are."""


class Part(ABC):
    """Consecutive rows, or some of them; any process can read it."""

    @abstractmethod
    def rows(self, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
        """The rows, with these numbers; those of a table that have more bytes than `limit` are error rows."""


class Content(ABC):
    """What a program holds; it is read and never changed."""

    kind: Kind

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @property
    @abstractmethod
    def size(self) -> int:
        """About how many bytes they are."""

    @abstractmethod
    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows from `start` to `stop`, or of them only those `taken`, counted from `start`."""


@dataclass(frozen=True, slots=True)
class PlainRows(Part):
    """Rows as Python objects."""

    values: Sequence[Row | str]
    """Rows, or why one cannot be read."""
    open: bool
    """Whether they may get keys at any depth, as JSON may."""

    def rows(self, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
        """The rows, whatever their size: they are in memory already."""
        for number, value in zip(numbers, self.values, strict=True):
            if isinstance(value, str):
                yield RawRow(number, None, value)
            else:
                yield RawRow(number, value, open=self.open)


class TableRows(Part):
    """Rows as an Arrow record batch."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        import pyarrow as pa

        # pyarrow itself pickles all of the table that a slice belongs to.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return _table_rows, (sink.getvalue().to_pybytes(),)

    def rows(self, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
        """The rows as they are read from an Arrow file."""
        return rows_of_batch(self.batch, numbers, limit)


def _table_rows(data: bytes) -> TableRows:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        return TableRows(stream.read_next_batch())


class Objects(Content):
    """A sequence of objects, read as JSONL with one of them a line."""

    kind: Kind = "objects"

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def size(self) -> int:
        """About how many bytes the rows would be as JSONL."""
        return weight(self.values)

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows, with what is plain already shared."""
        numbers = range(start, stop) if taken is None else (start + taken).tolist()
        return PlainRows([_row(self.values[number]) for number in numbers], open=True)


def _row(value: Any) -> Row | str:
    if isinstance(value, Mapping):
        return plain_row(value)
    try:
        return not_an_object(plain_value(value))
    except NotPlain:
        return not_an_object(value)


class ArrowRows(Content):
    """A table of which each part can be had as an Arrow table."""

    kind: Kind = "frame"

    def __init__(self, count: int, size: int, table: Callable[[int, int], Any]) -> None:
        self._count = count
        self._size = size
        self.table = table
        """The rows from one number to another, as an Arrow table."""

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows as one record batch."""
        batch = batch_of(self.table(start, stop))
        return TableRows(batch if taken is None else take_rows(batch, taken))


def batch_of(table: Any) -> Any:
    """A table, or what `to_arrow` makes, as one record batch."""
    import pyarrow as pa

    table = table.combine_chunks()
    return next(iter(table.to_batches()), None) or pa.RecordBatch.from_pylist([], schema=table.schema)


class Columns(Content):
    """A table of which each column can be had as a list: a pandas frame, a polars frame with Python objects."""

    kind: Kind = "frame"

    def __init__(self, count: int, size: int, columns: Callable[[int, int], Mapping[str, Sequence[Any]]]) -> None:
        self._count = count
        self._size = size
        self._columns = columns

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self._size

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows, each with the value that every column has for it."""
        columns = self._columns(start, stop)
        numbers = range(stop - start) if taken is None else taken.tolist()
        return PlainRows([_of_columns(columns, number) for number in numbers], open=False)


def _of_columns(columns: Mapping[str, Sequence[Any]], number: int) -> Row | str:
    row: dict[str, Any] = {}
    for name, column in columns.items():
        value = column[number]
        if isinstance(value, NotPlain):
            return f"column {name!r} holds {value}"
        if value is not ABSENT:
            row[name] = value
    return row


def cells(values: Sequence[Any], missing: Any = None, *, lean: bool = True) -> list[Any]:
    """Python objects of one column as a log's values; a NotPlain in the place of one that no log can hold.

    `missing` is put where a frame has no value; None stays. `lean`: objects lose keys without a value.
    """
    return [missing if is_missing(value) else _cell(value, lean) for value in values]


def is_missing(value: Any) -> bool:
    """Whether a frame has no value here, not even None."""
    return (isinstance(value, float) and value != value) or type(value).__name__ in MISSING


def _cell(value: Any, lean: bool) -> Any:
    try:
        return plain_value(value, lean=lean)
    except NotPlain as error:
        return error


def arrow_cells(values: Any) -> Sequence[Any]:
    """An Arrow array, chunked or not, as a table's values."""
    import pyarrow as pa

    return plain_values(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)


def weight(values: Sequence[Any]) -> int:
    """About how many bytes values are as JSON, judged by some of them."""
    count = len(values)
    some = [values[number * count // _WEIGHED] for number in range(_WEIGHED)] if count else []
    return sum(map(_weight, some)) * count // _WEIGHED


def _weight(value: Any) -> int:
    """About how many bytes a value is as JSON."""
    if isinstance(value, str | bytes):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(str(name)) + 4 + _weight(entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        if not value or isinstance(value[0], int | float):
            return 6 * len(value)
        return sum(map(_weight, value))
    return 6 * int(getattr(value, "size", 1)) if isinstance(getattr(value, "size", 1), int) else 6
