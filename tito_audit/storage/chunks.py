"""chunks_of: a log split into chunks that other processes can read; together they hold each row once.

RandomAccess: a file whose rows can be read again, in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.inside import RowPath, Unwrapped
from tito_audit.storage.log import Log, open_log, opened, readable
from tito_audit.storage.parquet import blocks_of_groups, open_parquet
from tito_audit.storage.remote import RangedFile, RemoteFile
from tito_audit.storage.row import RawRow, RowSample, parse_row, too_long
from tito_audit.storage.spool import CUT_OFF, Spool, entry_of, row_bytes, row_of, unpacked
from tito_audit.storage.streams import Damaged, ParseRow, Piece, cut_lines, cut_values, rows_of_pieces
from tito_audit.storage.table_rows import Block, MemoryPart, TableRows, rows_of_blocks, spans
from tito_audit.storage.torch_files import blocks_of_torch

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
    pieces: list[tuple[int, Piece, int]] = field(default_factory=list)
    """(number, text, how many before it were left out)"""
    parse: ParseRow = parse_row
    left_out: int = 0
    """How many rows were left out in total."""
    last: int = -1
    """The number of the last row, left out or not; -1 if there is none."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        for number, piece, left_out in self.pieces:
            if reading.sample is not None:
                reading.sample.left_out = left_out
            yield piece.row(number, self.limit, self.parse)
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
        yield from _of_blocks(log, log.blocks(), size)
        return
    with readable(log.path), opened(log.path) as raw:
        kind, stream, between = log.look(raw)
        if kind == "torch":  # one pickle, so one chunk
            yield _Groups(log.path, log.max_row_bytes, log.size, share=log.share)
            return
        if stream is None:
            try:
                yield from _of_blocks(log, log.blocks(), size) if kind == "arrow" else _of_parquet(log, size)
            except Damaged as damage:
                yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
            return
        try:
            start = len(between.rest())
            if kind == "lines" and log.compression is None and raw.seekable() and log.path.is_file():
                for at in range(start, max(log.size, start + 1), size):
                    done, end = min(at + size, log.size), at + size if at + size < log.size else _UNLIMITED
                    limit, first = log.max_row_bytes, at == start
                    yield _Lines(log.path, limit, done, at, end, first, log.parse, share=log.share)
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
    stop: int
    """Past the end of the file: to its end, even if it has grown since."""
    first: bool
    """Whether a line starts at `start`; else the first starts after the first line end at or after `start - 1`."""
    parse: ParseRow

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        with self.path.open("rb") as file:
            start, lines = self.lines(file, reading)
            yield from rows_of_pieces(
                lines, self.limit, self.parse, lines=True, sample=reading.sample, start=start
            )

    def lines(self, file: Any, reading: Reading) -> tuple[int, Iterator[Piece]]:
        """Where the first line starts in the open file, and the lines."""
        if isinstance(raw := file.raw, RangedFile):
            raw.expect([(max(self.start - 1, 0), min(self.stop, raw.size()))])
        file.seek(self.start if self.first else self.start - 1)
        with _damaged(file):
            for _ in () if self.first else _to_line_end(file, self.stop):
                pass
        return file.tell(), cut_lines(self._blocks(file, reading), self.limit)

    def _blocks(self, file: Any, reading: Reading) -> Iterator[bytes]:
        with _damaged(file):
            at, block = file.tell(), b"\n"
            while at < self.stop and (block := file.read(min(1 << 20, self.stop - at))):
                at += len(block)
                yield _counted(block, reading)
            for rest in () if block.endswith(b"\n") else _to_line_end(file, _UNLIMITED):
                yield _counted(rest, reading)


def _to_line_end(file: Any, stop: int) -> Iterator[bytes]:
    """The bytes from here to the next line end, or to one past `stop`."""
    while file.tell() < stop and (block := file.readline(_NEAR)):
        yield block
        if block.endswith(b"\n"):
            return


@contextmanager
def _damaged(file: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"the file cannot be read past byte {file.tell():,} ({error})") from None


def _counted(block: bytes, reading: Reading) -> bytes:
    reading.size += block.count(b"\n")
    reading.bytes += len(block)
    return block


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
                    chunk.pieces.append((chunk.size, piece, chunk.left_out))
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
class _Rows(Chunk):
    """Consecutive rows that are no text, or those that a sample takes; carries them to other processes."""

    parts: list[MemoryPart] = field(default_factory=list)
    size: int = 0
    numbers: list[int] = field(default_factory=list)
    """The number of each row; those that a sample leaves out have numbers too."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        numbers = iter(self.numbers)
        # Which rows are too long was checked before: a row that was sent may have lost empty buffers.
        parts = (part.rows([*islice(numbers, len(part))], 1 << 62) for part in self.parts)
        rows = chain.from_iterable(parts)
        yield from rows if reading.sample is None else reading.sample.counted(rows, 0, self.size)
        reading.size = self.size


def _of_blocks(log: Log, blocks: Iterable[Block], size: int) -> Iterator[Chunk]:
    """Blocks, or their sampled rows, in chunks of about `size` bytes."""
    sample, damage = RowSample(log.share) if log.share is not None else None, None
    chunk, stored = _Rows(log.path, log.max_row_bytes, 0, share=log.share), 0
    try:
        for block in blocks:
            passed = 0
            for content in block.contents:
                for start, stop in spans(content, size):
                    sampled = None
                    if sample is not None:
                        sampled = sample.among(block.seed, block.first + passed + start, stop - start)
                    part = content.part(start, stop, sampled)
                    chunk.parts += part.within(log.max_row_bytes) if isinstance(part, TableRows) else [part]
                    numbers = range(stop - start) if sampled is None else sampled.tolist()
                    chunk.numbers += (chunk.size + number for number in numbers)
                    chunk.size += stop - start
                    stored += content.size * len(part) // len(content)
                    done = block.before + (block.after - block.before) * (passed + stop) / block.count
                    chunk.done = int(log.size * done)
                    if 2 * stored >= size:
                        yield chunk
                        chunk, stored = _Rows(log.path, log.max_row_bytes, 0, share=log.share), 0
                    del part
                passed += len(content)
                del content  # the next is read into its place
            del block
    except Damaged as error:
        damage = error
    if chunk.size:
        yield chunk
    if damage is not None:
        raise damage


def _of_parquet(log: Log, size: int) -> Iterator[Chunk]:
    """Small row groups together, read by the process that audits them; large ones in parts."""
    remote = isinstance(log.path, RemoteFile)
    together, stored = None, 0
    with open_parquet(log.path, quick=log.quick) as file:
        for group, block in enumerate(blocks_of_groups(file, range(file.num_row_groups))):
            bytes_ = file.metadata.row_group(group).total_byte_size
            if bytes_ <= _GROUPS * size or (remote and file.num_row_groups >= _MANY):
                if together is None:
                    together, stored = (
                        _Groups(
                            log.path, log.max_row_bytes, 0, group, group, block.first, log.quick, share=log.share
                        ),
                        0,
                    )
                stored += bytes_
                together.stop, together.done = group + 1, int(log.size * block.after)
                if stored >= size or remote:
                    yield together
                    together = None
                continue
            if together is not None:
                yield together
                together = None
            yield from _of_blocks(log, [block], size)
    if together is not None:
        yield together


@dataclass(slots=True)
class _Groups(Chunk):
    """Row groups of a Parquet file, or a Torch file, read by the process that audits them."""

    start: int = 0
    stop: int = 0
    """Row groups."""
    first: int = 0
    """Their first row, counted in the file."""
    quick: bool = False

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        with ExitStack() as stack:
            if self.stop:
                file = stack.enter_context(open_parquet(self.path, quick=self.quick))
                blocks = blocks_of_groups(file, range(self.start, self.stop), self.first, threads=False)
            else:
                blocks = blocks_of_torch(self.path)
            for row, _ in rows_of_blocks(
                self._counted(blocks, reading), self.limit, reading.sample, start=self.first
            ):
                yield row

    def _counted(self, blocks: Iterator[Block], reading: Reading) -> Iterator[Block]:
        for block in blocks:
            reading.size += block.count
            yield block


# Rows read again, in any order


Ticket = tuple[int, int]
"""The index of a row, and where it is: the byte offset of its line, or where it begins in the spool."""


class RowBatch:
    """Consecutive rows that any process can read."""

    __slots__ = ()

    def rows(self, parse: ParseRow) -> Iterator[tuple[int | bytes, RawRow | None]]:
        """Each row with the byte offset of its line, or with its entry for the spool; None for a blank line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InPlace(RowBatch):
    """Lines of an uncompressed file."""

    chunk: _Lines

    def rows(self, parse: ParseRow) -> Iterator[tuple[int, RawRow | None]]:
        """Each line with its byte offset, numbered from 0 in the batch; None for a blank one."""
        chunk = self.chunk
        try:
            with readable(chunk.path), chunk.path.open("rb") as file:
                at, lines = chunk.lines(file, Reading(chunk))
                for index, line in enumerate(lines):
                    yield at, None if line.blank else line.row(index, chunk.limit, parse)
                    at += line.size + 1
        except Damaged as damage:
            raise StorageError(f"{chunk.path}: {damage}.") from None


@dataclass(frozen=True, slots=True)
class SpooledRows(RowBatch):
    """Rows of a file that cannot be read in place, each as `row_bytes` packs it."""

    each: list[bytes]

    def rows(self, parse: ParseRow) -> Iterator[tuple[bytes, RawRow]]:
        """Each row with its entry for the spool, numbered as in the file."""
        for data in self.each:
            yield entry_of(data), row_of(data, parse)


class RandomAccess:
    """The rows of one file: lines of uncompressed JSONL are read in place, other rows are kept in a spool."""

    def __init__(
        self, path: Path, *, max_row_bytes: int, spool: Spool | None = None, parse: ParseRow = parse_row
    ) -> None:
        self.path = path
        if not path.is_file():
            raise StorageError(
                f"{path}: this is a pipe or a device, which is not read twice; save it to a file first."
            )
        self._log = open_log(path, max_row_bytes=max_row_bytes)
        self._limit = max_row_bytes
        self.parse = parse
        self._spool = spool or Spool()
        # A remote row is fetched once, however often it is read.
        local = not isinstance(path, RemoteFile)
        self.in_place = local and self._log.kind == "lines" and self._log.compression is None

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Every row as `open_log` gives it, with its ticket; iterate once, over all rows."""
        first = 0
        for batch in self.batches(1 << 20):
            lines = 0
            for place, raw in batch.rows(self.parse):
                if isinstance(place, int):
                    lines += 1
                if raw is not None:
                    at = place if isinstance(place, int) else self.keep(place)
                    yield (first + raw.index, at), replace(raw, index=first + raw.index) if first else raw
            first += lines

    def batches(self, size: int) -> Iterator[RowBatch]:
        """All rows in batches of about `size` bytes, which any process can read; those in a spool go to `keep`."""
        with readable(self.path):
            if self.in_place:
                yield from (InPlace(chunk) for chunk in chunks_of(self._log, size) if isinstance(chunk, _Lines))
                return
            self._log.keep_text = self._log.kind == "lines"
            # The text is parsed later.
            self._log.parse = lambda index, data, cut_off=False: RawRow(index, CUT_OFF if cut_off else {})
            rows: list[bytes] = []
            total = 0
            for raw in self._log:
                rows.append(row_bytes(raw))
                total += len(rows[-1])
                if total >= size:
                    yield SpooledRows(rows)
                    rows, total = [], 0
            if rows:
                yield SpooledRows(rows)

    def keep(self, entry: bytes) -> int:
        """Keep the entry of a row of `SpooledRows`; returns where it is."""
        return self._spool.append(entry)

    def row(self, ticket: Ticket, parse: ParseRow | None = None) -> RawRow:
        """The row with this ticket; with its text if it is a line of JSONL."""
        if not self.in_place:
            return row_of(unpacked(self._spool.packed(ticket[1])), parse or self.parse)
        with readable(self.path), self.path.open("rb") as file:
            return line_at(file, ticket, self._limit, parse or self.parse)

    def packed(self, ticket: Ticket) -> bytes | None:
        """The row as it is in the spool; None if it is read in place."""
        return None if self.in_place else self._spool.packed(ticket[1])


def line_at(file: BinaryIO, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of an uncompressed file, with its text."""
    index, at = ticket
    file.seek(at)
    data = file.readline(min(limit + 2, sys.maxsize))
    line = data.removesuffix(b"\n")
    if len(line) > limit:
        return too_long(index, len(line), limit)
    return replace(parse(index, line, cut_off=line is data), text=line.strip())
