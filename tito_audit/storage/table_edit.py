"""Arrow tables with some rows changed; values that no change touches keep their exact bits."""

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
    """An edit, with the old value at its path."""

    path: Steps
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class _OldValues:
    """The old values around the place for which a new Arrow value is built, all of the same type."""

    here: Any
    """Arrow array of the values at this place in the changed row."""
    elsewhere: Any
    """Arrow array of values at this place in other rows."""
    old: Any = None
    """The plain value that `here` was read as, if it has one value."""


def changes_between(old: Any, new: Any) -> list[Change]:
    """The smallest changes that turn one row into another."""
    changes = []
    for edit in edits_between(old, new):
        value = old
        for step in edit.path:
            value = value.get(step) if isinstance(value, Mapping) else value[int(step)]
        changes.append(Change(edit.path, value, edit.value))
    return changes


def is_text_type(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    if isinstance(kind, pa.BaseExtensionType):
        return is_text_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return is_text_type(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _first_chunk(column: Any, start: int, length: int) -> Any:
    return next(chunk for chunk in column.slice(start, length).chunks if len(chunk))


def _edit_array(field: Any, array: Any, elsewhere: Any, changes: Sequence[Change]) -> Any:
    """An Arrow array of one value with changes applied, whose paths are relative to the value.

    `elsewhere` are other values of its column. Raises an ArrowException, or an error of Python's, if the type
    cannot hold the result.
    """
    kind = field.type
    for change in changes:
        if not change.path:
            return _build_array(field, [change.new], _OldValues(array, elsewhere, change.old))
    if isinstance(kind, pa.BaseExtensionType):
        storage = _edit_array(field.with_type(kind.storage_type), array.storage, elsewhere.storage, changes)
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_struct(kind):
        parts = [array.field(i) for i in range(kind.num_fields)]
        places = _indices(kind)
        for name, below in _by_first_step(changes).items():
            if name not in places:
                raise ValueError(_no_field(kind, name))
            i = places[str(name)]
            parts[i] = _edit_array(kind.field(i), parts[i], elsewhere.field(i), below)
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_map(kind):
        # If keys repeat, a row shows the last item.
        (keys, items), (_, far_items) = _map_pairs(array), _map_pairs(elsewhere)
        names = keys.to_pylist()
        for key, below in _by_first_step(changes).items():
            equal = [i for i, name in enumerate(names) if name == key]
            if below[0].new is ABSENT and not below[0].path:
                left = pa.array([i for i in range(len(names)) if i not in equal], pa.int64())
                keys, items = keys.take(left), items.take(left)
            elif equal:
                at = equal[-1]
                item = _edit_array(kind.item_field, items.slice(at, 1), far_items, below)
                items = pa.concat_arrays([items.slice(0, at), item, items.slice(at + 1)])
            else:
                fresh = _build_array(kind.item_field, [below[0].new], _OldValues(items, far_items))
                keys = pa.concat_arrays([keys, _build_array(kind.key_field, [key], _OldValues(keys, keys))])
                items = pa.concat_arrays([items, fresh])
            names = keys.to_pylist()
        return pa.MapArray.from_arrays(pa.array([0, len(keys)], pa.int32()), keys, items, type=kind)
    if is_list(kind):
        entries, far_entries = array.flatten(), elsewhere.flatten()
        pieces, start = [], 0
        for place, below in sorted(_by_first_step(changes).items()):
            index = int(place)
            pieces.append(entries.slice(start, index - start))
            pieces.append(_edit_array(kind.value_field, entries.slice(index, 1), far_entries, below))
            start = index + 1
        joined = pa.concat_arrays([*pieces, entries.slice(start)])
        return _list_array(kind, joined, [len(joined)])
    raise ValueError(f"a value of type {kind} has no parts")


def _by_first_step(changes: Sequence[Change]) -> dict[str | int, list[Change]]:
    """The changes grouped by the first step of their paths, with the rest of the path."""
    below: dict[str | int, list[Change]] = {}
    for change in changes:
        below.setdefault(change.path[0], []).append(Change(change.path[1:], change.old, change.new))
    return below


def _map_pairs(array: Any) -> tuple[Any, Any]:
    offsets = array.offsets
    low, high = offsets[0].as_py(), offsets[-1].as_py()
    return array.keys.slice(low, high - low), array.items.slice(low, high - low)


def _build_array(field: Any, values: Sequence[Any], before: _OldValues) -> Any:
    """Plain values, None and ABSENT among them, as an Arrow array of the field's type."""
    kind, here, elsewhere = field.type, before.here, before.elsewhere
    present = [value for value in values if value is not None and value is not ABSENT]
    if len(present) < len(values) and not field.nullable:
        raise ValueError(f"the field {field.name!r} must not be null")
    if isinstance(kind, pa.BaseExtensionType):
        storage = _build_array(
            field.with_type(kind.storage_type), values, _OldValues(here.storage, elsewhere.storage, before.old)
        )
        return pa.ExtensionArray.from_storage(kind, storage)
    if pa.types.is_dictionary(kind):
        decoded = _OldValues(here.dictionary_decode(), elsewhere.dictionary_decode(), before.old)
        return _build_array(field.with_type(kind.value_type), values, decoded).dictionary_encode().cast(kind)
    if not present:
        return pa.nulls(len(values), kind)
    array = _build_non_null(kind, present, before)
    if len(present) == len(values):
        return array
    counts = iter(range(len(present)))
    gap = pa.nulls(1, kind)
    absent = [value is None or value is ABSENT for value in values]
    return pa.concat_arrays([gap if empty else array.slice(next(counts), 1) for empty in absent])


def _build_non_null(kind: Any, values: list[Any], before: _OldValues) -> Any:
    """Plain values, none of them null, as an Arrow array of a type."""
    if pa.types.is_struct(kind):
        places = _indices(kind)
        for value in values:
            if not isinstance(value, Mapping):
                raise TypeError(f"an object was expected, not {_value_words(value)}")
            for name in value:
                if name not in places:
                    raise ValueError(_no_field(kind, name))
        parts = []
        for i in range(kind.num_fields):
            part = kind.field(i)
            # If two fields share a name, a row shows the last; the other has no value to build from.
            names = [value.get(part.name) if places[part.name] == i else None for value in values]
            parts.append(_build_array(part, names, _OldValues(before.here.field(i), before.elsewhere.field(i))))
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_map(kind):
        maps = [list(value.items()) if isinstance(value, Mapping) else list(value) for value in values]
        pairs = [pair for entries in maps for pair in entries]
        here, elsewhere = _map_pairs(before.here), _map_pairs(before.elsewhere)
        keys = _build_array(kind.key_field, [key for key, _ in pairs], _OldValues(here[0], elsewhere[0]))
        items = _build_array(kind.item_field, [item for _, item in pairs], _OldValues(here[1], elsewhere[1]))
        offsets = np.cumsum([0, *map(len, maps)]).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, items, type=kind)
    if is_list(kind):
        inside = _OldValues(before.here.flatten(), before.elsewhere.flatten(), before.old)
        lists = [_build_entries(kind.value_field, value, inside) for value in values]
        return _list_array(kind, pa.concat_arrays(lists), [len(entries) for entries in lists])
    if pa.types.is_temporal(kind) and all(isinstance(value, str) for value in values):
        if pa.types.is_duration(kind) or all(value.lstrip("-").isdigit() for value in values):
            counts = pa.array([int(value) for value in values], pa.int32() if kind.bit_width == 32 else pa.int64())
            return counts.view(kind)
        if pa.types.is_time(kind):
            # Arrow parses a time of day only as part of a timestamp.
            moments = pa.array([f"1970-01-01 {value}" for value in values], pa.string())
            return moments.cast(pa.timestamp(kind.unit)).cast(kind)
        return pa.array(values, pa.string()).cast(kind)
    if _is_number(kind):
        return _build_numbers(kind, values, nan_is_null=False)
    if pa.types.is_decimal(kind):
        return pa.array(
            [Decimal(repr(value) if isinstance(value, float) else value) for value in values], type=kind
        )
    return pa.array(values, type=kind)


def _build_entries(field: Any, value: Any, before: _OldValues) -> Any:
    """The entries of one list as an Arrow array; those of the old list are copied from it as Arrow data."""
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
        raise TypeError(f"a list was expected, not {_value_words(value)}")
    if _is_number(field.type):
        nan_is_null = field.nullable
        if field.nullable and pa.types.is_floating(before.here.type):
            # A missing float is written as in the old list, or else as in its column: as NaN, or as null.
            may_miss = not isinstance(value, np.ndarray) or np.isnan(value).any()
            for values in (before.here, before.elsewhere) if may_miss else ():
                has_nan = np.isnan(values.to_numpy(zero_copy_only=False)).sum() > values.null_count
                if has_nan or values.null_count:
                    nan_is_null = not has_nan
                    break
        return _build_numbers(field.type, value, nan_is_null=nan_is_null, nullable=field.nullable)
    around = _OldValues(before.here, before.elsewhere)
    # Plain values do not hold all of an extension or a time.
    opaque = isinstance(field.type, pa.BaseExtensionType) or pa.types.is_temporal(field.type)
    if not isinstance(before.old, list) or not (pa.types.is_nested(field.type) or opaque):
        return _build_array(field, list(value), around)
    places = {id(entry): i for i, entry in enumerate(before.old)}
    pieces = [before.here.slice(0, 0)]
    for entry in value:
        at = places.get(id(entry))
        pieces.append(_build_array(field, [entry], around) if at is None else before.here.slice(at, 1))
    return pa.concat_arrays(pieces)


def _list_array(kind: Any, entries: Any, sizes: Sequence[int]) -> Any:
    """Lists of these sizes over joined entries, as an Arrow array of any of its list types."""
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


@cache
def _indices(kind: Any) -> dict[str, int]:
    """The index of each field of an object; if names repeat, that of the last, which rows show."""
    return {kind.field(i).name: i for i in range(kind.num_fields)}


def _no_field(kind: Any, name: Any) -> str:
    return f"the objects of the column have no field {name!r} (they have {', '.join(map(repr, _indices(kind)))})"


def _value_words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "an object" if isinstance(value, Mapping) else type(value).__name__


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _build_numbers(kind: Any, values: Any, *, nan_is_null: bool, nullable: bool = True) -> Any:
    """Numbers as an Arrow array; only floats are rounded to its type, others have to fit exactly."""
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


RowCopies = list[list[Change]]
"""The changes of each row that is written instead of one: [] drops it, several are a fork."""


@dataclass(frozen=True, slots=True)
class TableEdit:
    """Changes rows of one file's tables; what no change touches passes through as Arrow data."""

    source: Path
    what: str
    """The kind of file, in words."""
    added: tuple[str, ...]
    """Text columns that changed rows may have and the source has not."""

    def edit_schema(self, schema: Any) -> Any:
        """The schema with the added columns."""
        for name in self.added:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return schema

    def edit_table(self, table: Any, first: int, changed: Mapping[int, RowCopies]) -> Any:
        """The table with rows changed, forked and dropped; it begins with row `first` of the file."""
        columns = {*table.column_names, *self.added}
        for row, copies in changed.items():
            unknown = [change.path[0] for copy in copies for change in copy if change.path[0] not in columns]
            if unknown:
                raise StorageError(
                    f"{self.source}: row {row}: the repair adds a column {unknown[0]!r} that the file does not "
                    f"have.\nThe columns of {self.what} are kept, so the repaired file cannot be written. "
                    "Write the log with that column, or as JSONL, or leave the repair out."
                )
        for name in self.added:
            if name not in table.column_names:
                table = table.append_column(pa.field(name, pa.string()), pa.nulls(len(table), pa.string()))
        edited_columns = [self._edit_column(table, place, first, changed) for place in range(table.num_columns)]
        return pa.table(edited_columns, schema=table.schema)

    def _edit_column(self, table: Any, place: int, first: int, changed: Mapping[int, RowCopies]) -> Any:
        """One column, with the values of changed rows spliced in."""
        field, column = table.schema.field(place), table.column(place)
        # If column names repeat, a row shows the last.
        shown = place == table.schema.get_all_field_indices(field.name)[-1]
        rows = {
            row: [_by_first_step(copy).get(field.name, []) if shown else [] for copy in copies]
            for row, copies in changed.items()
        }
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
                if field.name in self.added and is_text_type(field.type):
                    changes = [Change(change.path, change.old, json_text(change.new)) for change in changes]
                try:
                    # The first rows show how the column writes a missing float.
                    value, elsewhere = _first_chunk(column, start - 1, 1), _first_chunk(column, 0, 256)
                    pieces.append(_edit_array(field, value, elsewhere, changes))
                except (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException) as error:
                    kind = str(field.type)
                    kind = kind if len(kind) <= 80 else f"{kind[:77]}..."
                    raise StorageError(
                        f"{self.source}: row {row}, column {field.name!r}: the repaired value does not fit the "
                        f"column's type {kind} ({error}).\n"
                        f"The types of {self.what} are kept, so the repaired file cannot be written. Write the "
                        "log with a type that can hold the value, or as JSONL, or leave the repair out."
                    ) from error
        pieces += column.slice(start).chunks
        joined = pa.chunked_array(pieces, column.type)
        # The writer drops dictionary encoding if pieces have different dictionaries.
        return joined.unify_dictionaries() if pa.types.is_dictionary(column.type) else joined


def json_text(value: Any) -> Any:
    """An object as JSON text; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


class FileOutput:
    """A file of one kind written again with some rows replaced; a binary one is not finished if no row changes."""

    changed = False
    """Whether any row was changed, forked or dropped."""
    lost_features: Sequence[str] = ()
    """Features of the log's storage format that the written file lacks, in words; known after `finish`."""

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead."""
        raise NotImplementedError

    def finish(self, log: Any) -> None:
        """Write what follows the last row."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close what is open; nothing more is written."""


class TableOutput(FileOutput, ABC):
    """A table written again with some rows replaced; what no change touches passes through as Arrow data.

    Rows come in file order. One batch, a row group or a record batch, is in memory at a time and stays one batch.
    Nothing is read or written before the first changed row.
    """

    what: str
    """The kind of file, in words."""

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        self._source = source
        self._out = out
        self._edit = TableEdit(source, self.what, added)
        self._rows: dict[int, RowCopies] = {}
        """The changed rows of the next batch to write, by number in the file."""
        self._batches = self._batch_writer()
        self._stop: int | None = None
        """The row after the next batch to write; None after the last."""

    @abstractmethod
    def _batch_writer(self) -> Generator[int, None, None]:
        """Yields where each batch ends, and writes it when resumed: then its changes are known."""

    def keep(self, raw: RawRow) -> None:
        if self.changed:
            self._write_before(raw.index)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        copies = [changes_between(raw.value, row) for row in rows]
        if not self.changed:
            self.changed, self._stop = True, next(self._batches, None)
        self._write_before(raw.index)
        self._rows[raw.index] = copies

    def finish(self, log: Any) -> None:
        self._write_before(None)

    def abandon(self) -> None:
        self._batches.close()

    def _write_before(self, row: int | None) -> None:
        """Write the batches that end at or before this row; None: all."""
        while self._stop is not None and (row is None or self._stop <= row):
            self._stop = next(self._batches, None)
            self._rows = {}


def unwritable_error(source: Path, why: str) -> StorageError:
    """The error for a table that cannot be written again, as a part of it cannot be read."""
    return StorageError(
        f"{source}: {why}, so the file cannot be written again with its repairs.\n"
        "The copy is incomplete or damaged; copy it again, or write it again."
    )
