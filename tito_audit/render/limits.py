"""How long a template may run and how much it may write."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tito_audit.render.sizes import CONTAINERS, DEEPEST, Measured, written_size

_WORK = 32
"""A template may build up its output in pieces, which together may be this many times the size limit."""


class LimitReached(Exception):
    """A template exceeded a limit; the message says which."""


class TimeUp(BaseException):
    """The time is up. Not an Exception, so nothing inside Jinja mistakes it for a missing attribute."""


_GRACE = 0.5
"""How many seconds longer than the alarm the Budget's clock waits. If both raised TimeUp at once, the second would
interrupt the handling of the first, and the caller's timer would not be restored."""


_MEMORY = 192 << 20
"""Bytes of memory that a rendering may take, and as many more as its largest value has characters."""
_LOOK = 1 << 22
"""After so many characters the memory is looked at."""
_LONGEST = 1e8
"""Seconds that a timer can take; a longer limit is none."""
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_HELD = 8 << 20
"""Characters that a list or dict may be written with; more if the messages have more."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, size_limit: int, seconds: float, given: Any = None) -> None:
        self.size_limit = size_limit
        self._given = given
        self._left = size_limit * _WORK
        self._until_look = _LOOK
        self._memory: int | None = None
        self._known: dict[int, Measured] = {}
        self._most_held: int | None = None
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
        self._until_look -= size
        if self._until_look < 0:
            self._look(size)
        if time.monotonic() > self._deadline:
            raise TimeUp

    def hold(self, value: Any) -> Any:
        """The value; LimitReached if it is a list, tuple or dict that would be very large when written out."""
        if type(value) in CONTAINERS and value:
            size, deep = written_size(value, self._known)
            if deep > DEEPEST:
                raise LimitReached(f"the template nests values more than {DEEPEST:,} deep")
            if size > _HELD and size > self._most():
                raise LimitReached(
                    f"the template makes a list or dict of {size:,} characters, past the limit of {self._most():,}"
                )
        return value

    def _most(self) -> int:
        """The limit of a container, by what the template was given."""
        if self._most_held is None:
            self._most_held = _HELD + 4 * written_size(self._given)[0]
        return self._most_held

    def _look(self, size: int) -> None:
        """LimitReached if the process has taken much memory since the first look."""
        self._until_look = _LOOK
        held = _resident()
        if self._memory is None:
            self._memory = held - min(size, held)
        if held + size > self._memory + _MEMORY + 8 * self._most():
            raise LimitReached(f"the template takes more than {_MEMORY >> 20:,} MB of memory")


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as said:  # noqa: PTH123 - this takes microseconds
            return int(said.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


_given_up: set[tuple[int, float]] = set()


def give_up(source: str, seconds: float) -> None:
    """Note that a template was not finished in this time: no part of this process runs it again."""
    _given_up.add((hash(source), seconds))


def is_given_up(source: str, seconds: float) -> bool:
    """Whether a template was not finished in this time."""
    return (hash(source), seconds) in _given_up


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
    left, interval = signal.setitimer(signal.ITIMER_REAL, min(_LONGEST, seconds))
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
