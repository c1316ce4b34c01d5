"""The log of a gateway: an append-only file of JSON lines, one write per call.

An answer is sent after its line is written, so a crash loses or cuts off only answers that no client has. A line
that was cut off gets a line feed when the log is opened again, so that the next line is whole. A log that was
moved or deleted is created anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tito_audit.errors import SetupError, StorageError

_NOT_LINES = frozenset((".gz", ".zst", ".bz2", ".xz", ".parquet", ".arrow"))
_AS_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class CallLog:
    """A log that one gateway appends to."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        """Opens or creates the file; `sync`: wait until each write is on the disk.

        SetupError if it cannot be written, or another gateway writes to it.
        """
        self.path = path
        self.sync = sync
        self._file = _opened(path)
        self.was_torn = self._ends_in_a_line()
        """Whether the file ended in the middle of a line, as after a crash; a line feed was added."""
        self._torn = False
        self._moved: list[int] = []
        """Files that were moved away while writes to them may still be pending."""

    async def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines, all or none of them; StorageError if that failed."""
        self.append_now(lines)
        file = self._file
        if self.sync:
            try:
                await asyncio.to_thread(os.fdatasync, file)
            except OSError as error:
                raise StorageError(f"{self.path}: it cannot be written ({error.strerror})") from None

    def append_now(self, lines: Sequence[dict[str, Any]]) -> None:
        """The same without waiting for the disk."""
        data = b"".join(orjson.dumps(line, option=_AS_JSON) for line in lines)
        try:
            stays = os.path.samestat(self.path.stat(), os.fstat(self._file))
        except OSError:
            stays = False
        if not stays:
            try:
                file = _opened(self.path)
            except SetupError as error:
                raise StorageError(str(error)) from None
            self._moved.append(self._file)
            self._file, self._torn = file, False
            self._ends_in_a_line()
            if not self.sync:
                os.close(self._moved.pop())
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, b"\n" + data if self._torn else data)
        except OSError as error:
            raise StorageError(f"{self.path}: it cannot be written ({error.strerror})") from None
        if written < len(data) + self._torn:
            # Remove the part of a line that was written; if that fails, the next line begins after a line feed.
            try:
                os.ftruncate(self._file, before)
            except OSError:
                self._torn = True
            raise StorageError(f"{self.path}: it cannot be written (the disk is full)")
        self._torn = False

    def close(self) -> None:
        """Close the file; what was written stays."""
        for file in (self._file, *self._moved):
            os.close(file)

    def _ends_in_a_line(self) -> bool:
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        if os.pread(self._file, 1, status.st_size - 1) == b"\n":
            return False
        os.write(self._file, b"\n")
        return True


def _opened(path: Path) -> int:
    if path.suffix.lower() in _NOT_LINES:
        raise SetupError(f"--log {path}: the log is a file of JSON lines.\nName a file such as calls.jsonl.")
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SetupError(f"--log {path}: it cannot be written ({error.strerror}).") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise SetupError(
            f"--log {path}: another gateway writes to it.\nGive each gateway a log of its own."
        ) from None
    except OSError:
        pass  # A file system or device without locks.
    return file
