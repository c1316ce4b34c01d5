"""Content: rows that a program holds in memory, or gives once, read in parts."""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage.plain import NotPlain, plain_row, plain_value
from tito_audit.storage.row import RawRow, not_an_object
from tito_audit.storage.spool import Spool, unpacked
from tito_audit.storage.table_rows import first_line, rows_of_batch, take_rows

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


class Objects(Content):
    """A sequence of objects, read as JSONL with one of them a line; as a `frame`, only its columns can change."""

    def __init__(self, values: Sequence[Any], kind: Kind = "objects") -> None:
        self.values = values
        self.kind = kind

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def size(self) -> int:
        """About how many bytes the rows would be as JSONL."""
        count = len(self.values)
        some = [self.values[number * count // _WEIGHED] for number in range(_WEIGHED)] if count else []
        return sum(map(_weight, some)) * count // _WEIGHED

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows, with what is plain already shared."""
        numbers = range(start, stop) if taken is None else (start + taken).tolist()
        return PlainRows([_row(self.values[number]) for number in numbers], open=self.kind == "objects")


def _row(value: Any) -> Row | str:
    if isinstance(value, Mapping):
        return plain_row(value)
    try:
        return not_an_object(plain_value(value))
    except NotPlain:
        return not_an_object(value)


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


class ArrowRows(Content):
    """A table of which each part can be had as an Arrow table."""

    kind: Kind = "frame"
    size = 0

    def __init__(self, count: int, size: int, table: Callable[[int, int], Any]) -> None:
        self._count = count
        self.size = size
        self.table = table
        """The rows from one number to another, as an Arrow table."""

    @classmethod
    def of(cls, table: Any) -> ArrowRows:
        """The rows of an Arrow table."""
        return cls(len(table), table.nbytes, lambda start, stop: table.slice(start, stop - start))

    def __len__(self) -> int:
        return self._count

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows as one record batch."""
        batch = batch_of(self.table(start, stop))
        return TableRows(batch if taken is None else take_rows(batch, taken))


def batch_of(table: Any) -> Any:
    """A table, or what `to_arrow` makes, as one record batch."""
    import pyarrow as pa

    table = table.combine_chunks()
    return next(iter(table.to_batches()), None) or pa.RecordBatch.from_pylist([], schema=table.schema)


class OnceRead(Content):
    """Rows that come only once, kept in a temporary file when they are first needed, and read from there."""

    def __init__(self, kind: Kind, read: Callable[[], Content]) -> None:
        self.kind = kind
        self._read = read
        self._failed: BaseException | None = None
        """Why the rows could not be read: a second try would miss those that have come already."""

    @cached_property
    def rows(self) -> Content:
        """The rows; StorageError if they cannot be kept, each time."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._read()
        except BaseException as error:
            self._failed = error
            raise

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self.rows.size

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows from the file."""
        return self.rows.part(start, stop, taken)


class SpooledObjects(Sequence[Any]):
    """Python objects in a temporary file, each read when it is asked for."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._spool = Spool()
        self._starts = array("q")
        for number, value in enumerate(values):
            try:
                data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise StorageError(
                    f"logs: row {number} comes only once and cannot be kept in a file ({error}).\n"
                    "Pass the rows as a list."
                ) from error
            self._starts.append(self._spool.add(data))
        self._spool.flush()

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return pickle.loads(unpacked(self._spool.packed(self._starts[index])))  # written by this process


def spooled_table(batches: Iterable[Any], schema: Any = None) -> ArrowRows:
    """Record batches or tables of an iterator, all with the same columns, as a table in a temporary file."""
    import pyarrow as pa

    try:
        with tempfile.NamedTemporaryFile(prefix="tito-audit-") as file:
            writer = None
            for batch in batches:
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write(batch)
            if writer is None:
                writer = pa.ipc.new_stream(file, schema if schema is not None else pa.schema([]))
            writer.close()
            file.flush()
            return ArrowRows.of(pa.ipc.open_stream(pa.memory_map(file.name)).read_all())
    except OSError as error:
        raise StorageError(
            f"{tempfile.gettempdir()}: rows that can be read only once cannot be kept there "
            f"({error.strerror or error}).\nMake room, name another folder with TMPDIR, or write them to a file."
        ) from error
    except pa.ArrowException as error:
        raise StorageError(
            f"logs: the batches cannot be read as one table ({first_line(error)}).\n"
            "Give each batch the same columns, or pass the rows as a list of dicts."
        ) from error
