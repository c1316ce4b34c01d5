"""What a repair run did, counted row by row in constant memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tito_audit.record.finding import Finding, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.report_objects import fields
from tito_audit.settings.model import Settings

_VARIES = re.compile(r"\d+(?:,? ?\d+)*|'[^']*'")
"""Numbers, lists of numbers, and quoted names."""
_COUNTED = "written repaired forked forked_into more_tokens as_they_were standing quarantined"
"""Counts of rows in the JSON report."""
_KEPT = 200
"""How many different sentences are counted separately."""


@dataclass(slots=True)
class _Done:
    """What one repair did."""

    rows: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    """In how many rows each code was fixed."""


@dataclass(slots=True)
class Said:
    """A sentence about rows; numbers and names may vary."""

    text: str
    place: Place
    rows: int = 0
    alike: bool = True
    """Whether it was exactly the same each time."""
    needs_unsafe: bool = False
    """Whether it explains that a repair needs --unsafe."""

    def as_object(self) -> dict[str, Any]:
        """The sentence for the JSON report."""
        return {**fields(self, "text rows"), **fields(self.place, "file row")}


class Sayings:
    """Counts sentences; those that differ only in numbers and names count as one."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], Said] = {}
        self.others = 0
        """How many sentences were not counted separately."""

    def add(self, text: str, place: Place, by: str = "", *, needs_unsafe: bool = False) -> None:
        """Count a sentence of a repair, or of no repair."""
        key = (by, _VARIES.sub("#", text))
        sentence = self._said.get(key)
        if sentence is None:
            if len(self._said) >= _KEPT:
                self.others += 1
                return
            sentence = self._said[key] = Said(text, place, needs_unsafe=needs_unsafe)
        sentence.rows += 1
        sentence.alike = sentence.alike and sentence.text == text

    def __iter__(self) -> Iterator[tuple[str, Said]]:
        """Repair and sentence, the most frequent first."""
        for (by, _), sentence in sorted(self._said.items(), key=lambda item: -item[1].rows):
            yield by, sentence


@dataclass(slots=True)
class Tally:
    """Counts of rows by outcome."""

    threshold: Severity | None
    """Findings at or above it fail the run; None: none do."""
    settings: Settings | None = None
    """If given, its overrides decide what fails in each log."""
    _thresholds: dict[str, Severity | None] = field(default_factory=dict)
    rows: int = 0
    repaired: int = 0
    forked: int = 0
    """Rows that became several."""
    forked_into: int = 0
    """How many rows those became."""
    more_tokens: int = 0
    """Additional tokens in those rows, compared to one row each."""
    standing: int = 0
    """Rows written with findings at or above the threshold, repaired or not."""
    movable: int = 0
    """Those among them that a quarantine would take."""
    quarantined: int = 0
    done: dict[str, _Done] = field(default_factory=dict)
    notes: Sayings = field(default_factory=Sayings)
    declined: Sayings = field(default_factory=Sayings)
    moved: Sayings = field(default_factory=Sayings)
    """Why rows went to the quarantine."""
    left: dict[str, Counter[str | None]] = field(default_factory=dict)
    """By code: the repairs of the findings that are left at or above the threshold, None for no repair."""
    first_left: Finding | None = None
    """The first of the worst of these findings."""
    milder: int = 0
    """Warnings below the threshold that a repair claims."""

    @property
    def as_they_were(self) -> int:
        """Rows written as they were read."""
        return self.rows - self.repaired - self.quarantined

    @property
    def written(self) -> int:
        """All rows written."""
        return self.rows - self.quarantined - self.forked + self.forked_into

    def add(self, outcome: Outcome) -> None:
        """Count one row."""
        self.rows += 1
        if outcome.quarantined is not None:
            self.quarantined += 1
            self.moved.add(outcome.quarantined, outcome.place)
        elif outcome.repaired:
            self._add_repaired(outcome)
        for name, reason in outcome.declined.items():
            self.declined.add(reason, outcome.place, name, needs_unsafe=name in outcome.needs_unsafe)
        standing = [finding for result in outcome.after for finding in result.findings if self._fails(finding)]
        self.standing += bool(standing)
        self.movable += bool(standing) and not outcome.stays
        self.milder += sum(
            finding.times
            for result in outcome.after
            for finding in result.findings
            if finding.severity is Severity.WARNING and finding.repair is not None and not self._fails(finding)
        )
        for finding in standing:
            self.left.setdefault(finding.code, Counter())[finding.repair] += finding.times
            if self.first_left is None or finding.severity > self.first_left.severity:
                self.first_left = finding

    def as_object(self) -> dict[str, Any]:
        """The counts for the JSON report."""
        return {
            "rows": {"read": self.rows, **fields(self, _COUNTED)},
            "repairs": {
                name: {"rows": done.rows, "cured": dict(sorted(done.codes.items()))}
                for name, done in self.done.items()
            },
            "declined": [{"repair": by, **sentence.as_object()} for by, sentence in self.declined],
            "quarantined": [sentence.as_object() for _, sentence in self.moved],
            "notes": [sentence.as_object() for _, sentence in self.notes],
        }

    def _add_repaired(self, outcome: Outcome) -> None:
        self.repaired += 1
        if outcome.rows > 1:
            self.forked += 1
            self.forked_into += outcome.rows
            self.more_tokens += outcome.more_tokens
        for name, codes in outcome.cured.items():
            done = self.done.setdefault(name, _Done())
            done.rows += 1
            done.codes.update(codes)
        for note in outcome.notes:
            if note not in outcome.costs:
                self.notes.add(note, outcome.place)

    def _fails(self, finding: Finding) -> bool:
        threshold = self.threshold
        if self.settings is not None and self.settings.overrides:
            threshold = self._threshold_at(finding.place.file, self.settings)
        return threshold is not None and finding.severity >= threshold

    def _threshold_at(self, file: str, settings: Settings) -> Severity | None:
        if file not in self._thresholds:
            self._thresholds[file] = Severity.bar(settings.at(file).fail_on)
        return self._thresholds[file]
