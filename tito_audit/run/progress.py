"""Progress: how far a run has come, and whether it has reached its limit."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from tito_audit.summary import SampleCount, Summary

Progress = Callable[[int, int, int], None]
"""Called with rows audited, bytes read and total bytes, over all logs."""

REPAIRING, CHECKING = "repairing (1 of 2)", "scanning the result (2 of 2)"
"""The phases of a repair. The time left that is shown is that of the phase."""
TRYING = "repairing"
"""The only phase of a dry run."""


def enter_phase(progress: Progress | None, phase: str) -> Progress | None:
    """Start the next phase of a run, whose rows and bytes count from 0; returns its progress."""
    enter: Callable[[str], None] | None = getattr(progress, "enter", None)
    if enter is not None:
        enter(phase)
    return progress


class TaskCounters:
    """The rows, bytes and tokens of tasks in progress, counted by forked processes in shared memory."""

    def __init__(self, jobs: int) -> None:
        tasks = 4 * (jobs + 1)  # an executor takes three for each process
        self._counts = np.frombuffer(mmap(-1, 24 * tasks), np.int64).reshape(tasks, 3)

    def counts_of(self, task: int) -> MutableSequence[int]:
        """The counters of the task with this number: rows, bytes (0 if unknown), tokens."""
        counts: Any = self._counts[task % len(self._counts)]
        return counts  # type: ignore[no-any-return]

    def forget(self, task: int) -> None:
        """Reset the counters of a task: the run has counted its results."""
        self._counts[task % len(self._counts)] = 0

    def total(self) -> tuple[int, int, int]:
        """The rows, bytes and tokens of all tasks in progress."""
        rows, bytes_, tokens = self._counts.sum(axis=0).tolist()
        return rows, bytes_, tokens


def follow_counters(progress: Progress | None, summary: Summary, jobs: int) -> TaskCounters | None:
    """Counters for the processes of a run, if its progress shows tasks in progress; else None."""
    follow = getattr(progress, "follow", None)
    if follow is None:
        return None
    in_flight = TaskCounters(jobs)
    follow(summary, in_flight.total)
    return in_flight


@dataclass(slots=True)
class RowCounts:
    """How many rows a run has audited and left out."""

    rows: int = 0
    left_out: int = 0
    """Rows that a sample left out before the last audited row, and to the end of each log read to its end."""

    def is_full(self, limit: int | None, summary: Summary) -> bool:
        """Whether the limit is reached; if it is, a notice goes into the summary."""
        if limit is None or self.rows < limit:
            return False
        summary.notices.append(f"Stopped after {self.rows} rows, as asked by --limit.")
        return True

    def sampled(self, share: float | None) -> SampleCount | None:
        """The counts of a sample for the summary; None without a sample."""
        return SampleCount(share, self.rows, self.rows + self.left_out) if share is not None else None
