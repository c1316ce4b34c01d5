"""What a caller may pass as logs: paths, or rows that a program holds, whatever package made them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.record.edits import ABSENT
from tito_audit.storage.held import ArrowRows, Columns, Content, Objects, arrow_cells, cells, weight
from tito_audit.storage.in_memory import NAME, RowsInMemory
from tito_audit.storage.once_read import OnceRead, spooled_objects, spooled_table

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
_OF_POLARS = ("Object", "Int128", "UInt128")
"""Types of polars that Arrow does not have."""
_STREAMED = 1024
"""Rows of an IterableDataset that are read at once."""


@dataclass(frozen=True, slots=True)
class Given:
    """The logs that a caller passed."""

    names: list[Name]
    together: Callable[[list[Any]], Any] | None = None
    """Puts rows together as the caller had them, given those behind each name; None for paths."""


def given(logs: Logs) -> Given:
    """The logs that a caller passed; SetupError if it is neither paths nor rows. Rows are not read yet."""
    if isinstance(logs, str | os.PathLike):
        return Given([_path_name(logs)])
    content = content_of(logs)
    if content is not None:
        return Given([RowsInMemory.of(NAME, content, logs)], itemgetter(0))
    if isinstance(logs, Mapping):
        return _named(logs)
    if not _iterable(logs):
        raise _refused(_described(logs))
    entries: Sequence[Any] = logs if isinstance(logs, Sequence) else []
    if not isinstance(logs, Sequence):
        first = next(rest := iter(logs), None)
        if isinstance(first, Mapping) or is_a(first, "pyarrow", "RecordBatch", "Table"):
            return _once(logs, chain([first], rest), first)
        entries = [] if first is None else [first, *rest]
    if all(isinstance(entry, str | os.PathLike) for entry in entries):
        return Given([_path_name(entry) for entry in entries])
    contents = [None if isinstance(entry, Sequence) else content_of(entry) for entry in entries]
    known = [content for content in contents if content is not None]
    if len(known) < len(contents):
        raise _refused(_described_list(logs, entries[contents.index(None)]))
    pairs = enumerate(zip(known, entries, strict=True))
    return Given(
        [RowsInMemory.of(f"<rows {number}>", *pair) for number, pair in pairs],
        tuple if isinstance(logs, tuple) else list,
    )


def names_of(logs: Logs) -> list[Name]:
    """The names of the logs that a caller passed."""
    return given(logs).names


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


def _named(logs: Mapping[Any, Any]) -> Given:
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
    return Given(paths, lambda values: kind(zip(logs, values, strict=True)))


def _once(logs: Any, entries: Iterable[Any], first: Any) -> Given:
    """Rows of an iterator, which is read once."""
    if not isinstance(first, Mapping):
        _refuse_same_names(first.schema.names)
    read = spooled_objects if isinstance(first, Mapping) else spooled_table
    content = OnceRead("objects" if isinstance(first, Mapping) else "frame", lambda: read(entries))
    return Given([RowsInMemory.of(NAME, content, logs)], itemgetter(0))


def content_of(value: Any) -> Content | None:
    """Rows as what they are; None for a value that is no rows."""
    if is_a(value, "pyarrow", "RecordBatchReader"):
        _refuse_same_names(value.schema.names)
        return OnceRead("frame", lambda: spooled_table(value, value.schema))
    if is_a(value, "pyarrow", "Table", "RecordBatch"):
        return arrow_rows(value)
    if is_a(value, "datasets", "Dataset"):
        return _of_dataset(value)
    if is_a(value, "datasets", "IterableDataset"):
        return _of_stream(value)
    if is_a(value, "pandas", "DataFrame"):
        return _of_pandas(value)
    if is_a(value, "polars", "DataFrame"):
        return of_polars(value)
    if is_a(value, "polars", "LazyFrame"):
        raise SetupError("logs: a polars LazyFrame is not computed yet.\nPass frame.collect().")
    if isinstance(value, RowsInMemory):
        return value.content
    rows = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return Objects(value) if rows and any(isinstance(one, Mapping) for one in islice(value, _LOOKED_AT)) else None


def is_a(value: Any, package: str, *names: str) -> bool:
    """Whether a value is of one of these types; the package is not imported to find out."""
    return any(one.__name__ in names and one.__module__.split(".")[0] == package for one in type(value).__mro__)


def _iterable(value: Any) -> bool:
    """Whether the entries of a value may be logs or rows."""
    of_torch = any(one.__module__.split(".")[0] == "torch" for one in type(value).__mro__)
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
    if is_a(table, "pyarrow", "RecordBatch"):
        import pyarrow as pa

        table = pa.Table.from_batches([table])
    return ArrowRows(len(table), table.nbytes, lambda start, stop: table.slice(start, stop - start))


def _of_dataset(dataset: Any) -> ArrowRows:
    """A `datasets` Dataset as it is stored: its format and transform are not applied."""
    stored, data = dataset.with_format("arrow"), dataset.data
    size = data.nbytes * len(dataset) // max(len(data), 1)
    return ArrowRows(len(dataset), size, lambda start, stop: stored[start:stop])


def _of_stream(dataset: Any) -> OnceRead:
    """A `datasets` IterableDataset, which is read once."""
    if dataset.features is None:
        return OnceRead("objects", lambda: spooled_objects(dataset))
    batches = dataset.with_format("arrow").iter
    return OnceRead("frame", lambda: spooled_table(batches(_STREAMED), dataset.features.arrow_schema))


def _of_pandas(frame: Any) -> Columns:
    """A pandas frame: as JSON objects if it has Python's lists or objects, else as a table.

    A frame that was read from a table has its lists as arrays.
    """
    _refuse_same_names(frame.columns)
    size = int(frame.memory_usage(index=False).sum())
    objects = [frame.iloc[:, number].array for number in range(frame.shape[1]) if is_object(frame, number)]
    size += sum(map(weight, objects))
    some = [cell for column in objects for cell in column[:_LOOKED_AT]]
    lean = any(map(_has_array, some))
    lean |= not any(isinstance(cell, list | tuple | Mapping) for cell in some)
    lean |= any(str(dtype).endswith("[pyarrow]") for dtype in frame.dtypes)

    whole = [_is_whole(frame.iloc[:, number]) for number in range(frame.shape[1])]

    def columns(start: int, stop: int) -> Mapping[str, Sequence[Any]]:
        part, found = frame.iloc[start:stop], {}
        for number, name in enumerate(frame.columns):
            found[str(name)] = _pandas_cells(part.iloc[:, number], lean=lean, whole=whole[number])
        return found

    return Columns(len(frame), size, columns)


def _has_array(cell: Any) -> bool:
    """Whether a cell is an array, or an object with one inside."""
    return isinstance(cell, np.ndarray) or (isinstance(cell, Mapping) and any(map(_has_array, cell.values())))


def _is_whole(column: Any) -> bool:
    """Whether a column has floats, all without a fraction, only because some values are missing."""
    if str(column.dtype) not in ("float64", "float32") or not column.hasnans:
        return False
    return bool((column.dropna() % 1 == 0).all())


def is_object(frame: Any, number: int) -> bool:
    """Whether a column of a pandas frame holds Python objects."""
    return str(frame.dtypes.iloc[number]) == "object"


def _pandas_cells(column: Any, *, lean: bool, whole: bool) -> Sequence[Any]:
    """The values of a column; what is missing is None in a table, and absent from an object.

    `whole`: they are whole numbers, which pandas holds as floats because some are missing.
    """
    import pyarrow as pa

    missing = None if lean else ABSENT
    if str(column.dtype) == "object":
        return cells(column.tolist(), missing, lean=lean)
    try:
        values = arrow_cells(pa.Array.from_pandas(column))
    except (pa.ArrowException, TypeError):  # a type of pandas alone, such as Period
        values = [None if gone else str(one) for one, gone in zip(column, column.isna(), strict=True)]
    return [missing if value is None else int(value) if whole else value for value in values]


def is_of_polars(kind: Any) -> bool:
    """Whether polars has values of this type and Arrow does not: Python objects and integers of 128 bits."""
    inside = [field.dtype for field in getattr(kind, "fields", ())] or (
        [kind.inner] if hasattr(kind, "inner") else []
    )
    return kind.base_type().__name__ in _OF_POLARS or any(map(is_of_polars, inside))


def of_polars(frame: Any) -> Content:
    """A polars frame: as Arrow, unless it has columns that Arrow cannot hold."""
    objects = [name for name, kind in frame.schema.items() if is_of_polars(kind)]
    if not objects:
        return ArrowRows(
            len(frame), frame.estimated_size(), lambda start, stop: frame.slice(start, stop - start).to_arrow()
        )

    def columns(start: int, stop: int) -> Mapping[str, Sequence[Any]]:
        part = frame.slice(start, stop - start)
        typed = part.drop(objects).to_arrow()
        found = {name: arrow_cells(typed[name]) for name in typed.column_names}
        found |= {name: cells(part[name].to_list()) for name in objects}
        return {name: found[name] for name in frame.columns}

    return Columns(len(frame), frame.estimated_size(), columns)


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
