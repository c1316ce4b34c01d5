"""Which findings of a scan fail, which are known, and which a new baseline accepts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.evidence.needs import Needs
from tito_audit.gate.baseline import Baseline, EntryCounts
from tito_audit.levels.tally import level_failures
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.rollout import Place
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.run.auditor import selected_codes
from tito_audit.run.log_findings import FailingFindings
from tito_audit.settings.model import GateSettings, MaxRate, Requirement, Settings
from tito_audit.storage import Name, find_logs, output_path
from tito_audit.summary import CoverageCount, Fixed, Gate, RateCount, Summary
from tito_audit.terminal.verdict import coverage_reason
from tito_audit.terminal.words import limit_number, many, rate_number
from tito_audit.unknown import unknown_name


@dataclass(slots=True)
class RateTally:
    """The findings that count for one prefix: those for which it is the longest that matches."""

    findings: int = 0
    new: EntryCounts = field(default_factory=EntryCounts)
    """The findings that a baseline may accept."""


class Rates:
    """Counts findings against limits per rollout or per generated token."""

    def __init__(self, limits: Sequence[MaxRate]) -> None:
        for limit in limits:
            if not 0 <= limit.limit < math.inf:
                raise SetupError(f"--max-rate {limit}: a rate is a number, 0 or more.")
        self._limits = limits
        self._by_prefix = {limit.prefix: RateTally() for limit in limits}

        def of(code: str) -> RateTally | None:
            fitting = [prefix for prefix in self._by_prefix if code.startswith(prefix)]
            return self._by_prefix[max(fitting, key=len)] if fitting else None

        self.of = cache(of)
        """The tally for the findings of a code; None if no limit applies to it."""
        self.tokens = 0
        """Generated tokens in the logs that count."""
        self.rollouts = 0
        """Rollouts in the logs that count; an unreadable row is one."""

    def accepted(self) -> Iterator[EntryCounts]:
        """The findings above a limit, which a new baseline accepts and which then do not count for it."""
        above = [limit.prefix for limit, count in self.counts() if count.failed]
        for prefix in dict.fromkeys(above):
            rated = self._by_prefix[prefix]
            rated.findings -= rated.new.total
            yield rated.new

    def counts(self) -> list[tuple[MaxRate, RateCount]]:
        """Each limit with its count, in the given order."""
        counts = []
        for limit in self._limits:
            findings = self._by_prefix[limit.prefix].findings
            of = self.rollouts if limit.per == "rollout" else self.tokens
            rate = findings / of if of else math.inf if findings else 0.0
            counts.append((limit, RateCount(str(limit), findings, of, rate, rate > limit.limit)))
        return counts


def limit_reason(limit: MaxRate, count: RateCount) -> str:
    """The reason for a verdict: `TOK: 41 findings, 0.21 % of 20,000 generated tokens (limit 0.1 %)`."""
    by_rollout = limit.per == "rollout"
    unit = "rollout" if by_rollout else "generated token"
    name, count_text = limit.prefix or "all rules", many(count.findings, "finding")
    if math.isinf(count.rate):
        return f"{name}: {count_text}, but no {unit} to divide by"
    most, of = limit_number(limit.limit, by_rollout=by_rollout), many(count.of, unit)
    if by_rollout:
        return f"{name}: {count_text} in {of}, {rate_number(count)} per rollout (limit {most})"
    return f"{name}: {count_text}, {rate_number(count)} of {of} (limit {most})"


_UNREADABLE = "the row cannot be read"
_NO_IDS = "no token ids"
_OTHER = "other reasons"


@dataclass(slots=True)
class _CoverageTally:
    """How many rollouts a requirement covers, and why not the others."""

    codes: str
    share: float
    """The share of the rollouts that has to be covered."""
    covered: int = 0
    idle: int = 0
    of: int = 0
    applies: bool = False
    """Whether the requirement applies to any log."""
    reasons: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, Place] = field(default_factory=dict)
    """The first rollout of each reason."""

    def add(self, place: Place, because: str | None, idle: bool = False) -> None:
        """Count a rollout that is covered, or why it is not; `idle`: it is, but had nothing to check."""
        self.of += 1
        if because is None:
            self.covered += 1
            self.idle += idle
            return
        named = because if because in self.reasons or len(self.reasons) < 100 else _OTHER
        self.reasons[named] += 1
        self.firsts.setdefault(named, place)

    def count(self) -> CoverageCount:
        because, lacking = max(self.reasons.items(), key=itemgetter(1), default=(None, 0))
        # In fractions, since the float 0.07 * 100 is more than 7.
        failed = self.applies and (not self.of or self.covered < Fraction(repr(self.share)) * self.of)
        first = None if because is None else self.firsts[because]
        counts = self.covered, self.of, because, lacking, first, self.idle
        return CoverageCount(self.codes, self.share, *counts, failed)


class Coverage:
    """Counts the rollouts that required rules could check, and those that could be audited at all."""

    def __init__(
        self,
        required: Sequence[Requirement],
        min_audited: float | None,
        codes: Callable[[str], frozenset[str]],
        counts: Callable[[str], bool],
    ) -> None:
        """`codes` gives the codes selected for a log; `counts` says whether a log takes part in the gate."""
        rules = all_rules()
        self._of_rows = {rule.code for rule in rules if not rule.needs and not rule.of_log}
        """Rules that check rows with and without ids."""
        self._of_tokenizer = {rule.code for rule in rules if Needs.TOKENIZER in rule.needs}
        self._of_logs = {rule.code for rule in rules if rule.of_log}
        every = frozenset(rule.code for rule in rules)
        for need in required:
            if not any(code.startswith(need.prefix) for code in every):
                names, listed_by = (*FAMILIES, *sorted(every)), "tito-audit list rules"
                raise unknown_name("rule", need.prefix, names, flag="--require", listed_by=listed_by)
            if not self._coverable(need, every):
                raise SetupError(
                    f"--require {need}: {need.prefix} judges whole logs, so it covers no single rollout.\n"
                    "Require rules that check rollouts, such as LPR or SEQ."
                )
        for share in (*(need.share for need in required), *([] if min_audited is None else [min_audited])):
            if not 0 < share <= 1:
                raise SetupError(f"A required share of {share}: not above 0 and at most 1.")
        self._required = required
        self._tallies = [_CoverageTally(need.prefix or "ALL", need.share) for need in required]
        self._audited = None if min_audited is None else _CoverageTally("", min_audited)
        self._codes, self._counts = codes, counts
        # The rules that have to cover the rollouts of a log, by requirement; none if the log is exempt.
        self._wanted = cache(
            lambda file: [self._coverable(need, codes(file) if counts(file) else frozenset()) for need in required]
        )

    def begin(self, files: Iterable[str], selected: frozenset[str]) -> None:
        """Note which requirements apply to the logs; SetupError if every rule of one is deselected everywhere.

        `selected` are the codes selected where no override changes them.
        """
        logs = list(files)
        if self._audited is not None:
            self._audited.applies = not logs or any(map(self._counts, logs))
        for number, (need, tally) in enumerate(zip(self._required, self._tallies, strict=True)):
            tally.applies = not logs or any(self._wanted(file)[number] for file in logs)
            if not any(self._coverable(need, codes) for codes in (selected, *map(self._codes, logs))):
                raise SetupError(
                    f"--require {need}: --select and --ignore exclude every rule of it, so none can run."
                )

    def add(self, result: Result) -> None:
        """Count a rollout; results of whole logs are not counted."""
        if result.of_log:
            return
        file = result.place.file
        if self._audited is not None and self._counts(file):
            self._audited.add(result.place, self._why_unaudited(result))
        for wanted, tally in zip(self._wanted(file), self._tallies, strict=True) if self._tallies else ():
            if wanted:
                skipped = [skip for skip in result.skips if skip.code in wanted]
                partly = (skip for skip in result.partial if skip.code in wanted)
                because = next((skip.because for skip in chain(skipped, partly) if skip.applies), None)
                if result.rollout is None:
                    because = _UNREADABLE
                elif because is None and not result.counts.get("tokens") and not wanted <= self._of_rows:
                    because = _NO_IDS
                tally.add(result.place, because, idle=len(skipped) == len(wanted))

    def required(self) -> tuple[CoverageCount, ...]:
        """The count of each requirement, in the given order."""
        return tuple(tally.count() for tally in self._tallies)

    def min_audited(self) -> CoverageCount | None:
        """How many rollouts were audited; None if no share is required."""
        return None if self._audited is None else self._audited.count()

    def _why_unaudited(self, result: Result) -> str | None:
        """Why nothing was audited in a rollout; None if something was."""
        if result.rollout is None:
            return _UNREADABLE
        if not result.counts.get("tokens"):
            return _NO_IDS
        if result.counts.get("uncompared"):
            return next((skip.because for skip in result.skips if skip.code in self._of_tokenizer), _OTHER)
        if self._codes(result.place.file) - self._of_logs - {skip.code for skip in result.skips}:
            return None
        lacking = sorted(result.skips, key=lambda skip: not skip.applies)
        return lacking[0].because if lacking else _OTHER

    def _coverable(self, required: Requirement, codes: frozenset[str]) -> frozenset[str]:
        """The codes that belong to a requirement and check single rollouts."""
        return frozenset(code for code in codes - self._of_logs if code.startswith(required.prefix))


class Judge:
    """Judges each finding by the settings of its log, and the whole scan by its limits and requirements."""

    def __init__(self, settings: Settings, gate: GateSettings) -> None:
        self._settings, self._gate = settings, gate
        self._threshold = cache(self._thresholds)
        self.codes = cache(lambda file: selected_codes(settings.at(file)))
        """The codes selected for a log."""
        self._rates = Rates(gate.max_rates)
        self._coverage = Coverage(
            gate.required, gate.min_audited, self.codes, lambda file: self._threshold(file)[1] is not None
        )
        self._baseline: Baseline | None = None
        self._new = EntryCounts()
        self._known = 0
        self._failing = FailingFindings()

    def begin(self, logs: Sequence[Name], summary: Summary) -> None:
        """Read the baseline; SetupError if that fails, or if no log can meet a requirement."""
        gate = self._gate
        if gate.update_baseline and gate.baseline is None:
            raise SetupError(
                "--update-baseline: no baseline is named.\nName the file: --baseline tito-baseline.json"
            )
        self._summary = summary
        if gate.baseline is not None or gate.required or gate.min_audited:
            files = find_logs(logs)
            self._coverage.begin(map(str, files), selected_codes(self._settings))
            if gate.baseline is not None:
                self._baseline = Baseline(output_path(gate.baseline), files, update=gate.update_baseline)

    def _thresholds(self, file: str) -> tuple[Severity | None, Severity | None]:
        """From which severity on a finding of a log fails by itself, and counts for a rate; None: none does."""
        bar = Severity.threshold(self._settings.at(file).fail_on)
        if bar is None and self._settings.fail_on == "never":
            return None, Severity.NOTE  # nothing fails by itself anywhere; only rates apply
        return bar, bar  # a log that never fails does not count for rates either

    def fails(self, finding: Finding) -> bool:
        """Whether a finding fails by itself: severe enough, new, not accepted now, and under no rate limit."""
        bar = self._threshold(finding.place.file)[0]
        severe = bar is not None and finding.severity >= bar and self._rates.of(finding.code) is None
        return severe and not (finding.known or self._gate.update_baseline)

    def judge_result(self, result: Result) -> Result:
        """Count a result; the result, with the findings that are in the baseline marked `known`."""
        file = result.place.file
        if self._threshold(file)[1] is not None and not result.of_log:
            self._rates.rollouts += 1
            self._rates.tokens += result.counts.get("generated_tokens", 0)
        self._coverage.add(result)
        if self._baseline is not None:
            self._baseline.note_unchecked(result, self._baseline.name(file))
        if not result.findings:
            return result
        baseline, update, notes = self._baseline, self._gate.update_baseline, self._gate.notes
        findings, failing = list(result.findings), list[Finding]()
        for number, finding in enumerate(result.findings):
            file = finding.place.file  # of a joined call, its own
            name = "" if baseline is None else baseline.name(file)
            if baseline is not None and baseline.use_up(finding, name):
                self._known += finding.times
                self._summary.findings[finding.code].known += finding.times
                if update:
                    baseline.still_found.add(finding, name)
                findings[number] = replace(finding, known=True)
                continue
            fails, counts = self._threshold(file)
            if counts is None or finding.severity < counts:
                if update and notes:
                    self._new.add(finding, name)
                continue
            rated = self._rates.of(finding.code)
            if rated is not None:
                rated.findings += finding.times
            # If no finding fails by itself, a baseline accepts warnings and errors.
            least = Severity.NOTE if notes else Severity.WARNING if fails is None else fails
            if update and finding.severity >= least:
                (self._new if rated is None else rated.new).add(finding, name)
            elif rated is None and fails is not None:
                failing.append(finding)
        self._failing.add(result, failing)
        if findings == list(result.findings):
            return result
        judged = replace(result, findings=tuple(findings))
        self._summary.count_new(result, -1)
        self._summary.count_new(judged)
        return judged

    def verdict(self) -> Gate:
        """The verdict on all results; writes the baseline first, if it is updated."""
        added, fixed = 0, tuple[Fixed, ...]()
        if self._baseline is not None:
            # Where rows are left out, an entry that was not found may still be there.
            settings = self._settings
            whole = settings.limit is None and settings.row is None and (settings.sample or 1) >= 1
            fixed = self._baseline.fixed(self.codes) if whole else ()
            if self._gate.update_baseline:
                new = [self._new, *self._rates.accepted()]
                added = sum(entries.total for entries in new)
                self._baseline.rewrite(self.codes if whole else None, new)
        baseline, here = self._gate.baseline, Path.cwd()
        if baseline is not None and Path(baseline).is_relative_to(here):
            baseline = str(Path(baseline).relative_to(here))
        limits = self._rates.counts()
        failing = self._failing.findings.total()
        in_none = f" that {'is' if failing == 1 else 'are'} in no baseline" if self._baseline is not None else ""
        because = [self._failing.words(in_none)] if failing else []
        because += [limit_reason(limit, count) for limit, count in limits if count.failed]
        required, min_audited = self._coverage.required(), self._coverage.min_audited()
        coverage_counts = (*required, *([] if min_audited is None else [min_audited]))
        because += [coverage_reason(count) for count in coverage_counts if count.failed]
        because += level_failures(self._summary.records, self._summary.files, self._settings)
        return Gate(
            failed=bool(because),
            because=tuple(because),
            fail_on=self._settings.fail_on,
            failing=failing,
            rates=tuple(count for _, count in limits),
            baseline=baseline,
            known=self._known,
            fixed=fixed,
            added=added,
            updated=self._gate.update_baseline,
            required=required,
            min_audited=min_audited,
        )
