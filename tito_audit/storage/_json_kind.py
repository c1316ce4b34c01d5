"""json_kind: whether a JSON log is lines, documents or one array, by its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tito_audit.errors import StorageError
from tito_audit.storage.documents import cut_values
from tito_audit.storage.lines import Piece
from tito_audit.storage.number_arrays import Splicer
from tito_audit.storage.row import parses
from tito_audit.storage.sniff import refuse_binary, text_error
from tito_audit.storage.streams import ByteStream, Damaged

_HEAD = 1 << 16
_LONG = 1 << 20
"""From this many bytes on, a line is looked at without making an object for each of its numbers."""
_NUMBERS = Splicer({}, every="ifb")


def json_kind(path: Path, stream: ByteStream, limit: int) -> Literal["lines", "values", "array"]:
    """How a text holds its rows, without consuming it; StorageError if it is not JSON."""
    head = stream.peek(_HEAD)
    refuse_binary(path, head)
    first = head.lstrip()[:1]
    if first == b"[" and not _lines_of_lists(stream, limit):
        return "array"
    if first == b"{" and _is_document(path, stream, limit):
        return "values"
    if not head or first in b"[{" or _has_object_lines(head):
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


def _lines_of_lists(stream: ByteStream, limit: int) -> bool:
    """Whether this is JSONL whose first line is a list; nothing follows an array of rows."""
    lines = _first_lines(stream, 2, min(limit, 16 * _HEAD))
    return len(lines) == 2 and parses(lines[0])


def _is_document(path: Path, stream: ByteStream, limit: int) -> bool:
    """Whether the file's first object spans several lines.

    If the first line parses, it is JSONL. If not, it may be a broken line, so the first complete object is tried,
    and finally the second line.
    """
    first = _first_lines(stream, 1, limit)
    if not first or _is_json(first[0]):
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


def _is_json(line: bytes) -> bool:
    """Whether a line is a JSON value."""
    return _NUMBERS.parses(line) if len(line) > _LONG else parses(line)


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


def _has_object_lines(head: bytes) -> bool:
    """Whether a text that starts differently still has lines that look like rows."""
    return any(line.lstrip().startswith(b"{") for line in head.split(b"\n"))
