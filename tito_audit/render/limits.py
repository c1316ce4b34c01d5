"""How long a template may run, how much it may write, and how large its values may get.

A list that holds another one twice, which holds another one twice, and so on, takes little memory, but sixty of
them are written as 10 ** 18 elements. So what a template builds is measured before something reads all of it.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import clear_frames
from types import FrameType
from typing import Any

DEEPEST = 1000
"""Values are not nested deeper."""
_CONTAINERS = frozenset((list, tuple, dict))
_SIZED: tuple[Any, ...] = (
    str,
    list,
    dict,
    tuple,
    bytes,
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_ELEMENT = 4
"""What an element takes besides its text, in characters."""
_WORK = 32
"""A template may build up its output in pieces, which together may be this many times the size limit."""
_OUTPUT = 1 << 19
_VALUE = 1 << 22
_FOR_EACH = 16
"""Characters that a template may write, and that one value may have; more for each that the template is given."""
_HELD = 4 << 20
"""Characters that a list or dict may be written with; more if the messages have more."""
_MEMORY = 128 << 20
"""Bytes of memory that a rendering may take, and as many more as its largest value has characters."""
_LOOK = 1 << 22
"""After so many characters the memory is looked at."""
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_GRACE = 0.5
"""How many seconds longer than the alarm the Budget's clock waits. If both raised TimeUp at once, the second would
interrupt the handling of the first, and the caller's timer would not be restored."""
_BUSY = 20
"""On a busy machine a template may take this many times its limit, if it does not get the processor."""
_CHARACTERS_A_SECOND = 300_000
"""A rendering may take its time limit, and more by what it is given. Published templates are at least ten times
faster."""
_LONGEST = 1e8
"""Seconds that a timer can take; a longer limit is none."""
_FREE = 0.01
"""Seconds that a rendering may take at no cost; published templates take a tenth of a millisecond to two."""
_FINE = 0.4
"""What passing another limit costs, as a share of the time limit."""

Measured = tuple[Any, int, int]
"""A container, which is kept alive for its id; its size, and how deep it is nested."""


class LimitReached(Exception):
    """A template exceeded a limit; the message says which."""


class TimeUp(BaseException):
    """The time is up. Not an Exception, so nothing inside Jinja mistakes it for a missing attribute."""


def length(value: Any) -> int:
    """Characters of a text, elements of a collection, 0 for anything else."""
    return len(value) if isinstance(value, _SIZED) else 0


def written_size(value: Any, measured: dict[int, Measured] | None = None) -> tuple[int, int]:
    """How many characters a value is written with, roughly, and how deep it is nested.

    `measured` has the containers inside it that were measured before, by their ids, and gets the others.
    """
    if type(value) not in _CONTAINERS:
        return (len(value) if type(value) is str else 0) + _ELEMENT, 0
    measured = {} if measured is None else measured
    pending, opened = [value], set[int]()
    while True:
        container = pending[-1]
        parts = container if type(container) is not dict else (*container, *container.values())
        size, deep, missing = _ELEMENT, 0, {}
        for part in parts:
            kind = type(part)
            if kind is str:
                size += len(part) + _ELEMENT
            elif kind not in _CONTAINERS:
                size += _ELEMENT
            elif (before := measured.get(id(part))) is not None:
                size += before[1]
                deep = max(deep, before[2])
            else:
                missing[id(part)] = part
        if missing:
            if len(opened) > DEEPEST or not opened.isdisjoint(missing) or id(container) in missing:
                return size, DEEPEST + 1  # too deep, or it holds itself
            opened.add(id(container))
            pending += missing.values()
            continue
        if len(pending) == 1:
            return size, deep + 1
        opened.discard(id(container))
        measured[id(container)] = container, size, deep + 1
        while len(pending) > 1 and id(pending[-1]) in measured:
            pending.pop()


class _Clock:
    """How much of a time limit is left, in this thread."""

    def __init__(self, seconds: float, inputs: Any = None) -> None:
        self._seconds = seconds
        self._given = inputs
        self._began = time.monotonic()
        self._used = time.thread_time()

    def left(self) -> float:
        """The seconds that are left; 0 or less if the time is up."""
        left = self._left()
        if left <= 0 and self._given is not None:  # measured only now, since few templates come this far
            self._seconds += written_size(self._given)[0] / _CHARACTERS_A_SECOND
            self._given = None
            left = self._left()
        return 0 if left <= 0 else max(left, 0.01)

    def forget(self) -> None:
        """Let go of what the template was given."""
        self._given = None

    def _left(self) -> float:
        passed = time.monotonic() - self._began
        return min(self._seconds - (time.thread_time() - self._used), self._seconds * _BUSY - passed)


class Budget:
    """What one rendering may still use."""

    def __init__(self, size_limit: int, seconds: float, inputs: Any = None) -> None:
        self.size_limit = size_limit
        """Characters of one value."""
        self._given = inputs
        self._left = size_limit * _WORK
        self._until_look = _LOOK
        self._memory: int | None = None
        self._known: dict[int, Measured] = {}
        self._given_size: int | None = None
        self._most_held: int | None = None
        self._clock = _Clock(seconds + _GRACE, inputs)
        self._look_at = time.monotonic() + seconds + _GRACE

    def spend(self, size: int) -> None:
        """Account for a value of `size` characters or elements that is about to be made."""
        if size > _VALUE or size > self.size_limit:
            most = min(self.size_limit, _VALUE + _FOR_EACH * self._size_given())
            if size > most:
                raise LimitReached(
                    f"the template makes a value of {size:,} characters or elements, past the limit of {most:,}"
                )
        self._left -= size
        if self._left < 0:
            raise LimitReached(
                f"the template makes values of more than {self.size_limit * _WORK:,} characters in all"
            )
        self._until_look -= size
        if self._until_look < 0:
            # LimitReached if the process has taken much memory since the first look.
            self._until_look = _LOOK
            resident = 0  # bytes of memory that this process holds; the system may not say
            with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
                resident = int(statm.read().split()[1]) * _PAGE
            if self._memory is None:
                self._memory = resident - min(size, resident)
            if resident + size > self._memory + _MEMORY + 8 * self._most():
                raise LimitReached(f"the template takes more than {_MEMORY >> 20:,} MB of memory")
        if time.monotonic() > self._look_at:
            left = self._clock.left()
            if left <= 0:
                raise TimeUp
            self._look_at = time.monotonic() + left

    def close(self) -> None:
        """Let go of the values of the rendering, which has ended."""
        self._known.clear()
        self._given = None
        self._clock.forget()

    def written(self, size: int) -> None:
        """LimitReached if the output of this size is far larger than what the template was given."""
        if size > _OUTPUT or size > self.size_limit:
            most = min(self.size_limit, _OUTPUT + _FOR_EACH * self._size_given())
            if size > most:
                raise LimitReached(f"the template writes more than {most:,} characters")

    def hold(self, value: Any) -> Any:
        """The value; LimitReached if it is a list, tuple or dict that would be very large when written out."""
        if type(value) in _CONTAINERS and value:
            size, deep = written_size(value, self._known)
            if deep > DEEPEST:
                raise LimitReached(f"the template nests values more than {DEEPEST:,} deep")
            self._until_look -= 64 + 8 * len(value)  # bytes: what was measured is kept
            self.spend(len(value))
            if size > _HELD and size > self._most():
                raise LimitReached(
                    f"the template makes a list or dict of {size:,} characters, past the limit of {self._most():,}"
                )
        return value

    def _most(self) -> int:
        """The limit of a container, by what the template was given."""
        if self._most_held is None:
            self._most_held = _HELD + 4 * self._size_given()
        return self._most_held

    def _size_given(self) -> int:
        if self._given_size is None:
            self._given_size = written_size(self._given)[0]
        return self._given_size


_given_up: set[tuple[int, float]] = set()
_wasted: dict[tuple[int, float], float] = {}


@contextmanager
def charged(source: str, seconds: float, variables: Any) -> Iterator[None]:
    """Give a template up once its renderings have together wasted the time limit of one.

    Otherwise a template that always stays a little below its limit would take hours for a log. The time is that
    of the processor, so a busy machine does not count; passing a limit of size counts as time too.
    """
    began, fine = time.thread_time(), 0.0
    try:
        yield
    except (LimitReached, MemoryError):
        fine = _FINE * seconds
        raise
    finally:
        seconds_wasted = time.thread_time() - began - _FREE + fine
        if (
            seconds_wasted > 0
            and (seconds_wasted := seconds_wasted - written_size(variables)[0] / _CHARACTERS_A_SECOND) > 0
        ):
            key = hash(source), seconds
            _wasted[key] = _wasted.get(key, 0.0) + seconds_wasted
            if _wasted[key] > seconds:
                give_up(source, seconds)


def give_up(source: str, seconds: float) -> None:
    """Note that a template was not finished in this time: no part of this process runs it again."""
    _given_up.add((hash(source), seconds))


def is_given_up(source: str, seconds: float) -> bool:
    """Whether a template was not finished in this time."""
    return (hash(source), seconds) in _given_up


def let_go(error: BaseException) -> None:
    """Free the values in the frames that an error passed through: Jinja makes circles of them, and large values
    would pile up until the garbage collector runs."""
    link: BaseException | None = error
    while link is not None:
        clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__context__
    if isinstance(error, LimitReached | TimeUp | MemoryError):
        gc.collect()  # the frames that Jinja replaced


@contextmanager
def alarm(seconds: float, variables: Any = None) -> Iterator[None]:
    """Raise TimeUp inside the block when the time is up, whatever it is doing.

    The time is that of the processor, within `_BUSY`, and longer by the `variables` of the template. This needs a
    signal, which only the main thread of a Unix process can have. Elsewhere the block runs until the Budget ends
    it, from which every call, operator and piece of output spends. The caller's timer is restored with its
    remaining time.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not armed:
            return
        left = clock.left()
        if left <= 0:
            raise TimeUp
        signal.setitimer(signal.ITIMER_REAL, left)

    began, clock = time.monotonic(), _Clock(seconds, variables)
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
