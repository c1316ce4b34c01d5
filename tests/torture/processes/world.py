"""A run of the command in a fork of this process, which has loaded it, and what the system says about it.

Nothing of the tool is imported here but its entry point.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.torture.processes.works import Work

__all__ = ["HANG", "Ended", "Started", "children", "live_in_session", "load", "start"]

HANG = 10.0
"""Seconds after which a run hangs."""
_STEP = 0.004


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int | None
    """The exit code, or the negative number of a signal; None if it hung."""
    out: bytes
    err: str


@dataclass
class Started:
    """A run that was started, in a session of its own."""

    pid: int
    out: Path
    err: Path

    def kill(self, number: int) -> None:
        """Send a signal to the process that was started, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = HANG) -> Ended:
        """Wait until it ends; a run that hangs is killed."""
        until, code = time.monotonic() + seconds, None
        while code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            else:
                time.sleep(_STEP)
        out = self.out.read_bytes() if self.out.is_file() else b""
        return Ended(code, out, self.err.read_text(encoding="utf-8", errors="replace"))


def start(
    words: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    *,
    stdout: int | None = None,
    prepare: Callable[[], None] = lambda: None,
    real: bool = False,
) -> Started:
    """Start the command; `real`: in a new interpreter. Its streams are files beside `folder`, if none is given.

    `prepare` is called in the child before the command, for limits and the like.
    """
    aside = folder.parent
    run = Started(0, aside / f"{folder.name}.stdout", aside / f"{folder.name}.stderr")
    run.err.write_bytes(b"")  # a kill may come before the child opens it
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run.pid = os.fork()
    if not run.pid:
        _child(words, env, folder, run, stdout, prepare, real)
    return run


def _child(
    words: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    run: Started,
    stdout: int | None,
    prepare: Callable[[], None],
    real: bool,
) -> NoReturn:
    code: object = 70
    try:
        os.setsid()
        # As `__main__` has it until the command is loaded.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        streams = (nothing, os.open(run.out, flags) if stdout is None else stdout, os.open(run.err, flags))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1024)
        prepare()
        if real:
            os.execve(sys.executable, [sys.executable, "-m", "tito_audit", *words], dict(env))
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["tito-audit", *words]
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, mode in enumerate(("r", "w", "w"))
        )
        from tito_audit.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        ]
    except (OSError, ValueError):
        return []


def live_in_session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    pids = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry.name}/stat").read_text(encoding="ascii", errors="replace")
                state, _, _, session_id = fields.rpartition(")")[2].split()[:4]
                if int(session_id) == session and state not in "ZX":
                    pids.append(int(entry.name))
    return pids


def load(folder: Path, works: Sequence[Work]) -> None:
    """Load in this process what the runs need, so that each fork of it begins at once."""
    from tito_audit.cli import app

    before = Path.cwd()
    os.chdir(folder)
    try:
        for work in works:
            words = [*work.words, *work.again]
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):
                app(words)
    finally:
        os.chdir(before)
    gc.collect()
    gc.freeze()
