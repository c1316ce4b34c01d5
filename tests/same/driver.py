"""Runs command lines of the checkout on PYTHONPATH, each in a fork of this process, where all modules are loaded.

Started as a script. Reads one JSON object a line (arguments, cwd, out, err, env, seconds), answers with the exit
code. What runs is `python -m tito_audit` without the second that starting Python and importing take.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

LIBRARIES = (
    *("numpy", "orjson", "typer", "jinja2", "jinja2.sandbox", "minijinja", "pyarrow", "pyarrow.parquet"),
    *(
        "pyarrow.ipc",
        "pyarrow.dataset",
        "pyarrow.json",
        "tokenizers",
        "fastokens",
        "rich.console",
        "rich.progress",
    ),
    *("huggingface_hub", "multiprocessing.connection", "gzip", "tomllib", "difflib", "html", "statistics"),
)
"""What costs time to import. Importing starts no threads, so the process can be forked."""
LATE = -9
"""The exit code of a command that took too long."""


def main() -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    print(json.dumps({"package": _load()}), file=answers, flush=True)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps({"code": _run(json.loads(line))}), file=answers, flush=True)


def _load() -> str:
    """Import all there is; the folder of the package."""
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    package = importlib.import_module("tito_audit")
    missing = importlib.import_module("tito_audit.errors").SetupError
    for module in pkgutil.walk_packages(package.__path__, "tito_audit.", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            with suppress(ImportError, missing):  # something optional is not installed
                importlib.import_module(module.name)
    return str(package.__path__[0])


def _run(job: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        _child(job)
    until = time.monotonic() + job["seconds"]
    pause = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return LATE
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _child(job: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _redirect(job["out"], job["err"])
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        sys.argv = ["tito_audit", *job["arguments"]]
        sys.path[:] = [job["cwd"], *sys.path]
        code = _invoke()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _redirect(out: str, err: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.close(nothing)


def _invoke() -> int:
    """The exit code, as Python makes one of how a program ended."""
    try:
        runpy.run_module("tito_audit", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
