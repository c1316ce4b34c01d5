"""Views: which rollouts of a run come with a view, however the run is shared out."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.record.finding import Finding, Severity

VIEWS_PER_CODE = 12
"""Rollouts of each code and severity that come with a view, the first of a run."""
VIEWS = 240
"""Views of a run at most."""


class Views:
    """Rollouts with findings, counted in the order of the logs: the first of each code and severity are viewed.

    A process that has one part of the logs does not know what the others hold. It offers what its own part would
    have viewed had nothing more come before it than it was told of, which is never less than what is taken.
    """

    __slots__ = ("_seen", "_taken")

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Severity], int] = {}
        self._taken = 0

    def take(self, findings: Iterable[Finding]) -> bool:
        """Whether the next rollout, which has these findings, is viewed."""
        taken = self.offer(findings)
        self._taken += taken
        return taken

    def offer(self, findings: Iterable[Finding]) -> bool:
        """Whether the next rollout of a part may have to be viewed."""
        wanted = False
        for key in {(finding.code, finding.severity) for finding in findings}:
            seen = self._seen.get(key, 0)
            if seen < VIEWS_PER_CODE:
                self._seen[key] = seen + 1
                wanted = self._taken < VIEWS
        return wanted

    def copy(self) -> Views:
        """The same counts, to go on with elsewhere."""
        other = Views()
        other._seen, other._taken = dict(self._seen), self._taken
        return other
