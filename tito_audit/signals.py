"""Signals that end a run: the program cleans up and exits with the code that a shell expects."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
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


class HeldBack:
    """The signals that end a run, held back while it forks: they come when that is over.

    The mask of the main thread is not enough: another thread may get the signal, and its handler then runs in the
    main thread all the same, in the hooks of the fork, where Python swallows what a handler raises.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        """Those that were held back."""
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> HeldBack:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda number, _frame: self.came.append(number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        for number in self.came:
            signal.raise_signal(number)

    def end_child(self) -> None:
        """In the forked process: Ctrl-C is its parent's, and other signals end it at once."""
        ends = [n for n in ENDING if self._handlers.pop(n, signal.getsignal(n)) == exit_by_signal]
        self._handlers[signal.SIGINT] = signal.SIG_IGN
        self._handlers |= dict.fromkeys(ends, signal.SIG_DFL)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
