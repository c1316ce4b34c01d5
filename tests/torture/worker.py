"""A process that runs the command line again and again, as a shell would run it: `python -m tests.torture.worker`.

It reads a run as one JSON line (`words`, `stdin`), and answers with one when the run has ended. What a run prints
goes to the files `stdout` and `stderr` of the folder that it was started in, whoever in the process prints it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from tests import command
from tito_audit import cli

__all__ = ["main"]

_ADDRESSES = 8 << 30
"""Address space, so that a run that takes all memory ends before the machine does."""
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def main() -> None:
    """Run until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0), "r")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    typer.main.get_command = cache(typer.main.get_command)  # the parser of the command line is the same each time
    home = Path.cwd()
    _capture(home, None)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    folder = home / "work"
    environment = dict(os.environ)
    answers.write("ready\n")
    answers.flush()
    with command.loading_once():
        for line in orders:
            order = json.loads(line)
            _forget()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            answers.write(json.dumps(_run(home, order["words"], order["stdin"])) + "\n")
            answers.flush()


def _run(home: Path, words: list[str], stdin: str | None) -> dict[str, Any]:
    _capture(home, stdin)
    idle, children = _memory("VmRSS"), _children()
    Path("/proc/self/clear_refs").write_text("5")
    started, cpu = time.monotonic(), _processor()
    code = _called(words)
    seconds, cpu = time.monotonic() - started, _processor() - cpu
    peak = max(_memory("VmHWM") - idle, _children() if _children() > children else 0)
    return {"code": code, "seconds": seconds, "cpu": cpu, "peak": peak, "idle": idle}


def _called(words: list[str]) -> int:
    """The exit code of the command line, as Python ends with it."""
    warnings.resetwarnings()  # so that a warning is said in each run, and not once in the process
    for kind in _QUIET:
        warnings.simplefilter("ignore", kind, append=True)
    sys.argv = ["tito-audit", *words]
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        traceback.print_exc()
        code = 120
    return code if isinstance(code, int) else 0 if code is None else 1


def _capture(home: Path, stdin: str | None) -> None:
    """Point the standard streams at new files."""
    opened = (
        os.open(stdin or os.devnull, os.O_RDONLY),
        os.open(home / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        os.open(home / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
    )
    for number, stream in enumerate(opened):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )


def _memory(name: str) -> int:
    """Memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def _processor() -> float:
    """Seconds of the processor that this process and its ended children have had."""
    return sum(os.times()[:4])


def _children() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _forget() -> None:
    """Drop what earlier runs left in caches that no process of a user's would have."""
    if len(command._tokenizers) > 3:
        command._tokenizers.clear()
    if len(command._codes) > 100:
        command._codes.clear()
        command._readings.clear()
    gc.collect(1)


if __name__ == "__main__":
    main()
