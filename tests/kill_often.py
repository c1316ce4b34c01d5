"""Runs that are killed and started again: `python -m tests.kill_often SEED < WORK`.

WORK is a JSON list of `{"arguments": [...], "folder": "...", "kills": N}`, in whose arguments `{}` is the folder.
Each run is a fork of this process, which has loaded what they need by one run in a folder of its own. It dies by
SIGKILL after a random part of the time that a whole run takes, and the next one starts at once; the last one comes
to its end. With `"before": N` in place of `kills`, one run dies just before its N-th step that touches the folder
(see tests.kill), and one comes to its end. Prints how the runs ended, a list for each work.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.command import loading_once
from tests.kill import kill_before, run


def ended(arguments: list[str], folder: str, *, after: float | None = None, before: int | None = None) -> int:
    """How a forked run ended that is killed after so many seconds, or before this step, or not at all."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code: object = 2
        os.dup2(2, 1)
        try:
            if before is not None:
                kill_before(before, folder)
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


def done(work: dict[str, Any], chance: random.Random) -> list[int]:
    """How the runs of one work ended."""
    arguments, folder = work["arguments"], work["folder"]
    Path(folder).mkdir(exist_ok=True)
    if "before" in work:
        return [ended(arguments, folder, before=work["before"]), ended(arguments, folder)]
    with tempfile.TemporaryDirectory() as aside:
        started = time.monotonic()
        ended(arguments, aside)
        whole = time.monotonic() - started
    codes = [ended(arguments, folder, after=chance.uniform(0.05, 0.6) * whole) for _ in range(work["kills"])]
    if -signal.SIGKILL not in codes:  # all were done by then
        codes.append(ended(arguments, folder, before=1))
    return [*codes, ended(arguments, folder)]


if __name__ == "__main__":
    works, chance = json.load(sys.stdin), random.Random(int(sys.argv[1]))
    with loading_once():
        with (
            tempfile.TemporaryDirectory() as aside,
            contextlib.suppress(SystemExit),
            contextlib.redirect_stdout(sys.stderr),
        ):
            run(works[0]["arguments"], aside)
        print(json.dumps([done(work, chance) for work in works]))
