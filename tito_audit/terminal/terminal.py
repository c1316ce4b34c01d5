"""The terminal: colour, width, and progress on stderr."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from threading import Event, Thread
from typing import NamedTuple, TextIO, TypeVar

from tito_audit.summary import Summary
from tito_audit.terminal.encoding import FALLBACK

_EVERY, _RARELY = 0.25, 30.0
"""Seconds between two lines of progress: on a terminal, where the next replaces the last, and elsewhere."""
_LATELY, _EARLY, _STEADY = 10.0, 3.0, 60.0
"""Seconds over which speed is measured, after which the time left is told, and of the longest average for that."""
_BAR = 20
_TO_END = "\x1b[K"
"""Erases the rest of a line."""
_Item = TypeVar("_Item")


def colors(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal that has them, unless NO_COLOR or FORCE_COLOR says otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def page_width() -> int:
    """Columns of the terminal (or COLUMNS), from 60 to 160; 100 without a terminal."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 160)


@dataclass(slots=True)
class RunProgress:
    """How far a run has come; pass it as the run's `progress`."""

    limit: int | None = None
    """The most rows."""
    phase: str = ""
    """What the run is doing, in words; "" if it does one thing only."""
    rows: int = 0
    done: int = 0
    """Bytes of the logs read so far."""
    total: int = 0
    """Bytes of the logs; 0 if unknown, as for a pipe."""
    tokens: int = 0
    summary: Summary | None = None
    """Counts the tokens."""
    in_flight: Callable[[], tuple[int, int, int]] | None = None
    """Rows, bytes and tokens that other processes are through with, and that are not counted yet."""

    def __call__(self, rows: int, done: int, total: int) -> None:
        """Record how far the run has come."""
        self.rows, self.done, self.total = rows, done, total
        if self.summary is not None:
            self.tokens = self.summary.tokens

    def enter(self, phase: str) -> None:
        """Go on to another phase of the run, which reads other files from their start."""
        self.summary = self.in_flight = None
        self.rows = self.done = self.total = self.tokens = 0
        self.phase = phase

    def follow(self, summary: Summary, in_flight: Callable[[], tuple[int, int, int]]) -> None:
        """Count also the tokens of a summary, and what is in flight."""
        self.summary, self.in_flight = summary, in_flight

    def moment(self, now: float) -> Moment:
        """How far the run is with what is in flight."""
        rows, done, tokens = (0, 0, 0) if self.in_flight is None else self.in_flight()
        if rows and not done and self.rows:
            done = rows * self.done // self.rows
        rows, done, tokens = self.rows + rows, self.done + done, self.tokens + tokens
        by_bytes = done / self.total if self.total else 0.0
        return Moment(now, rows, done, tokens, min(max(by_bytes, rows / self.limit if self.limit else 0.0), 1.0))


class Moment(NamedTuple):
    """How far a run is at a time."""

    time: float
    rows: int
    done: int
    tokens: int
    share: float
    """Of the rows and bytes there are; 0 if that is unknown."""


class ProgressLine:
    """What is said about the progress of a run, moment by moment."""

    def __init__(self, pace: RunProgress) -> None:
        self._pace = pace
        self._started = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self._phase, self._lately, self._speed = self._pace.phase, deque[Moment](), 0.0
        self._first: Moment | None = None
        """When the first rows of the phase were seen: what was before is no measure."""

    def parts(self, now: float) -> tuple[list[str], float]:
        """What is said, the important first, and the share of the run that is done; 0 if it is unknown."""
        if self._pace.phase != self._phase:
            self._begin()
        here, phase = self._pace.moment(now), [self._phase] if self._phase else []
        minutes, seconds = divmod(int(now - self._started), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        if not here.rows:
            return [clock, *(phase or ["loading"])], 0.0
        if not (here.done or self._pace.total):
            return [clock, f"{here.rows:,} rows read, to join calls"], 0.0
        # The speed up to now.
        last = self._lately[-1] if self._lately else here
        self._first = self._first or here
        self._lately.append(here)
        while here.time - self._lately[0].time > _LATELY:
            self._lately.popleft()
        if (passed := here.time - last.time) > 0:
            # The longer a run, the longer the average reaches back: neither one slow chunk nor a fast start makes
            # it leap.
            elapsed = here.time - self._first.time
            over = max(min(elapsed, max(elapsed / 3, _LATELY), _STEADY), passed)
            self._speed += passed / over * ((here.share - last.share) / passed - self._speed)
        parts = [clock, *([f"{here.share:.0%}"] if here.share else []), *phase]
        if 0 < here.share < 1 and self._speed > 0 and self._first and now - self._first.time > _EARLY:
            # `40 s`, `3 min`, `2 h 10 min`: as exact as an estimate is.
            rest = (1 - here.share) / self._speed
            minutes = round(rest / 60)
            left = f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60 // 10 * 10} min"
            parts.append(f"about {left if rest >= 90 else f'{max(round(rest / 5) * 5, 5)} s'} left")
        parts.append(f"{here.rows:,} rows")
        parts += _rates(self._lately[0], here)
        return parts, here.share


def compute_first(results: Generator[_Item, None, None]) -> Generator[_Item, None, None]:
    """The results, the first one computed at once: a run forks its processes there, before threads start."""
    first = list(islice(results, 1))
    gc.freeze()  # what was loaded is not looked at again

    def rest() -> Generator[_Item, None, None]:
        with closing(results):
            yield from first
            yield from results

    return rest()


def with_progress(
    results: Iterable[_Item], pace: RunProgress, *, silent: bool = False
) -> Generator[_Item, None, None]:
    """The results; while they are computed, a line on stderr says how far the run is.

    On a terminal it is drawn again and again, elsewhere a new one is written every half minute.
    """
    with nullcontext() if silent else progress_shown(pace):
        yield from results


@contextmanager
def progress_shown(pace: RunProgress) -> Iterator[None]:
    """A block during which a thread says how far the run is.

    It writes to the descriptor itself and holds no lock meanwhile, so that processes may be forked.
    """
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # no file: a notebook, or a test
        yield
        return
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    ended = Event()
    teller = Thread(target=_tell, args=(pace, descriptor, live, ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(2 * _EVERY)  # a terminal may be stopped


def _tell(pace: RunProgress, descriptor: int, live: bool, ended: Event) -> None:
    """Write lines to the descriptor until the run has ended."""
    line, encoding, last = ProgressLine(pace), sys.stderr.encoding, time.monotonic()
    while not ended.wait(_EVERY):
        now = time.monotonic()
        parts, share = line.parts(now)
        if live:
            text = f"\r{_fitted(parts, share, descriptor)}{_TO_END}"
        elif now - last >= _RARELY:
            text, last = f"tito-audit: {' · '.join(parts)}\n", now
        else:
            continue
        with suppress(OSError):
            os.write(descriptor, text.encode(encoding, FALLBACK))
    if live:
        with suppress(OSError):
            os.write(descriptor, f"\r{_TO_END}".encode())


def _fitted(parts: list[str], share: float, descriptor: int) -> str:
    """As many parts as fit on one line of the terminal, with a bar before them if there is room."""
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(descriptor).columns) or 80
    except (OSError, ValueError):
        columns = 80
    while len(parts) > 1 and len(" · ".join(parts)) >= columns:
        parts = parts[:-1]
    words, full = " · ".join(parts)[: columns - 1], round(share * _BAR)
    return f"{'━' * full}{'─' * (_BAR - full)} {words}" if share and len(words) + _BAR + 1 < columns else words


def _rates(then: Moment, now: Moment) -> Iterator[str]:
    """What passes in a second: `34.4 MB/s`, `3,142 rows/s`, `1.2M tokens/s`."""
    passed = now.rows - then.rows, (now.done - then.done) / 1e6, now.tokens - then.tokens
    for number, unit in zip(passed, ("rows/s", "MB/s", "tokens/s"), strict=True):
        if number <= 0:
            continue
        number /= now.time - then.time
        if number >= 1e5:
            yield f"{number / 1e6:,.1f}M {unit}" if number >= 1e6 else f"{number / 1e3:.0f}k {unit}"
        else:
            yield f"{number:,.0f} {unit}" if number >= 100 else f"{number:,.1f} {unit}"
