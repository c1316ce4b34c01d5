"""The verdict of a scan in words, for reports that have one line for it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from tito_audit.record.finding import Result, Severity
from tito_audit.summary import Gate, RateCount, Summary
from tito_audit.terminal.words import many, rate_number


@dataclass(slots=True)
class FindingTally:
    """Counts of results that the summary lacks; known findings are included."""

    findings: Counter[Severity] = field(default_factory=Counter)
    rollouts: Counter[Severity] = field(default_factory=Counter)
    """Rollouts (and unreadable rows) with at least one finding of that severity."""
    of_logs: Counter[Severity] = field(default_factory=Counter)
    """Findings about a whole log."""
    between: Counter[Severity] = field(default_factory=Counter)
    """Rollouts with findings that compare them with others; they may be among `rollouts` too."""
    with_findings: int = 0
    """Rollouts (and unreadable rows) with any finding."""

    def add(self, result: Result) -> None:
        """Count one result."""
        severities = [finding.severity for finding in result.findings]
        self.findings.update(severities)
        if result.between_rows:
            self.between.update(set(severities))
            return
        if result.of_log:
            self.of_logs.update(severities)
            return
        self.rollouts.update(set(severities))
        self.with_findings += bool(severities)

    def words(self, summary: Summary) -> list[tuple[Severity, str]]:
        """`4 errors in 2 of 6 rollouts`, `1 warning in 1 of 6`, the worst first; empty if nothing was found.

        About a whole log: `1 error in the log as a whole (6 rollouts)`, `2 errors in 1 of 6 rollouts and in the …`
        """
        rows = summary.rollouts + summary.rows_unreadable
        present = [severity for severity in sorted(Severity, reverse=True) if self.findings[severity]]
        of_all = [many(rows, "rollout"), *[f"{rows:,}"] * len(present)]
        return [
            (severity, f"{many(self.findings[severity], severity.word)} in {self._where(severity, of)}")
            for severity, of in zip(present, of_all, strict=False)
        ]

    def _where(self, severity: Severity, of: str) -> str:
        alone, between = self.rollouts[severity], self.between[severity]
        rollouts = f"{alone or between:,} of {of}" + (" and between rows" if alone and between else "")
        if not self.of_logs[severity]:
            return rollouts
        log = "the log as a whole" if self.of_logs[severity] == 1 else "logs as a whole"
        return f"{rollouts} and in {log}" if alone or between else f"{log} ({of})"


def severities(summary: Summary) -> dict[Severity, int]:
    """The number of findings of each severity, known ones included, the worst first."""
    worst_first = sorted(Severity, reverse=True)
    return {one: sum(getattr(count, one.word) for count in summary.findings.values()) for one in worst_first}


def known(summary: Summary) -> int:
    """The number of findings that are in the baseline."""
    return sum(count.known for count in summary.findings.values())


def verdict(summary: Summary) -> str:
    """One or two words: `failed`, `passed`, `findings`, `clean`, `nothing compared` or `nothing audited`.

    Only a gate says `passed` or `failed`. A log in which nothing could be audited or compared neither passes nor
    is clean.
    """
    if summary.gate is not None and summary.gate.failed:
        return "failed"
    if summary.without_ids == summary.rollouts and not summary.findings:
        return "nothing audited"
    if nothing_compared(summary):
        return "nothing compared"
    if summary.gate is not None:
        return "passed"
    return "findings" if summary.findings else "clean"


def nothing_compared(summary: Summary) -> bool:
    """Whether nothing was found because nothing was compared, which says nothing about the log."""
    return not summary.findings and summary.uncompared > 0 and not summary.compared


def uncompared_words(summary: Summary) -> str:
    """`23 rules need a tokenizer: pass -t NAME`; or that the given one does not fit, if that is the reason."""
    lacking = sum(
        any("no tokenizer" in reason for reason in skipped.because) for skipped in summary.skipped.values()
    )
    if not lacking:
        return "the tokenizer does not fit the log (REC007)"
    return f"{many(lacking, 'rule')} {'needs' if lacking == 1 else 'need'} a tokenizer: pass -t NAME"


def verdict_words(summary: Summary) -> str:
    """`failed: 4 errors, 1 warning, 2 notes (3 of them known); 6 rollouts audited`."""
    found = [many(number, one.word) for one, number in severities(summary).items() if number]
    what = ", ".join(found) or "nothing found"
    if known(summary):
        what += f" ({known(summary):,} of them known)"
    parts = [f"{verdict(summary)}: {what}", f"{many(summary.rollouts - summary.without_ids, 'rollout')} audited"]
    if summary.rows_unreadable:
        parts.append(f"{many(summary.rows_unreadable, 'row')} unreadable")
    if summary.uncompared:
        parts.append(f"nothing compared in {summary.uncompared:,}, as {uncompared_words(summary)}")
    if summary.without_ids:
        parts.append(f"nothing to audit in {summary.without_ids:,} without token ids")
    if summary.skipped:
        parts.append(f"{many(len(summary.skipped), 'rule')} could not look everywhere")
    return "; ".join(parts)


def baseline_words(gate: Gate | None) -> str:
    """`3 known findings left out, as the baseline b.json holds them; 2 findings of it gone`; empty without one."""
    if gate is None or gate.baseline is None:
        return ""
    words = f"{many(gate.known, 'known finding')} left out, as the baseline {gate.baseline} holds them"
    return words + (f"; {many(gate.gone, 'finding')} of it gone" if gate.gone else "")


def rate_words(rate: RateCount) -> str:
    """`TOK=0.001: 41 findings in 20,000 generated tokens, 0.00205: too many`."""
    often = f", {rate_number(rate)}" if math.isfinite(rate.rate) else ""
    found = f"{many(rate.findings, 'finding')} in {rate.of:,} {rate.unit}"
    return f"{rate.limit}: {found}{often}: {'too many' if rate.failed else 'passed'}"
