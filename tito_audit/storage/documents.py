"""JSON documents and arrays of rows, split at their brackets without holding the whole file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.storage.lines import Between, Piece, PieceBuffer
from tito_audit.storage.number_arrays import Splicer
from tito_audit.storage.row import RawRow, parse_row, parses, too_long
from tito_audit.storage.sampling import Sample
from tito_audit.storage.sniff import refuse_binary, text_error
from tito_audit.storage.streams import ByteStream, Damaged

_BRACKET = re.compile(rb'["\[\]{}]')
_BRACKET_OR_COMMA = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_DENSE = 256
"""So many quotes and brackets in one piece are taken one by one; then whole windows are looked at."""
_WINDOW = 1 << 16
"""Bytes."""
_STEPS = np.zeros(256, np.int8)
"""What a byte outside strings adds to the depth."""
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def rows_of_values(
    blocks: Iterable[bytes], *, array: bool, limit: int, between: Between | None = None
) -> Iterator[RawRow]:
    """A row for each element of an array, or for each of several concatenated documents.

    With `between`, rows keep their text, and what remains in it at the end is the tail of the file.
    """
    index = 0
    for piece in cut_values(blocks, array=array, limit=limit, gaps=between is not None):
        if not piece.gap:
            if piece.data is None:
                row = too_long(index, piece.size, limit)
            else:
                row = parse_row(index, piece.data, cut_off=not piece.complete)
            yield row if between is None else between.with_text(row, piece.data)
            index += 1
        elif between is not None:
            between.skip(piece.data)
        if between is not None:
            between.skip(piece.mark)


def sampled_values(blocks: Iterable[bytes], *, array: bool, limit: int, sample: Sample) -> Iterator[RawRow]:
    """The rows of the sampled documents or elements; others are not parsed."""
    for index, piece in enumerate(cut_values(blocks, array=array, limit=limit)):
        if sample.takes(index, index, piece.data, piece.size):
            if piece.data is None:
                yield too_long(index, piece.size, limit)
            else:
                yield parse_row(index, piece.data, cut_off=not piece.complete)


def cut_values(blocks: Iterable[bytes], *, array: bool, limit: int, gaps: bool = False) -> Iterator[Piece]:
    """The text of each element of the array in the stream, or of each document.

    Looks only at quotes, brackets and the commas between elements; the parser decides whether a piece is JSON.
    What follows the end of an array comes as one last incomplete piece. With `gaps`, white space between
    elements comes too, so that all pieces and marks together are the stream.
    """
    cutter = _Cutter(array, limit)
    for block in blocks:
        yield from (piece for piece in cutter.feed(block) if gaps or not piece.gap)
    yield from (piece for piece in cutter.rest() if gaps or not piece.gap)


class _Cutter:
    """State of the scan: nesting depth and the current piece."""

    def __init__(self, array: bool, limit: int) -> None:
        self._array = array
        self._gathered = PieceBuffer(limit)
        self._depth = 0
        self._in_string = False
        self._closed = False
        self._carry = b""

    def feed(self, block: bytes) -> Iterator[Piece]:
        """The pieces that end in this block."""
        if self._carry:
            block, self._carry = self._carry + block, b""
        start = position = many = 0
        while not self._closed:
            if self._in_string:
                position = self._string_end(block, position)
                if self._in_string:
                    break
            if many >= _DENSE:
                position, self._depth = _passed(block, position, self._depth, int(self._array))
                many = 0
            commas = self._array and self._depth == 1
            bracket = (_BRACKET_OR_COMMA if commas else _BRACKET).search(block, position)
            if bracket is None:
                break
            position = bracket.end()
            cut = self._step(block[bracket.start()])
            if cut is None:
                many += 1
                continue
            many = 0
            # A document includes its closing bracket; an element ends before the comma or bracket after it.
            end = bracket.start() if self._array else position
            self._gathered.add(block[start:end])
            piece = self._gathered.take(mark=block[end:position])
            start = position
            yield piece if cut or not _blank(piece) else replace(piece, gap=True)
        self._gathered.add(block[start : len(block) - len(self._carry)])

    def rest(self) -> Iterator[Piece]:
        """What is left at the end of the file; a gap if that is blank."""
        self._gathered.add(self._carry)
        piece = self._gathered.take(complete=False)
        # An array that was never closed is incomplete even if its last element is complete.
        unclosed = self._array and not self._closed
        yield piece if unclosed or not _blank(piece) else replace(piece, gap=True)

    def _string_end(self, block: bytes, position: int) -> int:
        """The position after the string's closing quote, or where the usable part of the block ends."""
        match = _IN_STRING.match(block, position)
        end = match.end() if match else position
        if end < len(block) and block[end] == _QUOTE:
            self._in_string = False
            return end + 1
        # A backslash at the end of the block escapes the first byte of the next.
        self._carry = block[end:]
        return end

    def _step(self, char: int) -> bool | None:
        """None inside a piece; True where a piece ends; False where one ends unless it is blank."""
        if char == _QUOTE:
            self._in_string = True
            return None
        if char == _COMMA:
            return True
        if char in b"[{":
            self._depth += 1
            return False if self._array and self._depth == 1 else None
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return None
        self._closed = self._array
        return not self._array


def _passed(block: bytes, position: int, depth: int, least: int) -> tuple[int, int]:
    """A place behind brackets and strings in the next window, all of which leave the depth above `least`, and the
    depth there.

    `position` is outside strings. Nothing is passed if a window has a backslash outside strings, as no JSON has.
    """
    window = block[position : position + _WINDOW]
    text = _ESCAPED.sub(b"  ", window) if _BACKSLASH in window else window
    read = np.frombuffer(text, np.uint8)
    quotes = read == _QUOTE
    outside = quotes.cumsum(dtype=np.uint8) & 1 == 0
    if text is not window and outside[np.frombuffer(window, np.uint8) == _BACKSLASH].any():
        return position, depth
    steps = np.where(outside, _STEPS[read], 0)
    depths = depth + steps.cumsum(dtype=np.int64)
    low = (depths <= least).nonzero()[0][:1]
    ends = (steps != 0) | (quotes & outside)
    passed = (ends[: low[0]] if len(low) else ends).nonzero()[0]
    if not len(passed):
        return position, depth
    last = int(passed[-1])
    return position + last + 1, int(depths[last])


def _blank(piece: Piece) -> bool:
    return piece.data is not None and not piece.data.strip()


_HEAD = 1 << 16
_LONG = 1 << 20
"""From this many bytes on, a line is looked at without making an object for each of its numbers."""
_NUMBERS = Splicer({}, every="ifb")


def json_kind(path: Path, stream: ByteStream, limit: int) -> Literal["lines", "values", "array"]:
    """How a text holds its rows, without consuming it; StorageError if it is not JSON."""
    head = stream.peek(_HEAD)
    refuse_binary(path, head)
    first = head.lstrip()[:1]
    if first == b"[":
        # Nothing follows an array of rows: it is JSONL if a line that is a list is not the last.
        lines = _first_lines(stream, 2, min(limit, 16 * _HEAD))
        if not (len(lines) == 2 and parses(lines[0])):
            return "array"
    if first == b"{" and _is_document(path, stream, limit):
        return "values"
    # A text that starts differently may still have lines that look like rows.
    if not head or first in b"[{" or any(line.lstrip().startswith(b"{") for line in head.split(b"\n")):
        return "lines"
    raise text_error(path, head)


def _first_lines(stream: ByteStream, count: int, limit: int) -> list[bytes]:
    """The first `count` complete lines that are not blank; fewer if the file or the limit ends first."""
    size = min(_HEAD, limit)
    while True:
        head = stream.peek(size + 1)
        at_end = len(head) <= size
        end = len(head) if at_end else head.rfind(b"\n") + 1
        lines = [line for line in head[:end].split(b"\n") if line.strip()]
        if len(lines) >= count or at_end or size >= limit:
            return lines[:count]
        head, size = b"", min(2 * size, limit)  # a long first line is not held twice


def _is_document(path: Path, stream: ByteStream, limit: int) -> bool:
    """Whether the file's first object spans several lines.

    If the first line parses, it is JSONL. If not, it may be a broken line, so the first complete object is tried,
    and finally the second line.
    """
    first = _first_lines(stream, 1, limit)
    if not first or (_NUMBERS.parses if len(first[0]) > _LONG else parses)(first[0]):
        return False
    piece = _first_object(stream, limit)
    if piece is not None and piece.data is not None and b"\n" in piece.data.strip() and parses(piece.data):
        return True
    lines = _first_lines(stream, 2, limit)
    if len(lines) == 2 and lines[1].lstrip().startswith(b"{") and parses(lines[1]):
        return False
    if piece is not None and piece.data is None:
        raise StorageError(
            f"{path}: this is one JSON document of more than {limit:,} bytes, which has to fit in memory "
            "while it is read.\nWrite its rollouts as JSONL, one per line, or raise --max-row-bytes."
        )
    return True


def _first_object(stream: ByteStream, limit: int) -> Piece | None:
    """The first object of the stream as text, without consuming it; its data is None past the limit."""
    seen: list[bytes] = []

    def watched() -> Iterator[bytes]:
        size = 0
        for block in stream:
            seen.append(block)
            yield block
            size += len(block)
            if size > limit:
                return

    try:
        return next(cut_values(watched(), array=False, limit=limit), None)
    except Damaged:
        return None
    finally:
        stream.unread(seen)
