"""Limits of a rendering: time, output, and the size of values.

A list that holds another one twice, which holds another one twice, and so on, takes little memory; sixty of them
are written as 10 ** 18 elements. So what a template builds is measured before anything reads all of it.
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

MAX_DEPTH = 1000
"""The most levels of nested values."""
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
_ELEMENT_SIZE = 4
"""What each element counts besides its text, in characters."""
_TOTAL_FACTOR = 32
"""All values that a rendering makes together may have this many times the size limit."""
_BASE_OUTPUT = 1 << 19
_BASE_VALUE = 1 << 22
_PER_INPUT_CHARACTER = 16
"""Characters of the output and of one value, and how many more for each character of the input."""
_BASE_CONTAINER = 4 << 20
"""Characters of a list or dict when written out; more for large inputs."""
_BASE_MEMORY = 128 << 20
"""Bytes of memory that a rendering may take; more for large inputs."""
_MEMORY_CHECK_INTERVAL = 1 << 22
"""The memory is checked after so many characters."""
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_GRACE = 0.5
"""Seconds by which the Budget's clock is later than the alarm. If both raised TimeUp at once, the second would
interrupt the handling of the first, and the caller's timer would not be restored."""
_BUSY_FACTOR = 20
"""A template that does not get the processor may take this many times its limit in wall time."""
_CHARACTERS_A_SECOND = 300_000
"""Large inputs get more time, one second for so many characters; published templates are at least ten times
faster."""
_MAX_TIMER_SECONDS = 1e8
"""The longest time a timer takes; a longer limit is none."""
_FREE_SECONDS = 0.01
"""Seconds of a rendering that do not count as wasted; published templates take 0.1 to 2 ms."""
_FINE_SHARE = 0.4
"""Exceeding another limit counts as wasting this share of the time limit."""

Measured = tuple[Any, int, int]
"""A container, kept alive so that its id stays unique; its size; its depth."""


class LimitReached(Exception):
    """A template exceeded a limit; the message says which one."""


class TimeUp(BaseException):
    """The time is up. No Exception, so that nothing inside Jinja takes it for a missing attribute."""


def length(value: Any) -> int:
    """Characters of a text, elements of a collection; 0 for anything else."""
    return len(value) if isinstance(value, _SIZED) else 0


def measure(value: Any, measured: dict[int, Measured] | None = None) -> tuple[int, int]:
    """Roughly how many characters a value is written with, and how deep it is nested.

    `measured` holds containers that were measured before, by id; those measured now are added.
    """
    if type(value) not in _CONTAINERS:
        return (len(value) if type(value) is str else 0) + _ELEMENT_SIZE, 0
    measured = {} if measured is None else measured
    pending, opened = [value], set[int]()
    while True:
        container = pending[-1]
        parts = container if type(container) is not dict else (*container, *container.values())
        size, deep, missing = _ELEMENT_SIZE, 0, {}
        for part in parts:
            kind = type(part)
            if kind is str:
                size += len(part) + _ELEMENT_SIZE
            elif kind not in _CONTAINERS:
                size += _ELEMENT_SIZE
            elif (before := measured.get(id(part))) is not None:
                size += before[1]
                deep = max(deep, before[2])
            else:
                missing[id(part)] = part
        if missing:
            if len(opened) > MAX_DEPTH or not opened.isdisjoint(missing) or id(container) in missing:
                return size, MAX_DEPTH + 1  # too deep, or a container that holds itself
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
    """A limit on the CPU time of this thread, in wall time stretched by `_BUSY_FACTOR`."""

    def __init__(self, seconds: float, inputs: Any = None) -> None:
        self._seconds = seconds
        self._inputs = inputs
        self._began = time.monotonic()
        self._used = time.thread_time()

    def left(self) -> float:
        """The seconds that are left; 0 or less if the time is up."""
        left = self._remaining()
        if left <= 0 and self._inputs is not None:  # measure the inputs only now: few templates run this long
            self._seconds += measure(self._inputs)[0] / _CHARACTERS_A_SECOND
            self._inputs = None
            left = self._remaining()
        return 0 if left <= 0 else max(left, 0.01)

    def drop_inputs(self) -> None:
        """Release the inputs."""
        self._inputs = None

    def _remaining(self) -> float:
        passed = time.monotonic() - self._began
        return min(self._seconds - (time.thread_time() - self._used), self._seconds * _BUSY_FACTOR - passed)


class Budget:
    """What one rendering may still use."""

    def __init__(self, size_limit: int, seconds: float, inputs: Any = None) -> None:
        self.size_limit = size_limit
        """Characters of one value."""
        self._inputs = inputs
        self._size_left = size_limit * _TOTAL_FACTOR
        self._until_look = _MEMORY_CHECK_INTERVAL
        self._memory: int | None = None
        self._measured: dict[int, Measured] = {}
        self._measured_input_size: int | None = None
        self._measured_container_limit: int | None = None
        self._clock = _Clock(seconds + _GRACE, inputs)
        self._look_at = time.monotonic() + seconds + _GRACE

    def spend(self, size: int) -> None:
        """Count a value of `size` characters or elements that is about to be made; LimitReached or TimeUp."""
        if size > _BASE_VALUE or size > self.size_limit:
            most = min(self.size_limit, _BASE_VALUE + _PER_INPUT_CHARACTER * self._input_size())
            if size > most:
                raise LimitReached(
                    f"the template makes a value of {size:,} characters or elements, past the limit of {most:,}"
                )
        self._size_left -= size
        if self._size_left < 0:
            raise LimitReached(
                f"the template makes values of more than {self.size_limit * _TOTAL_FACTOR:,} characters in all"
            )
        self._until_look -= size
        if self._until_look < 0:
            self._until_look = _MEMORY_CHECK_INTERVAL
            resident = 0  # bytes of memory of this process, where /proc says
            with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
                resident = int(statm.read().split()[1]) * _PAGE_SIZE
            if self._memory is None:
                self._memory = resident - min(size, resident)
            if resident + size > self._memory + _BASE_MEMORY + 8 * self._container_limit():
                raise LimitReached(f"the template takes more than {_BASE_MEMORY >> 20:,} MB of memory")
        if time.monotonic() > self._look_at:
            left = self._clock.left()
            if left <= 0:
                raise TimeUp
            self._look_at = time.monotonic() + left

    def close(self) -> None:
        """Release the values of the rendering once it has ended."""
        self._measured.clear()
        self._inputs = None
        self._clock.drop_inputs()

    def check_output(self, size: int) -> None:
        """Raise LimitReached if an output of this size is far larger than the inputs."""
        if size > _BASE_OUTPUT or size > self.size_limit:
            most = min(self.size_limit, _BASE_OUTPUT + _PER_INPUT_CHARACTER * self._input_size())
            if size > most:
                raise LimitReached(f"the template writes more than {most:,} characters")

    def check_container(self, value: Any) -> Any:
        """The value; LimitReached if it is a list, tuple or dict that would be huge when written out."""
        if type(value) in _CONTAINERS and value:
            size, deep = measure(value, self._measured)
            if deep > MAX_DEPTH:
                raise LimitReached(f"the template nests values more than {MAX_DEPTH:,} deep")
            self._until_look -= 64 + 8 * len(value)  # the memory of `_measured`
            self.spend(len(value))
            if size > _BASE_CONTAINER and size > (limit := self._container_limit()):
                raise LimitReached(
                    f"the template makes a list or dict of {size:,} characters, past the limit of {limit:,}"
                )
        return value

    def _container_limit(self) -> int:
        """The characters that a container may be written with."""
        if self._measured_container_limit is None:
            self._measured_container_limit = _BASE_CONTAINER + 4 * self._input_size()
        return self._measured_container_limit

    def _input_size(self) -> int:
        if self._measured_input_size is None:
            self._measured_input_size = measure(self._inputs)[0]
        return self._measured_input_size


_too_slow: set[tuple[int, float]] = set()
_wasted: dict[tuple[int, float], float] = {}


@contextmanager
def count_waste(source: str, seconds: float, variables: Any) -> Iterator[None]:
    """Mark a template as too slow once its renderings have together wasted the time limit of one.

    Otherwise a template that stays a little below its limit would take hours for a log. Only CPU time counts, so a
    busy machine does not matter; exceeding a size limit counts as time too.
    """
    began, fine = time.thread_time(), 0.0
    try:
        yield
    except (LimitReached, MemoryError):
        fine = _FINE_SHARE * seconds
        raise
    finally:
        seconds_wasted = time.thread_time() - began - _FREE_SECONDS + fine
        if (
            seconds_wasted > 0
            and (seconds_wasted := seconds_wasted - measure(variables)[0] / _CHARACTERS_A_SECOND) > 0
        ):
            key = hash(source), seconds
            _wasted[key] = _wasted.get(key, 0.0) + seconds_wasted
            if _wasted[key] > seconds:
                mark_too_slow(source, seconds)


def mark_too_slow(source: str, seconds: float) -> None:
    """Never run a template again in this process with this time limit."""
    _too_slow.add((hash(source), seconds))


def is_too_slow(source: str, seconds: float) -> bool:
    """Whether a template was marked as too slow for this time limit."""
    return (hash(source), seconds) in _too_slow


def free_frames(error: BaseException) -> None:
    """Free the values in the frames that an error passed through.

    Jinja leaves reference cycles there, and large values would pile up until the garbage collector runs.
    """
    link: BaseException | None = error
    while link is not None:
        clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__context__
    if isinstance(error, LimitReached | TimeUp | MemoryError):
        gc.collect()  # frees the frames that Jinja replaced


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
    left, interval = signal.setitimer(signal.ITIMER_REAL, min(_MAX_TIMER_SECONDS, seconds))
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
