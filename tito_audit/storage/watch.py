"""Logs that do not stay as they are: pipes that nobody writes to, and files that change while they are read."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.remote import RemoteFile

_PATIENCE = 1.0
"""Seconds without a byte after which a message says what is waited for."""
_log = logging.getLogger("tito_audit")


@contextmanager
def patience(path: Path | str) -> Iterator[None]:
    """A block that waits for a pipe's first bytes; if that takes long, a message on stderr says so."""
    words = f"{path}: waiting for a program to write to this pipe; Ctrl-C stops the run."
    timer = threading.Timer(_PATIENCE, _log.warning, ["tito-audit: %s", words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_pipe(path: Path) -> bool:
    """Whether a path leads to a pipe with a name."""
    try:
        return not isinstance(path, RemoteFile) and stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


def refuse_device(path: Path) -> None:
    """StorageError for a terminal or another device without an end; the null device is empty."""
    try:
        mode = 0 if isinstance(path, RemoteFile | RowsInMemory) else path.stat().st_mode
    except OSError:
        return
    if stat.S_ISCHR(mode) and path.stat().st_rdev != os.stat(os.devnull).st_rdev:  # noqa: PTH116
        raise StorageError(f"{path}: this is a device, not a log.\nPipe a log into it and name -, or name a file.")


class Watch:
    """The files of a run as they were when it began; pipes, remote files and rows in memory are not watched."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._before: dict[Path, os.stat_result] = {}
        for file in files:
            status = _status(file) if not isinstance(file, RemoteFile | RowsInMemory) else None
            if status is not None and stat.S_ISREG(status.st_mode):
                self._before[file] = status

    def check(self, file: Path, *, grows: bool = False) -> str | None:
        """StorageError if the file was changed since; with `grows`, a notice if it only grew."""
        before = self._before.get(file)
        if before is None:
            return None
        now = _status(file)
        if now is None:
            raise _changed(file, "was deleted")
        if not os.path.samestat(before, now):
            raise _changed(file, "was replaced by another file")
        if now.st_size < before.st_size:
            raise _changed(file, f"shrank from {before.st_size:,} to {now.st_size:,} bytes")
        if now.st_size > before.st_size:
            if not grows:
                raise _changed(file, f"grew from {before.st_size:,} to {now.st_size:,} bytes")
            return (
                f"{file} grew while it was read: rows that were added since may be missing. "
                "Scan it again when nothing writes to it."
            )
        if now.st_mtime_ns != before.st_mtime_ns:
            raise _changed(file, "was written to")
        return None

    def grown(self) -> list[str]:
        """A notice for each file that grew; StorageError for one that was changed otherwise."""
        return [notice for file in self._before if (notice := self.check(file, grows=True)) is not None]


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _changed(file: Path, how: str) -> StorageError:
    return StorageError(
        f"{file}: it {how} while it was read, so what was read may be of two versions.\n"
        "Run again when nothing writes to it, or on a copy."
    )
