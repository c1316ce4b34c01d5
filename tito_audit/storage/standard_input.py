"""`-`: a log from standard input, kept in a temporary file and read like any other."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import StorageError
from tito_audit.storage.remote import is_url, remote_file
from tito_audit.storage.watch import patience

NAME = "-"
"""What the command line and reports call standard input."""
_DESCRIPTORS = "/proc/self/fd"
"""Where a file without a name can be opened again, by each process that inherited it."""


@dataclass(frozen=True, slots=True)
class _Input:
    """What was read from one stream."""

    stream: Any
    process: int
    file: Any
    """Kept open: the file is deleted when it is closed."""
    path: str


_copy: _Input | None = None


class StandardInput(type(Path())):  # type: ignore[misc]
    """A path that is shown as `-` and opens the file that keeps standard input."""

    def __fspath__(self) -> str:
        return _copy.path if _copy is not None else NAME


def standard_input() -> Path:
    """The path of standard input's content, read to its end the first time; StorageError if there is none.

    A file that the shell opened is read in place, anything else is copied to a temporary file first.
    """
    global _copy
    if _copy is None or (_copy.stream is not sys.stdin and _copy.process == os.getpid()):
        read = _read()
        if _copy is not None:
            _copy.file.close()
        _copy = read
    path: Path = StandardInput(NAME)
    return path


def path_of(name: str) -> Path:
    """The path for a name from `find_logs`."""
    if name == NAME:
        return standard_input()
    return remote_file(name) if is_url(name) else Path(name)


def _read() -> _Input:
    if sys.stdin is None or sys.stdin.closed:
        raise StorageError("-: standard input is closed.\nPipe a log into it, or name a file.")
    if sys.stdin.isatty():
        raise StorageError(
            "-: standard input is a terminal, so there is no log to read.\n"
            "Pipe one into it, as in: zcat run.jsonl.gz | tito-audit scan -"
        )
    raw: BinaryIO = sys.stdin.buffer
    if (file := _in_place(raw)) is None:
        file = _copied(raw)
    path = f"{_DESCRIPTORS}/{file.fileno()}" if Path(_DESCRIPTORS).is_dir() else str(file.name)
    return _Input(sys.stdin, os.getpid(), file, path)


def _in_place(raw: BinaryIO) -> Any:
    """Standard input itself, if it is a file that can be opened again and none of it was read yet."""
    try:
        number = raw.fileno()
        if not stat.S_ISREG(os.fstat(number).st_mode) or os.lseek(number, 0, os.SEEK_CUR):
            return None
    except (OSError, ValueError):  # tests have a stream without a number
        return None
    return os.fdopen(os.dup(number), "rb") if Path(_DESCRIPTORS).is_dir() else None


def _copied(raw: BinaryIO) -> Any:
    make = tempfile.TemporaryFile if Path(_DESCRIPTORS).is_dir() else tempfile.NamedTemporaryFile
    try:
        file = make(prefix="tito-audit-")
        if hasattr(raw, "peek"):
            with patience(NAME):
                raw.peek(1)
        shutil.copyfileobj(raw, file, 1 << 20)
        file.flush()
    except OSError as error:
        raise StorageError(
            f"-: standard input cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}).\n"
            "Make room, name another folder with TMPDIR, or save the log to a file and name that."
        ) from error
    return file
