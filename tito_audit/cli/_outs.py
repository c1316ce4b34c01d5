"""What a run writes and where: stdout, a whole file, a pipe or a device; never a file that it reads."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from tito_audit.errors import SetupError, StorageError
from tito_audit.terminal.encoding import ready_stdout

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tito_audit.cli._options import Options

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
def opened(path: Path | None, report: str = "text") -> Iterator[TextIO]:
    """Stdout for None; else a file that gets its name once the report is complete, with links resolved.

    A remote one is sent then, as a whole.
    Anything but a regular file (a pipe, `>(jq .)`, `/dev/null`) is written to directly and never replaced.
    """
    if path is None:
        ready_stdout(report)
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


def key_of(path: str | Path) -> str:
    """The same text for all names of a place; see `place_key`."""
    from tito_audit.storage import place_key

    return place_key(path)


def files_of(logs: Sequence[str]) -> frozenset[str]:
    """The keys of the logs, and of the files in folders and globs."""
    from tito_audit.storage import find_logs

    return frozenset({*map(key_of, logs), *map(key_of, find_logs(logs))})


def read_as(name: str) -> frozenset[str]:
    """The keys of the files of an input; none if it is missing, which its reader will report."""
    with suppress(StorageError, OSError):
        return files_of([name])
    return frozenset()


def refuse_inputs(outputs: Mapping[str, str | None], logs: Sequence[str], inputs: Sequence[str] = ()) -> None:
    """SetupError if one of the files to be written, by flag, is one of the logs or `inputs` under any name.

    Stdout is one of them if it is a file that holds something, as after `>>`. Remote files are not looked at.
    """
    keys = {flag: key_of(path) for flag, path in outputs.items() if path is not None and _is_file(path)}
    if _is_file("/dev/fd/1", least=1):
        keys["stdout"] = key_of("/dev/fd/1")
    if not keys:
        return
    read = [log for log in logs if not is_url(log)]
    for names, what in ((read, "one of the logs, and a log is never overwritten"), (inputs, "read by this run")):
        sources: frozenset[str] = frozenset().union(*map(read_as, names))
        for flag, key in keys.items():
            if key in sources:
                raise SetupError(f"{flag}: {outputs.get(flag) or 'it'} is {what}; name another file.")


def _is_file(path: str, *, least: int = 0) -> bool:
    """Whether there is a regular file of so many bytes."""
    try:
        status = os.stat(path)  # noqa: PTH116  a path that is no path has no file
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size >= least


def journal_place(options: Options, beside: str | None, way: str) -> Path | None:
    """The journal of a run: the one that is named, or with --resume one beside what the run writes; None: none.

    SetupError if there is nothing on disk that it could be beside (`way` says how to name something), or if an
    earlier run would be continued without being asked to.
    """
    journal, resume = options.journal, options.resume
    if journal is None and not resume:
        return None
    if is_url(journal or ""):
        raise SetupError(f"--journal {journal}: a journal is kept on disk.\nName a file on disk.")
    if journal is None and beside is not None and is_url(beside):
        raise SetupError(
            f"--resume: a journal is kept on disk, not beside {beside}.\nName it with --journal FILE."
        )
    if journal is None and beside is None:
        raise SetupError(f"--resume: no journal is named.\nName it with --journal FILE, or {way}.")
    from tito_audit.storage.journal import SUFFIX

    place = Path(journal if journal is not None else f"{beside}{SUFFIX}")
    if not resume and place.exists():
        raise SetupError(
            f"{place}: this holds what an earlier run finished.\nPass --resume to continue it, or delete the file."
        )
    return place


def print_object(value: Any) -> None:
    """Print one JSON object to stdout."""
    from tito_audit.report_objects import as_json
    from tito_audit.terminal.encoding import print_json

    print_json(as_json(value))


def print_result(
    shape: str,
    value: Callable[[], Any],
    wrapped: Iterable[RenderableType] = (),
    whole: Iterable[RenderableType] = (),
    notice: str | None = None,
) -> None:
    """Print what a command found: with `json` as one object, else as a page, see `print_page`."""
    from tito_audit.terminal.page import print_page

    if shape == "json":
        print_object(value())
    else:
        print_page(wrapped, whole, notice)


def say_resumed(resumed: int, of: int, place: Path | None, *, silent: bool) -> None:
    """Say on stderr how much an earlier run had finished."""
    if resumed and not silent:
        sys.stderr.write(f"{resumed:,} of {of:,} logs were finished before: {place}\n")
