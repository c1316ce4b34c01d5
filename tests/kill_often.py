"""Runs killed at random moments and started again: `python -m tests.kill_often KILLS SEED FOLDER -- ARGUMENTS...`.

Each run is a fork of this process, which has loaded what they need by running in a folder of its own: `{}` in the
arguments is the folder. It dies by SIGKILL after a random part of the time that a whole run takes, and the next
starts at once; the last one comes to its end. Prints how each one ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.command import loading_once
from tito_audit.cli import main


def run(arguments: list[str], folder: str) -> None:
    """The command with these arguments, in which `{}` is the folder."""
    sys.argv[1:] = [word.replace("{}", folder) for word in arguments]
    main()


def ended(arguments: list[str], folder: str, after: float | None) -> int:
    """How a forked run ended; `after` so many seconds it is killed."""
    child = os.fork()
    if not child:
        code: object = 2
        try:
            run(arguments, folder)
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0)
    if after is not None:
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    kills, seed, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    arguments = sys.argv[sys.argv.index("--") + 1 :]
    chance = random.Random(seed)
    with loading_once():
        with tempfile.TemporaryDirectory() as aside, contextlib.suppress(SystemExit):
            run(arguments, aside)
        with tempfile.TemporaryDirectory() as aside:
            started = time.monotonic()
            ended(arguments, aside, None)
            whole = time.monotonic() - started
        for _ in range(kills):
            print(ended(arguments, place, chance.uniform(0.05, 0.5) * whole), flush=True)
        print(ended(arguments, place, None), flush=True)
    assert Path(place).is_dir()
