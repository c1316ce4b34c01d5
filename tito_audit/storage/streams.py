"""Text of logs, decompressed block by block and cut into lines, documents or elements of an array.

No file is held whole, and no piece that is too long. What is no log is refused here.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.number_arrays import ArrayParser
from tito_audit.storage.row import RawRow, RowSample, is_json, parse_row, too_long_row

Compression = Literal["gzip", "zstd"] | None

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Damage(Exception):
    """A file cannot be read further; the message says where and why. Caught within this room."""


def detect_compression(head: bytes) -> Compression:
    """How a file is compressed, by its first four bytes; None if it is not, or in another way."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


class ByteStream:
    """The decompressed bytes of a file in blocks, of which `peek` can look ahead.

    Damage is raised only when all before it has been read, so `peek` never raises.
    """

    def __init__(self, raw: BinaryIO, compression: Compression) -> None:
        self._compression = compression
        self._reader: Any = raw
        self._size = 1 << 16 if compression == "zstd" else 1 << 20  # damage loses all of a read
        if compression == "gzip":
            self._reader = gzip.GzipFile(fileobj=raw)
        elif compression == "zstd":
            self._reader = pa.input_stream(raw, compression="zstd")
        self._ahead: list[bytes] = []
        self._damage: Damage | None = None
        self._bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        """The remaining blocks; Damage where the file is damaged."""
        while True:
            if self._ahead:
                yield self._ahead.pop(0)
            elif self._damage is not None:
                raise self._damage
            elif block := self._read_block():
                yield block
            elif self._damage is None:
                return

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, which stay to be read; fewer only at the end of the file."""
        have = sum(map(len, self._ahead))
        while have < size and (block := self._read_block()):
            self._ahead.append(block)
            have += len(block)
        # Joined for good, the blocks would all be held until the last row in them is read.
        parts, left = [], size
        for block in self._ahead:
            parts.append(block[:left])
            left -= len(block)
            if left <= 0:
                break
        return b"".join(parts)

    def preview(self, limit: int) -> Iterator[bytes]:
        """The next blocks, until they exceed the limit; all stay to be read. Damage where the file is damaged."""
        number = size = 0
        while size <= limit:
            if number == len(self._ahead):
                block = self._read_block()
                if self._damage is not None:
                    raise self._damage
                if not block:
                    return
                self._ahead.append(block)
            yield self._ahead[number]
            size += len(self._ahead[number])
            number += 1

    def skip(self, size: int) -> None:
        """Drop bytes that `peek` has returned."""
        head = b"".join(self._ahead)[size:]
        self._ahead = [head] if head else []

    def close(self) -> None:
        """Close the decompressor; the file itself stays open."""
        if self._compression is not None:
            self._reader.close()

    def _read_block(self) -> bytes:
        """The next block; b"" at the end of the file, and at damage, which is kept to be raised."""
        if self._damage is not None:
            return b""
        try:
            block: bytes = self._reader.read1(self._size)
        except (OSError, EOFError, zlib.error) as error:
            what = f"the {self._compression} data" if self._compression else "the file"
            self._damage = Damage(f"{what} cannot be read past byte {self._bytes_read:,} ({error})")
            return b""
        self._bytes_read += len(block)
        return block


ParseRow: TypeAlias = Callable[..., RawRow]
"""Parses a row, with the arguments of `parse_row`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, document or element that was cut out of a stream."""

    data: bytes | None
    """None if it is longer than the limit."""
    size: int
    complete: bool = True
    """False if the file ends before the piece does."""
    mark: bytes = b""
    """The byte that ends it: a line end, or the comma or bracket after an element."""
    gap: bool = False
    """True if it is white space between elements."""

    @property
    def is_blank(self) -> bool:
        """Whether it is empty or white space."""
        return self.data is not None and (not self.data or self.data.isspace())

    def row(self, index: int, limit: int, parse: ParseRow = parse_row) -> RawRow:
        """The piece parsed as a row; an error row if it is longer than the limit."""
        if self.data is None:
            return too_long_row(index, self.size, limit)
        return parse(index, self.data, cut_off=not self.complete)


class LeadBuffer:
    """Collects the bytes between rows until the next row takes them as its lead."""

    def __init__(self, start: bytes = b"") -> None:
        self._parts = [start]

    def with_lead(self, piece: Piece, row: RawRow | None) -> RawRow | None:
        """The row of a piece with its text and lead, if there is a row; white space and marks go into leads."""
        data = piece.data or b""
        start = len(data) - len(data.lstrip())
        text = data[start:].rstrip()
        self._parts.append(data[:start])
        if row is not None:
            row = replace(row, text=None if piece.data is None else text, lead=self.take_lead())
        self._parts += data[start + len(text) :], piece.mark
        return row

    def take_lead(self) -> bytes:
        """The bytes that no row took; empties the buffer."""
        joined = b"".join(self._parts)
        self._parts.clear()
        return joined


class PieceBuffer:
    """Joins the parts of a piece, and drops them if they exceed the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """Add a part; past the limit only its size is kept."""
        self.size += len(part)
        if self.size <= self._limit:
            self._parts.append(part)
        else:
            self._parts.clear()

    def take(self, *, complete: bool = True, mark: bytes = b"") -> Piece:
        """All parts as one piece; empties the buffer."""
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
    leads: LeadBuffer | None = None,
    sample: RowSample | None = None,
    start: int = 0,
) -> Iterator[RawRow]:
    """The rows of pieces, numbered from 0; blank `lines` are numbered but no rows, gaps neither.

    With `leads`, rows keep their text, and the buffer ends up with the tail of the file. With `sample`, only the
    sampled rows are parsed; it identifies lines by position, the first at byte `start`.
    """
    index, at = -1, start
    for piece in pieces:
        index += not piece.gap
        row = None
        if not (piece.is_blank if lines else piece.gap) and (
            sample is None or sample.takes(index, at if lines else index, piece.data, piece.size)
        ):
            row = piece.row(index, limit, parse)
        at += piece.size + 1
        if leads is not None:
            row = leads.with_lead(piece, row)
        # Else a long piece is held while its row is audited; `enumerate` would hold it, too.
        del piece
        if row is not None:
            yield row


def cut_lines(blocks: Iterable[bytes], limit: int) -> Iterator[Piece]:
    """Each line, also blank ones, with its line end as mark; a last line without one is incomplete."""
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


PARQUET_MAGIC = b"PAR1"

_RUNS_CODE = "reading a pickle runs whatever code its writer put in, so no pickle is ever loaded here"
_EXPORT = (
    "Where you trust the file, export it once, in the environment that wrote it:\n"
    '    import json, pickle; rows = pickle.load(open("{name}", "rb")); '
    'open("log.jsonl", "w").writelines(json.dumps(r, default=lambda a: a.tolist()) + "\\n" for r in rows)\n'
    "Marin rollouts are dataclasses inside groups: for those use "
    "rows = [dataclasses.asdict(r) for g in batch.groups for r in g.rollouts]."
)
_NPZ = (
    "Export it once:\n"
    '    import json, numpy as np; d = np.load("{name}"); '
    'open("log.jsonl", "w").writelines('
    'json.dumps({{k: d[k][i].tolist() for k in ("sequences", "loss_mask")}}) + "\\n" '
    'for i in range(len(d["sequences"])))'
)
_MSGPACK = (
    "Export it once:\n"
    '    import json, msgpack; u = msgpack.Unpacker(open("{name}", "rb")); '
    'open("log.jsonl", "w").writelines(json.dumps(r) + "\\n" for r in u)'
)
_FEATHER = (
    "Write it once as version 2:\n"
    '    from pyarrow import feather; feather.write_feather(feather.read_table("{name}"), "log.feather")'
)
_CSV = (
    "Convert it once:\n"
    '    import ast, pandas as pd; pd.read_csv("{name}").map(lambda cell: ast.literal_eval(cell) '
    'if str(cell)[:1] in ("[", "{{") else cell).to_json("log.jsonl", orient="records", lines=True)'
)
_UNPACK = "Unpack it first, and pass the files in it."

_UNSUPPORTED: tuple[tuple[bytes, str, str], ...] = (
    *((bytes([0x80, version]), f"a Python pickle; {_RUNS_CODE}", _EXPORT) for version in range(2, 6)),
    (
        b"SQLite format 3\0",
        "an SQLite database, whose tables could hold anything",
        'Export the table that holds the rows once:\n    sqlite3 -json "{name}" "select * from TABLE" > log.json',
    ),
    (b"FEA1", "a Feather file of version 1", _FEATHER),
    (b"ARROW1", "a compressed Arrow file", "Decompress it first; Arrow can be compressed inside."),
    (b"\xff\xff\xff\xff", "a compressed Arrow stream", "Decompress it first; Arrow can be compressed inside."),
    (b"\xff\xfe", "UTF-16 text", "Write it as UTF-8: iconv -f UTF-16 -t UTF-8 LOG > LOG.jsonl"),
    (b"\xfe\xff", "UTF-16 text", "Write it as UTF-8: iconv -f UTF-16 -t UTF-8 LOG > LOG.jsonl"),
    (b"BZh", "compressed with bzip2, which is not read", "Decompress it first: bunzip2 -k LOG"),
    (b"\xfd7zXZ", "compressed with xz, which is not read", "Decompress it first: unxz -k LOG"),
    (
        b"\x93NUMPY",
        "a numpy array, whose rows and columns have no names",
        "Export its rows to JSONL, one object a line.",
    ),
    (b"\x89HDF", "an HDF5 file", "Export its rows to JSONL, one object a line."),
    (b"\x1f\x8b", "compressed twice", "Decompress it once first: gunzip -k LOG"),
    (b"\x28\xb5\x2f\xfd", "compressed twice", "Decompress it once first: unzstd LOG"),
    (PARQUET_MAGIC, "a compressed Parquet file", "Decompress it first; Parquet is compressed inside."),
)


def refuse_unsupported(path: Path, head: bytes) -> None:
    """StorageError if a file begins like one of a kind that is not read, and how to convert it."""
    if head.startswith(b"PK\x03\x04"):
        # All of these are zip archives; a Torch file has a member data.pkl.
        if path.suffix == ".npz" or b".npy" in head[:512]:
            raise _unsupported_error(path, "a numpy archive, whose arrays have no common rows", _NPZ)
        if path.suffix == ".xlsx":
            raise _unsupported_error(path, "an Excel workbook", "Save the sheet as CSV, and convert that.")
        if b"data.pkl" in head:
            raise _unsupported_error(path, "a Torch file that was compressed", _UNPACK)
        raise _unsupported_error(path, "a zip archive", _UNPACK)
    for magic, what, way_out in _UNSUPPORTED:
        if head.startswith(magic):
            raise _unsupported_error(path, what, way_out)
    if head[257:262] == b"ustar":
        raise _unsupported_error(path, "a tar archive", _UNPACK)


def not_json_error(path: Path, head: bytes) -> StorageError:
    """The error for a file that is no JSON; its suffix and beginning hint at what it is."""
    if path.suffix in {".pkl", ".pickle"}:
        return _unsupported_error(path, f"a Python pickle; {_RUNS_CODE}", _EXPORT)
    if path.suffix in {".csv", ".tsv"}:
        return _unsupported_error(path, "a CSV file, in which lists of token ids are only text", _CSV)
    if path.suffix in {".msgpack", ".mpk", ".bin"} or (head and head[0] >= 0x80):
        return _unsupported_error(path, "binary data, perhaps msgpack, whose fields may have no names", _MSGPACK)
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return _unsupported_error(
            path,
            "a web page",
            "Pass the address of the file itself; for the Hugging Face hub, hf://datasets/OWNER/NAME.",
        )
    return StorageError(
        f"{path}: this is neither JSON nor a table; it begins with {head[:32]!r}.\n"
        "A log is JSON (an object per line, one document or an array of objects, plain, .gz or .zst), a Parquet "
        "file or an Arrow file.\nConvert it, or pass the file that holds the rollouts."
    )


def _unsupported_error(path: Path, what: str, way_out: str) -> StorageError:
    return StorageError(f"{path}: this is {what}.\n{way_out.format(name=path.name)}")


_BRACKET = re.compile(rb'["\[\]{}]')
_BRACKET_OR_COMMA = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_DENSE = 256
"""Quotes and brackets of a piece that are taken one by one; then whole windows are scanned."""
_WINDOW = 1 << 16
"""Bytes that are scanned at once."""
_DEPTH_STEPS = np.zeros(256, np.int8)
"""What each byte adds to the depth, outside of strings."""
_DEPTH_STEPS[list(b"[{")], _DEPTH_STEPS[list(b"]}")] = 1, -1


def cut_values(blocks: Iterable[bytes], *, array: bool, limit: int, keep_gaps: bool = False) -> Iterator[Piece]:
    """The text of each element of the array in a stream, or of each document.

    Looks only at quotes, brackets and commas: the parser decides whether a piece is JSON. What follows the array
    is one last incomplete piece. With `keep_gaps`, white space between elements is a piece as well, so that all
    pieces and marks together are the stream.
    """
    gathered, depth, carry = PieceBuffer(limit), 0, b""
    in_string = closed = False
    for block in blocks:
        block, carry = carry + block, b""
        start = position = many = 0
        while not closed:
            if in_string:
                match = _IN_STRING.match(block, position)
                position = match.end() if match else position
                if position == len(block) or block[position] != _QUOTE:
                    # A backslash at the end of the block escapes the first byte of the next.
                    carry = block[position:]
                    break
                in_string = False
                position += 1
            if many >= _DENSE:
                position, depth = _skip_nested(block, position, depth, int(array))
                many = 0
            bracket = (_BRACKET_OR_COMMA if array and depth == 1 else _BRACKET).search(block, position)
            if bracket is None:
                break
            position, char = bracket.end(), block[bracket.start()]
            ends = always = char == _COMMA
            if char == _QUOTE:
                in_string = True
            elif char in b"[{":
                depth += 1
                ends = array and depth == 1
            elif not always:
                depth = max(depth - 1, 0)
                ends, always = not depth, not array
                closed = array and ends
            if not ends:
                many += 1
                continue
            many = 0
            # A document includes its closing bracket; an element ends before the comma or bracket after it.
            end = bracket.start() if array else position
            gathered.add(block[start:end])
            piece = gathered.take(mark=block[end:position])
            start = position
            if always or not piece.is_blank:
                yield piece
            elif keep_gaps:
                yield replace(piece, gap=True)
        gathered.add(block[start : len(block) - len(carry)])
    gathered.add(carry)
    piece = gathered.take(complete=False)
    # An array that was never closed is incomplete even if its last element is complete.
    if (array and not closed) or not piece.is_blank:
        yield piece
    elif keep_gaps:
        yield replace(piece, gap=True)


def _skip_nested(block: bytes, position: int, depth: int, least: int) -> tuple[int, int]:
    """The position and depth after brackets and strings of the next window that keep the depth above `least`.

    `position` is outside of strings. Nothing is skipped if there is a backslash outside of strings, as in no JSON.
    """
    window = block[position : position + _WINDOW]
    text = _ESCAPED.sub(b"  ", window) if _BACKSLASH in window else window
    read = np.frombuffer(text, np.uint8)
    quotes = read == _QUOTE
    outside = quotes.cumsum(dtype=np.uint8) & 1 == 0
    if text is not window and outside[np.frombuffer(window, np.uint8) == _BACKSLASH].any():
        return position, depth
    steps = np.where(outside, _DEPTH_STEPS[read], 0)
    depths = depth + steps.cumsum(dtype=np.int64)
    low = (depths <= least).nonzero()[0][:1]
    ends = (steps != 0) | (quotes & outside)
    passed = (ends[: low[0]] if len(low) else ends).nonzero()[0]
    if not len(passed):
        return position, depth
    last = int(passed[-1])
    return position + last + 1, int(depths[last])


_HEAD_BYTES = 1 << 16
_NUMBERS = ArrayParser({}, other_kinds="ifb")


def detect_json_kind(path: Path, stream: ByteStream, limit: int) -> Literal["lines", "values", "array"]:
    """How a text holds its rows, all of which stays to be read; StorageError if it is not JSON."""
    head = stream.peek(_HEAD_BYTES)
    refuse_unsupported(path, head)
    first = head.lstrip()[:1]
    if first == b"[":
        # A first line that is a whole list is one of JSONL if another line follows: nothing follows an array.
        lines = _first_lines(stream, 2, min(limit, 16 * _HEAD_BYTES))
        if not (len(lines) == 2 and is_json(lines[0])):
            return "array"
    if first == b"{":
        # A first line that parses is JSONL. One that does not may be a broken row, so the first whole object is
        # tried, and then the second line. A long line is parsed without an object for each number.
        lines = _first_lines(stream, 1, limit)
        if lines and not (_NUMBERS.is_json if len(lines[0]) > 1 << 20 else is_json)(lines[0]):
            piece = None
            with suppress(Damage):
                piece = next(cut_values(stream.preview(limit), array=False, limit=limit), None)
            data = piece.data if piece is not None else None
            if data is not None and b"\n" in data.strip() and is_json(data):
                return "values"
            lines = _first_lines(stream, 2, limit)
            if not (len(lines) == 2 and lines[1].lstrip().startswith(b"{") and is_json(lines[1])):
                if piece is not None and data is None:
                    raise StorageError(
                        f"{path}: this is one JSON document of more than {limit:,} bytes, which has to fit in "
                        "memory while it is read.\n"
                        "Write its rollouts as JSONL, one per line, or raise --max-row-bytes."
                    )
                return "values"
    # Rows may follow lines that are no JSON.
    if not head or first in b"[{" or any(line.lstrip().startswith(b"{") for line in head.split(b"\n")):
        return "lines"
    raise not_json_error(path, head)


def _first_lines(stream: ByteStream, count: int, limit: int) -> list[bytes]:
    """The first `count` whole lines that are not blank; fewer if the file or the limit ends before."""
    size = min(_HEAD_BYTES, limit)
    while True:
        head = stream.peek(size + 1)
        at_end = len(head) <= size
        end = len(head) if at_end else head.rfind(b"\n") + 1
        lines = [line for line in head[:end].split(b"\n") if line.strip()]
        if len(lines) >= count or at_end or size >= limit:
            return lines[:count]
        head, size = b"", min(2 * size, limit)  # a long first line is not held twice
