"""The outputs of reports: stdout, a file that appears complete or not at all, a pipe or a device."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from tito_audit.errors import SetupError, StorageError

_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_STDERR = "/dev/stderr"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


def is_stdout(file: str) -> bool:
    """Whether a name stands for stdout."""
    return file in _STDOUT


def is_url(file: str) -> bool:
    """Whether a name is a URL rather than a path."""
    return _URL.match(file) is not None


@contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """Stdout for None; else a file that gets its name once the report is complete, with links resolved.

    A remote one is sent then, as a whole.
    Anything but a regular file (a pipe, `>(jq .)`, `/dev/null`) is written to directly and never replaced.
    """
    if path is None:
        yield sys.stdout
        return
    fd = None if is_url(str(path)) else _stream(path)
    if fd is not None:
        with io.TextIOWrapper(
            io.BufferedWriter(_Stream(fd, path)), encoding="utf-8", errors="backslashreplace", newline="\n"
        ) as out:
            yield out
        return
    from tito_audit.storage.atomic import new_file  # imports numpy, which --help does not need

    try:
        with new_file(path, overwrite=True) as raw:
            text = io.TextIOWrapper(
                cast(io.BufferedWriter, raw), encoding="utf-8", errors="backslashreplace", newline="\n"
            )
            yield text
            text.detach()
    except StorageError as error:
        if not str(error).startswith(f"{path}: "):
            raise  # about a log
        raise SetupError(f"--report: {error}") from error


class _Stream(io.FileIO):
    """A pipe or a device whose errors name it."""

    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd, "w")
        self._path = path

    def write(self, data: Any, /) -> int:
        """Write and return how many bytes were taken; SetupError on failure, BrokenPipeError without a reader."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _refused(self._path, error) from error


def _stream(path: Path) -> int | None:
    """A descriptor for a path that names a pipe or a device; None for a regular file, existing or new."""
    own = _DESCRIPTOR.fullmatch(str(path))
    try:
        if own is not None or str(path) == _STDERR:
            return os.dup(int(own[1]) if own is not None else 2)
        if not path.exists() or stat.S_ISREG(path.stat().st_mode):
            return None
        return os.open(path, os.O_WRONLY)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> SetupError:
    return SetupError(f"--report: {path} cannot be written: {error.strerror or error}.")
