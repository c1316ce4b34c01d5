"""ViewQuota: which rollouts of a run get a view, however the run is split among processes."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.record.finding import Finding, Severity

VIEWS_PER_CODE = 12
"""How many rollouts of each code and severity get a view: the first of a run."""
MAX_VIEWS = 240
"""How many rollouts of a run get a view."""


class ViewQuota:
    """Counts rollouts with findings in the order of the logs: the first of each code and severity get a view.

    A process that audits one part of the logs does not know the others. It makes views as if only the parts it
    knows came before, which may be too many but never too few.
    """

    __slots__ = ("_seen", "_taken")

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Severity], int] = {}
        self._taken = 0

    def take(self, findings: Iterable[Finding]) -> bool:
        """Whether the next rollout, which has these findings, gets a view."""
        viewed = self.offer(findings)
        self._taken += viewed
        return viewed

    def offer(self, findings: Iterable[Finding]) -> bool:
        """Whether the next rollout of a part may get a view."""
        wanted = False
        for key in {(finding.code, finding.severity) for finding in findings}:
            seen = self._seen.get(key, 0)
            if seen < VIEWS_PER_CODE:
                self._seen[key] = seen + 1
                wanted = self._taken < MAX_VIEWS
        return wanted

    def copy(self) -> ViewQuota:
        """A copy of the counts, to continue elsewhere."""
        other = ViewQuota()
        other._seen, other._taken = dict(self._seen), self._taken
        return other
