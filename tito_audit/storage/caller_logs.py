"""What a caller may pass as logs: paths, or rows in memory of any of several packages.

MemoryOutput returns such rows with some changed, in the form that the caller had them, and writes them to a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.storage.in_memory import (
    PANDAS_MISSING,
    UNNAMED_ROWS,
    ObjectRows,
    OneTimeRows,
    RowsInMemory,
    SpooledObjects,
    edit_object,
    spool_table,
)
from tito_audit.storage.log import Log
from tito_audit.storage.new_log import ColumnTypes, new_log, output_kind, table_writer
from tito_audit.storage.output import NestedOutput, Output
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.table_edit import FileOutput, RowCopies, TableEdit, changes_between, json_text
from tito_audit.storage.table_rows import ArrowRows, MemoryContent, row_spans, to_batch

Logs: TypeAlias = str | Path | Sequence[str | Path] | Any
"""A path, several paths, or rows: a list of dicts, a pandas or polars DataFrame, a pyarrow Table, RecordBatch or
RecordBatchReader, a `datasets` Dataset or IterableDataset; or several of these, in a list or with their names in
a dict, as in a DatasetDict."""
Name: TypeAlias = str | Path
"""What a run calls a log: the path that the caller passed, or a RowsInMemory."""

_ACCEPTED = (
    "Pass a path, a list of paths, or rows: a list of dicts, a pandas or polars DataFrame, a pyarrow Table, "
    "RecordBatch or RecordBatchReader, a datasets Dataset or IterableDataset, or a dict with a name for each."
)
_SEARCHED = 64
"""Entries of a list that are searched for a row."""
_MOST_KEYS = 3
"""Keys of a dict that a message lists at most."""


@dataclass(frozen=True, slots=True)
class PassedLogs:
    """The logs that a caller passed."""

    names: list[Name]
    together: Callable[[list[Any]], Any] | None = None
    """Puts rows together as the caller had them, from those of each name; None for paths."""


def passed_logs(logs: Logs) -> PassedLogs:
    """The logs that a caller passed, not yet read; SetupError for what is neither paths nor rows."""
    if isinstance(logs, str | os.PathLike):
        return PassedLogs([_checked_path(logs)])
    content = rows_in(logs)
    if content is not None:
        return PassedLogs([RowsInMemory.of(UNNAMED_ROWS, content, logs)], itemgetter(0))
    names: list[Name] = []
    if isinstance(logs, Mapping):
        for key, value in logs.items():
            content = rows_in(value)
            if content is None:
                keys = ", ".join(map(repr, list(logs)[:_MOST_KEYS])) + (", …" if len(logs) > _MOST_KEYS else "")
                raise SetupError(
                    f"logs: a dict names logs and their rows, and in this one, with the keys {keys}, {key!r} is "
                    f"{_describe(value)}.\n"
                    "Pass [row] for a single row, and pyarrow.table(columns) or pandas.DataFrame(columns) for "
                    "columns."
                )
            path = RowsInMemory.of(str(key), content, value)
            if path in names:
                raise SetupError(f"logs: two of the names are {str(path)!r}; give each log a name of its own.")
            names.append(path)
        kind: Any = type(logs)
        return PassedLogs(names, lambda values: kind(zip(logs, values, strict=True)))
    if not _is_iterable(logs):
        raise _not_logs_error(_describe(logs))
    entries: Sequence[Any] = logs if isinstance(logs, Sequence) else []
    if not isinstance(logs, Sequence):
        first: Any = next(rest := iter(logs), None)
        if isinstance(first, Mapping) or is_from(first, "pyarrow", "RecordBatch", "Table"):
            # An iterator of rows, which can be read only once.
            once = chain([first], rest)
            if isinstance(first, Mapping):
                content = OneTimeRows(lambda: ObjectRows(SpooledObjects(once)))
            else:
                _refuse_duplicate_columns(first.schema.names)
                content = OneTimeRows(lambda: spool_table(once))
            return PassedLogs([RowsInMemory.of(UNNAMED_ROWS, content, logs)], itemgetter(0))
        entries = [] if first is None else [first, *rest]
    if all(isinstance(entry, str | os.PathLike) for entry in entries):
        return PassedLogs([_checked_path(entry) for entry in entries])
    contents = [None if isinstance(entry, Sequence) else rows_in(entry) for entry in entries]
    if None in contents:
        raise _not_logs_error(_describe_list(logs, entries[contents.index(None)]))
    for number, (content, entry) in enumerate(zip(contents, entries, strict=True)):
        assert content is not None, "refused above"
        names.append(RowsInMemory.of(f"<rows {number}>", content, entry))
    return PassedLogs(names, tuple if isinstance(logs, tuple) else list)


def log_names(logs: Logs) -> list[Name]:
    """The names of the logs that a caller passed, paths or rows."""
    return passed_logs(logs).names


def log_paths(logs: str | Path | Iterable[str | Path]) -> list[str]:
    """The paths that a caller passed, one or several; SetupError for rows."""
    entries = [logs] if isinstance(logs, str | os.PathLike) else list(logs) if _is_iterable(logs) else [None]
    if not all(isinstance(entry, str | Path) for entry in entries):
        raise SetupError(
            f"logs: {_describe(logs)} is not a path.\nRows in memory can be scanned, gated, read and repaired; "
            "write them to a file for anything else."
        )
    return [str(entry) for entry in entries]


def _checked_path(path: str | os.PathLike[str]) -> Name:
    """A path as `find_logs` takes it; SetupError for the text of a row."""
    if isinstance(path, str) and path.lstrip().startswith('{"'):
        raise SetupError(
            "logs: this is the text of a row, not a path.\nPass [json.loads(line) for line in lines]."
        )
    return path if isinstance(path, RowsInMemory) else str(path) if isinstance(path, Path) else os.fspath(path)


def rows_in(value: Any) -> MemoryContent | OneTimeRows | None:
    """The rows that a value of a known type holds; None for anything else."""
    if is_from(value, "pyarrow", "RecordBatchReader"):
        _refuse_duplicate_columns(value.schema.names)
        return OneTimeRows(lambda: spool_table(value, value.schema))
    if is_from(value, "pyarrow", "Table", "RecordBatch"):
        return arrow_rows(value)
    if is_from(value, "datasets", "Dataset"):
        # Without its format and transform.
        stored, data = value.with_format("arrow"), value.data
        size = data.nbytes * len(value) // max(len(data), 1)
        return ArrowRows(len(value), size, lambda start, stop: stored[start:stop])
    if is_from(value, "datasets", "IterableDataset"):
        if value.features is None:
            return OneTimeRows(lambda: ObjectRows(SpooledObjects(value)))
        batches = value.with_format("arrow").iter
        return OneTimeRows(lambda: spool_table(batches(1024), value.features.arrow_schema))
    if is_from(value, "pandas", "DataFrame"):
        return _pandas_rows(value)
    if is_from(value, "polars", "DataFrame"):
        unknown = next((name for name, kind in value.schema.items() if _is_polars_only(kind)), None)
        if unknown is not None:
            raise SetupError(
                f"logs: the column {unknown!r} has the type {value.schema[unknown]}, which Arrow does not have.\n"
                "Drop or cast it, or pass frame.to_dicts()."
            )
        return ArrowRows(
            len(value), value.estimated_size(), lambda start, stop: value.slice(start, stop - start).to_arrow()
        )
    if is_from(value, "polars", "LazyFrame"):
        raise SetupError("logs: a polars LazyFrame is not computed yet.\nPass frame.collect().")
    if isinstance(value, RowsInMemory):
        return value.content
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        return None
    return ObjectRows(value) if any(isinstance(row, Mapping) for row in islice(value, _SEARCHED)) else None


def is_from(value: Any, package: str, *names: str) -> bool:
    """Whether a value is of one of these types of a package, which is not imported for that."""
    return any(base.__name__ in names and base.__module__.split(".")[0] == package for base in type(value).__mro__)


def _is_iterable(value: Any) -> bool:
    """Whether a value may be an iterable of logs or rows."""
    of_torch = any(base.__module__.split(".")[0] == "torch" for base in type(value).__mro__)
    bare = isinstance(value, str | bytes | bytearray) or hasattr(value, "dtype")
    return isinstance(value, Iterable) and not of_torch and not bare


def _refuse_duplicate_columns(names: Iterable[Any]) -> None:
    """SetupError if two columns have the same name, as rows could have only one of them."""
    seen: set[str] = set()
    for name in map(str, names):
        if name in seen:
            raise SetupError(f"logs: two of the columns are named {name!r}.\nRename or drop one of them.")
        seen.add(name)


def arrow_rows(table: Any) -> ArrowRows:
    """An Arrow table or record batch; SetupError if two columns have the same name."""
    _refuse_duplicate_columns(table.schema.names)
    return ArrowRows.of(pa.Table.from_batches([table]) if is_from(table, "pyarrow", "RecordBatch") else table)


def _pandas_rows(frame: Any) -> MemoryContent:
    """The rows of a pandas frame: as Arrow if it has types of Arrow, else as objects that share its cells.

    Cells that hold Python's lists or objects are read like JSON, others like those of a table. Tried instead:
    `pyarrow.Table.from_pandas` on 1,500 rows of 3,000 tokens takes as long as the rest of the scan and twice the
    memory of the frame, and refuses columns of several types.
    """
    _refuse_duplicate_columns(frame.columns)
    if any(str(dtype).endswith("[pyarrow]") for dtype in frame.dtypes):
        table = pandas_to_arrow(frame)
        if table is not None:
            return ArrowRows.of(table)
    columns = [frame.iloc[:, number] for number in range(frame.shape[1])]
    some = [cell for column in columns if column.dtype == object for cell in column.array[:_SEARCHED]]
    table_like = any(map(_has_array, some)) or not any(isinstance(cell, list | tuple | Mapping) for cell in some)
    # pandas turns a column of integers into floats if values are missing.
    floats = [column for column in columns if str(column.dtype) in ("float64", "float32") and column.hasnans]
    whole = {column.name for column in floats if (column.dropna() % 1 == 0).all()}
    rows: list[dict[Any, Any]] = []
    for cells in frame.to_dict("records"):
        row: dict[Any, Any] = {}
        for name, cell in cells.items():
            # pandas' own missing values.
            if (isinstance(cell, float) and cell != cell) or type(cell).__name__ in PANDAS_MISSING:
                row |= {name: None} if table_like else {}
            else:
                row[name] = int(cell) if name in whole else cell
        rows.append(row)
    return ObjectRows(rows, "frame", table_like=table_like)


def pandas_to_arrow(frame: Any) -> Any | None:
    """A pandas frame as an Arrow table; None if no type of Arrow fits a column."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError):  # a column of several types
        return None


def _has_array(cell: Any) -> bool:
    return isinstance(cell, np.ndarray) or (isinstance(cell, Mapping) and any(map(_has_array, cell.values())))


def _is_polars_only(kind: Any) -> bool:
    """Whether a type has parts that Arrow lacks: Python objects and integers of 128 bits."""
    inside = [field.dtype for field in getattr(kind, "fields", ())]
    inside += [kind.inner] if hasattr(kind, "inner") else []
    return kind.base_type().__name__ in ("Object", "Int128", "UInt128") or any(map(_is_polars_only, inside))


def _describe(value: Any) -> str:
    """What a caller passed, in words: `a list that holds a value of type torch.Tensor`."""
    kind = type(value)
    if value is None:
        return "None"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        entries: Iterator[Any] = iter(value)
        return _describe_list(value, next(entries, None)) if len(value) else f"an empty {kind.__name__}"
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}."
    return f"a value of type {module}{kind.__qualname__}"


def _describe_list(value: Any, entry: Any) -> str:
    return f"a {type(value).__name__} that holds {_describe(entry)}"


def _not_logs_error(what: str) -> SetupError:
    return SetupError(f"logs: {what} is neither paths nor rows.\n{_ACCEPTED}")


@dataclass
class MemoryOutput(FileOutput):
    """An output for rows in memory; `finish` makes `result` of the changes."""

    path: RowsInMemory
    added: tuple[str, ...]
    """Text columns that tables may get."""
    target: Path | None
    """The file to write as well, which appears when `stack` closes; None for none."""
    stack: ExitStack
    overwrite: bool
    _rows: dict[int, RowCopies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = self.path
        """The repaired rows, as a path."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        copies = [changes_between(raw.value, row) for row in rows]
        if copies != [[]]:
            self.changed = True
            self._rows[raw.index] = copies

    def finish(self, log: Log) -> None:
        """Make the changed rows, which share what did not change, and write the target, if there is one.

        StorageError if a column cannot hold a value.
        """
        value, content, once = self.path.value, self.path.content, self.path.is_one_time
        if isinstance(content, ObjectRows):
            rows: list[Any] = []
            for number in range(len(content)):
                for changes in self._rows.get(number, [[]]):
                    row = content.values[number]
                    for change in changes:
                        as_text = content.kind == "frame" and change.path[0] in self.added
                        new = json_text(change.new) if as_text else change.new
                        row = edit_object(row, change.path, new, change.old)
                    rows.append(row)
            content = ObjectRows(rows, content.kind, table_like=content.table_like)
            if content.kind == "frame":
                value = self._rebuild_frame(value, lambda name: [row.get(name, np.nan) for row in rows])
            elif once and is_from(value, "datasets", "IterableDataset"):
                value = type(value).from_generator(lambda: iter(rows))
            else:
                value = tuple(rows) if isinstance(value, tuple) else rows
        elif self.changed or once:
            assert isinstance(content, ArrowRows), "what is no objects is read as Arrow"
            edit, pieces = TableEdit(self.path, "a table", self.added if self._rows else ()), []
            for start, stop in row_spans(content):
                here = {row: copies for row, copies in self._rows.items() if start <= row < stop}
                pieces.append(edit.edit_table(content.table(start, stop), start, here))
            table = pa.concat_tables(pieces) if pieces else content.table(0, 0)
            content = arrow_rows(table)
            if is_from(value, "datasets", "Dataset", "IterableDataset"):
                value = _rebuild_dataset(value, table)
            elif is_from(value, "pandas", "DataFrame"):
                value = self._rebuild_frame(value, lambda name: table.column(str(name)).to_pandas().array)
            elif is_from(value, "polars", "DataFrame"):
                import polars as pl

                types = {**dict.fromkeys(table.column_names, pl.String), **value.schema}
                value = pl.from_arrow(table).cast(types)
            elif once:
                value = table.to_reader()
            else:
                value = to_batch(table) if is_from(value, "pyarrow", "RecordBatch") else table
        elif is_from(value, "pandas", "DataFrame"):
            value = value.copy()
        if is_from(value, "pandas", "DataFrame") or is_from(value, "polars", "DataFrame"):
            framed = rows_in(value)
            content = framed if isinstance(framed, MemoryContent) else content
        self.result = RowsInMemory.of(str(self.path), content, value)
        if self.target is not None:
            _write_file(self.result, self.target, self.stack, overwrite=self.overwrite)

    def _rebuild_frame(self, frame: Any, cells: Callable[[Any], Any]) -> Any:
        """A copy of a pandas frame with `cells(name)` in the columns that change; index and types stay."""
        import pandas as pd

        if not self._rows:
            return frame.copy()
        times = np.ones(len(frame), np.int64)
        for row, copies in self._rows.items():
            times[row] = len(copies)
        result = frame.iloc[np.repeat(np.arange(len(frame)), times)].copy()
        places = {str(name): number for number, name in enumerate(frame.columns)}
        changed = (change for copies in self._rows.values() for copy in copies for change in copy)
        touched = dict.fromkeys(str(change.path[0]) for change in changed)
        for name in (*touched, *(name for name in self.added if name not in touched and name not in places)):
            place = places.get(name)
            if place is None:
                result[name] = [None if isinstance(cell, float) else cell for cell in cells(name)]
            else:
                dtype = frame.dtypes.iloc[place]
                try:
                    column = pd.Series(cells(frame.columns[place]), index=result.index).astype(dtype)
                except (ArithmeticError, TypeError, ValueError) as error:
                    raise StorageError(
                        f"{self.path}: column {name!r}: a repaired value does not fit its type {dtype} "
                        f"({error}).\nThe types of a frame are kept, so there is no repaired frame. Pass one with "
                        "a type that can hold the value, or a list of dicts."
                    ) from error
                result.isetitem(place, column)
        return result


def _rebuild_dataset(dataset: Any, table: Any) -> Any:
    """A table as a data set of the same class, with the features, split and format of the old one."""
    from datasets import Dataset, Features, Value  # imported already: the caller has one of its objects

    features, info = dict(dataset.features), dataset.info.copy()
    new = [name for name in table.column_names if name not in features]
    info.features = Features({**features, **{name: Value("string") for name in new}})
    changed = Dataset(table.replace_schema_metadata(None), info=info, split=dataset.split)
    if is_from(dataset, "datasets", "IterableDataset"):
        return changed.to_iterable_dataset()
    form = dataset.format
    if form["type"] is not None:
        options = {"output_all_columns": form["output_all_columns"], **form["format_kwargs"]}
        changed.set_format(form["type"], columns=[*form["columns"], *new], **options)
    return changed


@contextmanager
def open_memory_output(
    log: Log, path: RowsInMemory, target: Path | None, *, overwrite: bool, added: tuple[str, ...]
) -> Iterator[tuple[MemoryOutput, Output]]:
    """An output for rows in memory, and the output that takes its rows, which differs if they are nested.

    With a `target`, that file appears when the block ends, or never.
    """
    if target is not None and not isinstance(target, RemoteFile):
        refuse_target(target, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        whole = MemoryOutput(path, added, target, stack, overwrite)
        moved = added if log.kind == "frame" else ()
        yield whole, whole if log.row_path is None else NestedOutput(whole, moved)


def memory_targets(files: Sequence[RowsInMemory], out: Path) -> Mapping[Path, Path]:
    """The target of each log in memory: `out` itself for a single one, else a file in the folder `out`.

    SetupError if the suffix of `out` is of no kind that is written.
    """
    if len(files) == 1 and not out.is_dir():
        output_kind(out)
        return {files[0]: out}
    if out.exists() and not out.is_dir():
        raise SetupError(f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder.")
    targets: dict[Path, Path] = {}
    for file in files:
        name = str(file.name).strip("<>").replace(" ", "-")
        try:
            output_kind(Path(name))
        except SetupError:  # objects go into JSONL, tables into Parquet
            name += ".jsonl" if file.content.kind == "objects" else ".parquet"
        targets[file] = out / name
    return targets


def _write_file(rows: RowsInMemory, target: Path, stack: ExitStack, *, overwrite: bool) -> None:
    content, to_table = rows.content, output_kind(target)[0] == "table"
    if to_table and is_from(rows.value, "pandas", "DataFrame"):
        table = pandas_to_arrow(rows.value)
        content = content if table is None else ArrowRows.of(table)
    if to_table and isinstance(content, ArrowRows):
        out = stack.enter_context(new_file(target, overwrite=overwrite))
        writer = table_writer(out, content.table(0, 0).schema, target.suffix.lower())
        for start, stop in row_spans(content):
            writer.write_table(content.table(start, stop))
        writer.close()
        return
    column_types = ColumnTypes()
    for row in _plain_rows(rows) if to_table else ():
        column_types.learn(row)
    log = stack.enter_context(new_log(target, overwrite=overwrite, column_types=column_types))
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
    """All rows as dicts; StorageError if one cannot be written."""
    for start, stop in row_spans(rows.content):
        for raw in rows.content.part(start, stop).rows(range(start, stop), 1 << 62):
            if raw.value is None:
                raise StorageError(
                    f"{rows}: row {raw.index} cannot be written, so nothing was written: {raw.error}."
                )
            yield raw.value
