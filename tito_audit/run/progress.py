"""Progress: how far a run is, and when it has had enough rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tito_audit.summary import Sampled, Summary

__all__ = ["Counted", "Progress"]

Progress = Callable[[int, int, int], None]
"""Called with rows audited, bytes read and bytes in all, of all logs together."""


@dataclass(slots=True)
class Counted:
    """Rows of a run, counted as they pass."""

    rows: int = 0
    """Rows that were audited."""
    left_out: int = 0
    """Rows that a sample left out: before the last that was audited, and to the end of logs read to their end."""

    def full(self, limit: int | None, summary: Summary) -> bool:
        """Whether no more rows are to be audited; the summary is told why."""
        if limit is None or self.rows < limit:
            return False
        summary.notices.append(f"Stopped after {self.rows} rows, as asked by --limit.")
        return True

    def sampled(self, share: float | None) -> Sampled | None:
        """The same for a summary; None when no sample was asked for."""
        return Sampled(share, self.rows, self.rows + self.left_out) if share is not None else None
