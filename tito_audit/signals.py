"""Signals that end a run: the program cleans up and exits with the code that a shell expects."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import NoReturn

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a run, besides Ctrl-C."""


def exit_by_signal(number: int, frame: object) -> NoReturn:
    """A signal handler that raises SystemExit with 128 + the signal's number."""
    raise SystemExit(128 + number)


def exit_on_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt and other ending signals SystemExit, so that the program cleans up.

    Signals that it was started to ignore, as by `nohup`, stay ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, exit_by_signal)


class DeferredSignals:
    """A block in which signals that end a run are deferred, for a fork; they are raised at its end.

    A signal mask is not enough: another thread may get the signal, and its handler then runs in the main thread
    all the same, inside the hooks of the fork, where Python swallows what it raises.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """The deferred signals."""
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> DeferredSignals:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING_SIGNALS})
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING_SIGNALS):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda number, _frame: self.received.append(number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        for number in self.received:
            signal.raise_signal(number)

    def restore_in_child(self) -> None:
        """Call it in the forked process: Ctrl-C is left to the parent, and other signals end the child at once."""
        ends = [n for n in ENDING_SIGNALS if self._handlers.pop(n, signal.getsignal(n)) == exit_by_signal]
        self._handlers[signal.SIGINT] = signal.SIG_IGN
        self._handlers |= dict.fromkeys(ends, signal.SIG_DFL)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
