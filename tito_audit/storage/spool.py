"""Spool: packed rows in a temporary file, for logs whose rows cannot be read by offset."""

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

_ENTRY_HEAD = struct.Struct("<II")
"""What precedes each entry: its packed and unpacked size."""


class Spool:
    """Compressed entries in a temporary file without a name, each found by its offset.

    It is gone when the process ends. Processes that are forked later can read it.
    """

    def __init__(self) -> None:
        self._file: Any = None
        self._unwritten: list[bytes] = []
        self._buffered = 0
        self._written = 0

    def add(self, data: bytes) -> int:
        """Add bytes as an entry; returns its offset."""
        return self.add_entry(pack_entry(data))

    def add_entry(self, entry: bytes) -> int:
        """Add an entry that `pack_entry` made; returns its offset."""
        start = self._written + self._buffered
        self._unwritten.append(entry)
        self._buffered += len(entry)
        if self._buffered >= 1 << 20:
            self.flush()
        return start

    def entry_at(self, start: int) -> bytes:
        """The entry at an offset, for `unpack_entry`."""
        self.flush()
        # This much holds most entries whole.
        head = self._read(start, 1 << 14)
        whole = _ENTRY_HEAD.size + _ENTRY_HEAD.unpack_from(head)[0]
        if whole > len(head):
            head += self._read(start + len(head), whole - len(head))
        return head[:whole]

    def _read(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # forked processes share the position in the file
            return os.pread(self._file.fileno(), size, start)
        self._file.seek(start)
        data: bytes = self._file.read(size)
        self._file.seek(0, os.SEEK_END)
        return data

    def flush(self) -> None:
        """Write what is buffered, so that processes forked later can read it."""
        if not self._buffered:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="tito-audit-")  # noqa: SIM115 - lives as long as this
                weakref.finalize(self, self._file.close)
            self._file.write(b"".join(self._unwritten))
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: rows that must be read twice cannot be kept there "
                f"({error.strerror or error}).\n"
                "Make room, name another folder with TMPDIR, or write the log as uncompressed JSONL, which needs "
                "none of it."
            ) from error
        self._written += self._buffered
        self._unwritten, self._buffered = [], 0


def pack_entry(data: bytes) -> bytes:
    """Bytes as an entry of a spool: both sizes, and the bytes compressed."""
    entry_at: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return _ENTRY_HEAD.pack(len(entry_at), len(data)) + entry_at


def unpack_entry(entry: bytes) -> bytes:
    """The bytes of an entry of a spool."""
    _, size = _ENTRY_HEAD.unpack_from(entry)
    data: bytes = pa.decompress(entry[_ENTRY_HEAD.size :], decompressed_size=size, codec="zstd", asbytes=True)
    return data


CUT_OFF: Row = {"cut_off": True}
"""The value of a row that is not parsed yet and in the middle of which its file ends."""


def pack_row(raw: RawRow) -> bytes:
    """A row as bytes for `unpack_row`: its text if it has one, else its value."""
    if raw.value is not None and raw.text is not None:
        return pickle.dumps((raw.index, raw.text, raw.value is CUT_OFF), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps(replace(raw, text=None, lead=b""), pickle.HIGHEST_PROTOCOL)


def unpack_row(data: bytes, parse: ParseRow) -> RawRow:
    """The row that `pack_row` packed. The pickle is this run's own and was never in a file with a name."""
    row = pickle.loads(data)
    if isinstance(row, RawRow):
        return row
    index, text, cut_off = row
    return replace(parse(index, text, cut_off=cut_off), text=text)
