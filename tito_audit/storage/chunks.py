"""chunks_of: a log split into chunks that other processes can read; together they hold each row once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tito_audit.storage.arrow import open_arrow, parts_of_batch, seed_of_batch
from tito_audit.storage.documents import cut_values
from tito_audit.storage.in_memory import MemoryPart, RowsInMemory, StreamedRows, seed_of_rows, spans
from tito_audit.storage.inside import RowPath, Unwrapped
from tito_audit.storage.log import Log, opened, readable
from tito_audit.storage.parquet import batches_of, open_parquet, rows_of_groups, seed_of_group
from tito_audit.storage.remote import RangedFile, RemoteFile
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import RowSample
from tito_audit.storage.streams import Damaged, ParseRow, Piece, cut_lines, rows_of_pieces
from tito_audit.storage.table_rows import streamed, take_rows
from tito_audit.storage.torch_files import rows_of_torch

_NEAR = 1 << 16
"""Bytes read at once while looking for the end of a line."""
_UNLIMITED = 1 << 62
_GROUPS = 8
"""A row group of up to this many chunks is read by the process that audits it; larger ones are sent in batches."""
_MANY = 8
"""Of a remote file with so many row groups each is fetched by the process that audits it."""


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of a log."""

    path: Path
    limit: int
    """Maximum bytes of a row."""
    done: int
    """Bytes of the file read once this chunk has been read."""
    share: float | None = field(default=None, kw_only=True)
    """About what share of its rows to sample; None: all."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, numbered from 0; updates `reading`."""
        raise NotImplementedError


class Reading:
    """Iterates over the rows of a chunk, numbered from 0; `size` and `damage` are set once all were read."""

    def __init__(self, chunk: Chunk) -> None:
        self.size = 0
        """How many row numbers the chunk takes up; the next chunk's rows are numbered from there."""
        self.bytes = 0
        """Bytes of the lines that `size` counts; 0 for other chunks."""
        self.damage: str | None = None
        """Why the file cannot be read past this chunk."""
        self.sample = RowSample(chunk.share) if chunk.share is not None else None
        """Counts the rows left out so far; None if all rows are read."""
        self._chunk = chunk

    def __iter__(self) -> Iterator[RawRow]:
        try:
            with readable(self._chunk.path):
                yield from self._chunk.rows(self)
        except Damaged as damage:
            self.damage = str(damage)


@dataclass(slots=True)
class RowTexts(Chunk):
    """Rows as text, without those that a sample leaves out."""

    size: int = 0
    pieces: list[tuple[int, bytes | None, int, bool, int]] = field(default_factory=list)
    """(number, text or None if too long, bytes, complete, how many before it were left out)"""
    parse: ParseRow = parse_row
    left_out: int = 0
    """How many rows were left out in total."""
    last: int = -1
    """The number of the last row, left out or not; -1 if there is none."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        for number, data, size, complete, left_out in self.pieces:
            if reading.sample is not None:
                reading.sample.left_out = left_out
            if data is None:
                yield too_long(number, size, self.limit)
            else:
                yield self.parse(number, data, cut_off=not complete)
        reading.size = self.size
        if reading.sample is not None:
            reading.sample.left_out, reading.sample.last = self.left_out, self.last


@dataclass(slots=True)
class Broken(Chunk):
    """No rows: says that the file cannot be read further."""

    damage: str

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        raise Damaged(self.damage)
        yield


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
        content, limit = log.path.content, log.max_row_bytes
        seed = seed_of_rows(content) if log.share is not None else 0
        for first, stop in spans(content, size):
            sampled, done = _chosen(log, seed, first, stop - first), log.size * stop // len(content)
            numbers, part = None if sampled is None else sampled.tolist(), content.part(first, stop, sampled)
            yield _Rows(log.path, limit, done, part, stop - first, numbers, share=log.share)
        return
    with readable(log.path), opened(log.path) as raw:
        kind, stream, between = log.look(raw)
        if kind == "torch":
            yield _Torch(log.path, log.max_row_bytes, log.size, share=log.share)
            return
        if stream is None:
            yield from _of_arrow(log, size) if kind == "arrow" else _of_parquet(log, size)
            return
        try:
            start = len(between.rest())
            if kind == "lines" and log.compression is None and raw.seekable() and log.path.is_file():
                for at in range(start, max(log.size, start + 1), size):
                    end = at + size if at + size < log.size else None
                    done, limit = end or log.size, log.max_row_bytes
                    yield _Lines(log.path, limit, done, at, end, at == start, log.parse, share=log.share)
            elif kind == "lines":
                yield from _of_pieces(log, raw, cut_lines(stream, log.max_row_bytes), size, start)
            else:
                pieces = cut_values(stream, array=kind == "array", limit=log.max_row_bytes)
                yield from _of_pieces(log, raw, pieces, size, None)
        finally:
            stream.close()


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
        stop = self.stop if self.stop is not None else _UNLIMITED
        with self.path.open("rb", buffering=0) as file:
            if isinstance(file, RangedFile):
                file.expect([(max(self.start - 1, 0), min(stop, file.size()))])
            start, block = (self.start, b"") if self.first else self._first_start(file, stop)
            lines = cut_lines(_counted(self._blocks(file, start, block, stop), reading), self.limit)
            yield from rows_of_pieces(
                lines, self.limit, self.parse, lines=True, sample=reading.sample, start=start
            )

    def _blocks(self, file: Any, position: int, block: bytes, stop: int) -> Iterator[bytes]:
        """The bytes from the start of the first line (`block` is already read) to the end of the last."""
        if position >= stop:
            return
        file.seek(position + len(block))
        while position < stop or block:
            block = block or _read(file, position, min(1 << 20, stop - position))
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
        reading.bytes += len(block)
        yield block


def _of_pieces(log: Log, raw: BinaryIO, pieces: Iterator[Piece], size: int, start: int | None) -> Iterator[Chunk]:
    """Chunks of about `size` bytes from pieces.

    With `start`, pieces are lines, the first at that byte, and blank lines are numbered but no rows; with None,
    each piece is a row.
    """
    lines = start is not None
    sample = RowSample(log.share) if log.share is not None else None

    def empty() -> RowTexts:
        parse = log.parse if lines else parse_row
        return RowTexts(log.path, log.max_row_bytes, log.size, parse=parse, share=log.share)

    chunk, size_so_far, damage = empty(), 0, None
    at = start or 0
    try:
        for piece in pieces:
            if not lines or not piece.blank:
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


@dataclass(slots=True)
class _Rows(Chunk):
    """Consecutive rows in memory or of a table, or those that a sample takes; carries them to other processes."""

    part: MemoryPart
    size: int
    numbers: list[int] | None = None
    """The numbers of the sampled rows; None: all rows."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        numbers = range(self.size) if self.numbers is None else self.numbers
        rows = self.part.rows(numbers, self.limit)
        yield from rows if reading.sample is None else reading.sample.counted(rows, 0, self.size)
        reading.size = self.size


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
        for row, _ in rows_of_torch(self.path, reading.sample):
            yield row
            reading.size = row.index + 1


# Tables: row groups of Parquet, record batches of Arrow; small ones together, large ones in parts.


def _of_parquet(log: Log, size: int) -> Iterator[Chunk]:
    remote = isinstance(log.path, RemoteFile)
    together, stored = None, 0
    with open_parquet(log.path, quick=log.quick) as file:
        total, read = max(file.metadata.num_rows, 1), 0

        def done(row: int) -> int:
            return int(log.size * (read + row) / total)

        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if about.total_byte_size <= _GROUPS * size or (remote and file.num_row_groups >= _MANY):
                if together is None:
                    groups = range(group, group)
                    together = _Groups(log.path, log.max_row_bytes, 0, groups, read, log.quick, share=log.share)
                    stored = 0
                read += about.num_rows
                stored += about.total_byte_size
                together.groups, together.done = range(together.groups.start, group + 1), done(0)
                if stored >= size or remote:
                    yield together
                    together = None
                continue
            if together is not None:
                yield together
                together = None
            try:
                for batch in batches_of(file, group):
                    chosen = _chosen(log, seed_of_group(about), read, batch.num_rows)
                    yield from _of_batch(log, batch, chosen, size, done)
                    read += batch.num_rows
            except Damaged as damage:
                yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
                return
    if together is not None:
        yield together


def _of_arrow(log: Log, size: int) -> Iterator[Chunk]:
    read = stored = done = 0
    small: list[tuple[Any, Any]] = []

    def at_its_end(_: int) -> int:
        return done

    with open_arrow(log.path) as file:
        try:
            for batch, _, share in file.batches():
                chosen = _chosen(log, seed_of_batch(batch), read, batch.num_rows)
                if batch.nbytes <= min(size // 2, log.max_row_bytes):
                    small.append((batch, chosen))
                    read += batch.num_rows
                    stored, done = stored + batch.nbytes, int(log.size * share)
                    if stored >= size:
                        yield from _together(log, small, done)
                        stored = 0
                    continue
                yield from _together(log, small, done)
                stored, done, seed, part = 0, int(log.size * share), seed_of_batch(batch), None
                for part in parts_of_batch(batch):
                    yield from _of_batch(log, part, _chosen(log, seed, read, part.num_rows), size, at_its_end)
                    read += part.num_rows
                del batch, part  # the next is read into its place
        except Damaged as damage:
            yield from _together(log, small, done)
            yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
            return
        yield from _together(log, small, done)


def _chosen(log: Log, seed: int, first: int, count: int) -> NDArray[np.int64] | None:
    """`[N]` which of `count` rows a log's sample takes, counted from 0; None for all."""
    return None if log.share is None else RowSample(log.share).among(seed, first, count)


def _together(log: Log, batches: list[tuple[Any, Any]], done: int) -> Iterator[Chunk]:
    """Record batches, each with its sampled rows or None for all, as one chunk; the list is empty afterwards."""
    size, parts = 0, []
    numbers: list[int] = []
    for batch, chosen in batches:
        parts.append(batch if chosen is None else take_rows(batch, chosen))
        numbers += [] if chosen is None else (size + chosen).tolist()
        size += batch.num_rows
    batches.clear()
    if size:
        rows = StreamedRows(streamed(*parts).to_pybytes())
        yield _Rows(log.path, _UNLIMITED, done, rows, size, numbers if log.share else None, share=log.share)


def _of_batch(log: Log, batch: Any, chosen: Any, size: int, done: Callable[[int], int]) -> Iterator[Chunk]:
    """A batch, or its sampled rows, in chunks of about `size` bytes; each reaches up to the first row of the next.

    `done` says how many bytes of the file were read before a row of the batch.
    """
    limit, share = log.max_row_bytes, log.share
    chosen = np.arange(batch.num_rows) if chosen is None else chosen
    # Checked here which rows are too long: a row that was sent may have lost empty buffers.
    alone = batch.nbytes > limit
    small = batch.slice(0, 0) if alone else take_rows(batch, chosen)
    each = 1 if alone else max(len(chosen) * size // max(small.nbytes, 1), 1)
    start = before = 0
    for stop in (*range(each, len(chosen), each), len(chosen)) if batch.num_rows else ():
        end = int(chosen[stop]) if stop < len(chosen) else batch.num_rows
        numbers = (chosen[start:stop] - before).tolist()
        part = batch.slice(before + numbers[0], 1) if alone and numbers else small.slice(start, stop - start)
        at = done(end)
        if alone and part.nbytes > limit:
            row = (numbers[0], None, part.nbytes, True, numbers[0])
            left_out, last = end - before - 1, end - before - 1
            yield RowTexts(log.path, limit, at, end - before, [row], left_out=left_out, last=last, share=share)
        else:
            rows = StreamedRows(streamed(part).to_pybytes())
            those = None if share is None else numbers
            yield _Rows(log.path, _UNLIMITED, at, rows, end - before, those, share=share)
        start, before = stop, end


@dataclass(slots=True)
class _Groups(Chunk):
    """Consecutive row groups of a Parquet file."""

    groups: range
    first: int
    """Their first row, counted in the file."""
    quick: bool

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        with open_parquet(self.path, quick=self.quick) as file:
            reading.size = sum(file.metadata.row_group(group).num_rows for group in self.groups)
            sample, before = reading.sample, self.first
            yield from rows_of_groups(file, self.groups, self.limit, sample, before=before, threads=False)
