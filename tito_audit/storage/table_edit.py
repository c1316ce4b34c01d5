"""Tables with some rows changed: Arrow values with edits applied; untouched values keep their exact bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.record.edits import ABSENT, edits_between
from tito_audit.record.edits import Path as Steps
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import RawRow
from tito_audit.storage.table_rows import is_list


@dataclass(frozen=True, slots=True)
class Change:
    """An edit together with the old value at its path."""

    path: Steps
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class _Before:
    """The old values at and around the place where a value is built."""

    near: Any
    """The old Arrow values at this place, any number of them, of the same type."""
    far: Any
    """Arrow values of the same column in other rows, of the same type."""
    old: Any = None
    """The plain value that `near`, then of length 1, was read as."""


def changes_between(old: Any, new: Any) -> list[Change]:
    """The smallest changes that turn the row `old` into the row `new`."""
    changes = []
    for edit in edits_between(old, new):
        value = old
        for step in edit.path:
            value = value.get(step) if isinstance(value, Mapping) else value[int(step)]
        changes.append(Change(edit.path, value, edit.value))
    return changes


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    if isinstance(kind, pa.BaseExtensionType):
        return is_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def edited(field: Any, column: Any, row: int, changes: Sequence[Change]) -> Any:
    """The value of one row of a column with changes applied, an Arrow array of length 1.

    Paths of the changes are relative to the value.
    Raises an ArrowException, or an error of Python's, if the type cannot hold the result.
    """
    # Rows that show how the column writes a missing float.
    return _edited(field, _first_chunk(column, row, 1), _first_chunk(column, 0, 256), changes)


def _first_chunk(column: Any, start: int, length: int) -> Any:
    return next(chunk for chunk in column.slice(start, length).chunks if len(chunk))


def _edited(field: Any, array: Any, far: Any, changes: Sequence[Change]) -> Any:
    kind = field.type
    for change in changes:
        if not change.path:
            return _built(field, [change.new], _Before(array, far, change.old))
    if isinstance(kind, pa.BaseExtensionType):
        storage = _edited(field.with_type(kind.storage_type), array.storage, far.storage, changes)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_struct(kind):
        parts = [array.field(i) for i in range(kind.num_fields)]
        places = _places(kind)
        for name, below in _by_head(changes).items():
            if name not in places:
                raise ValueError(_no_field(kind, name))
            i = places[str(name)]
            parts[i] = _edited(kind.field(i), parts[i], far.field(i), below)
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_map(kind):
        # Of items with the same key, a row shows the last.
        (keys, items), (_, far_items) = _pairs(array), _pairs(far)
        names = keys.to_pylist()
        for key, below in _by_head(changes).items():
            equal = [i for i, name in enumerate(names) if name == key]
            if below[0].new is ABSENT and not below[0].path:
                left = pa.array([i for i in range(len(names)) if i not in equal], pa.int64())
                keys, items = keys.take(left), items.take(left)
            elif equal:
                at = equal[-1]
                item = _edited(kind.item_field, items.slice(at, 1), far_items, below)
                items = pa.concat_arrays([items.slice(0, at), item, items.slice(at + 1)])
            else:
                fresh = _built(kind.item_field, [below[0].new], _Before(items, far_items))
                keys = pa.concat_arrays([keys, _built(kind.key_field, [key], _Before(keys, keys))])
                items = pa.concat_arrays([items, fresh])
            names = keys.to_pylist()
        return pa.MapArray.from_arrays(pa.array([0, len(keys)], pa.int32()), keys, items, type=kind)
    if is_list(kind):
        entries, far_entries = array.flatten(), far.flatten()
        pieces, start = [], 0
        for place, below in sorted(_by_head(changes).items()):
            index = int(place)
            pieces.append(entries.slice(start, index - start))
            pieces.append(_edited(kind.value_field, entries.slice(index, 1), far_entries, below))
            start = index + 1
        joined = pa.concat_arrays([*pieces, entries.slice(start)])
        return _list_array(kind, joined, [len(joined)])
    raise ValueError(f"a value of type {kind} has no parts")


def _by_head(changes: Sequence[Change]) -> dict[str | int, list[Change]]:
    """The changes by first key or position, with paths relative to it."""
    below: dict[str | int, list[Change]] = {}
    for change in changes:
        below.setdefault(change.path[0], []).append(Change(change.path[1:], change.old, change.new))
    return below


def _pairs(array: Any) -> tuple[Any, Any]:
    """The keys and the items of an array of maps."""
    offsets = array.offsets
    low, high = offsets[0].as_py(), offsets[-1].as_py()
    return array.keys.slice(low, high - low), array.items.slice(low, high - low)


def _built(field: Any, values: Sequence[Any], before: _Before) -> Any:
    """Plain values as an Arrow array of the field's type."""
    kind, near, far = field.type, before.near, before.far
    present = [value for value in values if value is not None and value is not ABSENT]
    if len(present) < len(values) and not field.nullable:
        raise ValueError(f"the field {field.name!r} must not be null")
    if isinstance(kind, pa.BaseExtensionType):
        storage = _built(
            field.with_type(kind.storage_type), values, _Before(near.storage, far.storage, before.old)
        )
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_dictionary(kind):
        decoded = _Before(near.dictionary_decode(), far.dictionary_decode(), before.old)
        return _built(field.with_type(kind.value_type), values, decoded).dictionary_encode().cast(kind)
    if not present:
        return pa.nulls(len(values), kind)
    array = _present(kind, present, before)
    if len(present) == len(values):
        return array
    counts = iter(range(len(present)))
    gap = pa.nulls(1, kind)
    absent = [value is None or value is ABSENT for value in values]
    return pa.concat_arrays([gap if empty else array.slice(next(counts), 1) for empty in absent])


def _present(kind: Any, values: list[Any], before: _Before) -> Any:
    """Plain values, none of them null, as an Arrow array."""
    if pa.types.is_struct(kind):
        places = _places(kind)
        for value in values:
            if not isinstance(value, Mapping):
                raise TypeError(f"an object was expected, not {_kind_of(value)}")
            for name in value:
                if name not in places:
                    raise ValueError(_no_field(kind, name))
        parts = []
        for i in range(kind.num_fields):
            part = kind.field(i)
            # If two fields share a name, a row shows the last; the other has no value to build from.
            names = [value.get(part.name) if places[part.name] == i else None for value in values]
            parts.append(_built(part, names, _Before(before.near.field(i), before.far.field(i))))
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_map(kind):
        maps = [list(value.items()) if isinstance(value, Mapping) else list(value) for value in values]
        pairs = [pair for entries in maps for pair in entries]
        near, far = _pairs(before.near), _pairs(before.far)
        keys = _built(kind.key_field, [key for key, _ in pairs], _Before(near[0], far[0]))
        items = _built(kind.item_field, [item for _, item in pairs], _Before(near[1], far[1]))
        offsets = np.cumsum([0, *map(len, maps)]).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, items, type=kind)
    if is_list(kind):
        inside = _Before(before.near.flatten(), before.far.flatten(), before.old)
        lists = [_entries(kind.value_field, value, inside) for value in values]
        return _list_array(kind, pa.concat_arrays(lists), [len(entries) for entries in lists])
    if pa.types.is_temporal(kind) and all(isinstance(value, str) for value in values):
        return _times_of_text(kind, values)
    if _is_number(kind):
        return _numbers(kind, values, nan_is_null=False)
    if pa.types.is_decimal(kind):
        return pa.array(
            [Decimal(repr(value) if isinstance(value, float) else value) for value in values], type=kind
        )
    return pa.array(values, type=kind)


def _entries(field: Any, value: Any, before: _Before) -> Any:
    """The entries of one list; those that were in the old list are taken from it as Arrow data."""
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
        raise TypeError(f"a list was expected, not {_kind_of(value)}")
    if _is_number(field.type):
        nan_is_null = field.nullable and not _writes_nan(value, before)
        return _numbers(field.type, value, nan_is_null=nan_is_null, nullable=field.nullable)
    # A row shows extensions and times in another form than Arrow holds them.
    opaque = isinstance(field.type, pa.BaseExtensionType) or pa.types.is_temporal(field.type)
    if not isinstance(before.old, list) or not (pa.types.is_nested(field.type) or opaque):
        return _built(field, list(value), _Before(before.near, before.far))
    places = {id(entry): i for i, entry in enumerate(before.old)}
    pieces = [before.near.slice(0, 0)]
    for entry in value:
        at = places.get(id(entry))
        fresh = at is None
        piece = _built(field, [entry], _Before(before.near, before.far)) if fresh else before.near.slice(at, 1)
        pieces.append(piece)
    return pa.concat_arrays(pieces)


def _list_array(kind: Any, entries: Any, sizes: Sequence[int]) -> Any:
    if pa.types.is_fixed_size_list(kind):
        wrong = next((size for size in sizes if size != kind.list_size), None)
        if wrong is not None:
            raise ValueError(f"every list of the column has {kind.list_size} entries, not {wrong}")
        return pa.FixedSizeListArray.from_arrays(entries, type=kind)
    offsets = np.cumsum([0, *sizes])
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), entries, type=kind)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets), entries, type=kind)
    if pa.types.is_list_view(kind):
        starts, lengths = pa.array(offsets[:-1].astype(np.int32)), pa.array(sizes, pa.int32())
        return pa.ListViewArray.from_arrays(starts, lengths, entries, type=kind)
    return pa.LargeListViewArray.from_arrays(
        pa.array(offsets[:-1]), pa.array(sizes, pa.int64()), entries, type=kind
    )


def _writes_nan(value: Any, before: _Before) -> bool:
    """Whether a missing float is written as NaN, not null: as in this list, or else in its column."""
    if not pa.types.is_floating(before.near.type) or (isinstance(value, np.ndarray) and not np.isnan(value).any()):
        return False
    for values in (before.near, before.far):
        flat = values.to_numpy(zero_copy_only=False)
        if np.isnan(flat).sum() > values.null_count:
            return True
        if values.null_count:
            return False
    return False


@cache
def _places(kind: Any) -> dict[str, int]:
    """The index of each field of an object; if names repeat, of the last, which is the one a row shows."""
    return {kind.field(i).name: i for i in range(kind.num_fields)}


def _no_field(kind: Any, name: Any) -> str:
    return f"the objects of the column have no field {name!r} (they have {', '.join(map(repr, _places(kind)))})"


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "an object" if isinstance(value, Mapping) else type(value).__name__


# Numbers and times, from the values that a row shows


def _is_number(kind: Any) -> bool:
    """Whether the values of a type are integers, floats or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _times_of_text(kind: Any, values: list[Any]) -> Any:
    """Times from the texts that a row shows, where it does not show counts."""
    if pa.types.is_duration(kind) or all(value.lstrip("-").isdigit() for value in values):
        counts = pa.array([int(value) for value in values], pa.int32() if kind.bit_width == 32 else pa.int64())
        return counts.view(kind)
    if pa.types.is_time(kind):
        # Arrow parses a time of day only as part of a timestamp.
        moments = pa.array([f"1970-01-01 {value}" for value in values], pa.string())
        return moments.cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.array(values, pa.string()).cast(kind)


def _numbers(kind: Any, values: Any, *, nan_is_null: bool, nullable: bool = True) -> Any:
    """Numbers as an Arrow array, exactly; floats are rounded to the width of the column."""
    whole = (
        pa.types.is_integer(kind) and isinstance(values, list) and not any(isinstance(v, float) for v in values)
    )
    array = pa.array(values, type=kind if whole else None)
    if not (_is_number(array.type) or pa.types.is_null(array.type)):
        raise TypeError(f"numbers of type {kind} were expected, not {array.type}")
    if array.null_count and not nullable:
        raise ValueError("an entry must not be null")
    if pa.types.is_floating(kind):
        missing = array.is_null().to_numpy(zero_copy_only=False)
        flat = array.to_numpy(zero_copy_only=False)
        with np.errstate(over="raise"):
            flat = flat.astype(f"float{kind.bit_width}", copy=False)
        if nan_is_null:
            missing = missing | np.isnan(flat)
        return pa.array(flat, type=kind, mask=missing)
    if pa.types.is_boolean(kind) and not pa.types.is_boolean(array.type):
        odd = next((value for value in array.to_pylist() if value not in (0, 1, None)), None)
        if odd is not None:
            raise ValueError(f"{odd} is neither true nor false")
    return array.cast(kind)


Copies = list[list[Change]]
"""The changes of each row that is written instead of one: [] drops it, several are a fork."""


class TableEdit:
    """Changes rows of one file; everything no change touches passes through as Arrow data."""

    def __init__(self, source: Path, what: str, added: tuple[str, ...]) -> None:
        self.added = added
        """Text columns that a row may have although the source does not."""
        self._source = source
        self._what = what
        """The kind of file, in words."""

    def schema(self, schema: Any) -> Any:
        """The schema with the added columns."""
        for name in self.added:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return schema

    def table(self, table: Any, first: int, changed: Mapping[int, Copies]) -> Any:
        """The table with rows changed, forked and dropped; its first row is row `first` of the file."""
        columns = {*table.column_names, *self.added}
        for row, copies in changed.items():
            unknown = [change.path[0] for copy in copies for change in copy if change.path[0] not in columns]
            if unknown:
                raise StorageError(
                    f"{self._source}: row {row}: the repair adds a column {unknown[0]!r} that the file does not "
                    f"have.\nThe columns of {self._what} are kept, so the repaired file cannot be written. "
                    "Write the log with that column, or as JSONL, or leave the repair out."
                )
        for name in self.added:
            if name not in table.column_names:
                table = table.append_column(pa.field(name, pa.string()), pa.nulls(len(table), pa.string()))
        edited_columns = [self._column(table, place, first, changed) for place in range(table.num_columns)]
        return pa.table(edited_columns, schema=table.schema)

    def _column(self, table: Any, place: int, first: int, changed: Mapping[int, Copies]) -> Any:
        """One column, with the values of changed rows spliced in."""
        field, column = table.schema.field(place), table.column(place)
        # If several columns share a name, a row shows the last.
        shown = place == table.schema.get_all_field_indices(field.name)[-1]
        rows = {row: [below(field.name, copy) if shown else [] for copy in changed[row]] for row in changed}
        if all(copies == [[]] for copies in rows.values()):
            return column
        pieces, start = [], 0
        for row, copies in rows.items():
            pieces += column.slice(start, row - first - start).chunks
            start = row - first + 1
            for changes in copies:
                if not changes:
                    pieces += column.slice(start - 1, 1).chunks
                    continue
                if field.name in self.added and is_text(field.type):
                    changes = [Change(change.path, change.old, as_text(change.new)) for change in changes]
                try:
                    pieces.append(edited(field, column, start - 1, changes))
                except (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException) as error:
                    kind = str(field.type)
                    kind = kind if len(kind) <= 80 else f"{kind[:77]}..."
                    raise StorageError(
                        f"{self._source}: row {row}, column {field.name!r}: the repaired value does not fit the "
                        f"column's type {kind} ({error}).\n"
                        f"The types of {self._what} are kept, so the repaired file cannot be written. Write the "
                        "log with a type that can hold the value, or as JSONL, or leave the repair out."
                    ) from error
        pieces += column.slice(start).chunks
        joined = pa.chunked_array(pieces, column.type)
        # The writer drops dictionary encoding if pieces have different dictionaries.
        return joined.unify_dictionaries() if pa.types.is_dictionary(column.type) else joined


def below(name: str, changes: Sequence[Change]) -> list[Change]:
    """The changes of one column, with paths relative to its value."""
    return [Change(change.path[1:], change.old, change.new) for change in changes if change.path[0] == name]


def as_text(value: Any) -> Any:
    """An object as JSON; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


class TableOutput(ABC):
    """A table written again with some rows replaced; everything no change touches passes through as Arrow data.

    Rows come in file order. One batch (a row group or a record batch) is in memory at a time and is written as one
    batch. Nothing is read or written before the first changed row.
    """

    def __init__(self, source: Path, out: BinaryIO, edit: TableEdit) -> None:
        self.changed = False
        self.not_kept: Sequence[str] = ()
        self._source = source
        self._out = out
        self._edit = edit
        self._rows: dict[int, Copies] = {}
        """The changed rows of the next batch to write, by row of the file."""
        self._batches = self._writing()
        self._stop: int | None = None
        """The row after the next batch to write; None after the last."""

    @abstractmethod
    def _writing(self) -> Generator[int, None, None]:
        """Write the file, batch by batch; before each, the row after its last: then all its changes are known."""

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""
        if self.changed:
            self._write_before(raw.index)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        copies = [changes_between(raw.value, row) for row in rows]
        if not self.changed:
            self.changed, self._stop = True, next(self._batches, None)
        self._write_before(raw.index)
        self._rows[raw.index] = copies

    def finish(self, log: object) -> None:
        """Write the remaining batches."""
        self._write_before(None)

    def abandon(self) -> None:
        """Close what is open; nothing more is written."""
        self._batches.close()

    def _write_before(self, row: int | None) -> None:
        """Write the batches that end at or before this row of the file; None: all of them."""
        while self._stop is not None and (row is None or self._stop <= row):
            self._stop = next(self._batches, None)
            self._rows = {}


def unwritable(source: Path, why: str) -> StorageError:
    """The error for a part of a table that cannot be read, so that the table cannot be written again."""
    return StorageError(
        f"{source}: {why}, so the file cannot be written again with its repairs.\n"
        "The copy is incomplete or damaged; copy it again, or write it again."
    )
