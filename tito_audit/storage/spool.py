"""Spool: packed rows in a temporary file, for files whose rows cannot be read by offset."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import weakref
from dataclasses import replace
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import RawRow
from tito_audit.storage.streams import ParseRow

_SIZES = struct.Struct("<II")
"""Packed and unpacked size, before each entry."""


class Spool:
    """Bytes in a temporary file without a name, found again by where they begin.

    Nothing is left of it when the process ends. Processes that are forked afterwards can read it.
    """

    def __init__(self) -> None:
        self._file: Any = None
        self._waiting: list[bytes] = []
        self._buffered = 0
        self._written = 0

    def add(self, data: bytes) -> int:
        """Keep some bytes; returns where they begin."""
        return self.append(entry_of(data))

    def append(self, entry: bytes) -> int:
        """Keep an entry that `entry_of` made; returns where it begins."""
        start = self._written + self._buffered
        self._waiting.append(entry)
        self._buffered += len(entry)
        if self._buffered >= 1 << 20:
            self.flush()
        return start

    def packed(self, start: int) -> bytes:
        """The entry that begins at `start`, for `unpacked`."""
        self.flush()
        # Most entries are shorter.
        head = self._read(start, 1 << 14)
        whole = _SIZES.size + _SIZES.unpack_from(head)[0]
        if whole > len(head):
            head += self._read(start + len(head), whole - len(head))
        return head[:whole]

    def _read(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # Forked processes share the position in the file.
            return os.pread(self._file.fileno(), size, start)
        self._file.seek(start)
        data: bytes = self._file.read(size)
        self._file.seek(0, os.SEEK_END)
        return data

    def flush(self) -> None:
        """Write what is buffered, so processes forked later can read it."""
        if not self._buffered:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="tito-audit-")  # noqa: SIM115 - lives as long as this
                weakref.finalize(self, self._file.close)
            self._file.write(b"".join(self._waiting))
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: rows that must be read twice cannot be kept there "
                f"({error.strerror or error}).\n"
                "Make room, name another folder with TMPDIR, or write the log as uncompressed JSONL, which needs "
                "none of it."
            ) from error
        self._written += self._buffered
        self._waiting, self._buffered = [], 0


def entry_of(data: bytes) -> bytes:
    """Bytes as an entry of a spool."""
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return _SIZES.pack(len(packed), len(data)) + packed


def unpacked(entry: bytes) -> bytes:
    """The bytes of an entry of a spool."""
    _, size = _SIZES.unpack_from(entry)
    data: bytes = pa.decompress(entry[_SIZES.size :], decompressed_size=size, codec="zstd", asbytes=True)
    return data


CUT_OFF: Row = {"cut_off": True}
"""The value of a row that was not parsed and whose file ends in the middle of it."""


def row_bytes(raw: RawRow) -> bytes:
    """A row for `row_of`: its text if it has one, else its value, without the surrounding file."""
    if raw.value is not None and raw.text is not None:
        return pickle.dumps((raw.index, raw.text, raw.value is CUT_OFF), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps(replace(raw, text=None, lead=b""), pickle.HIGHEST_PROTOCOL)


def row_of(data: bytes, parse: ParseRow) -> RawRow:
    """The row that `row_bytes` packed; the pickle is this run's own and was never in a named file."""
    row = pickle.loads(data)
    if isinstance(row, RawRow):
        return row
    index, text, cut_off = row
    return replace(parse(index, text, cut_off=cut_off), text=text)
