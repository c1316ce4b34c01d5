"""The terminal: colour, width, and progress on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TextIO, TypeVar

_EVERY = 0.25
"""Seconds between two drawings of the line."""
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

    rows: int = 0
    done: int = 0
    """Bytes of the logs read so far."""
    total: int = 0
    """Bytes of the logs; 0 if unknown, as for a pipe."""
    first: tuple[float, int, int] | None = None
    """Time, rows and bytes at the first call; the time before it was loading."""
    drawn: float = field(default_factory=time.monotonic)
    """When the line of a first pass was drawn last."""
    draws: bool = False
    """Whether the line is drawn here, because there is no bar yet."""
    phase: str = ""
    """What the run is doing, in words; "" if it does one thing only."""
    show: Callable[[], None] | None = None
    """Draws the bar anew, once there is one."""

    def __call__(self, rows: int, done: int, total: int) -> None:
        """Record how far the run has come."""
        self.rows, self.done, self.total = rows, done, total
        self.first = self.first or (time.monotonic(), rows, done)
        if self.draws and time.monotonic() - self.drawn > 1:
            self.drawn = time.monotonic()
            sys.stderr.write(f"\r{rows:,} rows read, to join calls{_TO_END}")
            sys.stderr.flush()
        elif self.show is not None and time.monotonic() - self.drawn > _EVERY:
            self.drawn = time.monotonic()
            self.show()

    def enter(self, phase: str) -> None:
        """Go on to another phase of the run, which reads other files from their start."""
        self.phase, self.first = phase, None
        self.rows = self.done = self.total = 0

    def begin(self) -> None:
        """Wipe the line of a first pass: the bar follows."""
        if self.draws:
            sys.stderr.write(f"\r{_TO_END}")
            sys.stderr.flush()
        self.draws, self.first = False, None

    def rates(self, now: float) -> tuple[float, float]:
        """Rows and bytes per second; 0 before the second call."""
        since, rows, done = self.first or (now, 0, 0)
        seconds = now - since
        return ((self.rows - rows) / seconds, (self.done - done) / seconds) if seconds > 0 else (0.0, 0.0)


def compute_first(results: Generator[_Item, None, None]) -> Generator[_Item, None, None]:
    """The results, the first one computed at once: a run forks its processes there, before threads start."""
    first = list(islice(results, 1))

    def rest() -> Generator[_Item, None, None]:
        with closing(results):
            yield from first
            yield from results

    return rest()


def with_progress(
    results: Iterable[_Item], *, silent: bool = False, counted: str = "rollouts", pace: RunProgress | None = None
) -> Generator[_Item, None, None]:
    """The results, counted by a line on stderr while they pass, on a terminal only.

    With the run's `pace`, the line is a progress bar with rows and bytes per second and the time left.
    """
    if silent or not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    started = shown = time.monotonic()
    source = iter(results)
    if pace is not None:
        pace.draws = True
    first = list(islice(source, 1))  # a thread draws the line, and the run should fork before it starts
    if pace is not None:
        pace.begin()
    # Rich would redirect what is printed meanwhile to stderr, but a report belongs on stdout.
    words_column = TextColumn("{task.fields[words]}", markup=False)
    columns = (words_column, TimeElapsedColumn()) if pace is None else (BarColumn(bar_width=24), words_column)
    bar = Progress(
        SpinnerColumn(),
        *columns,
        console=Console(stderr=True),
        auto_refresh=pace is None,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar as progress:
        task = progress.add_task("", total=None, words="")
        if pace is not None:
            pace.show = lambda: progress.update(task, refresh=True, **_paced(pace, time.monotonic()))
        for count, result in enumerate(chain(first, source), 1):
            if pace is not None:
                yield result
                continue
            now = time.monotonic()
            if now - shown > _EVERY:
                words = f"{count:,} {counted} · {count / (now - started):,.0f}/s"
                progress.update(task, completed=count, words=words)
                shown = now
            yield result


def _paced(pace: RunProgress, now: float) -> dict[str, Any]:
    """What the line says now, as fields of a rich task."""
    rows, data = pace.rates(now)
    words = f"{pace.phase} · {pace.rows:,} rows" if pace.phase else f"{pace.rows:,} rows"
    if data:
        words += f" · {rows:,.0f} rows/s · {data / 1e6:,.1f} MB/s"
    if not pace.total:
        return {"completed": 0, "total": None, "words": words}
    if data:
        words += f" · {_clock((pace.total - pace.done) / data)} left"
    return {"completed": pace.done, "total": pace.total, "words": f"{pace.done / pace.total:4.0%} · {words}"}


def _clock(seconds: float) -> str:
    """`1:05`, `2:00:00`."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
