"""The log of a gateway: an append-only file of JSON lines, one write per call.

An answer is sent after its line is written, so a crash loses or tears only lines of answers that no client has. A
torn last line is ended when the log is opened again. A log that was moved or deleted is created again.
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

_OTHER_SUFFIXES = frozenset((".gz", ".zst", ".bz2", ".xz", ".parquet", ".arrow"))
_JSON_LINE = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class CallLog:
    """A log that one gateway appends to."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        """Open or create the file; with `sync`, each `append` waits until it is on the disk.

        SetupError if it cannot be written, or if another gateway has locked it.
        """
        self.path = path
        self.sync = sync
        self._file = _open_log(path)
        self.was_torn = self._end_torn_line()
        """Whether the last line was torn, as after a crash."""
        self._torn = False
        """Whether a part of a line was written and could not be removed."""
        self._moved: list[int] = []
        """Files that were moved away, and may still be waited for."""

    async def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append all lines or none; StorageError if they cannot be written."""
        self.append_unsynced(lines)
        file = self._file
        if self.sync:
            try:
                await asyncio.to_thread(os.fdatasync, file)
            except OSError as error:
                raise StorageError(f"{self.path}: it cannot be written ({error.strerror})") from None

    def append_unsynced(self, lines: Sequence[dict[str, Any]]) -> None:
        """The same as `append`, without waiting for the disk."""
        data = b"".join(orjson.dumps(line, option=_JSON_LINE) for line in lines)
        try:
            in_place = os.path.samestat(self.path.stat(), os.fstat(self._file))
        except OSError:
            in_place = False
        if not in_place:
            try:
                file = _open_log(self.path)
            except SetupError as error:
                raise StorageError(str(error)) from None
            self._moved.append(self._file)
            self._file, self._torn = file, False
            self._end_torn_line()
            if not self.sync:
                os.close(self._moved.pop())
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, b"\n" + data if self._torn else data)
        except OSError as error:
            raise StorageError(f"{self.path}: it cannot be written ({error.strerror})") from None
        if written < len(data) + self._torn:
            # Remove what was written of the lines; if that fails, the next write begins with a line feed.
            try:
                os.ftruncate(self._file, before)
            except OSError:
                self._torn = True
            raise StorageError(f"{self.path}: it cannot be written (the disk is full)")
        self._torn = False

    def close(self) -> None:
        for file in (self._file, *self._moved):
            os.close(file)

    def _end_torn_line(self) -> bool:
        """Write a line feed if the file does not end with one; whether that was needed."""
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        if os.pread(self._file, 1, status.st_size - 1) == b"\n":
            return False
        os.write(self._file, b"\n")
        return True


def _open_log(path: Path) -> int:
    """A locked file descriptor to append to; SetupError if there is none."""
    if path.suffix.lower() in _OTHER_SUFFIXES:
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
        pass  # a file system or device without locks
    return file
