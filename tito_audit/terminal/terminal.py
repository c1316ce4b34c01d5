"""Colour and width of the terminal, and the progress line on stderr."""

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
from tito_audit.terminal.encoding import ERROR_HANDLER

_REDRAW_SECONDS, _LINE_SECONDS = 0.25, 30.0
"""Between two progress lines: on a terminal, where the next replaces the last, and elsewhere."""
_SPEED_SECONDS, _EARLY_SECONDS, _MAX_AVERAGE_SECONDS = 10.0, 3.0, 60.0
"""The window of the speeds shown; the time without an estimate of the time left; the longest average for it."""
_BAR = 20
_ERASE_TO_END = "\x1b[K"
"""Erases the rest of a line."""
_Item = TypeVar("_Item")


def colors(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal that has them; NO_COLOR and FORCE_COLOR decide first."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def page_width() -> int:
    """Columns of the terminal or $COLUMNS, clamped to 60..160; 100 without either."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 160)


@dataclass(slots=True)
class RunProgress:
    """How far a run is; the `progress` callback of runs, which `show_progress` displays."""

    limit: int | None = None
    """Maximum rows of the run; None: all."""
    phase: str = ""
    """What the run is doing, in words; "" for a run of one phase."""
    rows: int = 0
    done: int = 0
    """Bytes of the logs read so far."""
    total: int = 0
    """Bytes of the logs; 0 if unknown, as for a pipe."""
    tokens: int = 0
    summary: Summary | None = None
    """The counts of the run, for its tokens."""
    in_flight: Callable[[], tuple[int, int, int]] | None = None
    """Rows, bytes and tokens that worker processes have finished and the run has not counted yet."""

    def __call__(self, rows: int, done: int, total: int) -> None:
        """Record how far the run is."""
        self.rows, self.done, self.total = rows, done, total
        if self.summary is not None:
            self.tokens = self.summary.tokens

    def enter(self, phase: str) -> None:
        """Begin another phase, which reads other files from their start."""
        self.summary = self.in_flight = None
        self.rows = self.done = self.total = self.tokens = 0
        self.phase = phase

    def follow(self, summary: Summary, in_flight: Callable[[], tuple[int, int, int]]) -> None:
        """Take tokens from a summary and unfinished work from `in_flight`."""
        self.summary, self.in_flight = summary, in_flight

    def at(self, now: float) -> ProgressPoint:
        """How far the run is at this time, work in flight included."""
        rows, done, tokens = (0, 0, 0) if self.in_flight is None else self.in_flight()
        if rows and not done and self.rows:
            done = rows * self.done // self.rows
        rows, done, tokens = self.rows + rows, self.done + done, self.tokens + tokens
        share = max(done / self.total if self.total else 0.0, rows / self.limit if self.limit else 0.0)
        return ProgressPoint(now, rows, done, tokens, min(share, 1.0))


class ProgressPoint(NamedTuple):
    """How far a run is at one time."""

    time: float
    rows: int
    done: int
    tokens: int
    share: float
    """The share of the rows or bytes that is done; 0 if unknown."""


class ProgressLine:
    """The words of the progress line: elapsed time, share, time left, rows, speeds."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._started = time.monotonic()
        self._start_phase()

    def _start_phase(self) -> None:
        self._phase, self._recent, self._speed = self._progress.phase, deque[ProgressPoint](), 0.0
        self._first: ProgressPoint | None = None
        """When the first rows of the phase were seen; the loading before them must not slow the estimate."""

    def parts(self, now: float) -> tuple[list[str], float]:
        """The parts of the line, most important first, and the share of the run that is done (0: unknown)."""
        if self._progress.phase != self._phase:
            self._start_phase()
        here, phase = self._progress.at(now), [self._phase] if self._phase else []
        minutes, seconds = divmod(int(now - self._started), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        if not here.rows:
            return [clock, *(phase or ["loading"])], 0.0
        if not (here.done or self._progress.total):
            return [clock, f"{here.rows:,} rows read, to join calls"], 0.0
        # The speed up to now.
        last = self._recent[-1] if self._recent else here
        self._first = self._first or here
        self._recent.append(here)
        while here.time - self._recent[0].time > _SPEED_SECONDS:
            self._recent.popleft()
        if (passed := here.time - last.time) > 0:
            # The longer a run, the longer the average reaches back: neither one slow chunk nor a fast start makes
            # it leap.
            elapsed = here.time - self._first.time
            over = max(min(elapsed, max(elapsed / 3, _SPEED_SECONDS), _MAX_AVERAGE_SECONDS), passed)
            self._speed += passed / over * ((here.share - last.share) / passed - self._speed)
        parts = [clock, *([f"{here.share:.0%}"] if here.share else []), *phase]
        if 0 < here.share < 1 and self._speed > 0 and now - self._first.time > _EARLY_SECONDS:
            # `40 s`, `3 min`, `2 h 10 min`: as exact as an estimate is.
            rest = (1 - here.share) / self._speed
            minutes = round(rest / 60)
            left = f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60 // 10 * 10} min"
            parts.append(f"about {left if rest >= 90 else f'{max(round(rest / 5) * 5, 5)} s'} left")
        parts.append(f"{here.rows:,} rows")
        # The speed: `3,142 rows/s`, `34.4 MB/s`, `1.2M tokens/s`; unknown ones are left out.
        then = self._recent[0]
        passed_units = here.rows - then.rows, (here.done - then.done) / 1e6, here.tokens - then.tokens
        for number, unit in zip(passed_units, ("rows/s", "MB/s", "tokens/s"), strict=True):
            if number > 0:
                pace = number / (here.time - then.time)
                if pace >= 1e5:
                    parts.append(f"{pace / 1e6:,.1f}M {unit}" if pace >= 1e6 else f"{pace / 1e3:.0f}k {unit}")
                else:
                    parts.append(f"{pace:,.0f} {unit}" if pace >= 100 else f"{pace:,.1f} {unit}")
        return parts, here.share


def compute_first(results: Generator[_Item, None, None]) -> Generator[_Item, None, None]:
    """The results, with the first computed now: there a run forks its processes, which must precede any thread."""
    first = list(islice(results, 1))
    gc.freeze()  # what was loaded is not looked at again

    def rest() -> Generator[_Item, None, None]:
        with closing(results):
            yield from first
            yield from results

    return rest()


def with_progress(
    results: Iterable[_Item], progress: RunProgress, *, silent: bool = False
) -> Generator[_Item, None, None]:
    """The results, with a progress line on stderr while they are computed; `silent`: without one."""
    with nullcontext() if silent else show_progress(progress):
        yield from results


@contextmanager
def show_progress(progress: RunProgress) -> Iterator[None]:
    """While the block runs, a thread draws the progress line, or without a terminal writes one every half minute.

    The thread writes to the descriptor directly and holds no lock, so that the run may fork.
    """
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # no file: a notebook, or a test
        yield
        return
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    ended = Event()
    teller = Thread(target=_write_progress, args=(progress, descriptor, live, ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(2 * _REDRAW_SECONDS)  # a terminal may be stopped


def _write_progress(progress: RunProgress, descriptor: int, live: bool, ended: Event) -> None:
    """Write progress lines to the descriptor until the run has ended."""
    line, encoding, last = ProgressLine(progress), sys.stderr.encoding, time.monotonic()
    while not ended.wait(_REDRAW_SECONDS):
        now = time.monotonic()
        parts, share = line.parts(now)
        if live:
            text = f"\r{_fit_line(parts, share, descriptor)}{_ERASE_TO_END}"
        elif now - last >= _LINE_SECONDS:
            text, last = f"tito-audit: {' · '.join(parts)}\n", now
        else:
            continue
        with suppress(OSError):
            os.write(descriptor, text.encode(encoding, ERROR_HANDLER))
    if live:
        with suppress(OSError):
            os.write(descriptor, f"\r{_ERASE_TO_END}".encode())


def _fit_line(parts: list[str], share: float, descriptor: int) -> str:
    """The parts that fit on one line of the terminal, after a bar if there is room for it."""
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(descriptor).columns) or 80
    except (OSError, ValueError):
        columns = 80
    while len(parts) > 1 and len(" · ".join(parts)) >= columns:
        parts = parts[:-1]
    words, full = " · ".join(parts)[: columns - 1], round(share * _BAR)
    return f"{'━' * full}{'─' * (_BAR - full)} {words}" if share and len(words) + _BAR + 1 < columns else words
