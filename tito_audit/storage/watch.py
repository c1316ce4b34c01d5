"""Logs that do not stay the same: pipes, standard input, and files that change while they are read."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.remote import RemoteFile, is_url, remote_file

_PATIENCE = 1.0
"""Seconds after which a message says what is waited for."""


@contextmanager
def warn_if_waiting(path: Path | str) -> Iterator[None]:
    """A block that waits for the first bytes of a pipe; if that takes long, a message on stderr says so."""
    import logging

    words = f"{path}: waiting for a program to write to this pipe; Ctrl-C stops the run."
    timer = threading.Timer(_PATIENCE, logging.getLogger("tito_audit").warning, ["tito-audit: %s", words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_pipe(path: Path) -> bool:
    """Whether a path is a named pipe."""
    try:
        return not isinstance(path, RemoteFile) and stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


def refuse_device(path: Path) -> None:
    """StorageError for a terminal or another device without an end, but not for the null device."""
    try:
        mode = 0 if isinstance(path, RemoteFile | RowsInMemory) else path.stat().st_mode
    except OSError:
        return
    if stat.S_ISCHR(mode) and path.stat().st_rdev != os.stat(os.devnull).st_rdev:  # noqa: PTH116
        raise StorageError(f"{path}: this is a device, not a log.\nPipe a log into it and name -, or name a file.")


class FileWatch:
    """Notices which files changed since a run began; ignores pipes, remote files and rows in memory."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._before: dict[Path, os.stat_result] = {}
        for file in files:
            status = _status(file) if not isinstance(file, RemoteFile | RowsInMemory) else None
            if status is not None and stat.S_ISREG(status.st_mode):
                self._before[file] = status

    def check(self, file: Path, *, grows: bool = False) -> str | None:
        """StorageError if the file has changed; with `grows`, a notice if it only grew."""
        before = self._before.get(file)
        if before is None:
            return None
        now = _status(file)
        if now is None:
            raise _change_error(file, "was deleted")
        if not os.path.samestat(before, now):
            raise _change_error(file, "was replaced by another file")
        if now.st_size < before.st_size:
            raise _change_error(file, f"shrank from {before.st_size:,} to {now.st_size:,} bytes")
        if now.st_size > before.st_size:
            if not grows:
                raise _change_error(file, f"grew from {before.st_size:,} to {now.st_size:,} bytes")
            return (
                f"{file} grew while it was read: rows that were added since may be missing. "
                "Scan it again when nothing writes to it."
            )
        if now.st_mtime_ns != before.st_mtime_ns:
            raise _change_error(file, "was written to")
        return None

    def grown(self) -> list[str]:
        """A notice for each file that grew; StorageError if one changed otherwise."""
        return [notice for file in self._before if (notice := self.check(file, grows=True)) is not None]


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _change_error(file: Path, how: str) -> StorageError:
    return StorageError(
        f"{file}: it {how} while it was read, so what was read may be of two versions.\n"
        "Run again when nothing writes to it, or on a copy."
    )


STDIN = "-"
"""What the command line and reports call standard input."""
_DESCRIPTORS = "/proc/self/fd"
"""Where files without a name can be opened again, also by processes that inherited them."""


@dataclass(frozen=True, slots=True)
class _InputCopy:
    stream: Any
    process: int
    file: Any
    """Kept open: the file is deleted when it is closed."""
    path: str


_copy: _InputCopy | None = None


class StandardInput(type(Path())):  # type: ignore[misc]
    """A path that is shown as `-` and opens the file with the content of standard input."""

    def __fspath__(self) -> str:
        return _copy.path if _copy is not None else STDIN


def standard_input() -> Path:
    """The path of the content of standard input; StorageError if it is closed or a terminal.

    A file that the shell opened is read in place; anything else is copied to a temporary file, the first time.
    """
    global _copy
    path: Path = StandardInput(STDIN)
    if _copy is not None and (_copy.stream is sys.stdin or _copy.process != os.getpid()):
        return path
    can_reopen = Path(_DESCRIPTORS).is_dir()
    if sys.stdin is None or sys.stdin.closed:
        raise StorageError("-: standard input is closed.\nPipe a log into it, or name a file.")
    if sys.stdin.isatty():
        raise StorageError(
            "-: standard input is a terminal, so there is no log to read.\n"
            "Pipe one into it, as in: zcat run.jsonl.gz | tito-audit scan -"
        )
    raw: BinaryIO = sys.stdin.buffer
    file: Any = None
    try:  # read in place what can be opened again, if nothing of it was read yet
        number = raw.fileno()
        if can_reopen and stat.S_ISREG(os.fstat(number).st_mode) and not os.lseek(number, 0, os.SEEK_CUR):
            file = os.fdopen(os.dup(number), "rb")
    except (OSError, ValueError):  # tests have a stream without a number
        pass
    if file is None:
        make = tempfile.TemporaryFile if can_reopen else tempfile.NamedTemporaryFile
        try:
            file = make(prefix="tito-audit-")
            if hasattr(raw, "peek"):
                with warn_if_waiting(STDIN):
                    raw.peek(1)
            shutil.copyfileobj(raw, file, 1 << 20)
            file.flush()
        except OSError as error:
            raise StorageError(
                f"-: standard input cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}).\n"
                "Make room, name another folder with TMPDIR, or save the log to a file and name that."
            ) from error
    if _copy is not None:
        _copy.file.close()
    at = f"{_DESCRIPTORS}/{file.fileno()}" if can_reopen else str(file.name)
    _copy = _InputCopy(sys.stdin, os.getpid(), file, at)
    return path


def path_from_name(name: str) -> Path:
    """The path for a name from `find_logs`."""
    if name == STDIN:
        return standard_input()
    return remote_file(name) if is_url(name) else Path(name)
