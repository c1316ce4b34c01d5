"""RowsInMemory: rows that a program holds, or yields once, as a path that is read like a log."""

from __future__ import annotations

import datetime
import decimal
import enum
import os
import pickle
import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.record.edits import ABSENT
from tito_audit.record.edits import Path as Steps
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import block_seed, no_object_reason
from tito_audit.storage.spool import Spool, unpack_entry
from tito_audit.storage.table_rows import ArrowRows, Block, MemoryContent, MemoryPart, PlainRows, first_line

_SIMPLE = frozenset({str, int, float, bool, bytes, type(None)})
"""Types that need no conversion."""
_CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    *((base, base) for base in (str, int, float)),
    (bytearray, bytes),
    ((datetime.date, datetime.time, datetime.timedelta, uuid.UUID), str),
    (decimal.Decimal, float),
    (os.PathLike, os.fsdecode),
)
"""What makes plain values of those of other types."""
PANDAS_MISSING = {"NAType", "NaTType"}
"""Names of the types of pandas' missing values."""


class NotLoggable(ValueError):
    """No log can hold a value; the message names its type."""


def plain_row(row: Mapping[Any, Any], *, table_like: bool = False) -> Row | str:
    """A copy of the row as a log holds it, or why none can.

    Arrays and tensors become numpy arrays, other numbers Python's, times text, missing values None. What is plain
    already is shared. With `table_like`, objects lose keys without a value, as those of tables do.
    """
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[str(name)] = plain_value(value, table_like=table_like)
        except NotLoggable as error:
            return f"column {str(name)!r} holds {error}"
    return plain


def plain_value(value: Any, *, table_like: bool = False) -> Any:
    """A value as a log holds it; NotLoggable if none can."""
    try:
        return _to_plain(value, table_like)
    except RecursionError:
        raise NotLoggable("values nested too deeply to be read") from None


def _to_plain(value: Any, table_like: bool) -> Any:
    """`plain_value`, but for values that are nested too deeply."""
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if isinstance(value, Mapping):
        plain = {str(key): _to_plain(entry, table_like) for key, entry in value.items()}
        if not table_like:
            return plain
        # pandas turns integers into floats where a value next to them is missing.
        whole = {
            key: int(entry) for key, entry in plain.items() if isinstance(entry, float) and entry.is_integer()
        }
        return {key: whole.get(key, entry) for key, entry in plain.items() if entry is not None}
    if kind is list:
        return value if set(map(type, value)) <= _SIMPLE else [_to_plain(entry, table_like) for entry in value]
    if isinstance(value, np.ndarray):
        return _plain_array(value, table_like)
    if _is_tensor(value):
        try:
            tensor = value.detach().cpu()
            if tensor.is_floating_point() and tensor.element_size() < 4:  # numpy has no bfloat16
                tensor = tensor.float()
            array: np.ndarray[Any, Any] = tensor.resolve_conj().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, quantized, nested, or without values
            raise NotLoggable(f"a tensor that is not an array ({str(error).splitlines()[0]})") from None
        return _plain_array(array, table_like)
    if hasattr(value, "as_py"):
        return _to_plain(value.as_py(), table_like)
    if hasattr(value, "__array__"):
        return _plain_array(np.asarray(value), table_like)
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview):
        return _to_plain(list(value), table_like)
    if kind.__name__ in PANDAS_MISSING and kind.__module__.startswith("pandas."):
        return None
    if isinstance(value, enum.Enum):
        return _to_plain(value.value, table_like)
    if isinstance(value, memoryview):
        return bytes(value) if value.format in ("B", "b", "c") else value.tolist()
    for types, convert in _CONVERSIONS:
        if isinstance(value, types):
            return convert(value)
    if kind.__module__.startswith("PIL."):
        return {"path": str(getattr(value, "filename", ""))}
    if kind.__module__.startswith("pandas."):  # a period or an interval
        return str(value)
    raise NotLoggable(f"a value of type {kind.__module__}.{kind.__qualname__}, which no log can hold")


def _plain_array(values: np.ndarray[Any, Any], table_like: bool) -> Any:
    """The same for an array: one of numbers with one dimension stays, others become lists or single values."""
    kind = values.dtype.kind
    if kind == "c":
        raise NotLoggable(f"numbers of {values.dtype}, which no log can hold")
    if values.ndim == 0:
        if kind == "f":
            return float(values)
        return str(values) if kind in "mM" else _to_plain(values.item(), table_like)
    if kind in "mM":
        return values.astype(str).tolist()
    if kind in "biuf":
        return values if values.ndim == 1 else [_plain_array(entry, table_like) for entry in values]
    if kind in "OUS":
        return _to_plain(values.tolist(), table_like)
    raise NotLoggable(f"an array of {values.dtype}, which no log can hold")


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def edit_object(original: Any, path: Steps, value: Any, old: Any = None) -> Any:
    """A copy of a program's value with the part at `path` replaced, or removed by ABSENT; the rest is shared.

    `old` is that part as a log holds it. Tensors, tuples and arrays keep their types.
    """
    if not path:
        # Entries that were in the old list are the program's own.
        if not isinstance(value, list) or not isinstance(old, list) or isinstance(original, Mapping | str):
            with_originals = value
        else:
            places = {id(entry): number for number, entry in enumerate(old)}
            with_originals = [original[places[id(entry)]] if id(entry) in places else entry for entry in value]
        return _restore_type(original, with_originals)
    head, rest = path[0], path[1:]
    if isinstance(original, Mapping):
        copy = dict(original)
        key = next((key for key in original if key == head or str(key) == head), head)
        if value is ABSENT and not rest:
            copy.pop(key, None)
        else:
            copy[key] = edit_object(original.get(key), rest, value, old)
        return copy
    entries = list(original)
    entries[int(head)] = edit_object(entries[int(head)], rest, value, old)
    return _restore_type(original, entries)


def _restore_type(original: Any, value: Any) -> Any:
    """A plain value as a tensor, tuple or array if the original is one; else as JSON has it."""
    if _is_tensor(original) and isinstance(value, list | np.ndarray):
        import torch

        return torch.as_tensor(np.asarray(value), dtype=original.dtype, device=original.device)
    if isinstance(original, np.ndarray) and isinstance(value, list):
        if original.dtype.kind == "O":
            array = np.empty(len(value), object)
            array[:] = value
            return array
        try:
            return np.array(value, original.dtype)
        except (TypeError, ValueError, OverflowError):  # the type cannot hold it
            return value
    if isinstance(original, np.ndarray):
        return value
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(listed) if isinstance(original, tuple) and isinstance(listed, list) else listed


_SIZE_SAMPLE = 32
"""Rows from which the size of all is estimated."""


class ObjectRows(MemoryContent):
    """A sequence of objects, read as if each were a line of JSONL; those of a `frame` get no new keys."""

    def __init__(
        self,
        values: Sequence[Any] | SpooledObjects,
        kind: Literal["objects", "frame"] = "objects",
        *,
        table_like: bool = False,
    ) -> None:
        """With `table_like`, objects lose keys without a value, as those of tables do."""
        self.values = values
        self.kind = kind
        self.table_like = table_like

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def size(self) -> int:
        """About the bytes of the rows as JSONL."""
        count = len(self.values)
        some = [self.values[number * count // _SIZE_SAMPLE] for number in range(_SIZE_SAMPLE)] if count else []
        return sum(map(_json_size, some)) * count // _SIZE_SAMPLE

    def part(self, start: int, stop: int, sampled: NDArray[np.int64] | None = None) -> MemoryPart:
        numbers = range(start, stop) if sampled is None else (start + sampled).tolist()
        rows = [self.row(self.values[number]) for number in numbers]
        return PlainRows(rows, extensible=self.kind == "objects")

    def row(self, value: Any) -> Row | str:
        """A plain copy of an object, which shares what is plain already; or why it is no row."""
        if isinstance(value, Mapping):
            return plain_row(value, table_like=self.table_like)
        with suppress(NotLoggable):
            value = plain_value(value)
        return no_object_reason(value)


def _json_size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(str(name)) + 4 + _json_size(entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        if not value or isinstance(value[0], int | float):
            return 6 * len(value)
        return sum(map(_json_size, value))
    return 6 * int(getattr(value, "size", 1)) if isinstance(getattr(value, "size", 1), int) else 6


class OneTimeRows:
    """Rows of an iterator, which are put into a temporary file when they are first needed."""

    def __init__(self, read: Callable[[], MemoryContent]) -> None:
        self._read = read
        self._failed: BaseException | None = None
        """Why reading failed: a second try would miss the rows that were yielded before."""

    @cached_property
    def rows(self) -> MemoryContent:
        """The rows; if they cannot be kept, the same StorageError each time."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._read()
        except BaseException as error:
            self._failed = error
            raise


class SpooledObjects:
    """A sequence of Python objects in a temporary file, each read when it is indexed."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._spool = Spool()
        self._starts = array("q")
        for number, value in enumerate(values):
            try:
                data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise StorageError(
                    f"logs: row {number} comes only once and cannot be kept in a file ({error}).\n"
                    "Pass the rows as a list."
                ) from error
            self._starts.append(self._spool.add(data))
        self._spool.flush()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        return pickle.loads(unpack_entry(self._spool.entry_at(self._starts[index])))  # written by this process


def spool_table(batches: Iterable[Any], schema: Any = None) -> ArrowRows:
    """The record batches or tables of an iterator as one table, which is mapped from a temporary file."""
    try:
        with tempfile.NamedTemporaryFile(prefix="tito-audit-") as file:
            writer = None
            for batch in batches:
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write(batch)
            if writer is None:
                writer = pa.ipc.new_stream(file, schema if schema is not None else pa.schema([]))
            writer.close()
            file.flush()
            return ArrowRows.of(pa.ipc.open_stream(pa.memory_map(file.name)).read_all())
    except OSError as error:
        raise StorageError(
            f"{tempfile.gettempdir()}: rows that can be read only once cannot be kept there "
            f"({error.strerror or error}).\nMake room, name another folder with TMPDIR, or write them to a file."
        ) from error
    except pa.ArrowException as error:
        raise StorageError(
            f"logs: the batches cannot be read as one table ({first_line(error)}).\n"
            "Give each batch the same columns, or pass the rows as a list of dicts."
        ) from error


UNNAMED_ROWS = "<rows>"
"""The name of rows that got none, in reports."""

_names: set[str] = set()


class RowsInMemory(type(Path())):  # type: ignore[misc]
    """A path that stands for rows in memory, and is shown as their name.

    Forked processes share the rows. It pickles as its name alone, as no other process can read them.
    """

    value: Any = None
    """The rows as the caller passed them."""
    _content: MemoryContent | OneTimeRows | None = None

    @classmethod
    def of(cls, name: str, content: MemoryContent | OneTimeRows, value: Any) -> RowsInMemory:
        """A path for rows, which `value` holds in the caller's own form."""
        path: RowsInMemory = cls(name)
        path._content, path.value = content, value
        _names.add(str(path))
        return path

    @property
    def content(self) -> MemoryContent:
        """The rows; SetupError in a process that was not forked from their own."""
        if self._content is None:
            raise SetupError(
                f"{self}: rows in memory are read only by the process that holds them, and those forked from it.\n"
                "Write them to a file that all processes can read, and pass its name."
            )
        return self._content.rows if isinstance(self._content, OneTimeRows) else self._content

    @property
    def is_one_time(self) -> bool:
        """Whether the caller's rows can be iterated only once."""
        return isinstance(self._content, OneTimeRows)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """About the size of the rows in bytes; numbers of a file and a device that no file has."""
        return os.stat_result((0, -1, -1, 0, 0, 0, self.content.size, 0, 0, 0), {"st_mtime_ns": 0})

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        """True: the rows can be read again."""
        return True

    def is_dir(self) -> bool:
        return False

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any) -> BinaryIO:
        """StorageError: rows are no bytes."""
        raise StorageError(f"{self}: these are rows in memory, not a file.")


def is_in_memory(name: str) -> bool:
    """Whether a name is that of rows in memory of this process."""
    return name in _names


def memory_blocks(content: MemoryContent) -> Iterator[Block]:
    """All rows as one block. Its seed is of the first row alone, so appended rows leave a sample as it was."""
    count = len(content)
    first = next(content.part(0, 1).rows([0], 1 << 62), None) if count else None
    values = (first.value or {}).values() if first is not None else ()
    seed = block_seed(*(str(value)[:64] for value in values if isinstance(value, str | int | float)))
    yield Block(0, count, [content], seed, 0.0, 1.0)
