"""What a whole scan found, counted result by result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tito_audit.record.finding import Result, Severity
from tito_audit.record.rollout import Rollout

SCHEMA_VERSION = 1


@dataclass(slots=True)
class RuleCount:
    """Findings of one code."""

    error: int = 0
    warning: int = 0
    note: int = 0
    rollouts: int = 0
    """Rollouts with at least one; findings of a whole log count for none."""
    tokens: int = 0
    """Recorded tokens inside their ranges."""
    known: int = 0
    """How many of them are in the baseline."""


@dataclass(slots=True)
class Skipped:
    """Rollouts that a rule could not check, with the reasons."""

    rollouts: int = 0
    because: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Taken:
    """Rows of a file that were read as one format."""

    first_row: int
    rows: int = 0
    told_by: tuple[str, ...] = ()
    """The keys by which the first of these rows was recognized."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """How much of the logs was audited, when a sample was asked for."""

    share: float
    rows: int
    """Rows that were audited."""
    of: int
    """Rows that were read."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A finding of the baseline that no longer occurs."""

    fingerprint: str
    code: str
    file: str
    row: int
    """Where it was when the baseline was written."""
    message: str
    times: int = 1
    """How many findings with this fingerprint are gone."""


@dataclass(frozen=True, slots=True)
class RateCount:
    """A limit on how often findings may occur, and how often they did."""

    limit: str
    """As the user wrote it: `TOK=0.001`, `SEQ=0.1/rollout`."""
    findings: int
    of: int
    """Generated tokens, or rollouts."""
    rate: float
    """`findings` divided by `of`: 0 without findings, infinite if `of` is 0."""
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
    """Findings that fail one by one: at or above `fail_on`, not in the baseline, under no limit."""
    rates: tuple[RateCount, ...] = ()
    baseline: str | None = None
    """Its path; None without one."""
    known: int = 0
    """Findings that are in the baseline."""
    fixed: tuple[Fixed, ...] = ()
    """Findings of the baseline that are gone."""
    added: int = 0
    """Findings added to the baseline when it was rewritten."""
    updated: bool = False
    """Whether the baseline was rewritten."""

    @property
    def gone(self) -> int:
        """How many findings of the baseline are gone, each occurrence counted."""
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
    """By file, then by format: the rows read as that format."""
    causes: dict[str, Counter[str]] = field(default_factory=dict)
    """By code: how many findings have each cause."""
    without_ids: int = 0
    """Rollouts without any token ids: nothing was audited in them, which does not mean that they are clean."""
    uncompared: int = 0
    """Rollouts with ids of which nothing was compared, since no tokenizer was given: not known to be clean
    either."""
    tokenizer: str | None = None
    joining: tuple[str, ...] = ()
    """The flags by which single calls were joined, as `--session KEY`; () without any, or where logs differ."""
    encoder: str | None = None
    """What encoded: "tokenizers", or "fastokens, proved by tokenizers"; None without a tokenizer."""
    joined: list[str] = field(default_factory=list)
    """How rows that are single calls became conversations; `notices` say it too."""
    notices: list[str] = field(default_factory=list)
    """What a reader should know about the whole run: an empty file, no template, a fallback."""
    seconds: float = 0.0
    sampled: Sampled | None = None
    """None when every row was audited."""
    gate: Gate | None = None
    """Set by the caller that gates the run, once its results are used up."""

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
        of_rollout = not result.of_log or result.between_rows
        for code in {finding.code for finding in result.findings}:
            self.findings.setdefault(code, RuleCount()).rollouts += of_rollout
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
        """Keep the notice of a rollout's format, once."""
        notice = rollout.stated.notice
        if notice and notice not in self.notices:
            self.notices.append(notice)

    def _take(self, result: Result, format: str) -> None:
        place = result.place
        formats = self.taken.setdefault(place.file, {})
        taken = formats.get(format)
        if taken is None:
            taken = formats[format] = Taken(place.row)
        taken.rows += result.counts.get("rows", 1) if place.item == 0 else 0
        taken.told_by = taken.told_by or result.told_by

    @property
    def compared(self) -> int:
        """Rollouts in which something was compared."""
        return self.rollouts - self.without_ids - self.uncompared

    def worst(self) -> Severity | None:
        """The highest severity found; None when nothing was."""
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE):
            if any(getattr(count, severity.word) for count in self.findings.values()):
                return severity
        return None
