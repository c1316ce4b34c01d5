"""chunks_of: a log split into chunks that other processes can read; together they hold each row once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tito_audit.storage.chunk import Broken, Chunk, Pieces, Reading
from tito_audit.storage.documents import cut_values
from tito_audit.storage.in_memory import MemoryPart, RowsInMemory, seed_of_rows, spans
from tito_audit.storage.inside import RowPath, Unwrapped
from tito_audit.storage.lines import ParseRow, Piece, cut_lines, rows_of_lines, sampled_lines
from tito_audit.storage.log import Log, opened, unreadable
from tito_audit.storage.remote import RangedFile
from tito_audit.storage.row import RawRow, parse_row
from tito_audit.storage.sampling import Sample
from tito_audit.storage.streams import Damaged
from tito_audit.storage.table_chunks import chunks_of_arrow, chunks_of_parquet
from tito_audit.storage.torch_files import rows_of_torch

_BLOCK = 1 << 20
_NEAR = 1 << 16
"""Bytes read at once while looking for the end of a line."""
_UNLIMITED = 1 << 62


def chunks_of(log: Log, size: int) -> Iterator[Chunk]:
    """The log in chunks of about `size` bytes and at least one row; StorageError if it cannot be read.

    Lines of an uncompressed file are read only by the process that audits them. Compressed files, documents and
    large row groups are read here, and the chunk carries the bytes.
    """
    if log.inside is not None:
        for chunk in chunks_of(log.outer(), size):
            yield _Inside(chunk.path, chunk.limit, chunk.done, chunk, log.inside, share=log.share)
        return
    if isinstance(log.path, RowsInMemory):
        yield from _of_memory(log, log.path, size)
        return
    try:
        with opened(log.path) as raw:
            kind, stream, between = log.look(raw)
            if kind == "torch":
                yield _Torch(log.path, log.max_row_bytes, log.size, share=log.share)
                return
            if stream is None:
                yield from chunks_of_arrow(log, size) if kind == "arrow" else chunks_of_parquet(log, size)
                return
            try:
                start = len(between.rest())
                if kind == "lines" and log.compression is None and raw.seekable() and log.path.is_file():
                    yield from _of_lines(log, start, size)
                elif kind == "lines":
                    yield from _of_pieces(log, raw, cut_lines(stream, log.max_row_bytes), size, start)
                else:
                    pieces = cut_values(stream, array=kind == "array", limit=log.max_row_bytes)
                    yield from _of_pieces(log, raw, pieces, size, None)
            finally:
                stream.close()
    except OSError as error:
        raise unreadable(log.path, error) from error


@dataclass(slots=True)
class _Lines(Chunk):
    """The lines of an uncompressed file that start inside a byte range."""

    start: int
    stop: int | None
    """None: to the end of the file, even if it has grown since."""
    first: bool
    """Whether a line starts at `start`; else the first starts after the first line end at or after `start - 1`."""
    parse: ParseRow

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The lines that are not blank."""
        stop = self.stop if self.stop is not None else _UNLIMITED
        with self.path.open("rb", buffering=0) as file:
            if isinstance(file, RangedFile):
                file.expect([(max(self.start - 1, 0), min(stop, file.size()))])
            start, block = (self.start, b"") if self.first else self._first_start(file, stop)
            blocks = _counted(self._blocks(file, start, block, stop), reading)
            if reading.sample is None:
                yield from rows_of_lines(blocks, self.limit, parse=self.parse)
            else:
                yield from sampled_lines(blocks, self.limit, reading.sample, start, self.parse)

    def _blocks(self, file: Any, position: int, block: bytes, stop: int) -> Iterator[bytes]:
        """The bytes from the start of the first line (`block` is already read) to the end of the last."""
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
            # The line that starts before `stop` ends at the first line end at or after `stop - 1`.
            end = block.find(b"\n", max(len(block) - (position - stop) - 1, 0))
            if end >= 0:
                yield block[: end + 1]
                return
            yield block
            block = _read(file, position, _NEAR)

    def _first_start(self, file: Any, stop: int) -> tuple[int, bytes]:
        """Where the first line starts, and bytes already read from there; `stop` if no line starts before it."""
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
        yield _Lines(
            log.path,
            log.max_row_bytes,
            stop or log.size,
            number,
            stop,
            number == start,
            log.parse,
            share=log.share,
        )


def _of_pieces(log: Log, raw: BinaryIO, pieces: Iterator[Piece], size: int, start: int | None) -> Iterator[Chunk]:
    """Chunks of about `size` bytes from pieces.

    With `start`, pieces are lines, the first at that byte, and blank lines are numbered but no rows; with None,
    each piece is a row.
    """
    lines = start is not None
    sample = Sample(log.share) if log.share is not None else None

    def empty() -> Pieces:
        parse = log.parse if lines else parse_row
        return Pieces(log.path, log.max_row_bytes, log.size, parse=parse, share=log.share)

    chunk, size_so_far, damage = empty(), 0, None
    at = start or 0
    try:
        for piece in pieces:
            if not lines or piece.data is None or (piece.data and not piece.data.isspace()):
                chunk.last = chunk.size
                if sample is None or sample.takes(chunk.size, at, piece.data, piece.size):
                    row = (chunk.size, piece.data, piece.size, piece.complete, chunk.left_out)
                    chunk.pieces.append(row)
                else:
                    chunk.left_out += 1
            at += piece.size + 1 if lines else 1
            chunk.size += 1
            size_so_far += len(piece.data or b"") + 1
            if size_so_far >= size:
                chunk.done = raw.tell() if raw.seekable() else 0
                yield chunk
                chunk, size_so_far = empty(), 0
    except Damaged as error:
        damage = str(error)
    if chunk.size:
        yield chunk
    if damage is not None:
        yield Broken(log.path, log.max_row_bytes, log.size, damage)


def _of_memory(log: Log, path: RowsInMemory, size: int) -> Iterator[Chunk]:
    content, limit = path.content, log.max_row_bytes
    seed = seed_of_rows(content) if log.share is not None else 0
    for start, stop in spans(content, size):
        done = log.size * stop // len(content)
        if log.share is None:
            yield _Memory(path, limit, done, content.part(start, stop), stop - start)
            continue
        sampled = Sample(log.share).among(seed, start, stop - start)
        part, numbers = content.part(start, stop, sampled), sampled.tolist()
        yield _Memory(path, limit, done, part, stop - start, numbers, share=log.share)


@dataclass(slots=True)
class _Memory(Chunk):
    """Consecutive rows in memory, or those of them that a sample takes; carries them to other processes."""

    part: MemoryPart
    size: int
    numbers: list[int] | None = None
    """The numbers of the sampled rows; None: all rows."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows."""
        numbers = range(self.size) if self.numbers is None else self.numbers
        for passed, row in enumerate(self.part.rows(numbers, self.limit)):
            if reading.sample is not None:
                reading.sample.left_out = row.index - passed
            yield row
        reading.size = self.size
        if reading.sample is not None:
            reading.sample.left_out, reading.sample.last = self.size - len(numbers), self.size - 1


@dataclass(slots=True)
class _Inside(Chunk):
    """The rows nested in the rows of a chunk."""

    chunk: Chunk
    inside: RowPath

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The nested rows, numbered as they are found."""
        unwrapped = Unwrapped(self.inside, reading.sample)
        yield from unwrapped.rows(self.chunk.rows(Reading(self.chunk)))
        reading.size = unwrapped.count


@dataclass(slots=True)
class _Torch(Chunk):
    """A Torch file: one pickle, so one chunk."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its samples."""
        for row, _ in rows_of_torch(self.path, reading.sample):
            yield row
            reading.size = row.index + 1
