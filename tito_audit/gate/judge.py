"""Judge: which findings of a scan fail, which are known, and which a new baseline accepts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path

from tito_audit.errors import SetupError, StorageError
from tito_audit.evidence.needs import Needs
from tito_audit.gate.baseline import Entry, Key, LogNames, entry_of, folder_of, read_baseline, write_baseline
from tito_audit.levels.tally import below
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.rollout import Place
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.run.auditor import selected_codes
from tito_audit.run.log_findings import Failing
from tito_audit.settings.model import GateSettings, MaxRate, Requirement, Settings
from tito_audit.storage import Name, find_logs, output_path
from tito_audit.storage.atomic import refuse_target
from tito_audit.storage.remote import is_url, remote_file
from tito_audit.summary import CoverageCount, Fixed, Gate, RateCount, Summary
from tito_audit.terminal.coverage import coverage_reason
from tito_audit.terminal.words import limit_number, many, rate_number
from tito_audit.unknown import unknown

_UNREADABLE_ROW = "REC001"


class EntryCounts:
    """Findings collected as baseline entries: one entry for all identical findings."""

    def __init__(self) -> None:
        self.total = 0
        """Findings that were added."""
        self._by_key: dict[Key, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def add(self, finding: Finding, file: str) -> None:
        """Add one finding of a log, as the baseline names it."""
        fingerprint = finding.fingerprint
        if (fingerprint, finding.severity, file) in self._by_key:
            self._by_key[fingerprint, finding.severity, file].times += finding.times
            self.total += finding.times
        else:
            self.put(entry_of(finding, fingerprint, file))

    def put(self, entry: Entry) -> None:
        counted = self._by_key.setdefault(entry.key, entry)
        if counted is not entry:
            counted.times += entry.times
            counted.row = min(counted.row, entry.row)
        self.total += entry.times


class KnownFindings:
    """The entries of a baseline, used up by the findings of a run.

    A finding uses up an entry of its own log first, then one of a log that no longer exists (it may have been
    renamed), then one of another log of the run (its row may have moved there).
    """

    def __init__(self, entries: Sequence[Entry], folder: Path, scanned: Iterable[str]) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._kinds = {(entry.code, entry.severity) for entry in entries}
        self._scanned = frozenset(scanned)
        self._left: dict[tuple[str, Severity], dict[str, int]] = {}
        """By fingerprint and severity: by file, how many are not used up."""
        self._at: dict[tuple[str, int], list[Entry]] = {}
        self._unchecked: dict[str, set[str]] = {}
        """By file: codes that could not be checked in any rollout so far."""
        for entry in entries:
            self._left.setdefault((entry.fingerprint, entry.severity), {})[entry.file] = entry.times
            if entry.file in self._scanned:
                self._at.setdefault((entry.file, entry.row), []).append(entry)
                self._unchecked.setdefault(entry.file, set()).add(entry.code)
        self._unseen: set[Key] = set()
        """Entries whose row could not be read or not be checked for their code."""
        self._ends: dict[str, tuple[int, bool]] = {}
        """By file: its last row, and whether that could be read."""
        # os.path, since pathlib's raises if the name is too long.
        self._gone = cache(
            lambda file: not (remote_file(file).is_file() if is_url(file) else os.path.exists(folder / file))  # noqa: PTH110
        )

    def holds(self, finding: Finding, file: str) -> bool:
        """Whether an entry is left for the finding; if so, uses it up.

        Only entries of its own severity count: the same tokens may be a note in one rollout, an error in another.
        """
        if (finding.code, finding.severity) not in self._kinds:
            return False  # avoids computing the fingerprint, which is slow
        left = self._left.get((finding.fingerprint, finding.severity), {})
        renamed = (home for home in left if home not in self._scanned and self._gone(home))
        moved = (home for home in left if home in self._scanned)
        home = file if file in left else next(chain(renamed, moved), None)
        if home is None or left[home] < finding.times:
            return False
        left[home] -= finding.times
        if not left[home]:
            del left[home]
        return True

    def look(self, result: Result, file: str) -> None:
        """Record what could not be checked in a result."""
        unchecked = self._unchecked.get(file)
        if unchecked is None or result.of_log:
            return
        self._ends[file] = result.place.row, result.rollout is not None
        skipped = None
        if unchecked and result.rollout is not None:
            skipped = {skip.code for skip in result.skips}
            unchecked &= skipped
        for entry in self._at.get((file, result.place.row), ()):
            if result.rollout is None:
                unseen = entry.code != _UNREADABLE_ROW
            else:
                skipped = {skip.code for skip in result.skips} if skipped is None else skipped
                unseen = entry.code in skipped
            if unseen:
                self._unseen.add(entry.key)

    def left(self, is_checked: Callable[[str, str], bool]) -> tuple[list[Entry], list[Entry]]:
        """The entries not used up, with the remaining counts: those that are gone, and those not checked.

        `is_checked` tells whether the run checked a code in a file.
        """
        gone: list[Entry] = []
        unchecked: list[Entry] = []
        for (fingerprint, severity), files in self._left.items():
            for file, times in files.items():
                entry = replace(self._entries[fingerprint, severity, file], times=times)
                # Whether the place of an entry was checked.
                if entry.file not in self._ends or entry.code in self._unchecked[entry.file]:
                    seen = False
                else:
                    last, readable = self._ends[entry.file]
                    seen = entry.key not in self._unseen and (
                        readable or entry.row < last or entry.code == _UNREADABLE_ROW
                    )
                (gone if seen and is_checked(file, entry.code) else unchecked).append(entry)
        return gone, unchecked


# Rates: how often findings occur, and how often they may.


@dataclass(slots=True)
class PrefixCount:
    """The findings counted under one prefix: those for which it is the longest match."""

    limits: tuple[MaxRate, ...]
    """All limits of this prefix."""
    findings: int = 0
    new: EntryCounts = field(default_factory=EntryCounts)
    """The findings that a baseline may accept."""


class Rates:
    """Findings counted against limits, with the tokens and rollouts they are divided by."""

    def __init__(self, limits: Sequence[MaxRate]) -> None:
        for limit in limits:
            if not 0 <= limit.limit < math.inf:
                raise SetupError(f"--max-rate {limit}: a rate is a number, 0 or more.")
        prefixes = dict.fromkeys(limit.prefix for limit in limits)
        self._limits = limits
        self._by_prefix = {
            prefix: PrefixCount(tuple(limit for limit in limits if limit.prefix == prefix)) for prefix in prefixes
        }
        self._by_code: dict[str, PrefixCount | None] = {}
        self.tokens = 0
        """Generated tokens of the logs that count."""
        self.rollouts = 0
        """Rollouts of the logs that count; an unreadable row counts as one."""

    def of(self, code: str) -> PrefixCount | None:
        """The count that findings of a code go into; None if no limit applies."""
        if code not in self._by_code:
            fitting = [prefix for prefix in self._by_prefix if code.startswith(prefix)]
            self._by_code[code] = self._by_prefix[max(fitting, key=len)] if fitting else None
        return self._by_code[code]

    def accepted(self) -> Iterator[EntryCounts]:
        """The findings above their limits that a new baseline accepts; they no longer count."""
        for rated in self._by_prefix.values():
            if any(self._count(limit, rated).failed for limit in rated.limits):
                rated.findings -= rated.new.total
                yield rated.new

    def counts(self) -> tuple[RateCount, ...]:
        """Every limit with its count, in the order given."""
        return tuple(self._count(limit, self._by_prefix[limit.prefix]) for limit in self._limits)

    def _count(self, limit: MaxRate, rated: PrefixCount) -> RateCount:
        of = self.rollouts if limit.per == "rollout" else self.tokens
        rate = rated.findings / of if of else math.inf if rated.findings else 0.0
        return RateCount(str(limit), rated.findings, of, rate, rate > limit.limit)


def limit_reason(limit: MaxRate, count: RateCount) -> str:
    """Why a limit fails: `TOK: 41 findings, 0.21 % of 20,000 generated tokens (limit 0.1 %)`."""
    by_rollout = limit.per == "rollout"
    unit = "rollout" if by_rollout else "generated token"
    name, count_text = limit.prefix or "all rules", many(count.findings, "finding")
    if math.isinf(count.rate):
        return f"{name}: {count_text}, but no {unit} to divide by"
    most, of = limit_number(limit.limit, by_rollout=by_rollout), many(count.of, unit)
    if by_rollout:
        return f"{name}: {count_text} in {of}, {rate_number(count)} per rollout (limit {most})"
    return f"{name}: {count_text}, {rate_number(count)} of {of} (limit {most})"


# Coverage: in how many rollouts the required rules ran, and why not in the others.

_UNREADABLE = "the row cannot be read"
_NO_IDS = "no token ids"
_OTHER = "other reasons"


@dataclass(slots=True)
class _Tally:
    """Rollouts that are covered, and those that are not by reason."""

    covered: int = 0
    idle: int = 0
    of: int = 0
    applies: bool = False
    """Whether the requirement applies to any of the logs."""
    reasons: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, Place] = field(default_factory=dict)
    """The first rollout of each reason."""

    def add(self, place: Place, because: str | None, idle: bool = False) -> None:
        """Count one rollout: why it is not covered, or None; `idle`: there was nothing to check."""
        self.of += 1
        if because is None:
            self.covered += 1
            self.idle += idle
            return
        named = because if because in self.reasons or len(self.reasons) < 100 else _OTHER
        self.reasons[named] += 1
        self.firsts.setdefault(named, place)

    def count(self, codes: str, share: float) -> CoverageCount:
        because, lacking = max(self.reasons.items(), key=itemgetter(1), default=(None, 0))
        # Fractions, as 0.07 * 100 is more than 7.
        failed = self.applies and (not self.of or self.covered < Fraction(repr(share)) * self.of)
        return CoverageCount(
            codes,
            share,
            self.covered,
            self.of,
            because,
            lacking,
            self.firsts[because] if because is not None else None,
            self.idle,
            failed,
        )


class Coverage:
    """Counts the rollouts that required rules cover, and those that are audited at all."""

    def __init__(
        self,
        required: Sequence[Requirement],
        min_audited: float | None,
        codes: Callable[[str], frozenset[str]],
        counts: Callable[[str], bool],
    ) -> None:
        """`codes` are those selected for a log; `counts` says whether a log takes part in the gate."""
        rules = frozenset(rule.code for rule in all_rules())
        for need in required:
            if not any(code.startswith(need.prefix) for code in rules):
                possible = (*FAMILIES, *sorted(rules))
                raise unknown("rule", need.prefix, possible, flag="--require", listed_by="tito-audit list rules")
            if not _countable(need, rules):
                raise SetupError(
                    f"--require {need}: {need.prefix} judges whole logs, so it covers no single rollout.\n"
                    "Require rules that check rollouts, such as LPR or SEQ."
                )
        for share in (*(need.share for need in required), *([] if min_audited is None else [min_audited])):
            if not 0 < share <= 1:
                raise SetupError(f"A required share of {share}: not above 0 and at most 1.")
        self._required = required
        self._min_audited = min_audited
        self._tallies = [_Tally() for _ in required]
        self._audited = _Tally()
        self._codes = codes
        self._counts = counts
        # By requirement: the rules that have to cover the rollouts of a log; none if the log is exempt.
        self._wanted = cache(
            lambda file: tuple(_countable(need, codes(file) if counts(file) else frozenset()) for need in required)
        )

    def begin(self, files: Iterable[str], selected: frozenset[str]) -> None:
        """Check that a log can meet the requirements; SetupError if required rules are deselected.

        `selected` are the codes that are selected where no override changes them.
        """
        if not self._required and self._min_audited is None:
            return
        logs = list(files)
        self._audited.applies = not logs or any(map(self._counts, logs))
        for number, (need, tally) in enumerate(zip(self._required, self._tallies, strict=True)):
            tally.applies = not logs or any(self._wanted(file)[number] for file in logs)
            chosen = any(_countable(need, self._codes(file)) for file in logs)
            if not chosen and not _countable(need, selected):
                raise SetupError(
                    f"--require {need}: --select and --ignore exclude every rule of it, so none can run."
                )

    def add(self, result: Result) -> None:
        """Count a result; those of whole logs are not rollouts."""
        if result.of_log:
            return
        file = result.place.file
        if self._min_audited is not None and self._counts(file):
            self._audited.add(result.place, _unaudited(result, self._codes(file)))
        if self._required:
            for wanted, tally in zip(self._wanted(file), self._tallies, strict=True):
                if wanted:
                    tally.add(result.place, *_judged(result, wanted))

    def required(self) -> tuple[CoverageCount, ...]:
        """Every requirement with its count, in the order given."""
        return tuple(
            tally.count(need.prefix or "ALL", need.share)
            for need, tally in zip(self._required, self._tallies, strict=True)
        )

    def min_audited(self) -> CoverageCount | None:
        """How many rollouts were audited; None if no share is required."""
        return None if self._min_audited is None else self._audited.count("", self._min_audited)


def _judged(result: Result, wanted: Collection[str]) -> tuple[str | None, bool]:
    """Why these rules do not cover a rollout, None if they do; and whether no rule had anything to check."""
    if result.rollout is None:
        return _UNREADABLE, False
    skipped = [skip for skip in result.skips if skip.code in wanted]
    partly = (skip for skip in result.partial if skip.code in wanted)
    lacking = next((skip.because for skip in (*skipped, *partly) if skip.applies), None)
    if lacking is None and not result.counts.get("tokens") and not _of_rows() >= frozenset(wanted):
        lacking = _NO_IDS
    return lacking, len(skipped) == len(wanted)


def _unaudited(result: Result, codes: frozenset[str]) -> str | None:
    """Why nothing was audited in a rollout by these rules; None if something was."""
    if result.rollout is None:
        return _UNREADABLE
    if not result.counts.get("tokens"):
        return _NO_IDS
    if result.counts.get("uncompared"):
        return next((skip.because for skip in result.skips if skip.code in _of_tokenizer()), _OTHER)
    if codes - _of_logs() - {skip.code for skip in result.skips}:
        return None
    lacking = sorted(result.skips, key=lambda skip: not skip.applies)
    return lacking[0].because if lacking else _OTHER


@cache
def _of_rows() -> frozenset[str]:
    """Rules that check any row, with or without ids."""
    return frozenset(rule.code for rule in all_rules() if not rule.needs and not rule.of_log)


@cache
def _of_tokenizer() -> frozenset[str]:
    return frozenset(rule.code for rule in all_rules() if Needs.TOKENIZER in rule.needs)


@cache
def _of_logs() -> frozenset[str]:
    """Rules that judge whole logs."""
    return frozenset(rule.code for rule in all_rules() if rule.of_log)


def _countable(required: Requirement, codes: frozenset[str]) -> frozenset[str]:
    """Those of these rules that belong to a requirement and check single rollouts."""
    return frozenset(code for code in codes - _of_logs() if code.startswith(required.prefix))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The minimum severities for findings of a log."""

    fails: Severity | None
    """From which a finding fails by itself; None: none does."""
    counts: Severity | None
    """From which a finding counts for a rate; None: none does."""

    @classmethod
    def of(cls, settings: Settings, file: str) -> Thresholds:
        """The minimum severities for a log."""
        bar = Severity.bar(settings.at(file).fail_on)
        if bar is None and settings.fail_on == "never":
            return cls(None, Severity.NOTE)  # nothing fails by itself anywhere; only rates apply
        return cls(bar, bar)  # a log that never fails does not count for rates either


class Criteria:
    """What findings are judged by: limits for the run, severities and codes for each log."""

    def __init__(self, settings: Settings, gate: GateSettings) -> None:
        self.rates = Rates(gate.max_rates)
        self.bar = cache(lambda file: Thresholds.of(settings, file))
        self.codes = cache(lambda file: selected_codes(settings.at(file)))
        """The codes selected for a log."""
        self.coverage = Coverage(
            gate.required, gate.min_audited, self.codes, lambda file: self.bar(file).counts is not None
        )

    def fails(self, finding: Finding) -> bool:
        """Whether a finding that is not in a baseline fails by itself: severe enough and under no rate limit."""
        bar = self.bar(finding.place.file).fails
        return bar is not None and finding.severity >= bar and self.rates.of(finding.code) is None


class _OpenBaseline:
    def __init__(
        self, path: Path, logs: list[Path], settings: Settings, criteria: Criteria, *, update: bool
    ) -> None:
        if update:
            try:
                refuse_target(path, overwrite=True)
            except StorageError as error:
                raise SetupError(f"--baseline {error}") from error
        self.path = path
        self.name = cache(LogNames(path).of)
        """The name of a log in the baseline."""
        self._files: Mapping[str, str] = {self.name(str(file)): str(file) for file in logs}
        self._entries = [] if update and not path.exists() else read_baseline(path)
        self.known = KnownFindings(self._entries, folder_of(path), self._files)
        self.seen = EntryCounts()
        """The baseline's findings as they were found in this run."""
        self._codes = criteria.codes
        # If rows are left out, no entry is known to be gone.
        self._whole = settings.limit is None and settings.row is None and (settings.sample or 1) >= 1

    def gone(self) -> tuple[Fixed, ...]:
        """The entries that are no longer found in the logs."""
        entries = self.known.left(self._is_checked)[0] if self._whole else []
        return tuple(
            Fixed(entry.fingerprint, entry.code, self._files[entry.file], entry.row, entry.message, entry.times)
            for entry in sorted(entries, key=lambda entry: (entry.file, entry.row, entry.code))
        )

    def rewrite(self, *new: EntryCounts) -> None:
        """Write the file again without what is gone and with what is new."""
        stays = chain(self.known.left(self._is_checked)[1], self.seen) if self._whole else self._entries
        entries = EntryCounts()
        for entry in chain(stays, *new):
            entries.put(entry)
        write_baseline(self.path, entries)

    def _is_checked(self, name: str, code: str) -> bool:
        return name in self._files and code in self._codes(self._files[name])


class Judge:
    """Judges each finding, and in the end the scan."""

    def __init__(
        self, logs: Sequence[Name], settings: Settings, gate: GateSettings, criteria: Criteria, summary: Summary
    ) -> None:
        if gate.update_baseline and gate.baseline is None:
            raise SetupError(
                "--update-baseline: no baseline is named.\nName the file: --baseline tito-baseline.json"
            )
        self._settings = settings
        self._gate = gate
        self._summary = summary
        self._bar, self._rates, self._coverage = criteria.bar, criteria.rates, criteria.coverage
        files = find_logs(logs) if gate.baseline is not None or gate.required or gate.min_audited else []
        self._coverage.begin(map(str, files), selected_codes(settings))
        self._book = None
        if gate.baseline is not None:
            self._book = _OpenBaseline(
                output_path(gate.baseline), files, settings, criteria, update=gate.update_baseline
            )
        self._new = EntryCounts()
        self._known = 0
        self._failing = Failing()

    def judged(self, result: Result) -> Result:
        """The result, with findings that are in the baseline marked `known`."""
        file = result.place.file
        bar = self._bar(file)
        if bar.counts is not None and not result.of_log:
            self._rates.rollouts += 1
            self._rates.tokens += result.counts.get("generated_tokens", 0)
        self._coverage.add(result)
        if self._book is not None:
            self._book.known.look(result, self._book.name(file))
        if not result.findings:
            return result
        failing: list[Finding] = []
        findings = tuple(self._judged(finding, bar, failing) for finding in result.findings)
        self._failing.add(result, failing)
        if findings == result.findings:
            return result
        self._summary.count_new(result, -1)
        judged = replace(result, findings=findings)
        self._summary.count_new(judged)
        return judged

    def verdict(self) -> Gate:
        """The verdict on all results; writes the updated baseline first."""
        added, fixed = 0, self._book.gone() if self._book is not None else ()
        if self._book is not None and self._gate.update_baseline:
            new = [self._new, *self._rates.accepted()]
            added = sum(entries.total for entries in new)
            self._book.rewrite(*new)
        baseline, here = self._gate.baseline, Path.cwd()
        if baseline is not None and Path(baseline).is_relative_to(here):
            baseline = str(Path(baseline).relative_to(here))
        counts = self._rates.counts()
        limits = zip(self._gate.max_rates, counts, strict=True)
        failing = self._failing.findings.total()
        in_none = f" that {'is' if failing == 1 else 'are'} in no baseline" if self._book is not None else ""
        because = [self._failing.words(in_none)] if failing else []
        because += [limit_reason(limit, count) for limit, count in limits if count.failed]
        required, min_audited = self._coverage.required(), self._coverage.min_audited()
        coverage_counts = (*required, *([] if min_audited is None else [min_audited]))
        because += [coverage_reason(count) for count in coverage_counts if count.failed]
        because += below(self._summary.records, self._summary.files, self._settings)
        return Gate(
            failed=bool(because),
            because=tuple(because),
            fail_on=self._settings.fail_on,
            failing=failing,
            rates=counts,
            baseline=baseline,
            known=self._known,
            fixed=fixed,
            added=added,
            updated=self._gate.update_baseline,
            required=required,
            min_audited=min_audited,
        )

    def _judged(self, finding: Finding, bar: Thresholds, failing: list[Finding]) -> Finding:
        """The finding, marked if it is known; one that fails by itself is added to `failing`."""
        book = self._book
        if book is not None and book.known.holds(finding, book.name(finding.place.file)):
            self._known += finding.times
            self._summary.findings[finding.code].known += finding.times
            if self._gate.update_baseline:
                book.seen.add(finding, book.name(finding.place.file))
            return replace(finding, known=True)
        if bar.counts is None or finding.severity < bar.counts:
            if book is not None and self._gate.update_baseline and self._gate.notes:
                self._new.add(finding, book.name(finding.place.file))
            return finding
        rated = self._rates.of(finding.code)
        if rated is not None:
            rated.findings += finding.times
        # If no finding fails by itself, a baseline accepts everything above a note.
        least = Severity.NOTE if self._gate.notes else Severity.WARNING if bar.fails is None else bar.fails
        if book is not None and self._gate.update_baseline and finding.severity >= least:
            (self._new if rated is None else rated.new).add(finding, book.name(finding.place.file))
        elif rated is None and bar.fails is not None:
            failing.append(finding)
        return finding
