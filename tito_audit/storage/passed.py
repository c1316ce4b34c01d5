"""What a caller may pass as logs: paths, or rows that a program holds, whatever package made them.

MemoryOutput makes the same rows with some changed, as the caller had them, and a new file if one is wanted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
    MISSING,
    NAME,
    Objects,
    OnceRead,
    RowsInMemory,
    SpooledObjects,
    edited,
    spooled_table,
)
from tito_audit.storage.log import Log
from tito_audit.storage.new_log import ColumnTypes, kind_of_name, new_log, writer_of
from tito_audit.storage.output import NestedOutput, Output
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.table_edit import Copies, TableEdit, as_text, changes_between
from tito_audit.storage.table_rows import ArrowRows, MemoryContent, batch_of, spans

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
_LOOKED_AT = 64
"""How many entries of a list are searched for a row."""
_SHOWN = 3
"""Keys of a dict that a message lists."""


@dataclass(frozen=True, slots=True)
class PassedLogs:
    """The logs that a caller passed."""

    names: list[Name]
    together: Callable[[list[Any]], Any] | None = None
    """Puts rows together as the caller had them, given those behind each name; None for paths."""


def passed_logs(logs: Logs) -> PassedLogs:
    """The logs that a caller passed; SetupError if it is neither paths nor rows. Rows are not read yet."""
    if isinstance(logs, str | os.PathLike):
        return PassedLogs([_path_name(logs)])
    content = content_of(logs)
    if content is not None:
        return PassedLogs([RowsInMemory.of(NAME, content, logs)], itemgetter(0))
    if isinstance(logs, Mapping):
        return _named(logs)
    if not _iterable(logs):
        raise _refused(_described(logs))
    entries: Sequence[Any] = logs if isinstance(logs, Sequence) else []
    if not isinstance(logs, Sequence):
        first: Any = next(rest := iter(logs), None)
        if isinstance(first, Mapping) or is_a(first, "pyarrow", "RecordBatch", "Table"):
            # Rows of an iterator, which is read once.
            once = chain([first], rest)
            if isinstance(first, Mapping):
                content = OnceRead(lambda: Objects(SpooledObjects(once)))
            else:
                _refuse_same_names(first.schema.names)
                content = OnceRead(lambda: spooled_table(once))
            return PassedLogs([RowsInMemory.of(NAME, content, logs)], itemgetter(0))
        entries = [] if first is None else [first, *rest]
    if all(isinstance(entry, str | os.PathLike) for entry in entries):
        return PassedLogs([_path_name(entry) for entry in entries])
    contents = [None if isinstance(entry, Sequence) else content_of(entry) for entry in entries]
    if None in contents:
        raise _refused(_described_list(logs, entries[contents.index(None)]))
    names: list[Name] = []
    for number, (content, entry) in enumerate(zip(contents, entries, strict=True)):
        assert content is not None, "refused above"
        names.append(RowsInMemory.of(f"<rows {number}>", content, entry))
    return PassedLogs(names, tuple if isinstance(logs, tuple) else list)


def names_of(logs: Logs) -> list[Name]:
    """The names of the logs that a caller passed."""
    return passed_logs(logs).names


def paths_of(logs: str | Path | Iterable[str | Path]) -> list[str]:
    """The paths that a caller passed, one or several; SetupError for anything else."""
    entries = [logs] if isinstance(logs, str | os.PathLike) else list(logs) if _iterable(logs) else [None]
    if not all(isinstance(entry, str | Path) for entry in entries):
        raise SetupError(
            f"logs: {_described(logs)} is not a path.\nRows in memory can be scanned, gated, read and repaired; "
            "write them to a file for anything else."
        )
    return [str(entry) for entry in entries]


def _path_name(path: str | os.PathLike[str]) -> Name:
    """What names a path to `find_logs`: as it is shown, which is not always what opens it."""
    if isinstance(path, str) and path.lstrip().startswith('{"'):
        raise SetupError(
            "logs: this is the text of a row, not a path.\nPass [json.loads(line) for line in lines]."
        )
    return path if isinstance(path, RowsInMemory) else str(path) if isinstance(path, Path) else os.fspath(path)


def _named(logs: Mapping[Any, Any]) -> PassedLogs:
    """Several logs with their names."""
    paths: list[Name] = []
    for key, value in logs.items():
        content = content_of(value)
        if content is None:
            keys = ", ".join(map(repr, list(logs)[:_SHOWN])) + (", …" if len(logs) > _SHOWN else "")
            raise SetupError(
                f"logs: a dict names logs and their rows, and in this one, with the keys {keys}, {key!r} is "
                f"{_described(value)}.\n"
                "Pass [row] for a single row, and pyarrow.table(columns) or pandas.DataFrame(columns) for columns."
            )
        path = RowsInMemory.of(str(key), content, value)
        if path in paths:
            raise SetupError(f"logs: two of the names are {str(path)!r}; give each log a name of its own.")
        paths.append(path)
    kind: Any = type(logs)
    return PassedLogs(paths, lambda values: kind(zip(logs, values, strict=True)))


def content_of(value: Any) -> MemoryContent | OnceRead | None:
    """Rows as what they are; None for a value that is no rows."""
    if is_a(value, "pyarrow", "RecordBatchReader"):
        _refuse_same_names(value.schema.names)
        return OnceRead(lambda: spooled_table(value, value.schema))
    if is_a(value, "pyarrow", "Table", "RecordBatch"):
        return arrow_rows(value)
    if is_a(value, "datasets", "Dataset"):
        # As it is stored: its format and transform are not applied.
        stored, data = value.with_format("arrow"), value.data
        size = data.nbytes * len(value) // max(len(data), 1)
        return ArrowRows(len(value), size, lambda start, stop: stored[start:stop])
    if is_a(value, "datasets", "IterableDataset"):
        if value.features is None:
            return OnceRead(lambda: Objects(SpooledObjects(value)))
        batches = value.with_format("arrow").iter
        return OnceRead(lambda: spooled_table(batches(1024), value.features.arrow_schema))
    if is_a(value, "pandas", "DataFrame"):
        return _of_pandas(value)
    if is_a(value, "polars", "DataFrame"):
        unknown = next((name for name, kind in value.schema.items() if _is_of_polars(kind)), None)
        if unknown is not None:
            raise SetupError(
                f"logs: the column {unknown!r} has the type {value.schema[unknown]}, which Arrow does not have.\n"
                "Drop or cast it, or pass frame.to_dicts()."
            )
        return ArrowRows(
            len(value), value.estimated_size(), lambda start, stop: value.slice(start, stop - start).to_arrow()
        )
    if is_a(value, "polars", "LazyFrame"):
        raise SetupError("logs: a polars LazyFrame is not computed yet.\nPass frame.collect().")
    if isinstance(value, RowsInMemory):
        return value.content
    rows = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return Objects(value) if rows and any(isinstance(row, Mapping) for row in islice(value, _LOOKED_AT)) else None


def is_a(value: Any, package: str, *names: str) -> bool:
    """Whether a value is of one of these types; the package is not imported to find out."""
    return any(base.__name__ in names and base.__module__.split(".")[0] == package for base in type(value).__mro__)


def _iterable(value: Any) -> bool:
    """Whether the entries of a value may be logs or rows."""
    of_torch = any(base.__module__.split(".")[0] == "torch" for base in type(value).__mro__)
    bare = isinstance(value, str | bytes | bytearray) or hasattr(value, "dtype")
    return isinstance(value, Iterable) and not of_torch and not bare


def _refuse_same_names(names: Iterable[Any]) -> None:
    """SetupError if two columns of a table have the same name: a row could show only one of them."""
    seen: set[str] = set()
    for name in map(str, names):
        if name in seen:
            raise SetupError(f"logs: two of the columns are named {name!r}.\nRename or drop one of them.")
        seen.add(name)


def arrow_rows(table: Any) -> ArrowRows:
    """An Arrow table or record batch; SetupError if two columns have the same name."""
    _refuse_same_names(table.schema.names)
    return ArrowRows.of(pa.Table.from_batches([table]) if is_a(table, "pyarrow", "RecordBatch") else table)


def _of_pandas(frame: Any) -> MemoryContent:
    """A pandas frame: as Arrow if it has types of Arrow, else as objects that share its cells, as JSON has them if
    they hold Python's lists or objects, as a table has them if they hold arrays or neither.

    `pyarrow.Table.from_pandas`, tried for all on 1,500 rows of 3,000 tokens, takes as long as the rest of the scan
    and twice the memory of the frame, and refuses columns of several types.
    """
    _refuse_same_names(frame.columns)
    if any(str(dtype).endswith("[pyarrow]") for dtype in frame.dtypes):
        table = table_of_pandas(frame)
        if table is not None:
            return ArrowRows.of(table)
    columns = [frame.iloc[:, number] for number in range(frame.shape[1])]
    some = [cell for column in columns if column.dtype == object for cell in column.array[:_LOOKED_AT]]
    lean = any(map(_has_array, some)) or not any(isinstance(cell, list | tuple | Mapping) for cell in some)
    # Columns of floats, all without a fraction, only because some values are missing.
    floats = [column for column in columns if str(column.dtype) in ("float64", "float32") and column.hasnans]
    whole = {column.name for column in floats if (column.dropna() % 1 == 0).all()}
    rows: list[dict[Any, Any]] = []
    for cells in frame.to_dict("records"):
        row: dict[Any, Any] = {}
        for name, cell in cells.items():
            # No value, not even None.
            if (isinstance(cell, float) and cell != cell) or type(cell).__name__ in MISSING:
                row |= {name: None} if lean else {}
            else:
                row[name] = int(cell) if name in whole else cell
        rows.append(row)
    return Objects(rows, "frame", lean=lean)


def table_of_pandas(frame: Any) -> Any | None:
    """A pandas frame as an Arrow table; None if a column holds what no column of a table can."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError):  # a column of several types
        return None


def _has_array(cell: Any) -> bool:
    """Whether a cell is an array, or an object with one inside."""
    return isinstance(cell, np.ndarray) or (isinstance(cell, Mapping) and any(map(_has_array, cell.values())))


def _is_of_polars(kind: Any) -> bool:
    """Whether polars has values of this type and Arrow does not: Python objects and integers of 128 bits."""
    inside = [field.dtype for field in getattr(kind, "fields", ())]
    inside += [kind.inner] if hasattr(kind, "inner") else []
    return kind.base_type().__name__ in ("Object", "Int128", "UInt128") or any(map(_is_of_polars, inside))


def _described(value: Any) -> str:
    kind = type(value)
    if value is None:
        return "None"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        entries: Iterator[Any] = iter(value)
        return _described_list(value, next(entries, None)) if len(value) else f"an empty {kind.__name__}"
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}."
    return f"a value of type {module}{kind.__qualname__}"


def _described_list(value: Any, entry: Any) -> str:
    return f"a {type(value).__name__} that holds {_described(entry)}"


def _refused(what: str) -> SetupError:
    return SetupError(f"logs: {what} is neither paths nor rows.\n{_ACCEPTED}")


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
        copies = [changes_between(raw.value, row) for row in rows]
        if copies != [[]]:
            self.changed = True
            self._rows[raw.index] = copies

    def finish(self, log: Log) -> None:
        """Make the repaired rows, and write them to the target if there is one; StorageError if a column cannot
        hold a repaired value. What no repair changed is shared with what the caller gave."""
        value, content, once = self._path.value, self._path.content, self._path.once
        if isinstance(content, Objects):
            rows: list[Any] = []
            for number in range(len(content)):
                for changes in self._rows.get(number, [[]]):
                    row = content.values[number]
                    for change in changes:
                        text = content.kind == "frame" and change.path[0] in self._added
                        row = edited(row, change.path, as_text(change.new) if text else change.new, change.old)
                    rows.append(row)
            content = Objects(rows, content.kind, lean=content.lean)
            if content.kind == "frame":
                value = self._frame(value, lambda name: [row.get(name, np.nan) for row in rows])
            elif once and is_a(value, "datasets", "IterableDataset"):
                value = type(value).from_generator(lambda: iter(rows))
            else:
                value = tuple(rows) if isinstance(value, tuple) else rows
        elif self.changed or once:
            assert isinstance(content, ArrowRows), "what is no objects is read as Arrow"
            edit, pieces = TableEdit(self._path, "a table", self._added if self._rows else ()), []
            for start, stop in spans(content):
                here = {row: copies for row, copies in self._rows.items() if start <= row < stop}
                pieces.append(edit.table(content.table(start, stop), start, here))
            table = pa.concat_tables(pieces) if pieces else content.table(0, 0)
            content = arrow_rows(table)
            if is_a(value, "datasets", "Dataset", "IterableDataset"):
                value = _dataset(value, table)
            elif is_a(value, "pandas", "DataFrame"):
                value = self._frame(value, lambda name: table.column(str(name)).to_pandas().array)
            elif is_a(value, "polars", "DataFrame"):
                import polars as pl

                types = {**dict.fromkeys(table.column_names, pl.String), **value.schema}
                value = pl.from_arrow(table).cast(types)
            elif once:
                value = table.to_reader()
            else:
                value = batch_of(table) if is_a(value, "pyarrow", "RecordBatch") else table
        elif is_a(value, "pandas", "DataFrame"):
            value = value.copy()
        if is_a(value, "pandas", "DataFrame") or is_a(value, "polars", "DataFrame"):
            framed = content_of(value)
            content = framed if isinstance(framed, MemoryContent) else content
        self.result = RowsInMemory.of(str(self._path), content, value)
        if self.target is not None:
            _write(self.result, self.target, self._stack, overwrite=self._overwrite)

    def _frame(self, frame: Any, cells: Callable[[Any], Any]) -> Any:
        """A pandas frame with `cells(name)` in the columns that change; the others keep type and values, and rows
        their label.
        """
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


def _dataset(dataset: Any, table: Any) -> Any:
    """A data set of a table with the features of another, its split and, if it can be indexed, its format."""
    from datasets import Dataset, Features, Value  # imported already: the caller has one of its objects

    features, info = dict(dataset.features), dataset.info.copy()
    new = [name for name in table.column_names if name not in features]
    info.features = Features({**features, **{name: Value("string") for name in new}})
    changed = Dataset(table.replace_schema_metadata(None), info=info, split=dataset.split)
    if is_a(dataset, "datasets", "IterableDataset"):
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
    """An output for rows in memory, and the output to give its rows to.

    With a `target`, a file of the kind that its suffix names appears when the block ends, or never.
    """
    if target is not None and not isinstance(target, RemoteFile):
        refuse_target(target, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        whole = MemoryOutput(path, added, target, stack=stack, overwrite=overwrite)
        moved = added if log.kind == "frame" else ()
        yield whole, whole if log.inside is None else NestedOutput(whole, moved)


def memory_targets(files: Sequence[RowsInMemory], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log in memory: `out` itself for a single one, else a file in the folder `out`.

    SetupError if the suffix of a file is not one that can be written.
    """
    if len(files) == 1 and not out.is_dir():
        kind_of_name(out)
        return {files[0]: out}
    if out.exists() and not out.is_dir():
        raise SetupError(f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder.")
    targets: dict[Path, Path] = {}
    for file in files:
        name = str(file.name).strip("<>").replace(" ", "-")
        try:
            kind_of_name(Path(name))
        except SetupError:  # objects go into JSONL, tables into Parquet
            name += ".jsonl" if file.content.kind == "objects" else ".parquet"
        targets[file] = out / name
    return targets


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
