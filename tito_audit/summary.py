"""What a whole scan found, counted result by result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tito_audit.record.finding import Result, Severity
from tito_audit.record.rollout import Rollout

__all__ = ["SCHEMA_VERSION", "Fixed", "Gate", "RateCount", "RuleCount", "Sampled", "Skipped", "Summary", "Taken"]

SCHEMA_VERSION = 1


@dataclass(slots=True)
class RuleCount:
    """Findings of one code."""

    error: int = 0
    warning: int = 0
    note: int = 0
    rollouts: int = 0
    """Rollouts with at least one; findings of a whole log are of none."""
    tokens: int = 0
    """Recorded tokens inside its ranges."""
    known: int = 0
    """Of all of them, those that the baseline holds."""


@dataclass(slots=True)
class Skipped:
    """Rollouts that a rule could not look at."""

    rollouts: int = 0
    because: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Taken:
    """Rows of a file that were taken for one format."""

    first_row: int
    rows: int = 0
    told_by: tuple[str, ...] = ()
    """The keys that showed it, in the first of them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """How much of the logs was audited, where a sample was asked for."""

    share: float
    rows: int
    """Rows that were audited."""
    of: int
    """Rows that were read."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A finding of the baseline that is no longer there."""

    fingerprint: str
    code: str
    file: str
    row: int
    """Where it was when the baseline was written."""
    message: str
    times: int = 1
    """How many of that fingerprint are gone."""


@dataclass(frozen=True, slots=True)
class RateCount:
    """A limit on how often findings occur, and how often they did."""

    limit: str
    """As it was asked for: `TOK=0.001`, `SEQ=0.1/rollout`."""
    findings: int
    of: int
    """Generated tokens, or rollouts."""
    rate: float
    """Findings by `of`; 0 without findings, infinite where there is nothing to divide by."""
    failed: bool

    @property
    def unit(self) -> str:
        """What `of` counts: `rollouts` or `generated tokens`."""
        return "rollouts" if self.limit.endswith("/rollout") else "generated tokens"


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the logs pass, and why not."""

    failed: bool
    because: tuple[str, ...]
    """What failed, in sentences; () when nothing did."""
    fail_on: str
    failing: int
    """Findings that fail one by one: at or above `fail_on`, not known, under no limit."""
    rates: tuple[RateCount, ...] = ()
    baseline: str | None = None
    """Its file; None without one."""
    known: int = 0
    """Findings that the baseline holds."""
    fixed: tuple[Fixed, ...] = ()
    """Findings of the baseline that are gone."""
    added: int = 0
    """Findings that came into it, when it was written anew."""
    updated: bool = False
    """Whether the baseline was written anew."""

    @property
    def gone(self) -> int:
        """How many findings of the baseline are gone, those of one fingerprint counted one by one."""
        return sum(one.times for one in self.fixed)


@dataclass(slots=True)
class Summary:
    """Counts of a scan; complete once its results are used up."""

    files: list[str] = field(default_factory=list)
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    rows_unreadable: int = 0
    findings: dict[str, RuleCount] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    """Rollouts of each format."""
    taken: dict[str, dict[str, Taken]] = field(default_factory=dict)
    """By file and format: what its rows were taken for."""
    causes: dict[str, Counter[str]] = field(default_factory=dict)
    """By code: how many findings have each cause."""
    without_ids: int = 0
    """Rollouts that hold no token ids at all: nothing was audited in them, which is not clean."""
    uncompared: int = 0
    """Rollouts with ids of which nothing was compared, since no tokenizer was given: they are not clean either."""
    tokenizer: str | None = None
    encoder: str | None = None
    """What encoded: "tokenizers", or "fastokens, proved by tokenizers"; None without a tokenizer."""
    notices: list[str] = field(default_factory=list)
    """Things about the whole run that a reader should know: an empty file, no template, a fallback."""
    seconds: float = 0.0
    sampled: Sampled | None = None
    """None when every row was audited."""
    gate: Gate | None = None
    """Set by whoever gates the run, once its results are used up."""

    def add(self, result: Result) -> None:
        """Count one result."""
        if result.of_log:
            pass
        elif result.rollout is None:
            self.rows_unreadable += 1
        else:
            self.rollouts += 1
            self._note(result.rollout)
            self.formats[result.rollout.format] += 1
            self._take(result, result.rollout.format)
        self.turns += result.counts.get("turns", 0)
        self.tokens += result.counts.get("tokens", 0)
        self.generated_tokens += result.counts.get("generated_tokens", 0)
        self.without_ids += result.rollout is not None and not result.counts.get("tokens", 0)
        self.uncompared += result.counts.get("uncompared", 0)
        for code in {finding.code for finding in result.findings}:
            self.findings.setdefault(code, RuleCount()).rollouts += not result.of_log
        for finding in result.findings:
            count = self.findings[finding.code]
            word = finding.severity.word
            setattr(count, word, getattr(count, word) + 1)
            count.tokens += finding.hit.end - finding.hit.start
            count.known += finding.known
            self.causes.setdefault(finding.code, Counter())[finding.hit.cause] += 1
        for skip in result.skips:
            skipped = self.skipped.setdefault(skip.code, Skipped())
            skipped.rollouts += 1
            skipped.because[skip.because] += 1

    def _note(self, rollout: Rollout) -> None:
        """Keep what a reader should know of a format's rows, once."""
        notice = rollout.stated.notice
        if notice and notice not in self.notices:
            self.notices.append(notice)

    def _take(self, result: Result, format: str) -> None:
        place = result.place
        formats = self.taken.setdefault(place.file, {})
        taken = formats.get(format)
        if taken is None:
            taken = formats[format] = Taken(place.row)
        taken.rows += place.item == 0
        taken.told_by = taken.told_by or result.told_by

    @property
    def compared(self) -> int:
        """Rollouts in which something was held against something."""
        return self.rollouts - self.without_ids - self.uncompared

    def worst(self) -> Severity | None:
        """The highest severity found; None when nothing was."""
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE):
            if any(getattr(count, severity.word) for count in self.findings.values()):
                return severity
        return None
