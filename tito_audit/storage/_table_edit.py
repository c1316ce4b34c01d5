"""TableEdit: tables with some rows changed and the rest of each column as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tito_audit.errors import StorageError
from tito_audit.storage._arrow_edit import Change, conversion_errors, edited, is_text

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
        import pyarrow as pa

        for name in self.added:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return schema

    def table(self, table: Any, first: int, changed: Mapping[int, Copies]) -> Any:
        """The table with rows changed, forked and dropped; its first row is row `first` of the file."""
        import pyarrow as pa

        self.check_names(table.column_names, changed)
        for name in self.added:
            if name not in table.column_names:
                table = table.append_column(pa.field(name, pa.string()), pa.nulls(len(table), pa.string()))
        columns = [self._column(table, place, first, changed) for place in range(table.num_columns)]
        return pa.table(columns, schema=table.schema)

    def _column(self, table: Any, place: int, first: int, changed: Mapping[int, Copies]) -> Any:
        """One column, with the values of changed rows spliced in."""
        import pyarrow as pa

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
                same = column.slice(start - 1, 1).chunks
                pieces += [self._value(field, column, row, start - 1, changes)] if changes else same
        pieces += column.slice(start).chunks
        joined = pa.chunked_array(pieces, column.type)
        # The writer drops dictionary encoding if pieces have different dictionaries.
        return joined.unify_dictionaries() if pa.types.is_dictionary(column.type) else joined

    def _value(self, field: Any, column: Any, row: int, place: int, changes: list[Change]) -> Any:
        """The new value of one row in one column, as an Arrow array of length 1."""
        if field.name in self.added and is_text(field.type):
            changes = [Change(change.path, change.old, as_text(change.new)) for change in changes]
        try:
            return edited(field, column, place, changes)
        except conversion_errors() as error:
            raise StorageError(
                f"{self._source}: row {row}, column {field.name!r}: the repaired value does not fit the "
                f"column's type {_shortened(field.type)} ({error}).\n"
                f"The types of {self._what} are kept, so the repaired file cannot be written. Write the log "
                "with a type that can hold the value, or as JSONL, or leave the repair out."
            ) from error

    def check_names(self, names: Sequence[str], changed: Mapping[int, Copies]) -> None:
        """StorageError if a change is of a column that is not among these."""
        known = {*names, *self.added}
        for row, copies in changed.items():
            unknown = [change.path[0] for copy in copies for change in copy if change.path[0] not in known]
            if unknown:
                raise StorageError(
                    f"{self._source}: row {row}: the repair adds a column {unknown[0]!r} that the file does not "
                    f"have.\nThe columns of {self._what} are kept, so the repaired file cannot be written. "
                    "Write the log with that column, or as JSONL, or leave the repair out."
                )


def below(name: str, changes: Sequence[Change]) -> list[Change]:
    """The changes of one column, with paths relative to its value."""
    return [Change(change.path[1:], change.old, change.new) for change in changes if change.path[0] == name]


def as_text(value: Any) -> Any:
    """An object as JSON; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


def _shortened(kind: Any) -> str:
    text = str(kind)
    return text if len(text) <= 80 else f"{text[:77]}..."
