"""The findings worth a reader's time: the most severe, spread over rules, causes and rollouts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain, zip_longest

from tito_audit.record.finding import Finding, Severity

__all__ = ["PER_CODE", "Worst"]

PER_CODE = 3
"""Shown of one code; more of the same teach nothing new."""
_KEPT = 8
"""Causes and rollouts remembered of one code while the log is read: memory does not grow with the log."""


class Worst:
    """A bounded choice of findings: of each code, one of every cause first, then of other rollouts."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[dict[Hashable, Finding], dict[Hashable, Finding]]] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Remember those findings of a rollout that may be among the worst."""
        for finding in findings:
            by_cause, by_place = self._kept.setdefault(finding.code, ({}, {}))
            _keep(by_cause, finding.hit.cause, finding)
            _keep(by_place, finding.place, finding)

    def pick(self, number: int) -> list[Finding]:
        """At most `number` findings: errors, then warnings, then notes; the codes take turns in each."""
        left = dict.fromkeys(self._kept, PER_CODE)
        picked: list[Finding] = []
        for severity in sorted(Severity, reverse=True):
            columns = [self._of(code, severity) for code in sorted(self._kept)]
            for finding in chain.from_iterable(zip_longest(*columns)):
                if finding is not None and left[finding.code] and len(picked) < number:
                    left[finding.code] -= 1
                    picked.append(finding)
        return picked

    def _of(self, code: str, severity: Severity) -> list[Finding]:
        by_cause, by_place = self._kept[code]
        distinct = dict.fromkeys(chain(by_cause.values(), by_place.values()))
        return [finding for finding in distinct if finding.severity is severity]


def _keep(kept: dict[Hashable, Finding], key: Hashable, finding: Finding) -> None:
    """Let the most severe of each key in, and when there is no room, push out a milder one."""
    held = kept.get(key)
    if held is None and len(kept) >= _KEPT:
        key_out = min(kept, key=lambda one: kept[one].severity)
        if kept[key_out].severity >= finding.severity:
            return
        del kept[key_out]
    if held is None or held.severity < finding.severity:
        kept[key] = finding
