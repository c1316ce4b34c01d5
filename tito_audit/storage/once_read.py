"""OnceRead: rows that come only once, kept in a temporary file and read from there."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import StorageError
from tito_audit.storage.held import ArrowRows, Content, Kind, Objects, Part
from tito_audit.storage.spool import Spool, unpacked
from tito_audit.storage.table_rows import first_line


class OnceRead(Content):
    """Rows that are kept in a temporary file when they are first needed."""

    def __init__(self, kind: Kind, read: Callable[[], Content]) -> None:
        self.kind = kind
        self._read = read
        self._failed: BaseException | None = None
        """Why the rows could not be read: a second try would miss those that have come already."""

    @cached_property
    def kept(self) -> Content:
        """The rows; StorageError if they cannot be kept, each time."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._read()
        except BaseException as error:
            self._failed = error
            raise

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self.kept.size

    def part(self, start: int, stop: int, taken: NDArray[np.int64] | None = None) -> Part:
        """The rows from the file."""
        return self.kept.part(start, stop, taken)


class SpooledObjects(Sequence[Any]):
    """Python objects in a temporary file, each read when it is asked for."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._spool = Spool()
        self._starts = array("q")
        for number, value in enumerate(values):
            self._starts.append(self._spool.add(_pickled(value, number)))
        self._spool.flush()

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return pickle.loads(unpacked(self._spool.packed(self._starts[index])))  # written by this process


def _pickled(value: Any, number: int) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"logs: row {number} comes only once and cannot be kept in a file ({error}).\nPass the rows as a list."
        ) from error


def spooled_objects(values: Iterable[Any]) -> Objects:
    """Objects of an iterator."""
    return Objects(SpooledObjects(values))


def spooled_table(batches: Iterable[Any], schema: Any = None) -> ArrowRows:
    """Record batches or tables of an iterator, all with the same columns, as a table in a temporary file."""
    import pyarrow as pa

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
            table = pa.ipc.open_stream(pa.memory_map(file.name)).read_all()
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
    return ArrowRows(len(table), table.nbytes, lambda start, stop: table.slice(start, stop - start))
