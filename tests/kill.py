"""Runs that kill themselves: `python -m tests.kill FOLDER... -- repair ARGUMENTS...`, in which `{}` is the folder.

One run before them, in a folder of its own, loads what they all need. The first of these dies by SIGKILL just
before its first step that touches its folder (opening something there, naming,
renaming, removing), the second before its second, and so on until one comes to
its end. Prints how each one ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile

from tests.command import loading_once
from tito_audit.cli import main

NAMING = {"os.link", "os.rename", "os.remove"}
"""Steps that name a file relative to a folder that was opened before."""


def kill_before(last: int, folder: str) -> None:
    """Nothing; from now on the steps are counted, and the last one never comes."""
    done = 0

    def step(event: str, values: tuple[object, ...]) -> None:
        nonlocal done
        if event in NAMING or (event == "open" and str(values[0]).startswith(folder)):
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(step)


def run(arguments: list[str], folder: str) -> None:
    """The command with these arguments, in which `{}` is the folder."""
    sys.argv[1:] = [word.replace("{}", folder) for word in arguments]
    main()


if __name__ == "__main__":
    end = sys.argv.index("--")
    folders, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    with loading_once():
        with tempfile.TemporaryDirectory() as aside, contextlib.suppress(SystemExit):
            run(arguments, aside)
        for number, folder in enumerate(folders, 1):
            child = os.fork()
            if not child:
                kill_before(number, folder)
                run(arguments, folder)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(code, flush=True)
            if code != -signal.SIGKILL:
                break
