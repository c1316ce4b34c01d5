"""Progress: how far a run is, and whether it reached its limit."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from tito_audit.summary import SampleCount, Summary

Progress = Callable[[int, int, int], None]
"""Called with the rows audited, the bytes read and the total bytes, over all logs."""

REPAIRING, CHECKING = "repairing (1 of 2)", "scanning the result (2 of 2)"
"""The phases of a repair; the time left is that of its phase."""
TRYING = "repairing"
"""The one phase of a dry run."""


def entered(progress: Progress | None, phase: str) -> Progress | None:
    """The progress of a run's next phase, whose rows and bytes count from 0 again."""
    enter: Callable[[str], None] | None = getattr(progress, "enter", None)
    if enter is not None:
        enter(phase)
    return progress


class InFlight:
    """Rows, bytes and tokens of the tasks whose results have not passed yet.

    A forked process counts here while it works on a task, since memory is shared; from other processes nothing
    comes.
    """

    def __init__(self, jobs: int) -> None:
        tasks = 4 * (jobs + 1)  # an executor takes three for each process
        self._counts = np.frombuffer(mmap(-1, 24 * tasks), np.int64).reshape(tasks, 3)

    def of(self, task: int) -> MutableSequence[int]:
        """The rows, bytes and tokens of the task with this number, to count on; bytes stay 0 if unknown."""
        counts: Any = self._counts[task % len(self._counts)]
        return counts  # type: ignore[no-any-return]

    def passed(self, task: int) -> None:
        """Forget a task: its results are counted by the run."""
        self._counts[task % len(self._counts)] = 0

    def total(self) -> tuple[int, int, int]:
        """Rows, bytes and tokens of all tasks."""
        rows, data, tokens = self._counts.sum(axis=0).tolist()
        return rows, data, tokens


def followed(progress: Progress | None, summary: Summary, jobs: int) -> InFlight | None:
    """What the processes of a run count on, if its progress shows that and the tokens of the summary."""
    follow = getattr(progress, "follow", None)
    if follow is None:
        return None
    in_flight = InFlight(jobs)
    follow(summary, in_flight.total)
    return in_flight


@dataclass(slots=True)
class Counted:
    """Counts of the rows of a run as they pass."""

    rows: int = 0
    """Rows that were audited."""
    left_out: int = 0
    """Rows that a sample left out: those before the last audited row, and the rest of each log read to its end."""

    def full(self, limit: int | None, summary: Summary) -> bool:
        """Whether the limit is reached; if so, the summary says so."""
        if limit is None or self.rows < limit:
            return False
        summary.notices.append(f"Stopped after {self.rows} rows, as asked by --limit.")
        return True

    def sampled(self, share: float | None) -> SampleCount | None:
        """The counts of a sample for the summary; None without one."""
        return SampleCount(share, self.rows, self.rows + self.left_out) if share is not None else None
