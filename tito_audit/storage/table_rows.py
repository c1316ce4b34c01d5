"""Rows of tables and Python objects, read block by block; lists of numbers in tables become numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import RawRow, RowSample, too_long_row

BATCH_BYTES = 32 << 20
BATCH_ROWS = 4096
"""Bytes and rows of a table that become Python objects at once, at most."""


class MemoryContent(ABC):
    """Rows in memory, of which parts can be read; they are never changed."""

    kind: Literal["objects", "frame"]
    """Objects as in JSON, or a table with typed columns."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @property
    @abstractmethod
    def size(self) -> int:
        """About the bytes of all rows."""

    @abstractmethod
    def part(self, start: int, stop: int, sampled: NDArray[np.int64] | None = None) -> MemoryPart:
        """Rows `[start, stop)`, or only the `sampled` ones of them, `[N]` counted from `start`."""


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows as Python objects."""

    values: Sequence[Row | str]
    """Each row, or why it cannot be read."""
    extensible: bool
    """Whether they may get new keys at any depth, as JSON may."""

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
        """The rows of any size: they are in memory already."""
        for number, value in zip(numbers, self.values, strict=True):
            if isinstance(value, str):
                yield RawRow(number, None, value)
            else:
                yield RawRow(number, value, extensible=self.extensible)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of an Arrow record batch."""

    batch: Any
    chosen: NDArray[np.int64] | None = None
    """Numbers of the rows, `[N]`; None for all."""
    copied: bool = False
    """Whether rows do not keep a larger batch in memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        # pyarrow would pickle the whole table that the batch is a slice of.
        return _read_stream, (_to_stream(self._chosen_batch()).to_pybytes(),)

    def __len__(self) -> int:
        return int(self.batch.num_rows) if self.chosen is None else len(self.chosen)

    def rows(self, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
        """The rows, numbered so; error rows for those of more than `limit` bytes."""
        if self.batch.nbytes <= limit:
            yield from rows_of_batch(self._chosen_batch(), numbers)
            return
        for single, number in zip(self._single_rows(), numbers, strict=True):
            yield _single_row(single, number, limit)

    def split_oversized(self, limit: int) -> list[MemoryPart]:
        """The same rows, error rows for those too long: once sent, they may have lost empty buffers."""
        if self.batch.nbytes <= limit:
            return [TableRows(self._chosen_batch())]
        return [
            TableRows(single)
            if single.nbytes <= limit
            else PlainRows((str(too_long_row(0, single.nbytes, limit).error),), extensible=False)
            for single in self._single_rows()
        ]

    def _chosen_batch(self) -> Any:
        if self.chosen is not None:
            return take_rows(self.batch, self.chosen)
        return _read_stream(_to_stream(self.batch)).batch if self.copied else self.batch

    def _single_rows(self) -> Iterator[Any]:
        places = range(self.batch.num_rows) if self.chosen is None else self.chosen.tolist()
        return (self.batch.slice(at, 1) for at in places)


MemoryPart: TypeAlias = PlainRows | TableRows
"""Consecutive rows, or a sample of them, which can be sent to other processes."""


def _read_stream(data: Any) -> TableRows:
    with pa.ipc.open_stream(data) as stream:
        return TableRows(stream.read_next_batch())


class ArrowRows(MemoryContent):
    """Rows of a table that is Arrow, or can give parts of itself as Arrow."""

    kind = "frame"
    size = 0

    def __init__(self, count: int, size: int, table: Callable[[int, int], Any], *, copied: bool = False) -> None:
        self._count = count
        self.size = size
        self.table = table
        """Returns rows `[start, stop)` as an Arrow table or record batch."""
        self._copied = copied

    @classmethod
    def of(cls, table: Any, *, copied: bool = False) -> ArrowRows:
        """The rows of an Arrow table or record batch; if `copied`, rows that are read do not keep all of it."""
        count = table.num_rows
        return cls(count, table.nbytes, lambda start, stop: table.slice(start, stop - start), copied=copied)

    def __len__(self) -> int:
        return self._count

    def part(self, start: int, stop: int, sampled: NDArray[np.int64] | None = None) -> TableRows:
        copied = self._copied and stop - start < self._count
        return TableRows(to_batch(self.table(start, stop)), sampled, copied=copied)


def to_batch(table: Any) -> Any:
    """An Arrow table or record batch as one record batch."""
    if isinstance(table, pa.RecordBatch):
        return table
    table = table.combine_chunks()
    return next(iter(table.to_batches()), None) or pa.RecordBatch.from_pylist([], schema=table.schema)


def row_spans(content: MemoryContent, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive parts of about `size` bytes."""
    count = len(content)
    each = min(max((size or BATCH_BYTES) * count // max(content.size, 1), 1), BATCH_ROWS)
    yield from ((start, min(start + each, count)) for start in range(0, count, each))


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a binary log: a row group, a record batch, a Torch file, or rows in memory."""

    first: int
    """Number of its first row in the log."""
    count: int
    contents: Iterable[MemoryContent]
    """Its rows, which are read when they are iterated."""
    seed: int
    """Hash of what identifies it, for samples."""
    before: float
    after: float
    """Shares of the log that are read before and after it."""


def rows_of_blocks(
    blocks: Iterable[Block], limit: int, sample: RowSample | None = None, only: int | None = None, start: int = 0
) -> Iterator[tuple[RawRow, float]]:
    """Each row with the share of the log that is read after it; row `start` of the log has number 0.

    With `only`, that row alone; with `sample`, the sampled rows. Blocks that have none of them are not read.
    """
    for block in blocks:
        if only is not None and not block.first <= only < block.first + block.count:
            continue
        if sample is not None and not len(sample.sampled_rows(block.seed, block.first, block.count)):
            sample.count_skipped(block.first - start + block.count - 1, block.count)
            continue
        passed = 0
        for content in block.contents:
            if only is not None:
                wanted = only - block.first - passed
                if wanted < len(content):
                    (row,) = content.part(wanted, wanted + 1).rows([only], limit)
                    yield row, 1.0
                    return
            for at, stop in row_spans(content) if only is None else ():
                first = block.first + passed + at
                sampled = None if sample is None else sample.sampled_rows(block.seed, first, stop - at)
                first -= start
                numbers = range(first, first + stop - at) if sampled is None else (first + sampled).tolist()
                rows = content.part(at, stop, sampled).rows(numbers, limit)
                for row in rows if sample is None else sample.count_left_out(rows, first, stop - at):
                    done = (start + row.index + 1 - block.first) / block.count
                    yield row, block.before + (block.after - block.before) * done
                del rows
            passed += len(content)
            del content  # the next is read into its place
        del block


def take_rows(batch: Any, chosen: NDArray[np.int64]) -> Any:
    """The batch with only the rows of these numbers, `[N]`."""
    if len(chosen) == batch.num_rows:
        return batch
    try:
        return batch.take(pa.array(chosen))
    except pa.ArrowNotImplementedError:  # types that Arrow can only slice, such as string_view
        pieces = [batch.slice(at, 1) for at in chosen.tolist()]
        whole = pa.Table.from_batches(pieces, batch.schema).combine_chunks().to_batches()
        return whole[0] if whole else batch.slice(0, 0)


def _to_stream(batch: Any) -> Any:
    """A batch as an Arrow stream in a buffer, which of a slice has only its rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def rows_of_batch(batch: Any, numbers: Sequence[int]) -> Iterator[RawRow]:
    """The rows of a batch, numbered so."""
    try:
        columns = [plain_values(column) for column in batch.columns]
    except _read_errors():  # one row is at fault
        for offset, number in enumerate(numbers):
            yield _single_row(batch.slice(offset, 1), number, batch.nbytes)
        return
    names = batch.schema.names
    for offset, number in enumerate(numbers):
        yield RawRow(number, {name: column[offset] for name, column in zip(names, columns, strict=True)})


def _single_row(batch: Any, index: int, limit: int) -> RawRow:
    """The row of a batch of one; an error row that names the column if a value cannot be read."""
    if batch.nbytes > limit:
        return too_long_row(index, batch.nbytes, limit)
    values: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = plain_values(column)[0]
        except UnicodeDecodeError as error:
            return RawRow(index, None, f"column {name!r} holds text that is not UTF-8 ({error.reason})")
        except _read_errors() as error:
            kind = f"a value of type {column.type}"
            return RawRow(index, None, f"column {name!r} holds {kind} that cannot be read ({first_line(error)})")
    return RawRow(index, values)


def _read_errors() -> tuple[type[Exception], ...]:
    """What is raised for values that Python cannot hold; a function, as pyarrow is imported late."""
    return (pa.ArrowException, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


def plain_values(array: Any) -> Sequence[Any]:
    """A plain value for each entry of an Arrow array.

    A list of numbers becomes a numpy array, a view if possible. Null becomes NaN in lists of floats; lists of
    integers or booleans with null stay Python lists, so that formats can report them. Objects lose null fields:
    Parquet gives each object of a column the fields of all others, so null means absent.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain_values(array.storage)
    if pa.types.is_dictionary(kind):
        return plain_values(array.dictionary_decode())
    if pa.types.is_temporal(kind):
        # As text: Python's datetime holds neither nanoseconds nor every year.
        try:
            times = array.cast(pa.string())
        except pa.ArrowException:  # no data for its time zone: counts of units; an interval has several
            width = array.type.bit_width
            times = array if width > 64 else array.view(pa.int32() if width == 32 else pa.int64())
        return [None if value is None else str(value) for value in times.to_pylist()]
    if pa.types.is_run_end_encoded(kind):
        return plain_values(pa.compute.run_end_decode(array))
    if pa.types.is_decimal(kind):
        return [None if value is None else plain_decimal(value) for value in array.to_pylist()]
    if pa.types.is_map(kind):  # objects, or lists of pairs if the keys are nested
        nested = pa.types.is_nested(kind.key_type)
        starts, ends = _list_bounds(array)
        keys, items = plain_values(array.keys), plain_values(array.items)
        keys = [key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key for key in keys]
        null = array.is_null().to_numpy(zero_copy_only=False)
        maps: list[Any] = []
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            pairs = [(keys[at], items[at]) for at in range(start, end)] if not null[row] else []
            maps.append(None if null[row] else [list(pair) for pair in pairs] if nested else dict(pairs))
        return maps
    if is_list(kind):
        return _list_values(array)
    if pa.types.is_struct(kind):
        names = [field.name for field in array.type]
        columns = [plain_values(array.field(i)) for i in range(len(names))]
        null = array.is_null().to_numpy(zero_copy_only=False)
        return [
            None
            if null[row]
            else {
                name: column[row] for name, column in zip(names, columns, strict=True) if column[row] is not None
            }
            for row in range(len(array))
        ]
    values: list[Any] = array.to_pylist()
    return values


def plain_decimal(value: Decimal) -> int | float | str:
    """A decimal as an integer or a float of the same value, else as text."""
    if value == value.to_integral_value() and value.as_tuple().exponent == 0:
        return int(value)
    nearest = float(value)
    return nearest if not value.is_finite() or Decimal(repr(nearest)) == value else str(value)


def is_list(kind: Any) -> bool:
    """Whether a type is any of Arrow's list types."""
    types = pa.types
    fixed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(fixed or types.is_list_view(kind) or types.is_large_list_view(kind))


def _list_values(array: Any) -> list[Any]:
    """Lists as slices of their child array, which is converted as a whole."""
    starts, ends = _list_bounds(array)
    filled = starts < ends
    low, high = (int(starts[filled].min()), int(ends[filled].max())) if filled.any() else (0, 0)
    child = array.values.slice(low, high - low)
    starts, ends = starts - low, ends - low
    null = array.is_null().to_numpy(zero_copy_only=False)
    kind = child.type
    spans = [None if null[i] else (int(starts[i]), int(ends[i])) for i in range(len(array))]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        holes = None
        if child.null_count and not pa.types.is_floating(child.type):
            holes = child.is_null().to_numpy(zero_copy_only=False)
            flat = child.fill_null(False if pa.types.is_boolean(child.type) else 0).to_numpy(zero_copy_only=False)
        else:
            # Here Arrow turns null into NaN, which means "not recorded".
            flat = child.to_numpy(zero_copy_only=False)
        lists: list[Any] = []
        for span in spans:
            if span is None:
                lists.append(None)
            elif holes is not None and holes[slice(*span)].any():
                lists.append(child.slice(span[0], span[1] - span[0]).to_pylist())
            else:
                lists.append(flat[slice(*span)])
        return lists
    values = plain_values(child)
    return [None if span is None else [values[j] for j in range(*span)] for span in spans]


def _list_bounds(array: Any) -> tuple[Any, Any]:
    """Where each list starts and ends in `array.values`, `[N]` int64 each."""
    if pa.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
        return starts, starts + width
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        sizes = array.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        return offsets, offsets + sizes
    return offsets[:-1], offsets[1:]


def first_line(error: Exception) -> str:
    """The first line of a pyarrow exception, without its details."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def refuse_duplicate_names(path: Path, schema: Any) -> None:
    """StorageError if two columns, or two fields of an object, have the same name, or one that is not UTF-8."""
    try:
        where = next(_duplicate_names((), schema), None)
    except UnicodeDecodeError:
        raise StorageError(
            f"{path}: the name of a column is not UTF-8, so its rows cannot be shown.\n"
            "The file is damaged: copy it again, or write it again."
        ) from None
    if where is not None:
        *outer, name = where
        what = f"two fields of {'.'.join(outer)!r}" if outer else "two of the columns"
        raise StorageError(
            f"{path}: {what} are named {name!r}, and a row can show only one.\nRename or drop one of them."
        )


def _duplicate_names(outer: tuple[str, ...], fields: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """The paths of fields whose name an earlier field of the same object has."""
    seen: set[str] = set()
    for field in fields:
        inside = (*outer, field.name)
        if field.name in seen:
            yield inside
        seen.add(field.name)
        kind: Any = None
        within = field.type
        while within is not None:  # to the values of lists, maps, dictionaries and extensions
            kind = within
            if isinstance(kind, pa.BaseExtensionType):
                within = kind.storage_type
            else:
                within = kind.item_type if pa.types.is_map(kind) else getattr(kind, "value_type", None)
        if pa.types.is_struct(kind):
            yield from _duplicate_names(inside, kind)
