"""The goals for the scan's speed and what was reached: the first table of the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.budget import Budget
from benchmarks.studies import LINEAR, PER_TURN, SCAN, Cold, Comparison
from benchmarks.tables import table

__all__ = ["Reached", "goals_section"]


@dataclass(slots=True)
class Reached:
    """What a run has measured so far."""

    compared: list[Comparison] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    cold: Cold | None = None


@dataclass(frozen=True, slots=True)
class _Goal:
    """One goal: a lower or an upper bound."""

    what: str
    goal: float
    unit: str
    measured: Sequence[float]
    most: bool = False

    @property
    def reached(self) -> bool:
        value = statistics.median(self.measured)
        return value <= self.goal if self.most else value >= self.goal


def goals_section(found: Reached) -> str:
    """The table; empty if nothing in it was measured."""
    goals = [one for one in _goals(found) if one.measured]
    if not goals:
        return ""
    rows = [
        (
            one.what,
            f"{'at most' if one.most else 'at least'} {one.goal:g} {one.unit}",
            f"{_shown(statistics.median(one.measured))} {one.unit}",
            "yes" if one.reached else "**no**",
        )
        for one in goals
    ]
    return "\n".join(["## Goals", "", table(("goal", "", "measured", "reached"), rows), ""])


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _goals(found: Reached) -> Iterator[_Goal]:
    for one in found.budgets:
        goal = 10.0 if one.name.startswith("calls") else 8.0 if one.name.endswith("Parquet") else 6.0
        yield _Goal(f"{one.name}, one process", goal, "M tokens a CPU second", [one.rate / 1e6])
    for compared in found.compared:
        rates = [run.rate / 1e6 for run in compared.timed((SCAN, 2))] if (SCAN, 2) in compared.runs else []
        yield _Goal(f"training rows, {compared.shown}, two processes", 12, "M tokens a second", rates)
    for one in found.budgets:
        yield _Goal(f"{one.name}, compared with reading alone", 3, "times", [one.times_reading], most=True)
    for name, goal in ((LINEAR, 15.0), (PER_TURN, 300.0)):
        for compared in found.compared:
            for jobs in sorted({jobs for other, jobs in compared.runs if other == name}):
                what = f"{name}, {compared.shown}, {jobs} process{'es' * (jobs > 1)}"
                yield _Goal(f"faster than {what}", goal, "times", compared.ratios((name, jobs)))
    yield from _starts(found)


def _starts(found: Reached) -> Iterator[_Goal]:
    rows = [one for one in found.budgets if one.name == "training rows, JSONL"]
    for what, goal, at in (("with a full cache", 0.5, 0), ("with an empty cache", 1.2, 1)):
        yield _Goal(f"start-up {what}", goal, "CPU s", [one.start_up[at] for one in rows], most=True)
    if found.cold is not None:
        what = f"{found.cold.rows} rows from the shell, with a full cache"
        yield _Goal(what, 0.3, "CPU s", found.cold.warm, most=True)
