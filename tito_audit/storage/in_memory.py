"""RowsInMemory: rows that the caller holds, as a path that is read like a log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import SetupError, StorageError
from tito_audit.storage.held import Content
from tito_audit.storage.row import RawRow
from tito_audit.storage.sampling import Sample, seed_of
from tito_audit.storage.table_rows import BATCH_BYTES, BATCH_ROWS

NAME = "<rows>"
"""What reports call rows without a name."""
_TEXT = 64
"""Characters of a value of the first row that distinguish a log from others."""

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
    _content: Content | None = None

    @classmethod
    def of(cls, name: str, content: Content, value: Any) -> RowsInMemory:
        """The path of some rows."""
        path: RowsInMemory = cls(name)
        path._content, path.value = content, value
        _names.add(str(path))
        return path

    @property
    def content(self) -> Content:
        """The rows; SetupError in a process that was not forked from the one that holds them."""
        if self._content is None:
            raise SetupError(
                f"{self}: rows in memory are read only by the process that holds them, and those forked from it.\n"
                "Write them to a file that all processes can read, and pass its name."
            )
        return self._content

    def stat(self, *, follow_symlinks: bool = True) -> StatusInMemory:
        """About how many bytes the rows are."""
        return StatusInMemory(self.content.size)

    def exists(self) -> bool:
        """True."""
        return True

    def is_file(self) -> bool:
        """True: the rows can be read again."""
        return True

    def is_dir(self) -> bool:
        """False."""
        return False

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any) -> BinaryIO:
        """Raises StorageError: rows are no bytes."""
        raise StorageError(f"{self}: these are rows in memory, not a file.")


def is_in_memory(name: str) -> bool:
    """Whether a name in a report is one that this process gave to rows in memory."""
    return name in _names


def spans(content: Content, size: int = BATCH_BYTES) -> Iterator[tuple[int, int]]:
    """The rows in parts of about `size` bytes: the first row of each, and the first that is past it."""
    count = len(content)
    each = min(max(size * count // max(content.size, 1), 1), BATCH_ROWS)
    yield from ((start, min(start + each, count)) for start in range(0, count, each))


def seed_of_rows(content: Content) -> int:
    """A seed that identifies a log by its first row: rows added later change nothing."""
    first = next(content.part(0, 1).rows([0], 1 << 62), None) if len(content) else None
    values = (first.value or {}).values() if first is not None else ()
    return seed_of(*(str(value)[:_TEXT] for value in values if isinstance(value, str | int | float)))


def rows_in_memory(
    path: RowsInMemory, limit: int, only: int | None = None, sample: Sample | None = None
) -> Iterator[tuple[RawRow, float]]:
    """Each row with the share of the rows read up to it, from 0 to 1.

    With `only`, that row alone; with `sample`, the sampled rows.
    """
    content = path.content
    count = len(content)
    if only is not None:
        if 0 <= only < count:
            yield from ((row, 1.0) for row in content.part(only, only + 1).rows([only], limit))
        return
    seed = seed_of_rows(content) if sample is not None else 0
    for start, stop in spans(content):
        if sample is None:
            for row in content.part(start, stop).rows(range(start, stop), limit):
                yield row, (row.index + 1) / count
            continue
        taken, before = sample.among(seed, start, stop - start), sample.left_out
        numbers = (start + taken).tolist()
        for passed, row in enumerate(content.part(start, stop, taken).rows(numbers, limit)):
            sample.left_out, sample.last = before + row.index - start - passed, row.index
            yield row, (row.index + 1) / count
        sample.left_out, sample.last = before + stop - start - len(taken), stop - 1
