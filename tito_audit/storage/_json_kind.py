"""What a JSON log is, by its first lines: a row a line, documents, or one array of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tito_audit.errors import StorageError
from tito_audit.storage.documents import cut_values
from tito_audit.storage.lines import Piece
from tito_audit.storage.row import parses
from tito_audit.storage.sniff import refuse_binary, refuse_text
from tito_audit.storage.streams import ByteStream, Damaged

_HEAD = 1 << 16


def json_kind(path: Path, stream: ByteStream, limit: int) -> Literal["lines", "values", "array"]:
    """How the rows of a text lie in it, which stays unread; StorageError where it is no JSON."""
    head = stream.peek(_HEAD)
    refuse_binary(path, head)
    first = head.lstrip()[:1]
    if first == b"[" and not _lines_of_lists(stream, limit):
        return "array"
    if first == b"{" and _is_document(path, stream, limit):
        return "values"
    if not head or first in b"[{" or _has_object_lines(head):
        return "lines"
    raise refuse_text(path, head)


def _first_lines(stream: ByteStream, count: int, limit: int) -> list[bytes]:
    """The first `count` lines that are not blank, whole; fewer if the file or the limit ends before."""
    size = min(_HEAD, limit)
    while True:
        head = stream.peek(size)
        at_end = len(head) < size
        lines = [line for line in (head if at_end else head[: head.rfind(b"\n") + 1]).split(b"\n") if line.strip()]
        if len(lines) >= count or at_end or size >= limit:
            return lines[:count]
        size = min(2 * size, limit)


def _lines_of_lists(stream: ByteStream, limit: int) -> bool:
    """True for JSONL whose first line is a list by itself; one array of rows has nothing after it."""
    lines = _first_lines(stream, 2, min(limit, 16 * _HEAD))
    return len(lines) == 2 and parses(lines[0])


def _is_document(path: Path, stream: ByteStream, limit: int) -> bool:
    """True when the file's first object spans several lines.

    A first line that parses decides for JSONL. One that does not may also be a line that broke, so the
    first whole object is cut out and tried, and at last the second line.
    """
    first = _first_lines(stream, 1, limit)
    if not first or parses(first[0]):
        return False
    piece = _first_object(stream, limit)
    if piece is not None and piece.data is not None and b"\n" in piece.data.strip() and parses(piece.data):
        return True
    lines = _first_lines(stream, 2, limit)
    if len(lines) == 2 and lines[1].lstrip().startswith(b"{") and parses(lines[1]):
        return False
    if piece is not None and piece.data is None:
        raise StorageError(
            f"{path}: this is one JSON document of more than {limit:,} bytes, which has to be held in "
            "memory while it is read.\nWrite its rollouts as JSONL, one a line, or raise --max-row-bytes."
        )
    return True


def _first_object(stream: ByteStream, limit: int) -> Piece | None:
    """The first object of the stream as text, which stays unread; its data is None past the limit."""
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
    """True when a text that starts otherwise still has lines that look like rows."""
    return any(line.lstrip().startswith(b"{") for line in head.split(b"\n"))
