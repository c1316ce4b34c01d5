"""rebuilt: rows in memory with some of them repaired, as an object of the kind that the caller has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.edits import ABSENT
from tito_audit.storage._arrow_edit import Change
from tito_audit.storage._table_edit import Copies, TableEdit, as_text, below
from tito_audit.storage.given import arrow_rows, content_of, is_a, is_object, is_of_polars
from tito_audit.storage.held import ArrowRows, Content, Objects, batch_of
from tito_audit.storage.in_memory import RowsInMemory, spans
from tito_audit.storage.once_read import OnceRead
from tito_audit.storage.plain import edited

_WHAT = "a table"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Repaired rows."""

    value: Any
    """As the caller had them; what no repair changed is shared with what the caller gave."""
    content: Content
    """As they are read."""


def rebuilt(path: RowsInMemory, changed: Mapping[int, Copies], added: Sequence[str]) -> Rebuilt:
    """The rows with these changes; `added` names text columns that a table may get.

    StorageError if a column cannot hold a repaired value.
    """
    value, content = path.value, path.content
    if isinstance(content, OnceRead):
        content = content.kept
    edit = _Edit(path, changed, tuple(added))
    if isinstance(content, Objects):
        return _of_objects(value, content, edit)
    if is_a(value, "pandas", "DataFrame"):
        frame = _pandas(value, edit) if changed else value.copy()
        return Rebuilt(frame, content_of(frame) or content)
    if is_a(value, "polars", "DataFrame"):
        frame = _polars(value, edit) if changed else value
        return Rebuilt(frame, content_of(frame) or content)
    assert isinstance(content, ArrowRows), "every other table is read as Arrow"
    if is_a(value, "datasets", "Dataset", "IterableDataset"):
        return _of_dataset(value, content, edit)
    table = edit.table(content)
    rows = arrow_rows(table)
    if is_a(value, "pyarrow", "RecordBatch"):
        return Rebuilt(batch_of(table) if changed else value, rows)
    if is_a(value, "pyarrow", "Table"):
        return Rebuilt(table if changed else value, rows)
    return Rebuilt(table.to_reader(), rows)


@dataclass(frozen=True, slots=True)
class _Edit:
    """The changes of some rows."""

    path: Path
    changed: Mapping[int, Copies]
    added: tuple[str, ...]

    def table(self, content: ArrowRows) -> Any:
        """An Arrow table with the changes; parts without any are shared."""
        import pyarrow as pa

        added = self.added if self.changed else ()
        edit, pieces = TableEdit(self.path, _WHAT, added), []
        for start, stop in spans(content):
            here = {row: copies for row, copies in self.changed.items() if start <= row < stop}
            pieces.append(edit.table(content.table(start, stop), start, here))
        return pa.concat_tables(pieces) if pieces else content.table(0, 0)

    def columns(self) -> set[str]:
        """The names of the columns in which something changes."""
        return {str(one.path[0]) for copies in self.changed.values() for copy in copies for one in copy}

    def positions(self, count: int) -> NDArray[np.int64]:
        """`[N]` for each row of the result, the row that it is made from."""
        times = np.ones(count, np.int64)
        for row, copies in self.changed.items():
            times[row] = len(copies)
        return np.repeat(np.arange(count), times)

    def column(self, name: str, column: Any) -> Any:
        """One Arrow column with the changes."""
        import pyarrow as pa

        table = pa.table({name: column})
        only = {row: [_of(name, copy) for copy in copies] for row, copies in self.changed.items()}
        edit = TableEdit(self.path, _WHAT, (name,) if name in self.added else ())
        return edit.table(table, 0, only).column(0)

    def cells(self, name: str, cells: Sequence[Any]) -> list[Any]:
        """The cells of a column of Python objects with the changes."""
        result: list[Any] = []
        for row, cell in enumerate(cells):
            copies = self.changed.get(row)
            if copies is None:
                result.append(cell)
            else:
                result += [_cell(cell, below(name, copy), text=name in self.added) for copy in copies]
        return result


def _of(name: str, changes: Sequence[Change]) -> list[Change]:
    return [change for change in changes if change.path[0] == name]


def _cell(cell: Any, changes: Sequence[Change], *, text: bool) -> Any:
    for change in changes:
        new = as_text(change.new) if text else change.new
        cell = None if not change.path and new is ABSENT else edited(cell, change.path, new, change.old)
    return cell


def _of_objects(value: Any, content: Objects, edit: _Edit) -> Rebuilt:
    rows: list[Any] = []
    for number in range(len(content)):
        row, copies = content.values[number], edit.changed.get(number)
        if copies is None:
            rows.append(row)
            continue
        for changes in copies:
            now = row
            for change in changes:
                now = edited(now, change.path, change.new, change.old)
            rows.append(now)
    if is_a(value, "datasets", "IterableDataset"):
        return Rebuilt(type(value).from_generator(lambda: iter(rows)), Objects(rows))
    return Rebuilt(tuple(rows) if isinstance(value, tuple) else rows, Objects(rows))


def _of_dataset(dataset: Any, content: ArrowRows, edit: _Edit) -> Rebuilt:
    """The data set with its features, its split and, if it can be indexed, its format."""
    from datasets import Dataset, Features, Value  # imported already: the caller has one of its objects

    stream = is_a(dataset, "datasets", "IterableDataset")
    if not edit.changed and not stream:
        return Rebuilt(dataset, content)
    table, features, info = edit.table(content), dict(dataset.features), dataset.info.copy()
    new = [name for name in table.column_names if name not in features]
    info.features = Features({**features, **{name: Value("string") for name in new}})
    made = Dataset(table.replace_schema_metadata(None), info=info, split=dataset.split)
    rows = arrow_rows(table)
    if stream:
        return Rebuilt(made.to_iterable_dataset(), rows)
    form = dataset.format
    if form["type"] is not None:
        shown = [*form["columns"], *new]
        options = {"output_all_columns": form["output_all_columns"], **form["format_kwargs"]}
        made.set_format(form["type"], columns=shown, **options)
    return Rebuilt(made, rows)


def _polars(frame: Any, edit: _Edit) -> Any:
    """A polars frame; columns without changes keep their type and values."""
    import polars as pl

    new, touched = [], edit.columns()
    for name in frame.columns:
        if name not in touched:
            continue
        kind = frame.schema[name]
        if is_of_polars(kind):
            new.append(pl.Series(name, edit.cells(name, frame[name].to_list()), kind))
        else:
            column = edit.column(name, frame.select(name).to_arrow()[name])
            new.append(pl.Series(name, pl.from_arrow(column)).cast(kind))
    absent = [name for name in edit.added if name not in frame.columns]
    new += [pl.Series(name, edit.cells(name, [None] * len(frame)), pl.String) for name in absent]
    return frame[edit.positions(len(frame))].with_columns(new)


def _pandas(frame: Any, edit: _Edit) -> Any:
    """A pandas frame; columns without changes keep their type and values, rows their label."""
    import pandas as pd
    import pyarrow as pa

    result = frame.iloc[edit.positions(len(frame))].copy()
    touched = edit.columns()
    last = {str(name): number for number, name in enumerate(frame.columns)}
    for name, number in last.items():
        if name not in touched:
            continue
        column = frame.iloc[:, number]
        if is_object(frame, number):
            made = pd.Series(edit.cells(name, column.tolist()), index=result.index, dtype=object)
        else:
            values = edit.column(name, pa.Array.from_pandas(column))
            made = pd.Series(values.to_pandas().array, index=result.index).astype(column.dtype)
        result.isetitem(number, made)
    for name in edit.added:
        if name not in last:
            result[name] = edit.cells(name, [None] * len(frame))
    return result
