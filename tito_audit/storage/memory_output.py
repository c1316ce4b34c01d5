"""MemoryOutput: rows in memory with some of them changed, as the caller had them, and in a new file if wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.storage.given import arrow_rows, content_of, is_a, table_of_pandas
from tito_audit.storage.in_memory import ArrowRows, Objects, OnceRead, RowsInMemory, batch_of, edited, spans
from tito_audit.storage.log import Log
from tito_audit.storage.new_log import ColumnTypes, kind_of_name, new_log, writer_of
from tito_audit.storage.output import Output, nested_output
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.table_edit import Copies, TableEdit, as_text, changes_between


class MemoryOutput:
    """Collects the changes of rows in memory; `result` is set by `finish`."""

    def __init__(
        self, path: RowsInMemory, added: tuple[str, ...], target: Path | None, *, stack: ExitStack, overwrite: bool
    ) -> None:
        """`added` names text columns that a table may get; a file that is written appears when `stack` ends."""
        self.changed = False
        self.result = path
        """The repaired rows, as a path."""
        self.target = target
        """The file to write; None: the rows stay in memory."""
        self._path = path
        self._added = added
        self._stack = stack
        self._overwrite = overwrite
        self._rows: dict[int, Copies] = {}

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Put these rows in the place of one: none drops it, several are a fork."""
        copies = [changes_between(raw.value, row) for row in rows]
        if copies != [[]]:
            self.changed = True
            self._rows[raw.index] = copies

    def finish(self, log: Log) -> None:
        """Make the repaired rows, and write them to the target if there is one; StorageError if a column cannot
        hold a repaired value. What no repair changed is shared with what the caller gave."""
        value, content = self._path.value, self._path.content
        once = isinstance(content, OnceRead)
        if isinstance(content, OnceRead):
            content = content.rows
        if isinstance(content, Objects):
            rows = self._objects(content)
            content = Objects(rows, content.kind, lean=content.lean)
            if content.kind == "frame":
                value = self._frame(value, lambda name: [row.get(name, np.nan) for row in rows])
            elif once and is_a(value, "datasets", "IterableDataset"):
                value = type(value).from_generator(lambda: iter(rows))
            else:
                value = tuple(rows) if isinstance(value, tuple) else rows
        elif self.changed or once:
            assert isinstance(content, ArrowRows), "what is no objects is read as Arrow"
            table = self._table(content)
            content = arrow_rows(table)
            if is_a(value, "datasets", "Dataset", "IterableDataset"):
                value = _dataset(value, table)
            elif is_a(value, "pandas", "DataFrame"):
                value = self._frame(value, lambda name: table.column(str(name)).to_pandas().array)
            elif is_a(value, "polars", "DataFrame"):
                value = _polars(value, table)
            elif once:
                value = table.to_reader()
            else:
                value = batch_of(table) if is_a(value, "pyarrow", "RecordBatch") else table
        elif is_a(value, "pandas", "DataFrame"):
            value = value.copy()
        if is_a(value, "pandas", "DataFrame") or is_a(value, "polars", "DataFrame"):
            content = content_of(value) or content
        self.result = RowsInMemory.of(str(self._path), content, value)
        if self.target is not None:
            _write(self.result, self.target, self._stack, overwrite=self._overwrite)

    def _objects(self, content: Objects) -> list[Any]:
        rows: list[Any] = []
        for number in range(len(content)):
            row, copies = content.values[number], self._rows.get(number)
            if copies is None:
                rows.append(row)
                continue
            for changes in copies:
                now = row
                for change in changes:
                    text = content.kind == "frame" and change.path[0] in self._added
                    now = edited(now, change.path, as_text(change.new) if text else change.new, change.old)
                rows.append(now)
        return rows

    def _table(self, content: ArrowRows) -> Any:
        """An Arrow table with the changes; parts without any are shared."""
        edit, pieces = TableEdit(self._path, "a table", self._added if self._rows else ()), []
        for start, stop in spans(content):
            here = {row: copies for row, copies in self._rows.items() if start <= row < stop}
            pieces.append(edit.table(content.table(start, stop), start, here))
        return pa.concat_tables(pieces) if pieces else content.table(0, 0)

    def _frame(self, frame: Any, cells: Callable[[Any], Any]) -> Any:
        """A pandas frame with `cells(name)` in the columns that change; the others keep type and values, and rows
        their label.
        """
        import pandas as pd

        if not self._rows:
            return frame.copy()
        result = frame.iloc[self._positions(len(frame))].copy()
        places = {str(name): number for number, name in enumerate(frame.columns)}
        changed = (change for copies in self._rows.values() for copy in copies for change in copy)
        touched = dict.fromkeys(str(change.path[0]) for change in changed)
        for name in (*touched, *(name for name in self._added if name not in touched and name not in places)):
            place = places.get(name)
            if place is None:
                result[name] = [None if isinstance(cell, float) else cell for cell in cells(name)]
            else:
                dtype = frame.dtypes.iloc[place]
                try:
                    column = pd.Series(cells(frame.columns[place]), index=result.index).astype(dtype)
                except (ArithmeticError, TypeError, ValueError) as error:
                    raise StorageError(
                        f"{self._path}: column {name!r}: a repaired value does not fit its type {dtype} "
                        f"({error}).\nThe types of a frame are kept, so there is no repaired frame. Pass one with "
                        "a type that can hold the value, or a list of dicts."
                    ) from error
                result.isetitem(place, column)
        return result

    def _positions(self, count: int) -> NDArray[np.int64]:
        """`[N]` for each row of the result, the row that it is made from."""
        times = np.ones(count, np.int64)
        for row, copies in self._rows.items():
            times[row] = len(copies)
        return np.repeat(np.arange(count), times)


def _dataset(dataset: Any, table: Any) -> Any:
    """A data set of a table with the features of another, its split and, if it can be indexed, its format."""
    from datasets import Dataset, Features, Value  # imported already: the caller has one of its objects

    features, info = dict(dataset.features), dataset.info.copy()
    new = [name for name in table.column_names if name not in features]
    info.features = Features({**features, **{name: Value("string") for name in new}})
    made = Dataset(table.replace_schema_metadata(None), info=info, split=dataset.split)
    if is_a(dataset, "datasets", "IterableDataset"):
        return made.to_iterable_dataset()
    form = dataset.format
    if form["type"] is not None:
        options = {"output_all_columns": form["output_all_columns"], **form["format_kwargs"]}
        made.set_format(form["type"], columns=[*form["columns"], *new], **options)
    return made


def _polars(frame: Any, table: Any) -> Any:
    import polars as pl

    types = {**dict.fromkeys(table.column_names, pl.String), **frame.schema}
    return pl.from_arrow(table).cast(types)


@contextmanager
def open_memory_output(
    log: Log, path: RowsInMemory, target: Path | None, *, overwrite: bool, added: tuple[str, ...]
) -> Iterator[tuple[MemoryOutput, Output]]:
    """An output for rows in memory, and the output to give its rows to.

    With a `target`, a file of the kind that its suffix names appears when the block ends, or never.
    """
    if target is not None and not isinstance(target, RemoteFile):
        refuse_target(target, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        whole = MemoryOutput(path, added, target, stack=stack, overwrite=overwrite)
        moved = added if log.kind == "frame" else ()
        yield whole, whole if log.inside is None else nested_output(whole, moved)


def memory_targets(files: Sequence[RowsInMemory], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log in memory: `out` itself for a single one, else a file in the folder `out`.

    SetupError if the suffix of a file is not one that can be written.
    """
    if len(files) == 1 and not out.is_dir():
        kind_of_name(out)
        return {files[0]: out}
    if out.exists() and not out.is_dir():
        raise SetupError(f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder.")
    return {file: out / _file_name(file) for file in files}


def _file_name(file: RowsInMemory) -> str:
    """The name of the file for a log in memory; objects go into JSONL, tables into Parquet."""
    name = str(file.name).strip("<>").replace(" ", "-")
    with contextlib.suppress(SetupError):
        kind_of_name(Path(name))
        return name
    return name + (".jsonl" if file.content.kind == "objects" else ".parquet")


def _write(rows: RowsInMemory, target: Path, stack: ExitStack, *, overwrite: bool) -> None:
    """Write rows as the kind of file that the suffix names."""
    content, to_table = rows.content, kind_of_name(target)[0] == "table"
    if to_table and is_a(rows.value, "pandas", "DataFrame"):
        table = table_of_pandas(rows.value)
        content = content if table is None else ArrowRows.of(table)
    if to_table and isinstance(content, ArrowRows):
        out = stack.enter_context(new_file(target, overwrite=overwrite))
        writer = writer_of(out, content.table(0, 0).schema, target.suffix.lower())
        for start, stop in spans(content):
            writer.write_table(content.table(start, stop))
        writer.close()
        return
    shapes = ColumnTypes()
    for row in _plain_rows(rows) if to_table else ():
        shapes.learn(row)
    log = stack.enter_context(new_log(target, overwrite=overwrite, shapes=shapes))
    for row in _plain_rows(rows):
        try:
            log.add(row)
        except TypeError as error:
            raise StorageError(
                f"{rows}: the rows cannot be written to {target} ({error}), so nothing was written.\n"
                "Name it .parquet, or convert that column first."
            ) from error
    log.finish()


def _plain_rows(rows: RowsInMemory) -> Iterator[Row]:
    for start, stop in spans(rows.content):
        for raw in rows.content.part(start, stop).rows(range(start, stop), 1 << 62):
            if raw.value is None:
                raise StorageError(
                    f"{rows}: row {raw.index} cannot be written, so nothing was written: {raw.error}."
                )
            yield raw.value
