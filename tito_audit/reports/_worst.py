"""The findings worth showing: the most severe, one for each cause and log, spread over the headlines."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from tito_audit.record.finding import Finding, Severity, Where

FIRST = "REC007", "REC011", "TPL210", "TPL212"
"""The codes whose findings about a whole log are shown first, because all others depend on them."""
_UNREADABLE = "REC001"
"""The code of rows that cannot be read."""
_VALUES = re.compile(r"near .*\Z|\d[\d,]*|'[^']*'|\"[^\"]*\"", re.DOTALL)
"""What differs between messages of one reason: numbers, names and what is near."""
PER_HEADLINE = 2
"""Maximum findings shown of one headline; one if they are notes."""
_KEPT = 8
"""Findings kept of one headline, one per cause and log, while the logs are read: memory stays bounded."""
_COUNTED = 4_096
"""Maximum causes and logs whose findings are counted."""
_PLACES = 5
"""Maximum rows named of one cause."""

_Key = tuple[str, str, str]
"""Code, file and cause, or the reason of a row that cannot be read: what identifies an entry."""
_GroupKey = tuple[str, str]
"""A headline and what it counts."""


@dataclass(slots=True)
class _Group:
    """Findings of one code, log, cause and severity."""

    findings: int = 0
    rows: int = 0
    places: list[str] = field(default_factory=list)
    last: int = -1

    def add(self, finding: Finding) -> None:
        self.findings += finding.times
        place = finding.place
        if place.row == self.last:
            return
        self.rows, self.last = self.rows + 1, place.row
        if len(self.places) < _PLACES:
            self.places.append(f"{place.row}[{place.item}]" if place.item else f"{place.row}")


@dataclass(frozen=True, slots=True)
class WorstEntry:
    """One finding that represents all with its code, log, cause and severity."""

    finding: Finding
    findings: int = 1
    """How many findings it represents."""
    rows: int = 1
    """In how many rows of the log they are."""
    places: tuple[str, ...] = ()
    """The first of those rows."""


class Worst:
    """A bounded selection of findings: one per code, log and cause, with a count of all like it.

    Findings that follow from another are left out.
    """

    def __init__(self) -> None:
        self._kept: dict[_GroupKey, dict[Hashable, Finding]] = {}
        self._groups: dict[tuple[_Key, Severity], _Group] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep those findings of a rollout that may be among the worst."""
        several = list(findings)
        held = {one.fingerprint for one in several if one.because_of is None} if len(several) > 1 else frozenset()
        for finding in several:
            if finding.because_of in held:
                continue
            key = _key(finding)
            group = self._groups.get((key, finding.severity))
            if group is None and len(self._groups) < _COUNTED:
                group = self._groups[key, finding.severity] = _Group()
            if group is not None:
                group.add(finding)
            _keep(self._kept.setdefault(_group(finding), {}), key, finding)

    def pick(self, number: int) -> list[WorstEntry]:
        """At most `number` findings: errors, then warnings, then notes, alternating between headlines.

        Findings about what wrote the log come first.
        """
        left = dict.fromkeys(self._kept, PER_HEADLINE)
        picked: list[WorstEntry] = []
        groups = sorted(self._kept, key=self._weight)
        ranked = [[self._of(group, severity) for group in groups] for severity in sorted(Severity, reverse=True)]
        for columns in ([self._of(group, None) for group in groups], *ranked):
            for finding in chain.from_iterable(zip_longest(*columns)):
                group = None if finding is None else _group(finding)
                if finding is not None and group is not None and left[group] > 0 and len(picked) < number:
                    left[group] -= PER_HEADLINE if finding.severity is Severity.NOTE else 1
                    picked.append(self._entry(finding))
        return picked

    def _weight(self, group: _GroupKey) -> tuple[int, str]:
        """The order of headlines: those with more findings first."""
        entries = (self._groups.get((_key(one), one.severity)) for one in self._kept[group].values())
        return -sum(entry.findings for entry in entries if entry is not None), group[0]

    def _of(self, group: _GroupKey, severity: Severity | None) -> list[Finding]:
        """The findings of a headline with this severity; None: those about what wrote the log."""
        kept = sorted(self._kept[group].values(), key=lambda one: -self._entry(one).findings)
        if severity is None:
            return [finding for finding in kept if leads(finding)]
        return [finding for finding in kept if finding.severity is severity and not leads(finding)]

    def _entry(self, finding: Finding) -> WorstEntry:
        group = self._groups.get((_key(finding), finding.severity))
        if group is None:
            return WorstEntry(finding)
        return WorstEntry(finding, group.findings, group.rows, tuple(group.places))


def by_weight(codes: Iterable[str]) -> list[str]:
    """Codes sorted, with those that are only about a whole log and come first at the front."""
    return sorted(codes, key=lambda code: (code not in FIRST[:2], code))


def leads(finding: Finding) -> bool:
    """Whether a finding is about what wrote the whole log."""
    return finding.code in FIRST and finding.hit.where is Where.LOG


def more_words(entry: WorstEntry) -> str:
    """`119 more like it, in rows 0, 3, 4, 7, 9, …`; empty if there is only one."""
    if entry.findings < 2 or entry.finding.hit.where is Where.LOG:
        return ""
    named = ", ".join([*entry.places, *(["…"] if entry.rows > len(entry.places) else [])])
    row = f"row {named}" if entry.rows == 1 else f"{entry.rows:,} rows: {named}"
    return f"{entry.findings:,} like this in {row}"


def _group(finding: Finding) -> _GroupKey:
    return finding.headline or finding.code, finding.unit


def _key(finding: Finding) -> _Key:
    hit = finding.hit
    # Rows that cannot be read have one cause and many reasons, each with its own places and values.
    why = _VALUES.sub("#", hit.message) if finding.code == _UNREADABLE else hit.cause
    return finding.code, finding.place.file, why


def _keep(kept: dict[Hashable, Finding], key: Hashable, finding: Finding) -> None:
    """Keep the most severe finding of each key; if there is no room, drop a milder one."""
    held = kept.get(key)
    if held is None and len(kept) >= _KEPT:
        key_out = min(kept, key=lambda one: kept[one].severity)
        if kept[key_out].severity >= finding.severity:
            return
        del kept[key_out]
    if held is None or held.severity < finding.severity:
        kept[key] = finding
