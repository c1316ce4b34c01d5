"""ByteStream: the decompressed bytes of a log in blocks, with lookahead; and its lines, however long they are."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal, TypeAlias

from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import RawRow, parse_row, too_long
from tito_audit.storage.sampling import RowSample

Compression = Literal["gzip", "zstd"] | None

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Damaged(Exception):
    """The file cannot be read further; the message says where. Caught within this room."""


def compression_of(head: bytes) -> Compression:
    """How a file is compressed, by its first four bytes; None if it is not."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


class ByteStream:
    """Blocks of decompressed bytes; what `peek` showed is still read afterwards.

    Damage is reported only once everything before it was read, so `peek` never raises.
    """

    def __init__(self, raw: BinaryIO, compression: Compression) -> None:
        self._compression = compression
        self._reader: Any = raw
        self._size = 1 << 16 if compression == "zstd" else 1 << 20  # a damaged frame loses all of the same read
        if compression == "gzip":
            self._reader = gzip.GzipFile(fileobj=raw)
        elif compression == "zstd":
            self._reader = pa.input_stream(raw, compression="zstd")
        self._ahead: list[bytes] = []
        self._damage: Damaged | None = None
        self._taken = 0

    def __iter__(self) -> Iterator[bytes]:
        """The remaining blocks; raises Damaged where the file is damaged."""
        while True:
            if self._ahead:
                yield self._ahead.pop(0)
            elif self._damage is not None:
                raise self._damage
            elif block := self._pull():
                yield block
            elif self._damage is None:
                return

    def peek(self, size: int) -> bytes:
        """The next `size` bytes without consuming them; fewer only at the end of the file."""
        have = sum(map(len, self._ahead))
        while have < size and (block := self._pull()):
            self._ahead.append(block)
            have += len(block)
        # The blocks stay apart: a joined one would be held until its last row is read.
        parts, left = [], size
        for block in self._ahead:
            parts.append(block[:left])
            left -= len(block)
            if left <= 0:
                break
        return b"".join(parts)

    def unread(self, blocks: list[bytes]) -> None:
        """Put blocks back to be read again."""
        self._ahead[:0] = blocks

    def skip(self, size: int) -> None:
        """Consume bytes that `peek` showed."""
        head = b"".join(self._ahead)[size:]
        self._ahead = [head] if head else []

    def close(self) -> None:
        """Close the decompressor; the file itself stays open."""
        if self._compression is not None:
            self._reader.close()

    def _pull(self) -> bytes:
        """The next block of the file; b"" at its end and at damage, which is kept for later."""
        if self._damage is not None:
            return b""
        try:
            block: bytes = self._reader.read1(self._size)
        except (OSError, EOFError, zlib.error) as error:
            what = f"the {self._compression} data" if self._compression else "the file"
            self._damage = Damaged(f"{what} cannot be read past byte {self._taken:,} ({error})")
            return b""
        self._taken += len(block)
        return block


ParseRow: TypeAlias = Callable[..., RawRow]
"""Reads a row, as `parse_row` does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes cut out of a stream."""

    data: bytes | None
    """None if the piece was over the limit and not kept."""
    size: int
    complete: bool = True
    """False if the file ended inside the piece."""
    mark: bytes = b""
    """The byte after it: the comma or bracket of an array, the end of a line."""
    gap: bool = False
    """True for white space between elements."""

    @property
    def blank(self) -> bool:
        """Whether it is empty or white space."""
        return self.data is not None and (not self.data or self.data.isspace())

    def row(self, index: int, limit: int, parse: ParseRow = parse_row) -> RawRow:
        """The row that it is; an error row if it was over the limit."""
        if self.data is None:
            return too_long(index, self.size, limit)
        return parse(index, self.data, cut_off=not self.complete)


class Between:
    """The bytes between rows, collected until the next row takes them as its lead."""

    def __init__(self, start: bytes = b"") -> None:
        self._parts = [start]

    def after(self, piece: Piece, row: RawRow | None) -> RawRow | None:
        """The row of a piece with its text and lead, if it has one; white space and marks go into leads."""
        data = piece.data or b""
        start = len(data) - len(data.lstrip())
        text = data[start:].rstrip()
        self._parts.append(data[:start])
        if row is not None:
            row = replace(row, text=None if piece.data is None else text, lead=self.rest())
        self._parts += data[start + len(text) :], piece.mark
        return row

    def rest(self) -> bytes:
        """The bytes that no row has taken yet; empties the buffer."""
        joined = b"".join(self._parts)
        self._parts.clear()
        return joined


class PieceBuffer:
    """The parts of one piece, kept only while they fit the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """Add a part; past the limit only the size is counted."""
        self.size += len(part)
        if self.size <= self._limit:
            self._parts.append(part)
        else:
            self._parts.clear()

    def take(self, *, complete: bool = True, mark: bytes = b"") -> Piece:
        """All parts as one piece; starts the next one empty."""
        data = b"".join(self._parts) if self.size <= self._limit else None
        piece = Piece(data, self.size, complete, mark)
        self._parts.clear()
        self.size = 0
        return piece


def rows_of_pieces(
    pieces: Iterable[Piece],
    limit: int,
    parse: ParseRow = parse_row,
    *,
    lines: bool = False,
    between: Between | None = None,
    sample: RowSample | None = None,
    start: int = 0,
) -> Iterator[RawRow]:
    """A row for each piece that is no gap, numbered from 0; of `lines`, blank ones are numbered and no rows.

    With `between`, rows keep their text, and what remains in it at the end is the tail of the file. With `sample`,
    only the sampled ones are parsed; it knows lines by where they begin, the first at byte `start`.
    """
    index, at = -1, start
    for piece in pieces:
        index += not piece.gap
        row = None
        if not (piece.blank if lines else piece.gap) and (
            sample is None or sample.takes(index, at if lines else index, piece.data, piece.size)
        ):
            row = piece.row(index, limit, parse)
        at += piece.size + 1
        if between is not None:
            row = between.after(piece, row)
        # A long piece would be held for as long as its row is audited; `enumerate` would hold it too.
        del piece
        if row is not None:
            yield row


def cut_lines(blocks: Iterable[bytes], limit: int) -> Iterator[Piece]:
    """Each line, blank ones included, with its end as its mark; a last line without a line end is incomplete."""
    gathered = PieceBuffer(limit)
    for block in blocks:
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            if gathered.size or end - start > limit:
                gathered.add(block[start:end])
                yield gathered.take(mark=b"\n")
            else:
                yield Piece(block[start:end], end - start, True, b"\n")
            start = end + 1
        if start < len(block):
            gathered.add(block[start:])
    if gathered.size:
        yield gathered.take(complete=False)
