"""A log in chunks that other processes can read: one after the other they are its rows, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.storage.documents import cut_values
from tito_audit.storage.lines import ParseRow, Piece, cut_lines, rows_of_lines
from tito_audit.storage.log import Log, unreadable
from tito_audit.storage.parquet import batches_of, open_parquet, rows_of_batch
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.streams import Damaged
from tito_audit.storage.torch_files import rows_of_torch

__all__ = ["Chunk", "Reading", "chunks_of"]

_BLOCK = 1 << 20
_NEAR = 1 << 16
"""Bytes read at once while only the end of a line is looked for."""
_GROUPS = 8
"""A row group of up to so many chunks is read where it is audited; of a larger one the batches are handed out."""
_UNLIMITED = 1 << 62


@dataclass(slots=True)
class Chunk:
    """Some rows of a log that follow one another."""

    path: Path
    limit: int
    """Bytes of a row at most."""
    done: int
    """How many bytes of the file have been read once this chunk is."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, numbered from 0; what there is to say beside them goes into `reading`."""
        raise NotImplementedError


class Reading:
    """The rows of a chunk, numbered from 0; `size` and `damage` are set once all were read."""

    def __init__(self, chunk: Chunk) -> None:
        self.size = 0
        """How far the numbers of the next chunk's rows are from those of this one's."""
        self.damage: str | None = None
        """Why the file cannot be read past this chunk."""
        self._chunk = chunk

    def __iter__(self) -> Iterator[RawRow]:
        try:
            yield from self._chunk.rows(self)
        except Damaged as damage:
            self.damage = str(damage)
        except OSError as error:
            raise unreadable(self._chunk.path, error) from error


def chunks_of(log: Log, size: int) -> Iterator[Chunk]:
    """The log in chunks of about `size` bytes, of one row at least; StorageError when it cannot be read.

    Lines of a plain file are not read here, only where they are audited; what is compressed, a document or a
    large row group is read here, and the chunk holds it.
    """
    try:
        with log.path.open("rb") as raw:
            kind, stream, between = log.look(raw)
            if kind == "torch":
                yield _Torch(log.path, log.max_row_bytes, log.size)
                return
            if stream is None:
                yield from _of_parquet(log, size)
                return
            try:
                if kind == "lines" and log.compression is None and raw.seekable() and log.path.is_file():
                    yield from _of_lines(log, len(between.rest()), size)
                elif kind == "lines":
                    yield from _of_pieces(log, raw, cut_lines(stream, log.max_row_bytes), size, blank=False)
                else:
                    pieces = cut_values(stream, array=kind == "array", limit=log.max_row_bytes)
                    yield from _of_pieces(log, raw, pieces, size, blank=True)
            finally:
                stream.close()
    except OSError as error:
        raise unreadable(log.path, error) from error


@dataclass(slots=True)
class _Lines(Chunk):
    """The lines of a plain file that start inside a range of bytes."""

    start: int
    stop: int | None
    """None: to the end of the file, however much was written since."""
    first: bool
    """Whether a line starts right at `start`; else only behind the first line end from the byte before it."""
    parse: ParseRow

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The lines that are not blank."""
        with self.path.open("rb", buffering=0) as file:
            yield from rows_of_lines(_counted(self._blocks(file), reading), self.limit, parse=self.parse)

    def _blocks(self, file: Any) -> Iterator[bytes]:
        """The bytes from the start of the first line to the end of the last."""
        stop = self.stop if self.stop is not None else _UNLIMITED
        position, block = (self.start, b"") if self.first else self._first_start(file, stop)
        if position >= stop:
            return
        file.seek(position + len(block))
        while position < stop or block:
            block = block or _read(file, position, min(_BLOCK, stop - position))
            if not block:
                return
            position += len(block)
            if position < stop:
                yield block
                block = b""
                continue
            # A line that starts before `stop` ends at the first line end from the byte before it.
            end = block.find(b"\n", max(len(block) - (position - stop) - 1, 0))
            if end >= 0:
                yield block[: end + 1]
                return
            yield block
            block = _read(file, position, _NEAR)

    def _first_start(self, file: Any, stop: int) -> tuple[int, bytes]:
        """Where the first line starts, and bytes from there on that were read; `stop` if none does before."""
        position = self.start - 1
        file.seek(position)
        while position < stop - 1:
            block = _read(file, position, _NEAR)
            end = block.find(b"\n")
            if end >= 0:
                start = position + end + 1
                return (start, block[end + 1 :]) if start < stop else (stop, b"")
            if not block:
                break
            position += len(block)
        return stop, b""


def _read(file: Any, position: int, size: int) -> bytes:
    try:
        block: bytes = file.read(size)
    except OSError as error:
        raise Damaged(f"the file cannot be read past byte {position:,} ({error})") from None
    return block


def _counted(blocks: Iterable[bytes], reading: Reading) -> Iterator[bytes]:
    for block in blocks:
        reading.size += block.count(b"\n")
        yield block


def _of_lines(log: Log, start: int, size: int) -> Iterator[Chunk]:
    starts = range(start, max(log.size, start + 1), size)
    for number in starts:
        stop = number + size if number + size < log.size else None
        yield _Lines(log.path, log.max_row_bytes, stop or log.size, number, stop, number == start, log.parse)


@dataclass(slots=True)
class _Pieces(Chunk):
    """Rows as text."""

    size: int = 0
    pieces: list[tuple[int, bytes | None, int, bool]] = field(default_factory=list)
    """Number, text (None: too long), bytes, complete."""
    parse: ParseRow = parse_row

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows, parsed."""
        for number, data, size, complete in self.pieces:
            if data is None:
                yield too_long(number, size, self.limit)
            else:
                yield self.parse(number, data, cut_off=not complete)
        reading.size = self.size


@dataclass(slots=True)
class _Broken(Chunk):
    """Nothing but the news that the file cannot be read further."""

    damage: str

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """No rows."""
        raise Damaged(self.damage)
        yield


def _of_pieces(log: Log, raw: BinaryIO, pieces: Iterator[Piece], size: int, *, blank: bool) -> Iterator[Chunk]:
    """Pieces together until they have the size; unless `blank`, those that are blank only count."""

    def empty() -> _Pieces:
        return _Pieces(log.path, log.max_row_bytes, log.size, parse=parse_row if blank else log.parse)

    chunk, held, damage = empty(), 0, None
    try:
        for piece in pieces:
            if blank or piece.data is None or (piece.data and not piece.data.isspace()):
                chunk.pieces.append((chunk.size, piece.data, piece.size, piece.complete))
            chunk.size += 1
            held += len(piece.data or b"") + 1
            if held >= size:
                chunk.done = raw.tell() if raw.seekable() else 0
                yield chunk
                chunk, held = empty(), 0
    except Damaged as found:
        damage = str(found)
    if chunk.size:
        yield chunk
    if damage is not None:
        yield _Broken(log.path, log.max_row_bytes, log.size, damage)


@dataclass(slots=True)
class _Group(Chunk):
    """A row group of a Parquet file."""

    group: int

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, batch after batch."""
        with open_parquet(self.path) as file:
            for batch in batches_of(file, self.group, threads=False):
                yield from rows_of_batch(batch, reading.size, self.limit)
                reading.size += batch.num_rows


@dataclass(slots=True)
class _Batch(Chunk):
    """Rows of a Parquet file as an Arrow stream, none of them too long."""

    data: bytes

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows."""
        import pyarrow as pa

        with pa.ipc.open_stream(self.data) as stream:
            for batch in stream:
                yield from rows_of_batch(batch, reading.size, _UNLIMITED)
                reading.size += batch.num_rows


@dataclass(slots=True)
class _Torch(Chunk):
    """A Torch file, which is one pickle and so one chunk."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its samples."""
        for row, _ in rows_of_torch(self.path):
            yield row
            reading.size = row.index + 1


def _of_parquet(log: Log, size: int) -> Iterator[Chunk]:
    with open_parquet(log.path) as file:
        total, read = max(file.metadata.num_rows, 1), 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)

            def done(rows: int) -> int:
                return int(log.size * rows / total)

            if about.total_byte_size <= _GROUPS * size:
                read += about.num_rows
                yield _Group(log.path, log.max_row_bytes, done(read), group)
                continue
            try:
                for batch in batches_of(file, group):
                    yield from _of_batch(log, batch, size, read, done)
                    read += batch.num_rows
            except Damaged as damage:
                yield _Broken(log.path, log.max_row_bytes, log.size, str(damage))
                return


def _of_batch(log: Log, batch: Any, size: int, read: int, done: Callable[[int], int]) -> Iterator[Chunk]:
    import pyarrow as pa

    held = batch.nbytes
    # Which rows are too long is said here: a row that was sent may have lost empty buffers.
    each = 1 if held > log.max_row_bytes else max(batch.num_rows * size // max(held, 1), 1)
    for start in range(0, batch.num_rows, each):
        part = batch.slice(start, each)
        at = done(read + start + part.num_rows)
        if held > log.max_row_bytes and part.nbytes > log.max_row_bytes:
            yield _Pieces(log.path, log.max_row_bytes, at, 1, [(0, None, part.nbytes, True)])
            continue
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.schema) as stream:
            stream.write_batch(part)
        yield _Batch(log.path, log.max_row_bytes, at, sink.getvalue().to_pybytes())
