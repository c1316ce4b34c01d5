"""The verdict of a scan in words, for reports that have one line for it."""

from __future__ import annotations

from tito_audit.record.finding import Severity
from tito_audit.summary import Gate, Summary

__all__ = ["baseline_words", "known", "many", "severities", "verdict", "verdict_words"]


def many(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def severities(summary: Summary) -> dict[Severity, int]:
    """How many findings of each severity there are, known ones with them, the worst first."""
    worst_first = sorted(Severity, reverse=True)
    return {one: sum(getattr(count, one.word) for count in summary.findings.values()) for one in worst_first}


def known(summary: Summary) -> int:
    """How many findings a baseline holds."""
    return sum(count.known for count in summary.findings.values())


def verdict(summary: Summary) -> str:
    """One or two words: `failed`, `passed`, `findings`, `clean` or `nothing audited`.

    `passed` and `failed` are said by a gate only, and a log in which nothing could be looked at is neither
    passed nor clean.
    """
    if summary.gate is not None and summary.gate.failed:
        return "failed"
    if summary.without_ids == summary.rollouts and not summary.findings:
        return "nothing audited"
    if summary.gate is not None:
        return "passed"
    return "findings" if summary.findings else "clean"


def verdict_words(summary: Summary) -> str:
    """`failed: 4 errors, 1 warning, 2 notes (3 of them known); 6 rollouts audited`."""
    found = [many(number, one.word) for one, number in severities(summary).items() if number]
    what = ", ".join(found) or "nothing found"
    if known(summary):
        what += f" ({known(summary):,} of them known)"
    parts = [f"{verdict(summary)}: {what}", f"{many(summary.rollouts - summary.without_ids, 'rollout')} audited"]
    if summary.rows_unreadable:
        parts.append(f"{many(summary.rows_unreadable, 'row')} unreadable")
    if summary.without_ids:
        parts.append(f"nothing to audit in {summary.without_ids:,} without token ids")
    if summary.skipped:
        parts.append(f"{many(len(summary.skipped), 'rule')} could not look everywhere")
    return "; ".join(parts)


def baseline_words(gate: Gate | None) -> str:
    """`3 known findings are left out (baseline.json); 2 of it are gone`; empty without a baseline."""
    if gate is None or gate.baseline is None:
        return ""
    fixed = sum(one.times for one in gate.fixed)
    words = f"{many(gate.known, 'known finding')} left out, as the baseline {gate.baseline} holds them"
    return words + (f"; {many(fixed, 'finding')} of it gone" if fixed else "")
