"""ViewQuota: which rollouts of a run get a view and of what size, however the run is split among processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tito_audit.record.finding import Finding, Severity

VIEWS_PER_CODE = 12
"""How many rollouts of each code and severity get a view: the first of a run."""
MAX_VIEWS = 240
"""How many rollouts of a run get a view."""


@dataclass(frozen=True, slots=True)
class ViewSize:
    """How much a view shows of a rollout at most."""

    tokens: int = 3_000
    """Recorded tokens."""
    sequences: int = 64


REPORTED = ViewSize()
"""In a page that holds all of its rollouts."""


class ViewQuota:
    """Counts rollouts with findings in the order of the logs: the first of each code and severity get a view.

    A process that audits one part of the logs does not know the others. It makes views as if only the parts it
    knows came before, which may be too many but never too few.

    With `rows`, the first rows of each log all get one, which counts for none of these.
    """

    __slots__ = ("_rows", "_seen", "_taken", "size")

    def __init__(self, rows: int = 0, size: ViewSize = REPORTED) -> None:
        self._rows, self.size = rows, size
        self._seen: dict[tuple[str, Severity], int] = {}
        self._taken = 0

    def take(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The size of the view of the next rollout, which has these findings; None if it gets none."""
        size = self.offer(findings, row)
        self._taken += size is not None and row >= self._rows
        return size

    def offer(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The same for the next rollout of a part, which may get a view."""
        if row < self._rows:
            return self.size
        wanted = False
        for key in {(finding.code, finding.severity) for finding in findings}:
            seen = self._seen.get(key, 0)
            if seen < VIEWS_PER_CODE:
                self._seen[key] = seen + 1
                wanted = self._taken < MAX_VIEWS
        return self.size if wanted else None

    def copy(self) -> ViewQuota:
        other = ViewQuota(self._rows, self.size)
        other._seen, other._taken = dict(self._seen), self._taken
        return other
