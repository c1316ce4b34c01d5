"""chunks_of: a log split into chunks that other processes can read, each row in one of them.

RandomAccess: a file whose rows can be read again in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.log import Log, open_bytes, open_log, reading_file
from tito_audit.storage.nested_rows import NestedRowReader, RowPath
from tito_audit.storage.parquet import open_parquet, row_group_blocks
from tito_audit.storage.remote import RangedFile, RemoteFile
from tito_audit.storage.row import RawRow, RowSample, parse_row, too_long_row
from tito_audit.storage.spool import CUT_OFF, Spool, pack_entry, pack_row, unpack_entry, unpack_row
from tito_audit.storage.streams import Damage, ParseRow, Piece, cut_lines, cut_values, rows_of_pieces
from tito_audit.storage.table_rows import Block, MemoryPart, TableRows, row_spans, rows_of_blocks
from tito_audit.storage.torch_files import torch_blocks

_LINE_END_READ = 1 << 16
"""Bytes that are read at once while looking for the end of a line."""
_NO_LIMIT = 1 << 62
_SMALL_GROUP_CHUNKS = 8
"""Row groups up to this many chunks are read by the process that audits them; larger ones are sent in batches."""
_MANY_GROUPS = 8
"""In a remote file with so many row groups, each is fetched by the process that audits it."""


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of a log."""

    path: Path
    limit: int
    """Bytes of a row at most."""
    done: int
    """Bytes of the file that are read once this chunk is, for progress."""
    share: float | None = field(default=None, kw_only=True)
    """Share of its rows to sample; None for all."""

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        """Its rows, numbered from 0; counts them in `reader`."""
        raise NotImplementedError


class ChunkReader:
    """Iterates over the rows of a chunk, numbered from 0; `size` and `damage` are known at its end."""

    def __init__(self, chunk: Chunk) -> None:
        self.size = 0
        """Row numbers that the chunk takes up: the next chunk starts after them."""
        self.bytes = 0
        """Bytes of its lines; 0 for chunks of anything else."""
        self.damage: str | None = None
        """Why the file cannot be read past this chunk; None if it can."""
        self.sample = RowSample(chunk.share) if chunk.share is not None else None
        """The sample to take, with the rows left out so far; None to take all rows."""
        self._chunk = chunk

    def __iter__(self) -> Iterator[RawRow]:
        try:
            with reading_file(self._chunk.path):
                yield from self._chunk.rows(self)
        except Damage as damage:
            self.damage = str(damage)


@dataclass(slots=True)
class TextRows(Chunk):
    """Rows as text, which the chunk carries, without those that a sample leaves out."""

    size: int = 0
    pieces: list[tuple[int, Piece, int]] = field(default_factory=list)
    """Number and text of each row, and how many rows before it are left out."""
    parse: ParseRow = parse_row
    left_out: int = 0
    """Rows that are left out."""
    last: int = -1
    """Number of the last row, left out or not; -1 if there is none."""

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        for number, piece, left_out in self.pieces:
            if reader.sample is not None:
                reader.sample.left_out = left_out
            yield piece.row(number, self.limit, self.parse)
        reader.size = self.size
        if reader.sample is not None:
            reader.sample.left_out, reader.sample.last = self.left_out, self.last


@dataclass(slots=True)
class DamagedEnd(Chunk):
    """No rows, only that the file cannot be read further."""

    damage: str

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        raise Damage(self.damage)
        yield  # makes it a generator


def chunks_of(log: Log, size: int) -> Iterator[Chunk]:
    """The log in chunks of about `size` bytes, at least one row each; StorageError if it cannot be read.

    Lines of uncompressed files are read only by the process that audits them. Compressed files, documents and
    large row groups are read here, and their chunks carry the rows.
    """
    if log.row_path is not None:
        for chunk in chunks_of(log.outer(), size):
            yield _NestedRows(chunk.path, chunk.limit, chunk.done, chunk, log.row_path, share=log.share)
        return
    if isinstance(log.path, RowsInMemory):
        yield from _chunk_blocks(log, log.blocks(), size)
        return
    with reading_file(log.path), open_bytes(log.path) as raw:
        kind, stream, leads = log.detect_kind(raw)
        if kind == "torch":  # one pickle, so one chunk
            yield _BlocksInFile(log.path, log.max_row_bytes, log.size, share=log.share)
            return
        try:
            if stream is None:
                yield from _chunk_blocks(log, log.blocks(), size) if kind == "arrow" else _chunk_parquet(log, size)
                return
            start = len(leads.take_lead())
            if kind == "lines" and log.compression is None and raw.seekable() and log.path.is_file():
                for at in range(start, max(log.size, start + 1), size):
                    done, end = min(at + size, log.size), at + size if at + size < log.size else _NO_LIMIT
                    limit, first = log.max_row_bytes, at == start
                    yield _Lines(log.path, limit, done, at, end, first, log.parse, share=log.share)
            elif kind == "lines":
                yield from _chunk_text(log, raw, cut_lines(stream, log.max_row_bytes), size, start)
            else:
                pieces = cut_values(stream, array=kind == "array", limit=log.max_row_bytes)
                yield from _chunk_text(log, raw, pieces, size, None)
        except Damage as damage:
            yield DamagedEnd(log.path, log.max_row_bytes, log.size, str(damage))
        finally:
            if stream is not None:
                stream.close()


@dataclass(slots=True)
class _Lines(Chunk):
    """The lines of an uncompressed file that start in a range of bytes."""

    start: int
    stop: int
    """`_NO_LIMIT` for the last range, so that it ends with the file even if that has grown."""
    first: bool
    """Whether a line starts at `start`; else the first one starts after the next line end from `start - 1` on."""
    parse: ParseRow

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        with self.path.open("rb") as file:
            start, lines = self.lines(file, reader)
            yield from rows_of_pieces(lines, self.limit, self.parse, lines=True, sample=reader.sample, start=start)

    def lines(self, file: Any, reader: ChunkReader) -> tuple[int, Iterator[Piece]]:
        """Where the first line starts, and the lines."""
        if isinstance(raw := file.raw, RangedFile):
            raw.expect_ranges([(max(self.start - 1, 0), min(self.stop, raw.size()))])
        file.seek(self.start if self.first else self.start - 1)
        with _read_errors_as_damage(file):
            for _ in () if self.first else _read_to_line_end(file, self.stop):
                pass
        return file.tell(), cut_lines(self._blocks(file, reader), self.limit)

    def _blocks(self, file: Any, reader: ChunkReader) -> Iterator[bytes]:
        with _read_errors_as_damage(file):
            at, block = file.tell(), b"\n"
            while at < self.stop and (block := file.read(min(1 << 20, self.stop - at))):
                at += len(block)
                yield _count_lines(block, reader)
            for rest in () if block.endswith(b"\n") else _read_to_line_end(file, _NO_LIMIT):
                yield _count_lines(rest, reader)


def _read_to_line_end(file: Any, stop: int) -> Iterator[bytes]:
    """The bytes up to the next line end, or to the first one past `stop`."""
    while file.tell() < stop and (block := file.readline(_LINE_END_READ)):
        yield block
        if block.endswith(b"\n"):
            return


@contextmanager
def _read_errors_as_damage(file: Any) -> Iterator[None]:
    """A block in which an OSError becomes damage at the position of the file."""
    try:
        yield
    except OSError as error:
        raise Damage(f"the file cannot be read past byte {file.tell():,} ({error})") from None


def _count_lines(block: bytes, reader: ChunkReader) -> bytes:
    reader.size += block.count(b"\n")
    reader.bytes += len(block)
    return block


def _chunk_text(log: Log, raw: BinaryIO, pieces: Iterator[Piece], size: int, start: int | None) -> Iterator[Chunk]:
    """Pieces of text in chunks of about `size` bytes.

    With `start`, they are lines, the first at that byte, and blank ones are numbered but no rows; with None, each
    piece is a row.
    """
    lines = start is not None
    sample = RowSample(log.share) if log.share is not None else None

    def empty() -> TextRows:
        parse = log.parse if lines else parse_row
        return TextRows(log.path, log.max_row_bytes, log.size, parse=parse, share=log.share)

    chunk, size_so_far, damage = empty(), 0, None
    at = start or 0
    try:
        for piece in pieces:
            if not lines or not piece.is_blank:
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
    except Damage as error:
        damage = error
    if chunk.size:
        yield chunk
    if damage is not None:
        raise damage


@dataclass(slots=True)
class _NestedRows(Chunk):
    """The rows nested in the rows of a chunk."""

    chunk: Chunk
    row_path: RowPath

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        """The nested rows, numbered in their order."""
        nested = NestedRowReader(self.row_path, reader.sample)
        yield from nested.rows(self.chunk.rows(ChunkReader(self.chunk)))
        reader.size = nested.count


@dataclass(slots=True)
class _CarriedRows(Chunk):
    """Consecutive rows that are no text, or a sample of them, which the chunk carries."""

    parts: list[MemoryPart] = field(default_factory=list)
    size: int = 0
    numbers: list[int] = field(default_factory=list)
    """Number of each row; rows that a sample leaves out are counted too."""

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        numbers = iter(self.numbers)
        # Long rows were refused before: a row that was sent may have lost empty buffers, and be shorter.
        parts = (part.rows([*islice(numbers, len(part))], 1 << 62) for part in self.parts)
        rows = chain.from_iterable(parts)
        yield from rows if reader.sample is None else reader.sample.count_left_out(rows, 0, self.size)
        reader.size = self.size


def _chunk_blocks(log: Log, blocks: Iterable[Block], size: int) -> Iterator[Chunk]:
    """Blocks in chunks of about `size` bytes, only the sampled rows of each."""
    sample, damage = RowSample(log.share) if log.share is not None else None, None
    chunk, stored = _CarriedRows(log.path, log.max_row_bytes, 0, share=log.share), 0
    try:
        for block in blocks:
            passed = 0
            for content in block.contents:
                for start, stop in row_spans(content, size):
                    sampled = None
                    if sample is not None:
                        sampled = sample.sampled_rows(block.seed, block.first + passed + start, stop - start)
                    part = content.part(start, stop, sampled)
                    limit = log.max_row_bytes
                    chunk.parts += part.split_oversized(limit) if isinstance(part, TableRows) else [part]
                    numbers = range(stop - start) if sampled is None else sampled.tolist()
                    chunk.numbers += (chunk.size + number for number in numbers)
                    chunk.size += stop - start
                    stored += content.size * len(part) // len(content)
                    done = block.before + (block.after - block.before) * (passed + stop) / block.count
                    chunk.done = int(log.size * done)
                    if 2 * stored >= size:
                        yield chunk
                        chunk, stored = _CarriedRows(log.path, log.max_row_bytes, 0, share=log.share), 0
                    del part
                passed += len(content)
                del content  # the next is read into its place
            del block
    except Damage as error:
        damage = error
    if chunk.size:
        yield chunk
    if damage is not None:
        raise damage


def _chunk_parquet(log: Log, size: int) -> Iterator[Chunk]:
    """Small row groups, several to a chunk; large ones in parts."""
    remote = isinstance(log.path, RemoteFile)
    together, stored = None, 0
    with open_parquet(log.path, skip_binary=log.skip_binary) as file:
        for group, block in enumerate(row_group_blocks(file, range(file.num_row_groups))):
            bytes_ = file.metadata.row_group(group).total_byte_size
            if bytes_ <= _SMALL_GROUP_CHUNKS * size or (remote and file.num_row_groups >= _MANY_GROUPS):
                if together is None:
                    limit, skips = log.max_row_bytes, log.skip_binary
                    together = _BlocksInFile(log.path, limit, 0, group, group, block.first, skips, share=log.share)
                    stored = 0
                stored += bytes_
                together.stop, together.done = group + 1, int(log.size * block.after)
                if stored >= size or remote:
                    yield together
                    together = None
                continue
            if together is not None:
                yield together
                together = None
            yield from _chunk_blocks(log, [block], size)
    if together is not None:
        yield together


@dataclass(slots=True)
class _BlocksInFile(Chunk):
    """Row groups of a Parquet file, or a Torch file, to be read by the process that audits them."""

    start: int = 0
    stop: int = 0
    """The row groups; both 0 for a Torch file."""
    first: int = 0
    """Number of their first row in the file."""
    skip_binary: bool = False

    def rows(self, reader: ChunkReader) -> Iterator[RawRow]:
        with ExitStack() as stack:
            if self.stop:
                file = stack.enter_context(open_parquet(self.path, skip_binary=self.skip_binary))
                blocks = row_group_blocks(file, range(self.start, self.stop), self.first, threads=False)
            else:
                blocks = torch_blocks(self.path)
            for block in blocks:
                reader.size += block.count
                for row, _ in rows_of_blocks([block], self.limit, reader.sample, start=self.first):
                    yield row


Ticket = tuple[int, int]
"""The index of a row, and where to read it again: the byte offset of its line, or of its entry in the spool."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a file that are read more than once; any process can read them."""

    lines: _Lines | None = None
    """The lines of an uncompressed file; None for rows that cannot be read by offset."""
    packed_rows: Sequence[bytes] = ()
    """Those rows, each as `pack_row` returns it."""

    def rows(self, parse: ParseRow) -> Iterator[tuple[int | bytes, RawRow | None]]:
        """Each row after the byte offset of its line, or its entry for the spool; None for a blank line.

        Lines are numbered from 0 in the batch, other rows as in the file.
        """
        yield from ((pack_entry(data), unpack_row(data, parse)) for data in self.packed_rows)
        if (chunk := self.lines) is None:
            return
        try:
            with reading_file(chunk.path), chunk.path.open("rb") as file:
                at, lines = chunk.lines(file, ChunkReader(chunk))
                for index, line in enumerate(lines):
                    yield at, None if line.is_blank else line.row(index, chunk.limit, parse)
                    at += line.size + 1
        except Damage as damage:
            raise StorageError(f"{chunk.path}: {damage}.") from None


class RandomAccess:
    """The rows of one file: lines of uncompressed JSONL are read by offset, other rows are kept in a spool."""

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
        # A spool saves fetching remote rows more than once.
        local = not isinstance(path, RemoteFile)
        self.in_place = local and self._log.kind == "lines" and self._log.compression is None

    def __iter__(self) -> Iterator[tuple[Ticket, RawRow]]:
        """Each row as `open_log` gives it, after its ticket; iterate once, over all rows."""
        first = 0
        for batch in self.batches(1 << 20):
            lines = 0
            for place, raw in batch.rows(self.parse):
                if isinstance(place, int):
                    lines += 1
                if raw is not None:
                    at = place if isinstance(place, int) else self.add_entry(place)
                    yield (first + raw.index, at), replace(raw, index=first + raw.index) if first else raw
            first += lines

    def batches(self, size: int) -> Iterator[RowBatch]:
        """All rows in batches of about `size` bytes; entries for the spool have to be given to `add_entry`."""
        with reading_file(self.path):
            if self.in_place:
                chunks = chunks_of(self._log, size)
                yield from (RowBatch(chunk) for chunk in chunks if isinstance(chunk, _Lines))
                return
            self._log.keep_text = self._log.kind == "lines"
            # `unpack_row` parses the text.
            self._log.parse = lambda index, data, cut_off=False: RawRow(index, CUT_OFF if cut_off else {})
            rows: list[bytes] = []
            total = 0
            for raw in self._log:
                rows.append(pack_row(raw))
                total += len(rows[-1])
                if total >= size:
                    yield RowBatch(packed_rows=rows)
                    rows, total = [], 0
            if rows:
                yield RowBatch(packed_rows=rows)

    def add_entry(self, entry: bytes) -> int:
        """Put the entry of a row into the spool; returns its offset."""
        return self._spool.add_entry(entry)

    def row(self, ticket: Ticket, parse: ParseRow | None = None) -> RawRow:
        """The row with this ticket; a line of JSONL has its text."""
        if not self.in_place:
            return unpack_row(unpack_entry(self._spool.entry_at(ticket[1])), parse or self.parse)
        with reading_file(self.path), self.path.open("rb") as file:
            return line_at(file, ticket, self._limit, parse or self.parse)

    def spool_entry(self, ticket: Ticket) -> bytes | None:
        """The row's entry in the spool; None if it is read by offset."""
        return None if self.in_place else self._spool.entry_at(ticket[1])


def line_at(file: BinaryIO, ticket: Ticket, limit: int, parse: ParseRow = parse_row) -> RawRow:
    """The row of one line of an uncompressed file, read by its offset, with its text."""
    index, at = ticket
    file.seek(at)
    data = file.readline(min(limit + 2, sys.maxsize))
    line = data.removesuffix(b"\n")
    if len(line) > limit:
        return too_long_row(index, len(line), limit)
    return replace(parse(index, line, cut_off=line is data), text=line.strip())
