"""What a whole scan found, counted result by result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.mismatch import LogMismatch
from tito_audit.record.rollout import Place

SCHEMA_VERSION = 1
METRICS = "tito_audit/"
"""What the names of all metrics begin with, so that a tracker shows them together."""


@dataclass(slots=True)
class RuleCount:
    """The findings of one rule."""

    error: int = 0
    warning: int = 0
    note: int = 0
    rollouts: int = 0
    """Rollouts with at least one; findings about a whole log belong to none."""
    tokens: int = 0
    """Recorded tokens in their ranges."""
    known: int = 0
    """How many of them are in the baseline."""
    new: Counter[Severity] = field(default_factory=Counter)
    """By severity: findings that are not in the baseline."""


@dataclass(slots=True)
class NewCount:
    """Findings of one severity that are not in the baseline."""

    findings: int = 0
    rollouts: int = 0
    """Rollouts and unreadable rows with at least one."""
    of_logs: int = 0
    """Findings among them about a whole log."""
    between: int = 0
    """Rollouts with one that compares them with others, which `rollouts` may count too."""


@dataclass(slots=True)
class Headline:
    """One cause, counted once for every prompt, completion, training row or rollout that shows it."""

    text: str
    """With `{n}` for the count and its unit: `{n} re-tokenized`."""
    unit: str
    """What `times` counts: `prompt`, `completion`, `training row`, `rollout` or `log`."""
    error: int = 0
    """How many of them have an error that is not in the baseline."""
    warning: int = 0
    """How many of the others have such a warning."""
    note: int = 0
    rollouts: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    """Its findings by code; here and above, findings in the baseline are left out."""
    places: Counter[tuple[int | None, int | None]] = field(default_factory=Counter)
    """By turn and later turn whose prompt shows it: how often."""

    @property
    def times(self) -> int:
        """How many prompts, completions, … show it."""
        return self.error + self.warning + self.note

    @property
    def words(self) -> str:
        """`20 prompts re-tokenized`."""
        return self.text.replace("{n}", f"{self.times:,} {self.unit}" + ("" if self.times == 1 else "s"))

    @property
    def severity(self) -> Severity:
        """Its worst severity anywhere."""
        return Severity.ERROR if self.error else Severity.WARNING if self.warning else Severity.NOTE

    @property
    def place(self) -> tuple[int, int | None] | None:
        """The turn, and the later turn, at which each of several rollouts shows it once; None if they differ."""
        places = [place for place, number in self.places.items() if number]
        if len(places) != 1 or not 1 < self.rollouts == self.times:
            return None
        turn, later = places[0]
        return None if turn is None else (turn, later)


@dataclass(slots=True)
class SkipCount:
    """Rollouts that a rule could not check."""

    rollouts: int = 0
    because: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class FormatCount:
    """Rows of a file read as one format."""

    first_row: int
    rows: int = 0
    told_by: tuple[str, ...] = ()
    """The keys by which the first of these rows was recognized."""


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How much of the logs a sample audited."""

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
    """A limit on the rate of findings, and their rate."""

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
class CoverageCount:
    """A share of rollouts that was required, and how many there were; unreadable rows count as rollouts."""

    codes: str
    """The rules that were required, as the user wrote them: `LPR`, `TPL203`, `ALL`; "" for any audit at all."""
    share: float
    """What was required, above 0 and at most 1."""
    covered: int
    """Rollouts in which these rules ran or had nothing to check; without `codes`, audited rollouts."""
    of: int
    because: str | None = None
    """The most common reason why rollouts are not covered; None if all are."""
    lacking: int = 0
    """How many of them have that reason."""
    first: Place | None = None
    """The first of these."""
    idle: int = 0
    """Covered rollouts in which none of the rules ran, as none had anything to check."""
    failed: bool = False

    @property
    def rate(self) -> float:
        """The share that is covered; 0 without rollouts."""
        return self.covered / self.of if self.of else 0.0


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the logs pass, and why not."""

    failed: bool
    because: tuple[str, ...]
    """What failed, in sentences; () when nothing did."""
    fail_on: str
    failing: int
    """Findings that each fail the gate: at or above `fail_on`, not in the baseline, under no limit."""
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
    required: tuple[CoverageCount, ...] = ()
    """The rules that were required, and the rollouts that they cover."""
    min_audited: CoverageCount | None = None
    """The share of rollouts that had to be audited; None if none was asked for."""

    @property
    def coverage(self) -> tuple[CoverageCount, ...]:
        """Everything that was required, the rules first."""
        return self.required if self.min_audited is None else (*self.required, self.min_audited)

    @property
    def gone(self) -> int:
        """How many findings of the baseline are gone, counting each occurrence."""
        return sum(finding.times for finding in self.fixed)


RECORD = "record"
"""The key of `Result.counts` whose value is no count: the mask of what the rollout's record lacks."""
RecordCounts = dict[tuple[str, str, int], tuple[int, Place]]
"""By file, format ("" for a row that cannot be read) and mask: how many rollouts, and the first."""


def count_record(counts: RecordCounts, place: Place, format: str, mask: int | None) -> None:
    """Count the record of one rollout, or of a row that cannot be read; None: the row is no rollout."""
    if mask is None:
        return
    number, first = counts.get((place.file, format, mask), (0, place))
    counts[place.file, format, mask] = number + 1, first


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
    codes: frozenset[str] = frozenset()
    """The codes of the rules that were selected for any log."""
    skipped: dict[str, SkipCount] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    """Rollouts of each format."""
    taken: dict[str, dict[str, FormatCount]] = field(default_factory=dict)
    """By file, then by format: the rows read as that format."""
    unread: dict[str, dict[str, str]] = field(default_factory=dict)
    """By file: the columns that were not read, and what each looks like, such as token ids."""
    causes: dict[str, Counter[str]] = field(default_factory=dict)
    """By code: how many findings have each cause."""
    new: dict[Severity, NewCount] = field(default_factory=dict)
    """By severity: the findings that are not in the baseline."""
    headlines: dict[tuple[str, str], Headline] = field(default_factory=dict)
    """Each cause with its counts, by headline and unit, in the order found."""
    mismatches: dict[str, LogMismatch] = field(default_factory=dict)
    """By trainer's column: why it differs from the sampler's."""
    without_ids: int = 0
    """Rollouts without any token ids: not audited, so not known to be clean."""
    uncompared: int = 0
    """Rollouts with ids that were not compared, as no tokenizer was given: not known to be clean either."""
    open_rows: int = 0
    """Rows that could not be judged: several explanations of their mask and logprobs are left."""
    open_beside_faults: int = 0
    """Rows without a finding that allow the very fault that other rows of their log prove."""
    fault_beside: str = ""
    """That fault, as the flags that state it: `--assume logprobs=+1`."""
    tokenizer: str | None = None
    """Its name, as given; several are separated by commas."""
    tokenizer_commits: dict[str, str] = field(default_factory=dict)
    """By name: the commit of each tokenizer that came from the hub."""
    reading: tuple[str, ...] = ()
    """The flags by which rows were read and rendered, as `--map token_ids=toks`; () if logs differ."""
    joining: tuple[str, ...] = ()
    """The flags by which single calls were joined, as `--session KEY`; () if logs differ."""
    encoder: str | None = None
    """What encoded: "tokenizers", or "fastokens, proved by tokenizers"; None without a tokenizer."""
    joined: list[str] = field(default_factory=list)
    """How rows that are single calls became conversations; also in `notices`."""
    notices: list[str] = field(default_factory=list)
    """What a reader should know about the run as a whole: an empty file, no template, a fallback."""
    seconds: float = 0.0
    sft: Counter[str] = field(default_factory=Counter)
    """What rows for SFT show, by fact, added up; empty without such rows."""
    sampled: SampleCount | None = None
    """None when every row was audited."""
    records: RecordCounts = field(default_factory=dict)
    """With `require_level`: what the records of rollouts lack."""
    gate: Gate | None = None
    """Set by the caller that gates the run, after the last result."""

    @property
    def tokenizer_words(self) -> str | None:
        """The tokenizer with its commit on the hub: `org/model@v2 (commit 0123456789ab)`."""
        commits = [commit[:12] for name, commit in self.tokenizer_commits.items() if commit not in name]
        words = f" (commit{'s' if len(commits) > 1 else ''} {', '.join(commits)})" if commits else ""
        return None if self.tokenizer is None else self.tokenizer + words

    def add(self, result: Result) -> None:
        """Count a result."""
        if result.of_log:
            pass
        elif result.rollout is None:
            self.rows_unreadable += 1
        else:
            self.rollouts += 1
            notice = result.rollout.stated.notice
            if notice and notice not in self.notices:
                self.notices.append(notice)
            place, form = result.place, result.rollout.format
            self.formats[form] += 1
            for kind, path in result.unread:
                self.unread.setdefault(place.file, {})[path] = kind
            formats = self.taken.setdefault(place.file, {})
            if (of_format := formats.get(form)) is None:
                of_format = formats[form] = FormatCount(place.row)
            of_format.rows += result.counts.get("rows", 1) if place.item == 0 else 0
            of_format.told_by = of_format.told_by or result.told_by
        self.turns += result.counts.get("turns", 0)
        self.tokens += result.counts.get("tokens", 0)
        self.generated_tokens += result.counts.get("generated_tokens", 0)
        self.without_ids += result.rollout is not None and not result.counts.get("tokens", 0)
        self.uncompared += result.counts.get("uncompared", 0)
        for name, number in result.counts.items() if "sft_rows" in result.counts else ():
            if name.startswith("sft_"):
                self.sft[name.removeprefix("sft_")] += number
        if RECORD in result.counts:
            form = result.rollout.format if result.rollout is not None else ""
            count_record(self.records, result.place, form, result.counts[RECORD])
        of_rollout = not result.of_log or result.between_rows
        for code in {finding.code for finding in result.findings} if result.findings else ():
            if code not in self.findings:
                self.findings[code], self.causes[code] = RuleCount(), Counter()
            self.findings[code].rollouts += of_rollout
        for finding in result.findings:
            count, times = self.findings[finding.code], finding.times
            word = finding.severity.word
            setattr(count, word, getattr(count, word) + times)
            count.tokens += finding.tokens
            count.known += finding.known and times
            self.causes[finding.code][finding.hit.cause] += times
        self.count_new(result)
        for mismatch in result.mismatches:
            if mismatch.trainer not in self.mismatches:
                self.mismatches[mismatch.trainer] = LogMismatch(mismatch.sampler)
            self.mismatches[mismatch.trainer].add(mismatch, result.place)
        for skip in result.skips:
            if skip.code not in self.skipped:
                self.skipped[skip.code] = SkipCount()
            skipped = self.skipped[skip.code]
            skipped.rollouts += 1
            skipped.because[skip.because] += 1

    def count_new(self, result: Result, by: int = 1) -> None:
        """Count the findings of a result that are not in the baseline, and each of their causes once.

        `by=-1` undoes this, for a result whose findings turn out to be known.
        """
        new = [finding for finding in result.findings if not finding.known] if result.findings else []
        if not new:
            return
        numbers: dict[Severity, int] = {}
        roots = [finding for finding in result.findings if finding.because_of is None]
        # Roots of one fingerprint are one. As long as none is named by another finding, their places may tell.
        places = {(root.code, root.hit.turn, root.hit.where, root.hit.start, root.hit.end) for root in roots}
        apart = len(places) == len(result.findings)
        keys: dict[int, int | str] = {}
        by_key: dict[int | str, Finding] = {}
        for root in roots:
            key_of_root = keys[id(root)] = id(root) if apart else root.fingerprint
            by_key[key_of_root] = root
        worst: dict[int | str, tuple[Severity, Headline, Finding]] = {}
        for finding in new:
            severity, times = finding.severity, finding.times
            numbers[severity] = numbers.get(severity, 0) + times
            self.findings[finding.code].new[severity] += by * times
            own = finding.because_of or keys[id(finding)]
            root = by_key.get(own, finding)
            key = root.headline, root.unit
            if key not in self.headlines:
                self.headlines[key] = Headline(*key)
            headline = self.headlines[key]
            headline.codes[finding.code] += by * times
            if own in worst:
                severity = max(severity, worst[own][0])
            worst[own] = severity, headline, root
        for severity, number in numbers.items():
            if severity not in self.new:
                self.new[severity] = NewCount()
            count = self.new[severity]
            count.findings += by * number
            count.between += by * result.between_rows
            count.of_logs += by * number * (result.of_log and not result.between_rows)
            count.rollouts += by * (not result.of_log)
        shown: dict[int, Headline] = {}
        for severity, headline, root in worst.values():
            word, units = severity.word, by * root.units
            setattr(headline, word, getattr(headline, word) + units)
            headline.places[root.hit.turn, root.hit.later_turn] += units
            shown[id(headline)] = headline
        for headline in shown.values():
            headline.rollouts += by * (not result.of_log or result.between_rows)

    @property
    def compared(self) -> int:
        """Rollouts in which something was compared."""
        return self.rollouts - self.without_ids - self.uncompared

    def ranked_headlines(self) -> list[Headline]:
        """The causes found: the most severe first, then those of whole logs, then the most frequent."""
        headlines = [headline for headline in self.headlines.values() if headline.times]
        return sorted(
            headlines,
            key=lambda headline: (
                -headline.severity,
                headline.unit != "log",
                -getattr(headline, headline.severity.word),
                headline.text,
            ),
        )

    def metrics(self) -> dict[str, float]:
        """The counts by name, all floats, as experiment trackers log them; what could not be counted is left out.

        Findings in the baseline are left out. Shares are between 0 and 1. Only codes that were found have a
        `findings/CODE`.
        """
        rows = self.rollouts + self.rows_unreadable
        names = ("rollouts", "rows_unreadable", "tokens", "generated_tokens")
        numbers: dict[str, float] = {name: getattr(self, name) for name in names}
        for severity in sorted(Severity, reverse=True):
            new = self.new.get(severity, NewCount())
            numbers[f"{severity.word}s"] = new.findings
            if rows:
                numbers[f"share_with_{severity.word}s"] = min(new.rollouts / rows, 1)
        if rows:
            numbers["share_compared"] = self.compared / rows
        numbers |= {f"findings/{code}": count.new.total() for code, count in sorted(self.findings.items())}
        if self.gate is not None:
            for name in ("failed", "failing", "known"):
                numbers[f"gate/{name}"] = getattr(self.gate, name)
        numbers["seconds"] = self.seconds
        return {f"{METRICS}{name}": float(value) for name, value in numbers.items()}

    def worst(self) -> Severity | None:
        """The highest severity found; None when nothing was."""
        counts = self.findings.values()
        return max(
            (severity for severity in Severity if any(getattr(count, severity.word) for count in counts)),
            default=None,
        )
