"""The command line in a process that kills itself: `python tests/kill.py FOLDER NUMBER ARGUMENTS...`.

It dies by SIGKILL just before the step of that number, counted from 1, of all that touch a file in FOLDER or
the folder itself: opening, naming, renaming, removing, changing modes. Where there are fewer steps it lives.
"""

from __future__ import annotations

import os
import signal
import sys

from tito_audit.cli import main

STEPS = {"open", "os.link", "os.rename", "os.remove", "os.truncate", "os.chmod", "os.mkdir", "os.rmdir"}


def watch(folder: str, last: int) -> None:
    """Count the steps from now on, and stop for good before the last one."""
    done = 0

    def step(event: str, values: tuple[object, ...]) -> None:
        nonlocal done
        if event not in STEPS:
            return
        # A name without a folder is one in a folder that was opened before, which only links and renames use.
        near = event in {"os.link", "os.rename", "os.remove"}
        if near or str(values[0]).startswith(folder):
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(step)


if __name__ == "__main__":
    folder, number = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    watch(folder, int(number))
    main()
