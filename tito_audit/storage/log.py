"""Log, open_log: the rows of one file, whose content tells what kind of file it is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tito_audit.errors import StorageError
from tito_audit.storage.arrow import arrow_blocks, is_arrow, open_arrow
from tito_audit.storage.in_memory import RowsInMemory, memory_blocks
from tito_audit.storage.nested_rows import NestedRowReader, RowPath, parse_row_path
from tito_audit.storage.number_arrays import ArrayParser
from tito_audit.storage.parquet import open_parquet, row_group_blocks
from tito_audit.storage.row import RawRow, RowSample, parse_row
from tito_audit.storage.streams import (
    PARQUET_MAGIC,
    ByteStream,
    Compression,
    Damage,
    LeadBuffer,
    ParseRow,
    cut_lines,
    cut_values,
    detect_compression,
    detect_json_kind,
    rows_of_pieces,
)
from tito_audit.storage.table_rows import Block, rows_of_blocks
from tito_audit.storage.torch_files import TORCH_HEAD, is_torch, torch_blocks
from tito_audit.storage.watch import is_pipe, refuse_device, warn_if_waiting

Kind = Literal["lines", "values", "array", "parquet", "arrow", "torch", "objects", "frame"]
"""JSONL; JSON documents, one after another; a JSON array of rows; Parquet; Arrow IPC; a Torch file; objects or a
table in memory."""
BINARY: tuple[Kind, ...] = ("parquet", "arrow", "torch", "objects", "frame")
"""Kinds whose rows have no text."""
TABLES: tuple[Kind, ...] = ("parquet", "arrow", "frame")
"""Kinds with typed columns."""

MAX_ROW_BYTES = 256 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


@dataclass(eq=False)
class Log:
    """The rows of one file; each iteration reads it again.

    A row that cannot be read is a RawRow with an error. A damaged file yields the rows before the damage and one
    error row, or StorageError if there are no rows before it.
    """

    path: Path
    max_row_bytes: int
    keep_text: bool = False
    """Whether JSON rows keep their bytes."""
    parse: ParseRow = parse_row
    """Parses a line of JSON."""
    share: float | None = None
    """Share of the rows to sample; None for all."""
    row_path: RowPath | None = None
    """Where the rows are nested in those of the file; None if they are the file's own."""
    only: int | None = None
    """The one row that is wanted, None for all; others may be missing, or be error rows."""
    skip_binary: bool = False
    """Whether large binary values may be left out, which no audit looks at."""
    position: int = 0
    """Bytes that were read so far, for progress."""
    left_out: int = 0
    """Rows that the sample has left out so far."""
    tail: bytes = b""
    """What follows the last row, known after all rows if `keep_text`."""
    rows_without: Sequence[RawRow] = ()
    """With `row_path` and `keep_text`, the last rows of the file that contain none; known after all rows."""
    _kind: Kind | None = None
    _compression: Compression = None

    def __post_init__(self) -> None:
        self.size = self.path.stat().st_size
        """Bytes on disk; 0 for a pipe."""
        if self.size >= _LARGE_LOG:
            tune_malloc()

    @property
    def kind(self) -> Kind:
        """The kind of file by its content. Reads its beginning, which a pipe then lacks."""
        if isinstance(self.path, RowsInMemory):
            return self.path.content.kind
        if self._kind is None:
            with reading_file(self.path), open_bytes(self.path) as raw:
                kind, stream, _ = self.detect_kind(raw)
                if stream is not None:
                    stream.close()
                return kind
        return self._kind

    @property
    def compression(self) -> Compression:
        """How the file is compressed; None for tables, which are compressed inside, and Torch files."""
        return self._compression if self.kind not in BINARY else None

    def count(self) -> int:
        """Number of rows, with blank lines before the last one; parses no row where that can be avoided."""
        if self.row_path is not None:
            return sum(1 for _ in self)
        if isinstance(self.path, RowsInMemory):
            return len(self.path.content)
        if self.kind == "parquet":
            with open_parquet(self.path) as file:
                return int(file.metadata.num_rows)
        if self.kind == "arrow":
            with open_arrow(self.path) as table, contextlib.suppress(OSError, ValueError, Damage):
                return table.count()
        return max((row.index + 1 for row in Log(self.path, self.max_row_bytes, only=-1)), default=0)

    def schema(self) -> Any:
        """The Arrow schema of the rows of a Parquet or an Arrow file."""
        if self.kind == "arrow":
            with open_arrow(self.path) as table:
                schema = table.schema
        else:
            with open_parquet(self.path) as file:
                schema = file.schema_arrow
        return schema if self.row_path is None else self.row_path.schema(schema)

    def outer(self) -> Log:
        """The log of the file's own rows; SetupError if rows should be nested in them and none has the path."""
        outer = Log(self.path, self.max_row_bytes, self.keep_text, self.parse)
        if self.row_path is not None and self.path.is_file():
            self.row_path.refuse_missing_path(Log(self.path, self.max_row_bytes), self.path)
        return outer

    def __iter__(self) -> Iterator[RawRow]:
        sample = RowSample(self.share) if self.share is not None else None
        last = -1
        self.position = self.left_out = 0
        try:
            with reading_file(self.path):
                for row in self._rows(sample):
                    last = row.index
                    if sample is not None:
                        self.left_out = sample.left_out
                    yield row
        except Damage as damage:
            last = last if sample is None else sample.last
            if sample is not None:
                self.left_out = sample.left_out
            yield damage_row(self.path, last, str(damage))
        if sample is not None:
            self.left_out = sample.left_out

    def _rows(self, sample: RowSample | None) -> Iterator[RawRow]:
        if self.row_path is not None:
            outer, nested = self.outer(), NestedRowReader(self.row_path, sample, keep=self.keep_text)
            for row in nested.rows(outer):
                self.position = outer.position
                yield row
            self.tail, self.rows_without = outer.tail, nested.rows_without
            # `outer` cannot check a pipe before it is read.
            if nested.first_without_path is not None and not self.path.is_file():
                raise self.row_path.missing_path_error(nested.first_without_path, self.path)
            return
        with contextlib.ExitStack() as stack:
            raw = None if isinstance(self.path, RowsInMemory) else stack.enter_context(open_bytes(self.path))
            kind, stream, leads = (self.kind, None, LeadBuffer()) if raw is None else self.detect_kind(raw)
            if raw is None or stream is None:
                for row, share in rows_of_blocks(self.blocks(), self.max_row_bytes, sample, self.only):
                    self.position = int(self.size * share)
                    yield row
                return
            stack.callback(stream.close)
            limit, lines, keeps = self.max_row_bytes, kind == "lines", self.keep_text and sample is None
            parse = self.parse if lines else parse_row
            if lines and self.only is not None:
                # Skipping the others is many times faster than parsing them.
                parse = lambda index, data, cut_off=False: (  # noqa: E731
                    self.parse(index, data, cut_off=cut_off)
                    if index == self.only
                    else RawRow(index, None, "the row was passed over")
                )
            pieces = cut_lines(stream, limit)
            if not lines:
                pieces = cut_values(stream, array=kind == "array", limit=limit, keep_gaps=keeps)
            start, row_leads = (0, leads) if keeps else (len(leads.take_lead()), None)
            for row in rows_of_pieces(
                pieces, limit, parse, lines=lines, leads=row_leads, sample=sample, start=start
            ):
                self.position = raw.tell() if raw.seekable() else 0
                yield row
        self.tail = leads.take_lead() if self.keep_text else b""

    def blocks(self) -> Iterator[Block]:
        """The blocks of a log of a binary kind."""
        if isinstance(self.path, RowsInMemory):
            yield from memory_blocks(self.path.content)
        elif self.kind == "torch":
            yield from torch_blocks(self.path)
        elif self.kind == "arrow":
            yield from arrow_blocks(self.path)
        else:
            with open_parquet(self.path, skip_binary=self.skip_binary) as file:
                yield from row_group_blocks(file, range(file.num_row_groups))

    def detect_kind(self, raw: BinaryIO) -> tuple[Kind, ByteStream | None, LeadBuffer]:
        """The kind of an open file; of text also its bytes from the first row on, and what precedes them."""
        head = raw.peek(TORCH_HEAD)[:TORCH_HEAD]  # type: ignore[attr-defined]  # a file opened for bytes is buffered
        if head.startswith(PARQUET_MAGIC):
            self._kind = "parquet"
            return self._kind, None, LeadBuffer()
        if is_arrow(head) or is_torch(head):
            self._kind = "arrow" if is_arrow(head) else "torch"
            return self._kind, None, LeadBuffer()
        self._compression = detect_compression(head)
        stream = ByteStream(raw, self._compression)
        before = _BOM if stream.peek(len(_BOM)) == _BOM else b""
        stream.skip(len(before))
        try:
            self._kind = detect_json_kind(self.path, stream, self.max_row_bytes)
        except StorageError:
            stream.close()
            raise
        return self._kind, stream, LeadBuffer(before)


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

    StorageError if the file is missing, cannot be opened, or is of another kind. A row of more than
    `max_row_bytes` becomes an error row and is never held in memory. With `keep_text`, JSON rows keep their bytes:
    all leads and texts and the tail are the file. In the columns `arrays` (see ArrayParser), long lists of
    numbers in JSON lines become numpy arrays: faster, but not to be written back (see `RawRow.without_arrays`).
    With `share`, only about that share of the rows is parsed (see RowSample), without text. With `rows_at`, the
    rows are the objects at that path in each row of the file (see RowPath), numbered in their order.
    """
    if path.is_dir():
        raise StorageError(f"{path}: this is a folder. Name a file in it, or let find_logs list its logs.")
    with reading_file(path):
        row_path = parse_row_path(rows_at) if rows_at is not None else None
        if row_path is not None and arrays:
            arrays = row_path.columns(arrays)
        parse = ArrayParser(arrays).parse_row if arrays else parse_row
        log = Log(path, max_row_bytes, keep_text, parse, share, row_path)
        refuse_device(path)
        if path.is_file() and not isinstance(path, RowsInMemory):
            path.open("rb").close()
    return log


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading; of a pipe, wait for its first bytes."""
    if not is_pipe(path):
        return path.open("rb")
    with warn_if_waiting(path):
        raw = path.open("rb")
        raw.peek(1)
        return raw


def damage_row(path: Path, last: int, damage: str) -> RawRow:
    """The error row for damage after row `last`; StorageError if that is -1, as there is no row before it."""
    if last < 0:
        raise StorageError(
            f"{path}: {damage}. No row could be read before that place.\n"
            "The copy is incomplete or the file was not closed; copy it again, or write it again."
        ) from None
    return RawRow(last + 1, None, f"{damage}; no row after this one could be read", lost=True)


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """A block that reads a file, in which an OSError becomes a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: the file cannot be read ({error.strerror or error}).") from error


_LARGE_LOG = 8 << 20
"""Bytes of a log that may have large rows."""


@cache
def tune_malloc() -> None:
    """Make glibc give large blocks back to the system.

    By default it keeps freed blocks of up to 32 MB, into which later ones rarely fit: the arrays of a row then
    take several times their size.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD: larger blocks have pages of their own
        library.mallopt(-1, 32 << 20)  # M_TRIM_THRESHOLD: free memory that is kept for smaller ones
