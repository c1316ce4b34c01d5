"""RowsInMemory: rows that a program holds, or gives once, as a path that is read like a log."""

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
from dataclasses import dataclass
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
from tito_audit.storage.row import not_an_object, seed_of
from tito_audit.storage.spool import Spool, unpacked
from tito_audit.storage.table_rows import ArrowRows, Block, MemoryContent, MemoryPart, PlainRows, first_line

_SIMPLE = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values that stay as they are."""
MISSING = {"NAType", "NaTType"}
"""What pandas calls the types of a missing value."""


class NotPlain(ValueError):
    """A value that no log can hold; the message names its type."""


def plain_row(row: Mapping[Any, Any], *, lean: bool = False) -> Row | str:
    """The row as a log holds it, or the reason why it cannot be read; `row` itself is not changed.

    Arrays and tensors become numpy arrays, other numbers Python's, times text, missing values None. What is plain
    already is shared, not copied. `lean`: objects lose keys without a value, as tables do.
    """
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[str(name)] = plain_value(value, lean=lean)
        except NotPlain as error:
            return f"column {str(name)!r} holds {error}"
    return plain


def plain_value(value: Any, *, lean: bool = False) -> Any:
    """One value as a log holds it; NotPlain if no log can."""
    try:
        return _plain(value, lean)
    except RecursionError:
        raise NotPlain("values nested too deeply to be read") from None


def _plain(value: Any, lean: bool) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if isinstance(value, Mapping):
        plain = {str(key): _plain(entry, lean) for key, entry in value.items()}
        if not lean:
            return plain
        # A number without a fraction was a whole one before a value next to it was missing.
        whole = {
            key: int(entry) for key, entry in plain.items() if isinstance(entry, float) and entry.is_integer()
        }
        return {key: whole.get(key, entry) for key, entry in plain.items() if entry is not None}
    if kind is list:
        return value if set(map(type, value)) <= _SIMPLE else [_plain(entry, lean) for entry in value]
    if isinstance(value, np.ndarray):
        return _of_array(value, lean)
    if _is_tensor(value):
        try:
            tensor = value.detach().cpu()
            if tensor.is_floating_point() and tensor.element_size() < 4:  # numpy has no bfloat16
                tensor = tensor.float()
            array: np.ndarray[Any, Any] = tensor.resolve_conj().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, quantized, nested, or without values
            raise NotPlain(f"a tensor that is not an array ({str(error).splitlines()[0]})") from None
        return _of_array(array, lean)
    if hasattr(value, "as_py"):
        return _plain(value.as_py(), lean)
    if hasattr(value, "__array__"):
        return _of_array(np.asarray(value), lean)
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview):
        return _plain(list(value), lean)
    return _single(value, lean)


def _single(value: Any, lean: bool) -> Any:
    """A value that holds no others."""
    kind = type(value)
    if kind.__name__ in MISSING and kind.__module__.startswith("pandas."):
        return None
    if isinstance(value, enum.Enum):
        return _plain(value.value, lean)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, memoryview):
        return bytes(value) if value.format in ("B", "b", "c") else value.tolist()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | uuid.UUID):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if kind.__module__.startswith("PIL."):
        return {"path": str(getattr(value, "filename", ""))}
    if kind.__module__.startswith("pandas."):  # a period or an interval
        return str(value)
    raise NotPlain(f"a value of type {kind.__module__}.{kind.__qualname__}, which no log can hold")


def _of_array(values: np.ndarray[Any, Any], lean: bool) -> Any:
    """An array of numbers as it is, if it has one dimension; anything else as a list or a single value."""
    kind = values.dtype.kind
    if kind == "c":
        raise NotPlain(f"numbers of {values.dtype}, which no log can hold")
    if values.ndim == 0:
        if kind == "f":
            return float(values)
        return str(values) if kind in "mM" else _plain(values.item(), lean)
    if kind in "mM":
        return values.astype(str).tolist()
    if kind in "biuf":
        return values if values.ndim == 1 else [_of_array(entry, lean) for entry in values]
    if kind in "OUS":
        return _plain(values.tolist(), lean)
    raise NotPlain(f"an array of {values.dtype}, which no log can hold")


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def edited(original: Any, path: Steps, value: Any, old: Any = None) -> Any:
    """A copy of a value of a program with one part replaced, or removed by ABSENT, in the form that it had.

    `old` is that part as a log holds it. Tensors, tuples and arrays stay what they are; parts that do not change
    are shared.
    """
    if not path:
        # A list in which entries that are in the old list too are those of the program.
        if not isinstance(value, list) or not isinstance(old, list) or isinstance(original, Mapping | str):
            with_originals = value
        else:
            places = {id(entry): number for number, entry in enumerate(old)}
            with_originals = [original[places[id(entry)]] if id(entry) in places else entry for entry in value]
        return _like(original, with_originals)
    head, rest = path[0], path[1:]
    if isinstance(original, Mapping):
        copy = dict(original)
        key = next((key for key in original if key == head or str(key) == head), head)
        if value is ABSENT and not rest:
            copy.pop(key, None)
        else:
            copy[key] = edited(original.get(key), rest, value, old)
        return copy
    entries = list(original)
    entries[int(head)] = edited(entries[int(head)], rest, value, old)
    return _like(original, entries)


def _like(original: Any, value: Any) -> Any:
    """A value in the form of another: as a tensor, a tuple or an array, else as JSON has it."""
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


_WEIGHED = 32
"""How many rows show how large the others are."""


class Objects(MemoryContent):
    """A sequence of objects, read as JSONL with one of them a line; as a `frame`, only its columns can change."""

    def __init__(
        self,
        values: Sequence[Any] | SpooledObjects,
        kind: Literal["objects", "frame"] = "objects",
        *,
        lean: bool = False,
    ) -> None:
        """`lean`: objects lose keys without a value, as tables do."""
        self.values = values
        self.kind = kind
        self.lean = lean

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def size(self) -> int:
        """About how many bytes the rows would be as JSONL."""
        count = len(self.values)
        some = [self.values[number * count // _WEIGHED] for number in range(_WEIGHED)] if count else []
        return sum(map(_weight, some)) * count // _WEIGHED

    def part(self, start: int, stop: int, sampled: NDArray[np.int64] | None = None) -> MemoryPart:
        """The rows, with what is plain already shared."""
        rows: list[Row | str] = []
        for number in range(start, stop) if sampled is None else (start + sampled).tolist():
            value = self.values[number]
            if isinstance(value, Mapping):
                rows.append(plain_row(value, lean=self.lean))
                continue
            with suppress(NotPlain):
                value = plain_value(value)
            rows.append(not_an_object(value))
        return PlainRows(rows, open=self.kind == "objects")


def _weight(value: Any) -> int:
    """About how many bytes a value is as JSON."""
    if isinstance(value, str | bytes):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(str(name)) + 4 + _weight(entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        if not value or isinstance(value[0], int | float):
            return 6 * len(value)
        return sum(map(_weight, value))
    return 6 * int(getattr(value, "size", 1)) if isinstance(getattr(value, "size", 1), int) else 6


class OnceRead:
    """Rows that come only once, kept in a temporary file when they are first needed, and read from there."""

    def __init__(self, read: Callable[[], MemoryContent]) -> None:
        self._read = read
        self._failed: BaseException | None = None
        """Why the rows could not be read: a second try would miss those that have come already."""

    @cached_property
    def rows(self) -> MemoryContent:
        """The rows; StorageError if they cannot be kept, each time."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._read()
        except BaseException as error:
            self._failed = error
            raise


class SpooledObjects:
    """Python objects in a temporary file, each read when it is asked for."""

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
        return pickle.loads(unpacked(self._spool.packed(self._starts[index])))  # written by this process


def spooled_table(batches: Iterable[Any], schema: Any = None) -> ArrowRows:
    """Record batches or tables of an iterator, all with the same columns, as a table in a temporary file."""
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


NAME = "<rows>"
"""What reports call rows without a name."""

_names: set[str] = set()


@dataclass(frozen=True, slots=True)
class StatusInMemory:
    """What is known of rows in memory, under the names of `os.stat_result`."""

    st_size: int
    """Bytes, about."""
    st_mtime_ns: int = 0
    """Not known."""
    st_ino: int = -1
    st_dev: int = -1
    """Those of no file."""


class RowsInMemory(type(Path())):  # type: ignore[misc]
    """A path that is shown as the name of some rows, and is read from memory.

    Processes forked from this one share the rows. It pickles as its name alone: no other process can read it.
    """

    value: Any = None
    """The rows as the caller has them."""
    _content: MemoryContent | OnceRead | None = None

    @classmethod
    def of(cls, name: str, content: MemoryContent | OnceRead, value: Any) -> RowsInMemory:
        path: RowsInMemory = cls(name)
        path._content, path.value = content, value
        _names.add(str(path))
        return path

    @property
    def content(self) -> MemoryContent:
        """The rows; SetupError in a process that was not forked from the one that holds them."""
        if self._content is None:
            raise SetupError(
                f"{self}: rows in memory are read only by the process that holds them, and those forked from it.\n"
                "Write them to a file that all processes can read, and pass its name."
            )
        return self._content.rows if isinstance(self._content, OnceRead) else self._content

    @property
    def once(self) -> bool:
        """Whether the caller's rows come only once."""
        return isinstance(self._content, OnceRead)

    def stat(self, *, follow_symlinks: bool = True) -> StatusInMemory:
        return StatusInMemory(self.content.size)

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        """True: the rows can be read again."""
        return True

    def is_dir(self) -> bool:
        return False

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any) -> BinaryIO:
        """Raises StorageError: rows are no bytes."""
        raise StorageError(f"{self}: these are rows in memory, not a file.")


def is_in_memory(name: str) -> bool:
    """Whether a name in a report is one that this process gave to rows in memory."""
    return name in _names


def blocks_of_memory(content: MemoryContent) -> Iterator[Block]:
    """All rows as one block; its seed identifies them by the first: rows added later change nothing."""
    count = len(content)
    first = next(content.part(0, 1).rows([0], 1 << 62), None) if count else None
    values = (first.value or {}).values() if first is not None else ()
    seed = seed_of(*(str(value)[:64] for value in values if isinstance(value, str | int | float)))
    yield Block(0, count, [content], seed, 0.0, 1.0)
