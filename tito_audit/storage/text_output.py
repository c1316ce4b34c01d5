"""TextOutput: JSON logs written again row by row, with only the edited values changed."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tito_audit.format import Row
from tito_audit.record.edits import edits_between
from tito_audit.record.json_text import rewrite_json
from tito_audit.storage.log import Kind, Log
from tito_audit.storage.row import RawRow
from tito_audit.storage.streams import Compression

_LINE_END = re.compile(rb"\r?\n")
_GZIP_LEVEL = 6


class TextOutput:
    """JSONL, JSON documents or an array, with the bytes between rows as in the log.

    A dropped row takes its lead with it; the first row written gets the lead of the log's first row.
    """

    def __init__(self, out: BinaryIO, kind: Kind, compression: Compression) -> None:
        self.changed = False
        self.not_kept: Sequence[str] = ()
        """What of the log's form the written file does not have, in words; known once it is complete."""
        self._kind = kind
        self._compression = compression
        self._end = Sink(out)
        self._out = compressed(out, self._end, compression)
        self._first: bytes | None = None
        """The lead of the log's first row, while every row so far was dropped."""
        self._written = False
        self._held: list[bytes] = []
        """Rows of a fork waiting for the next lead, which shows how rows are separated."""
        self._lead = b""
        """The lead of the last row written."""
        self._closing = b""
        """The lead of a dropped row after the end of an array: the bracket that closes it is there."""
        self._read: int | None = 0
        """Bytes of the log's text so far; None past a row that was not read."""

    def keep(self, raw: RawRow) -> None:
        """Write the row as it was, byte for byte."""
        self._count(raw)
        self._put(raw.lead, _text_of(raw))

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one, each as its text with the differences edited in."""
        texts = []
        self._count(raw)
        for row in rows:
            edits = list(edits_between(raw.value, row))
            text = _text_of(raw)
            texts.append(rewrite_json(text.decode("utf-8"), edits).encode("utf-8") if edits else text)
        self.changed |= texts != [raw.text]
        if texts:
            self._put(raw.lead, texts[0])
            self._held += texts[1:]
        elif not self._written and self._first is None:
            self._first = raw.lead
        elif self._kind == "array" and b"]" in raw.lead:
            self._closing = raw.lead

    def finish(self, log: Log) -> None:
        """Write what follows the last row, and end the compressed stream."""
        tail = self._closing + log.tail
        self._separate(tail)
        if self._compression == log.compression == "gzip" and self._read is not None:
            one = _is_one_member(log.path, self._read + len(log.tail))
            self.not_kept = () if one else ("one gzip member, not several",)
        if not self._written and self._first is not None:
            # A dropped line takes its line end with it.
            tail = self._first + (tail if self._kind == "array" else _LINE_END.sub(b"", tail, count=1))
        self._out.write(tail)
        if self._compression is not None:
            self._out.close()

    def abandon(self) -> None:
        """Close the compressor; what it still writes is discarded."""
        self._end.closed = True
        if self._compression is not None and not self._out.closed:
            self._out.close()

    def _count(self, raw: RawRow) -> None:
        if raw.text is None or self._read is None:
            self._read = None
        else:
            self._read += len(raw.lead) + len(raw.text)

    def _put(self, lead: bytes, text: bytes) -> None:
        self._separate(lead)
        if not self._written and self._first is not None:
            # If something follows the end of an array, the closing bracket is in the lead.
            lead = self._first + (lead if self._kind == "array" and b"]" in lead else b"")
        self._out.write(lead)
        self._out.write(text)
        self._written, self._lead = True, lead

    def _separate(self, following: bytes) -> None:
        """Write the rows that were held back, separated as in the file."""
        if not self._held:
            return
        between = self._comma(following) if self._kind == "array" else self._line_end(following)
        for text in self._held:
            self._out.write(between)
            self._out.write(text)
        self._held.clear()

    def _comma(self, following: bytes) -> bytes:
        for lead in (self._lead, following):
            if lead.lstrip().startswith(b",") or lead.rstrip().endswith(b","):
                return lead
        space = self._lead[self._lead.rfind(b"[") + 1 :]
        return b"," + (space or (b" " if b'": ' in self._held[0] else b""))

    def _line_end(self, following: bytes) -> bytes:
        found = _LINE_END.search(following) or _LINE_END.search(self._lead)
        return found[0] if found else b"\n"


def _is_one_member(path: Path, size: int) -> bool:
    """Whether a gzip file whose text has this size is one member: each ends with the size of its own text."""
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little") == size % (1 << 32)


def _text_of(raw: RawRow) -> bytes:
    if raw.text is None:
        raise ValueError(f"row {raw.index} has no text: open the log with keep_text")
    return raw.text


def compressed(out: BinaryIO, end: Sink, compression: Compression) -> Any:
    """A stream that compresses into a file; the output depends on the input alone."""
    if compression == "gzip":
        return gzip.GzipFile("", "wb", _GZIP_LEVEL, cast(BinaryIO, end), mtime=0)
    if compression == "zstd":
        import pyarrow as pa  # slow to import, so only where it is needed

        return pa.CompressedOutputStream(pa.PythonFile(end, "w"), "zstd")
    return out


class Sink:
    """The file a compressor writes to, which it cannot close; writes after `close` are discarded."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.closed = False

    def write(self, data: bytes) -> int:
        """The number of bytes accepted."""
        return len(data) if self.closed else self._out.write(data)

    def flush(self) -> None:
        """Does nothing: the file is flushed at the end."""

    def tell(self) -> int:
        """The position in the file."""
        return self._out.tell()

    def close(self) -> None:
        """Discard all further writes."""
        self.closed = True
