"""Judge: which findings of a scan fail, which are known, and which a new baseline accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

from tito_audit.errors import SetupError, StorageError
from tito_audit.gate.baseline import LogNames, folder_of, read_baseline, write_baseline
from tito_audit.gate.coverage import Coverage
from tito_audit.gate.known import EntryCounts, Known
from tito_audit.gate.rates import Rates, limit_reason
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.run.auditor import selected_codes
from tito_audit.settings.model import GateSettings, Settings
from tito_audit.storage import Name, find_logs, output_path
from tito_audit.storage.atomic import refuse_target
from tito_audit.summary import Fixed, Gate, Summary
from tito_audit.terminal.coverage import coverage_reason
from tito_audit.terminal.words import listed, many

_CODES = 6
"""Maximum codes named in a reason."""


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
    """The baseline during a scan."""

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
        self.known = Known(self._entries, folder_of(path), self._files)
        self.held = EntryCounts()
        """The baseline's findings as they were found in this run."""
        self._codes = criteria.codes
        # If rows are left out, no entry is known to be gone.
        self._whole = settings.limit is None and settings.row is None and (settings.sample or 1) >= 1

    def gone(self) -> tuple[Fixed, ...]:
        """The entries that are no longer found in the logs."""
        entries = self.known.left(self._asked)[0] if self._whole else []
        return tuple(
            Fixed(one.fingerprint, one.code, self._files[one.file], one.row, one.message, one.times)
            for one in sorted(entries, key=lambda one: (one.file, one.row, one.code))
        )

    def rewrite(self, *new: EntryCounts) -> None:
        """Write the file again without what is gone and with what is new."""
        stays = chain(self.known.left(self._asked)[1], self.held) if self._whole else self._entries
        entries = EntryCounts()
        for entry in chain(stays, *new):
            entries.put(entry)
        write_baseline(self.path, entries)

    def _asked(self, name: str, code: str) -> bool:
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
        self._failing: Counter[Severity] = Counter()
        self._codes: Counter[str] = Counter()
        self._rollouts = 0
        """Rollouts with a finding that fails."""
        self._between = 0
        """Rollouts with a failing finding of a rule that compares rows; may overlap with these."""

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
        before = self._failing.total()
        findings = tuple(self._judged(finding, bar) for finding in result.findings)
        self._rollouts += self._failing.total() > before and not result.of_log
        self._between += self._failing.total() > before and result.between_rows
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
            new = [self._new, *self._rates.taken()]
            added = sum(entries.total for entries in new)
            self._book.rewrite(*new)
        counts = self._rates.counts()
        limits = zip(self._gate.max_rates, counts, strict=True)
        because = [self._failing_words()] if self._failing else []
        because += [limit_reason(limit, count) for limit, count in limits if count.failed]
        required, min_audited = self._coverage.required(), self._coverage.min_audited()
        asked = (*required, *([] if min_audited is None else [min_audited]))
        because += [coverage_reason(count) for count in asked if count.failed]
        return Gate(
            failed=bool(because),
            because=tuple(because),
            fail_on=self._settings.fail_on,
            failing=self._failing.total(),
            rates=counts,
            baseline=_relative(self._gate.baseline),
            known=self._known,
            fixed=fixed,
            added=added,
            updated=self._gate.update_baseline,
            required=required,
            min_audited=min_audited,
        )

    def _judged(self, finding: Finding, bar: Thresholds) -> Finding:
        book = self._book
        if book is not None and book.known.holds(finding, book.name(finding.place.file)):
            self._known += finding.times
            self._summary.findings[finding.code].known += finding.times
            if self._gate.update_baseline:
                book.held.add(finding, book.name(finding.place.file))
            return replace(finding, known=True)
        if bar.counts is None or finding.severity < bar.counts:
            return finding
        rated = self._rates.of(finding.code)
        if rated is not None:
            rated.findings += finding.times
        # If no finding fails by itself, a baseline accepts everything above a note.
        least = Severity.WARNING if bar.fails is None else bar.fails
        if book is not None and self._gate.update_baseline and finding.severity >= least:
            (self._new if rated is None else rated.new).add(finding, book.name(finding.place.file))
        elif rated is None and bar.fails is not None:
            self._failing[finding.severity] += finding.times
            self._codes[finding.code] += finding.times
        return finding

    def _failing_words(self) -> str:
        """`3 errors and 1 warning in 2 rollouts that are in no baseline: SEQ301 (3), TOK101 (1)`."""
        total = self._failing.total()
        kinds = [many(self._failing[one], one.word) for one in sorted(self._failing, reverse=True)]
        which = f" that {'is' if total == 1 else 'are'} in no baseline" if self._book is not None else ""
        codes = [f"{code} ({number:,})" for code, number in self._codes.most_common(_CODES)]
        more = len(self._codes) - _CODES
        rest = f" and {many(more, 'more rule')}" if more > 0 else ""
        rollouts = self._rollouts or self._between
        where = f"in {many(rollouts, 'rollout')}" if rollouts else "of the log as a whole"
        where += " and between rows" if self._rollouts and self._between else ""
        return f"{listed(kinds)} {where}{which}: {', '.join(codes)}{rest}"


def _relative(file: str | None) -> str | None:
    """The file name relative to the working folder, if it is below it."""
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if file is not None and Path(file).is_relative_to(here) else file
