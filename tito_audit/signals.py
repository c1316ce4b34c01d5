"""Signals that end a run: the program cleans up and exits with the code that a shell expects."""

from __future__ import annotations

import signal
from typing import NoReturn

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a run, besides Ctrl-C."""


def exit_by_signal(number: int, frame: object) -> NoReturn:
    """The handler of a signal that ends the program: SystemExit with 128 and its number."""
    raise SystemExit(128 + number)


def end_by_signals() -> None:
    """Let the signals end this program by SystemExit, and Ctrl-C by KeyboardInterrupt.

    Not those that it was started to ignore, as by `nohup`.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, exit_by_signal)
