"""Shows pages longer than the screen in a pager, as git does, if stdout is a terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TextIO

from tito_audit.terminal.encoding import ERROR_HANDLER

_CANNOT_RUN = (126, 127)
"""Exit statuses by which a shell says that it cannot run a command."""
_SHELL_SYNTAX = frozenset("|&;<>()$`\\\"'*?[#~=%")
"""A pager command with one of these characters needs a shell."""


def show_page(lines: Iterable[str], out: TextIO, *, paged: bool = True) -> None:
    """Write lines (with their ends) to `out`, through a pager if they do not fit the screen."""
    command = pager_command() if paged and out is sys.stdout and out.isatty() else None
    if command is None:
        out.writelines(lines)
        return
    from rich.text import Text

    columns, height = shutil.get_terminal_size()
    rest, first, used = iter(lines), list[str](), 0
    for line in rest:
        first.append(line)
        used += max(-(-Text.from_ansi(line).cell_len // columns), 1)
        if used >= height:  # with the shell prompt they do not fit the screen
            break
    else:
        out.writelines(first)
        return
    encoding = out.encoding or "utf-8"
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    if encoding.lower().replace("-", "") == "utf8":
        environment.setdefault("LESSCHARSET", "utf-8")
    out.flush()
    unread, shown = chain(first, rest), list[str]()
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    except OSError:
        out.writelines(unread)
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's while it runs
    assert pager.stdin is not None
    try:
        for line in unread:
            shown.append(line)
            pager.stdin.write(line.encode(encoding, ERROR_HANDLER))
    except BrokenPipeError:
        pass  # the user quit the pager, which is no error
    finally:
        with suppress(BrokenPipeError):
            pager.stdin.close()
        status = pager.wait()
        signal.signal(signal.SIGINT, before)
    if status in _CANNOT_RUN:
        out.writelines(chain(shown, unread))


def pager_command() -> list[str] | None:
    """$PAGER as a command, `less` if it is unset; None without a pager or with `PAGER=cat`."""
    wanted = os.environ.get("PAGER")
    if os.environ.get("TERM") in (None, "", "dumb"):
        return None
    if wanted is None:
        return ["less", "-R"] if shutil.which("less") else None
    if wanted.strip() in ("", "cat"):
        return None
    if _SHELL_SYNTAX & set(wanted):
        return ["sh", "-c", wanted] if shutil.which("sh") else None
    words = shlex.split(wanted)
    if shutil.which(words[0]) is None:
        return None
    # Without -R, less shows colour escapes as text.
    return [*words, "-R"] if Path(words[0]).name == "less" else words
