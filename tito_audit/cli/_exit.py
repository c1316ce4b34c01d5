"""How a run ends: the exit codes, and the messages for what the system refuses (disk, files, memory, threads)."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.terminal.encoding import ERROR_HANDLER

FAILED = 1
NO_RESULT = 2
HUNG_UP = 129
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143

EXIT_CODES: Mapping[int, tuple[str, str]] = {
    0: ("passed", "The run finished and nothing fails."),
    FAILED: (
        "failed",
        "The run finished with a bad result: findings that fail the gate, rows that no repair fixed, data that a "
        "conversion would lose, a log below a required level or without a certain explanation, a chat template "
        "that changes history, or logprobs that are not the model's.",
    ),
    NO_RESULT: (
        "no result",
        "The run was impossible: a missing file, a wrong flag or setting, no tokenizer where one is needed. "
        "stderr says what to do. A crash is also 2, so that it is never mistaken for findings.",
    ),
    HUNG_UP: ("hung up", "SIGHUP: the terminal is gone, and `nohup` was not used. The same as for Ctrl-C."),
    INTERRUPTED: ("interrupted", "Ctrl-C. No report was finished; files appear whole or not at all."),
    READER_GONE: ("reader gone", "The reader of stdout closed it before the result was known, as in `| head`."),
    TERMINATED: ("terminated", "SIGTERM, as when a job is cancelled. The same as for Ctrl-C."),
}
"""By exit code: a word and a sentence. No command exits with any other code."""


def epilog() -> str:
    """The exit codes in one line, for the help."""
    words = [f"{code} {word}" for code, (word, _) in EXIT_CODES.items()]
    return f"Exit codes: {', '.join(words)}."


_DISK_FULL = {errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else [])}
_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
_NO_THREAD = ("can't start new thread", "ThreadPoolBuildError")
"""In the errors of Python and of the Rust tokenizers when no thread can be started."""
_NO_FOLDER = "No usable temporary directory"


class Stream(io.FileIO):
    """Stdout, a pipe or a device. A failing write raises what `refusal` makes of it; BrokenPipeError stays."""

    def __init__(self, fd: int, refusal: Callable[[OSError], Exception], *, closefd: bool = True) -> None:
        super().__init__(fd, "w", closefd)
        self._refusal = refusal

    def write(self, data: Any, /) -> int:
        try:
            while (size := super().write(data)) is None:  # a non-blocking pipe that is full
                select.select([], [self], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._refusal(error) from error
        return size


def prepare_streams() -> None:
    """Replace stdout and stderr by streams that fail with a message and escape what their encoding lacks.

    A standard stream that the caller closed gets a descriptor again, so that no output file takes its number.
    Printing to a closed stdout is then an error; what is printed to a closed stderr is lost.
    """
    # The stand-in for stdout is opened for reading, so that a write to it fails.
    for number, (stream, flags) in enumerate(
        ((sys.stdin, os.O_WRONLY), (sys.stdout, os.O_RDONLY), (sys.stderr, os.O_WRONLY))
    ):
        if stream is None and (opened := os.open(os.devnull, flags)) != number:
            os.dup2(opened, number)
            os.close(opened)
    stdout = Stream(
        1,
        lambda error: StorageError(
            f"stdout: it cannot be written ({error.strerror or error}), so what was printed is not complete; "
            "send it to a file that can be written."
        ),
        closefd=False,
    )
    encoding = getattr(sys.stdout, "encoding", None)
    live = sys.stdout is not None and sys.stdout.isatty()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(stdout, 1 << 16),
        encoding=encoding or "utf-8",
        errors=ERROR_HANDLER,
        line_buffering=live,
    )
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stderr.reconfigure(errors=ERROR_HANDLER)  # type: ignore[union-attr]


def discard_stdout() -> None:
    """Discard unwritten output: Python flushes stdout once more at exit, which would fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def is_stdout_closed() -> bool:
    """Whether the reader of stdout is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def print_message(words: str) -> None:
    """Print `tito-audit: WORDS` to stderr; if that fails, nothing is printed."""
    with suppress(OSError, ValueError):
        print(f"tito-audit: {words}", file=sys.stderr)


def system_error_words(error: BaseException) -> str | None:
    """What the system refused and what to do about it; None for any other error."""
    if isinstance(error, MemoryError):
        return "there is not enough memory.\nRun with fewer --jobs, or on a machine with more."
    full = isinstance(error, OSError) and error.errno in _TOO_MANY_FILES
    try:  # at the limit of open files, an import fails with an unrelated error
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as refused:
        full = full or refused.errno in _TOO_MANY_FILES
    if full:
        return "no more files can be opened.\nRaise the limit with `ulimit -n`, or run with fewer --jobs."
    if any(words in str(error) for words in _NO_THREAD):
        return _too_many_words("threads")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno == errno.EAGAIN:
        return _too_many_words("processes")
    message = error.strerror or str(error)
    if _NO_FOLDER in message:
        return f"{message}.\nName a folder that can be written with TMPDIR."
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in _DISK_FULL:
        return f"{where}{message}.\nFree some space, or name another disk for outputs, and for TMPDIR."
    return f"{where}{message}."


def _too_many_words(what: str) -> str:
    return f"no more {what} can be started.\nRaise the limit with `ulimit -u`, or pass --jobs 1."
