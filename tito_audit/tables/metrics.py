"""The counts of a run as plain numbers, for experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.record.finding import Severity
from tito_audit.summary import Summary

PREFIX = "tito_audit/"
"""What the names of all numbers begin with, so that a tracker shows them together."""


def metrics_of(summary: Summary) -> dict[str, float]:
    """The counts of a run by name, all floats; what could not be counted is left out.

    Findings in a baseline are left out, as everywhere. Shares are between 0 and 1. Only codes that were found have
    a `findings/CODE`.
    """
    return {f"{PREFIX}{name}": float(value) for name, value in _numbers(summary)}


def _numbers(summary: Summary) -> Iterator[tuple[str, float]]:
    rows = summary.rollouts + summary.rows_unreadable
    yield "rollouts", summary.rollouts
    yield "rows_unreadable", summary.rows_unreadable
    yield "tokens", summary.tokens
    yield "generated_tokens", summary.generated_tokens
    for severity in sorted(Severity, reverse=True):
        new = summary.new.get(severity)
        yield f"{severity.word}s", 0 if new is None else new.findings
        if rows:
            yield f"share_with_{severity.word}s", 0 if new is None else min(new.rollouts / rows, 1)
    if rows:
        yield "share_compared", summary.compared / rows
    for code, count in sorted(summary.findings.items()):
        yield f"findings/{code}", count.new.total()
    if summary.gate is not None:
        yield "gate/failed", summary.gate.failed
        yield "gate/failing", summary.gate.failing
        yield "gate/known", summary.gate.known
    yield "seconds", summary.seconds
