"""How long a template may run and how much it may write."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_WORK = 32
"""A template may build up its output in pieces, which together may be this many times the size limit."""


class LimitReached(Exception):
    """A template exceeded a limit; the message says which."""


class TimeUp(BaseException):
    """The time is up. Not an Exception, so nothing inside Jinja mistakes it for a missing attribute."""


_GRACE = 0.5
"""How many seconds longer than the alarm the Budget's clock waits. If both raised TimeUp at once, the second would
interrupt the handling of the first, and the caller's timer would not be restored."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, size_limit: int, seconds: float) -> None:
        self.size_limit = size_limit
        self._left = size_limit * _WORK
        self._deadline = time.monotonic() + seconds + _GRACE

    def spend(self, size: int) -> None:
        """Account for a value of `size` characters or elements that is about to be made."""
        if size > self.size_limit:
            raise LimitReached(
                f"the template makes a value of {size:,} characters or elements, past the limit of "
                f"{self.size_limit:,}"
            )
        self._left -= size
        if self._left < 0:
            raise LimitReached(
                f"the template makes values of more than {self.size_limit * _WORK:,} characters in all"
            )
        if time.monotonic() > self._deadline:
            raise TimeUp


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeUp inside the block when the time is up, whatever it is doing.

    This needs a signal, which only the main thread of a Unix process can have. Elsewhere the block runs until the
    Budget ends it, from which every call, operator and piece of output spends. The caller's timer is restored with
    its remaining time.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TimeUp

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        with suppress(TimeUp):  # the alarm may ring on this very line, but not after the next
            armed = False
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)
