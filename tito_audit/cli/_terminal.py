"""What is known of the terminal: colour, width, and progress on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Generator, Iterable
from typing import TextIO, TypeVar

__all__ = ["colors", "page_width", "watched"]

_EVERY = 0.1
_Item = TypeVar("_Item")


def colors(stream: TextIO) -> bool:
    """Whether to write colours: a terminal that has them, and nobody asked for none (NO_COLOR)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def page_width() -> int:
    """Columns of the terminal (or of COLUMNS), within reason; 100 where there is no terminal."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 160)


def watched(
    results: Iterable[_Item], *, silent: bool = False, counted: str = "rollouts"
) -> Generator[_Item, None, None]:
    """The results, with a line on stderr that counts them while they pass, on a terminal only."""
    if silent or not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    line = f"{{task.completed:,.0f}} {counted} · {{task.fields[pace]:,.0f}}/s"
    columns = (SpinnerColumn(), TextColumn(line), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, pace=0.0)
        started = shown = time.monotonic()
        for count, result in enumerate(results, 1):
            now = time.monotonic()
            if now - shown > _EVERY:
                progress.update(task, completed=count, pace=count / (now - started))
                shown = now
            yield result
