"""Rows of a record batch of any table, with lists of numbers as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.storage.row import RawRow, too_long
from tito_audit.storage.sampling import Sample

BATCH_BYTES = 32 << 20
BATCH_ROWS = 4096
"""How much of a table is turned into rows at once."""


def sampled_of_batch(
    batch: Any, taken: NDArray[np.int64], first: int, limit: int, sample: Sample
) -> Iterator[RawRow]:
    """The sampled rows of a batch that is numbered from `first`; the others count as left out."""
    if batch.nbytes > limit:
        rows: Iterator[RawRow] = (_single_row(batch.slice(at, 1), first + at, limit) for at in taken.tolist())
    else:
        rows = rows_of_batch(take_rows(batch, taken), (first + taken).tolist(), limit)
    before = sample.left_out
    for passed, row in enumerate(rows):
        sample.left_out = before + row.index - first - passed
        sample.last = row.index
        yield row
    sample.left_out = before + batch.num_rows - len(taken)
    sample.last = first + batch.num_rows - 1


def take_rows(batch: Any, taken: NDArray[np.int64]) -> Any:
    """The batch with only these rows."""
    import pyarrow as pa

    return batch if len(taken) == batch.num_rows else batch.take(pa.array(taken))


def rows_of_batch(batch: Any, numbers: Sequence[int], limit: int) -> Iterator[RawRow]:
    """The rows of one batch, with these numbers."""
    if batch.nbytes <= limit:
        try:
            columns = [plain_values(column) for column in batch.columns]
        except UnicodeDecodeError:
            pass  # one row is at fault; below they are read one by one
        else:
            names = batch.schema.names
            for offset, number in enumerate(numbers):
                values = {name: column[offset] for name, column in zip(names, columns, strict=True)}
                yield RawRow(number, values)
            return
    for offset, number in enumerate(numbers):
        yield _single_row(batch.slice(offset, 1), number, limit)


def _single_row(batch: Any, index: int, limit: int) -> RawRow:
    if batch.nbytes > limit:
        return too_long(index, batch.nbytes, limit)
    values: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = plain_values(column)[0]
        except UnicodeDecodeError as error:
            return RawRow(index, None, f"column {name!r} holds text that is not UTF-8 ({error.reason})")
    return RawRow(index, values)


def plain_values(array: Any) -> Sequence[Any]:
    """A plain value for each entry of an Arrow array.

    A list of numbers becomes a numpy array, a view if possible. In a list of floats null becomes NaN; a list of
    integers or booleans that contains null stays a Python list, so that formats can report it. Null fields of
    objects are dropped: Parquet gives every object of a column the fields of all others, so null means absent.
    """
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain_values(array.storage)
    if pa.types.is_dictionary(kind):
        return plain_values(array.dictionary_decode())
    if pa.types.is_temporal(kind):
        # As text: Python's datetime holds neither nanoseconds nor every year.
        return [None if value is None else str(value) for value in _temporal_text(array)]
    if pa.types.is_map(kind) and not pa.types.is_nested(kind.key_type):
        return [None if pairs is None else dict(pairs) for pairs in array.to_pylist()]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(array)
    if pa.types.is_struct(kind):
        return _objects(array)
    values: list[Any] = array.to_pylist()
    return values


def _temporal_text(array: Any) -> Sequence[Any]:
    """Times as text; as plain counts if Arrow cannot format them (a time zone it has no data for)."""
    import pyarrow as pa

    try:
        written: list[Any] = array.cast(pa.string()).to_pylist()
    except pa.ArrowException:
        if array.type.bit_width > 64:  # an interval, which is several counts
            return array.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
        written = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()).to_pylist()
    return written


def _objects(array: Any) -> list[dict[str, Any] | None]:
    names = [field.name for field in array.type]
    columns = [plain_values(array.field(i)) for i in range(len(names))]
    null = array.is_null().to_numpy(zero_copy_only=False)
    return [
        None
        if null[row]
        else {name: column[row] for name, column in zip(names, columns, strict=True) if column[row] is not None}
        for row in range(len(array))
    ]


def _lists(array: Any) -> list[Any]:
    """Lists as slices of the child array, which is converted only once."""
    import pyarrow as pa

    starts, ends = _bounds(array)
    low, high = (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)
    child = array.values.slice(low, high - low)
    starts, ends = starts - low, ends - low
    null = array.is_null().to_numpy(zero_copy_only=False)
    kind = child.type
    spans = [None if null[i] else (int(starts[i]), int(ends[i])) for i in range(len(array))]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return _numbers(child, spans)
    values = plain_values(child)
    return [None if span is None else [values[j] for j in range(*span)] for span in spans]


def _numbers(child: Any, spans: Sequence[tuple[int, int] | None]) -> list[Any]:
    import pyarrow as pa

    holes = None
    if child.null_count and not pa.types.is_floating(child.type):
        holes = child.is_null().to_numpy(zero_copy_only=False)
        flat = child.fill_null(False if pa.types.is_boolean(child.type) else 0).to_numpy(zero_copy_only=False)
    else:
        # Arrow turns null into NaN here, which means "not recorded" in a list of floats.
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


def _bounds(array: Any) -> tuple[Any, Any]:
    """Where each list starts and ends in `array.values`, `[N]` int64 each."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
        return starts, starts + width
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return offsets[:-1], offsets[1:]


def first_line(error: Exception) -> str:
    """The first line of a pyarrow exception, without the details below."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
