"""Progress: how far a run is, and whether it reached its limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tito_audit.summary import Sampled, Summary

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

    def sampled(self, share: float | None) -> Sampled | None:
        """The counts of a sample for the summary; None without one."""
        return Sampled(share, self.rows, self.rows + self.left_out) if share is not None else None
