"""Log and open_log: one file as rows; its content decides what kind of file it is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tito_audit.errors import StorageError
from tito_audit.storage.arrow import blocks_of_arrow, is_arrow, open_arrow
from tito_audit.storage.in_memory import RowsInMemory, blocks_of_memory
from tito_audit.storage.inside import RowPath, Unwrapped, parse_row_path
from tito_audit.storage.number_arrays import Splicer
from tito_audit.storage.parquet import blocks_of_groups, open_parquet
from tito_audit.storage.row import RawRow, RowSample, parse_row
from tito_audit.storage.streams import (
    PARQUET_MAGIC,
    Between,
    ByteStream,
    Compression,
    Damaged,
    ParseRow,
    compression_of,
    cut_lines,
    cut_values,
    json_kind,
    rows_of_pieces,
)
from tito_audit.storage.table_rows import Block, rows_of_blocks
from tito_audit.storage.torch_files import TORCH_HEAD, blocks_of_torch, is_torch
from tito_audit.storage.watch import is_pipe, patience, refuse_device

Kind = Literal["lines", "values", "array", "parquet", "arrow", "torch", "objects", "frame"]
"""JSONL; one or more concatenated JSON documents; one JSON array of rows; Parquet; Arrow IPC; a Torch file; in
memory: objects, or a table."""
BINARY: tuple[Kind, ...] = ("parquet", "arrow", "torch", "objects", "frame")
"""Kinds whose rows have no text."""
TABLES: tuple[Kind, ...] = ("parquet", "arrow", "frame")
"""Kinds with typed columns."""

MAX_ROW_BYTES = 256 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


class Log:
    """The rows of one file; each iteration reads it again.

    A row that cannot be read is a RawRow with an error. Where the file itself is damaged, the rows before the
    damage come first, then one error row; StorageError if no row can be read.
    """

    def __init__(
        self,
        path: Path,
        max_row_bytes: int,
        keep_text: bool = False,
        parse: ParseRow = parse_row,
        share: float | None = None,
        inside: RowPath | None = None,
    ) -> None:
        self.path = path
        self.size = path.stat().st_size
        """Bytes on disk; 0 for a pipe."""
        if self.size >= LARGE:
            give_memory_back()
        self.position = 0
        """Bytes read so far, for progress."""
        self.tail = b""
        """What follows the last row, set once all rows were read, if the log keeps text."""
        self.keep_text = keep_text
        """Whether JSON rows keep their bytes."""
        self.parse = parse
        """Reads a line of JSON."""
        self.max_row_bytes = max_row_bytes
        self.share = share
        """About what share of the rows to sample; None: all."""
        self.inside = inside
        """Where the rows are nested in each row of the file; None: they are the file's own rows."""
        self.passed: list[RawRow] = []
        """Rows of the file after the last row that contain no rows, set once all were read."""
        self.left_out = 0
        """How many rows the sample has left out so far."""
        self.only: int | None = None
        """The one row that is wanted, None for all; others may be missing, or be error rows that were not read."""
        self.quick = False
        """Whether rows are only audited, so that binary values need not be fetched."""
        self._kind: Kind | None = None
        self._compression: Compression = None

    @property
    def kind(self) -> Kind:
        """What kind of file it is, by its content; reads its beginning, so do not ask it of an unread pipe."""
        if isinstance(self.path, RowsInMemory):
            return self.path.content.kind
        if self._kind is None:
            with readable(self.path), opened(self.path) as raw:
                kind, stream, _ = self.look(raw)
                if stream is not None:
                    stream.close()
                return kind
        return self._kind

    @property
    def compression(self) -> Compression:
        """How the whole file is compressed; None for tables (compressed inside) and Torch files."""
        return self._compression if self.kind not in BINARY else None

    def count(self) -> int:
        """The number of rows, blank lines before the last row included; reads no row where that is possible."""
        if self.inside is not None:
            return sum(1 for _ in self)
        if isinstance(self.path, RowsInMemory):
            return len(self.path.content)
        if self.kind == "parquet":
            with open_parquet(self.path) as file:
                return int(file.metadata.num_rows)
        if self.kind == "arrow":
            with open_arrow(self.path) as table, contextlib.suppress(OSError, ValueError, Damaged):
                return table.count()
        log = Log(self.path, self.max_row_bytes)
        log.only = -1
        return max((row.index + 1 for row in log), default=0)

    def schema(self) -> Any:
        """The Arrow schema of the rows of a table, a Parquet or an Arrow file."""
        if self.kind == "arrow":
            with open_arrow(self.path) as table:
                schema = table.schema
        else:
            with open_parquet(self.path) as file:
                schema = file.schema_arrow
        return schema if self.inside is None else self.inside.schema(schema)

    def outer(self) -> Log:
        """All rows of the file itself, not the rows nested in them.

        SetupError if rows should be nested in them and no row has the path.
        """
        outer = Log(self.path, self.max_row_bytes, self.keep_text, self.parse)
        if self.inside is not None and self.path.is_file():
            self.inside.refuse_nowhere(Log(self.path, self.max_row_bytes), self.path)
        return outer

    def __iter__(self) -> Iterator[RawRow]:
        sample = RowSample(self.share) if self.share is not None else None
        last = -1
        self.position = self.left_out = 0
        try:
            with readable(self.path):
                for row in self._rows(sample) if self.inside is None else self._nested(self.inside, sample):
                    last = row.index
                    if sample is not None:
                        self.left_out = sample.left_out
                    yield row
        except Damaged as damage:
            last = last if sample is None else sample.last
            if sample is not None:
                self.left_out = sample.left_out
            yield lost_row(self.path, last, str(damage))
        if sample is not None:
            self.left_out = sample.left_out

    def _nested(self, inside: RowPath, sample: RowSample | None) -> Iterator[RawRow]:
        outer, unwrapped = self.outer(), Unwrapped(inside, sample, keep=self.keep_text)
        for row in unwrapped.rows(outer):
            self.position = outer.position
            yield row
        self.tail, self.passed = outer.tail, unwrapped.passed
        # A pipe could not be checked before.
        if unwrapped.first_without is not None and not self.path.is_file():
            raise inside.nowhere(unwrapped.first_without, self.path)

    def _rows(self, sample: RowSample | None) -> Iterator[RawRow]:
        with contextlib.ExitStack() as stack:
            raw = None if isinstance(self.path, RowsInMemory) else stack.enter_context(opened(self.path))
            kind, stream, between = (self.kind, None, Between()) if raw is None else self.look(raw)
            if raw is None or stream is None:
                for row, share in rows_of_blocks(self.blocks(), self.max_row_bytes, sample, self.only):
                    self.position = int(self.size * share)
                    yield row
                return
            stack.callback(stream.close)
            limit, lines, keeps = self.max_row_bytes, kind == "lines", self.keep_text and sample is None
            parse = self.parse if lines else parse_row
            if lines and self.only is not None:
                # The others are skipped, many times faster than parsed.
                parse = lambda index, data, cut_off=False: (  # noqa: E731
                    self.parse(index, data, cut_off=cut_off)
                    if index == self.only
                    else RawRow(index, None, "the row was passed over")
                )
            pieces = cut_lines(stream, limit)
            if not lines:
                pieces = cut_values(stream, array=kind == "array", limit=limit, gaps=keeps)
            start, leads = (0, between) if keeps else (len(between.rest()), None)
            for row in rows_of_pieces(
                pieces, limit, parse, lines=lines, between=leads, sample=sample, start=start
            ):
                self.position = raw.tell() if raw.seekable() else 0
                yield row
        self.tail = between.rest() if self.keep_text else b""

    def blocks(self) -> Iterator[Block]:
        """The blocks of a log whose rows are no text."""
        if isinstance(self.path, RowsInMemory):
            yield from blocks_of_memory(self.path.content)
        elif self.kind == "torch":
            yield from blocks_of_torch(self.path)
        elif self.kind == "arrow":
            yield from blocks_of_arrow(self.path)
        else:
            with open_parquet(self.path, quick=self.quick) as file:
                yield from blocks_of_groups(file, range(file.num_row_groups))

    def look(self, raw: BinaryIO) -> tuple[Kind, ByteStream | None, Between]:
        """The kind of the file; unless binary, its bytes from the first row on, and what came before them."""
        head = raw.peek(TORCH_HEAD)[:TORCH_HEAD]  # type: ignore[attr-defined]  # a file opened for bytes is buffered
        if head.startswith(PARQUET_MAGIC):
            self._kind = "parquet"
            return self._kind, None, Between()
        if is_arrow(head) or is_torch(head):
            self._kind = "arrow" if is_arrow(head) else "torch"
            return self._kind, None, Between()
        self._compression = compression_of(head)
        stream = ByteStream(raw, self._compression)
        before = _BOM if stream.peek(len(_BOM)) == _BOM else b""
        stream.skip(len(before))
        try:
            self._kind = json_kind(self.path, stream, self.max_row_bytes)
        except StorageError:
            stream.close()
            raise
        return self._kind, stream, Between(before)


def open_log(
    path: Path,
    *,
    max_row_bytes: int = MAX_ROW_BYTES,
    keep_text: bool = False,
    arrays: Mapping[str, str] | None = None,
    share: float | None = None,
    rows_at: str | None = None,
) -> Log:
    """The rows of a file: JSONL (plain, gzip, zstd), a JSON document or array, Parquet, Arrow IPC, a Torch file.

    The content decides the kind. StorageError if the file is missing, cannot be opened, or is of an unsupported
    kind. A row longer than `max_row_bytes` becomes an error row and is never held in memory. With `keep_text`,
    JSON rows keep their bytes: all leads, texts and the tail together are the file. `arrays` names columns (see
    Splicer) whose long lists of numbers in JSON lines become numpy arrays, as in tables: faster to read, but
    not to be written back (see `RawRow.plain`). With `share`, only about that share of the rows is read (see
    RowSample), without text; the others are not parsed. With `rows_at`, the rows are the objects at that path in
    each row of the file (see RowPath), numbered as they are found.
    """
    if path.is_dir():
        raise StorageError(f"{path}: this is a folder. Name a file in it, or let find_logs list its logs.")
    with readable(path):
        inside = parse_row_path(rows_at) if rows_at is not None else None
        if inside is not None and arrays:
            arrays = inside.columns(arrays)
        parse = Splicer(arrays).parse_row if arrays else parse_row
        log = Log(path, max_row_bytes, keep_text, parse, share, inside)
        refuse_device(path)
        if path.is_file() and not isinstance(path, RowsInMemory):
            path.open("rb").close()
    return log


def opened(path: Path) -> BinaryIO:
    """The file of a log, opened; once there is something to read, if it is a pipe."""
    if not is_pipe(path):
        return path.open("rb")
    with patience(path):
        raw = path.open("rb")
        raw.peek(1)
        return raw


def lost_row(path: Path, last: int, damage: str) -> RawRow:
    """The error row after row `last`, where the file is damaged; StorageError if `last` is -1: no row was read."""
    if last < 0:
        raise StorageError(
            f"{path}: {damage}. No row could be read before that place.\n"
            "The copy is incomplete or the file was not closed; copy it again, or write it again."
        ) from None
    return RawRow(last + 1, None, f"{damage}; no row after this one could be read", lost=True)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A block that reads a file; StorageError where the system does not let us."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: the file cannot be read ({error.strerror or error}).") from error


LARGE = 8 << 20
"""From this many bytes on, a log may hold large rows."""


@cache
def give_memory_back() -> None:
    """Have the C library give large blocks back, where it can be told to.

    Left alone, glibc keeps blocks of up to 32 MB for later ones, which rarely fit into their places: the arrays of
    one row then take several times their size.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD: such blocks have own pages, given back when freed
        library.mallopt(-1, 32 << 20)  # M_TRIM_THRESHOLD: how much free memory is kept for smaller blocks
