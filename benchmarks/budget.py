"""Where the CPU time of a scan goes: nanoseconds per token by stage, and the least that each could take."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.stages import ROW_STAGES, Marks
from benchmarks.tables import spread, table

__all__ = ["Budget", "budget_of", "budget_section"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Runs of the command line in one process on one log, by round."""

    name: str
    plain: tuple[Marks, ...]
    """Without clocks, with a full cache."""
    cold: tuple[Marks, ...]
    """Up to the first result, with an empty cache."""
    clocked: tuple[Marks, ...]
    floors: tuple[Mapping[str, float], ...]
    """CPU seconds for all rows, by stage."""

    @property
    def rate(self) -> float:
        """Tokens per CPU second, after the first row."""
        return statistics.median(one.tokens / one.scan for one in self.plain)

    @property
    def start_up(self) -> tuple[float, float]:
        """CPU seconds to the first result, with a full and with an empty cache."""
        warm, cold = (statistics.median(one.start for one in runs) for runs in (self.plain, self.cold))
        return warm, cold

    @property
    def times_reading(self) -> float:
        """The time as a multiple of reading alone."""
        pairs = zip(self.plain, self.floors, strict=True)
        return statistics.median(one.scan / floor["reading"] for one, floor in pairs)

    def stage(self, name: str) -> float:
        """Nanoseconds per token in a stage."""
        return statistics.median(one.stages[name] / one.tokens * 1e9 for one in self.clocked)

    def floor(self, name: str) -> float | None:
        """Nanoseconds per token in the stage's library alone; None if there is none."""
        pairs = zip(self.floors, self.plain, strict=True)
        found = [floor[name] / one.tokens * 1e9 for floor, one in pairs if name in floor]
        return statistics.median(found) if found else None


def budget_of(
    name: str, log: str, tokenizer: Path, cache: Path, rounds: int, say: Callable[[str], None]
) -> Budget:
    """The budget of a log; `cache` is a folder filled by a scan."""
    plain, cold, clocked, floors = [], [], [], []
    for number in range(rounds):
        plain.append(_marks(log, tokenizer, cache))
        with tempfile.TemporaryDirectory() as empty:
            cold.append(_marks(log, tokenizer, Path(empty), "--start"))
        clocked.append(_marks(log, tokenizer, cache, "--clocks"))
        command = [sys.executable, "-m", "benchmarks.floors", log, str(tokenizer)]
        floors.append(json.loads(measure.run(command)[0]))
        say(f"round {number}: budget, {name}: {plain[-1].tokens / plain[-1].scan:,.0f} tokens a CPU second")
    return Budget(name, tuple(plain), tuple(cold), tuple(clocked), tuple(floors))


def _marks(log: str, tokenizer: Path, cache: Path, *flags: str) -> Marks:
    command = [sys.executable, "-m", "benchmarks.stages", log, str(tokenizer), *flags]
    return Marks(**json.loads(measure.run(command, variables={"TITO_AUDIT_CACHE": str(cache)})[0]))


def budget_section(budgets: list[Budget]) -> str:
    """A table of stages, two columns for each log."""
    head = ["CPU ns a token", *(part for one in budgets for part in (one.name, "least"))]
    rows = [[stage, *(cell for one in budgets for cell in _cells(one, stage))] for stage in ROW_STAGES]
    rows.append(["faulty rows", *(cell for one in budgets for cell in (_ns(_faulty(one)), ""))])
    rows.append(["sum, with clocks", *(cell for one in budgets for cell in (_ns(_whole(one)), ""))])
    plain = [spread([run.scan / run.tokens * 1e9 for run in one.plain], 1) for one in budgets]
    rows.append(["a scan without clocks", *(cell for one in plain for cell in (one, ""))])
    lines = [
        "## Where the time goes",
        "",
        table(head, rows),
        "",
        "CPU time of one process after its first row, medians. *Least* is the library alone on the same rows, in "
        "the same run: orjson or pyarrow, minijinja, fastokens, numpy's comparison of ids. Stages are for "
        "rows without findings; *faulty rows* is what rows with findings take in addition. The clocks wrap "
        "functions from outside and cost some time themselves.",
        "",
    ]
    return "\n".join(lines)


def _cells(one: Budget, stage: str) -> tuple[str, str]:
    least = one.floor(stage)
    return _ns(one.stage(stage)), "" if least is None else _ns(least)


def _faulty(one: Budget) -> float:
    return statistics.median(run.faulty / run.tokens * 1e9 for run in one.clocked)


def _whole(one: Budget) -> float:
    sums = [(sum(run.stages.values()) + run.faulty) / run.tokens for run in one.clocked]
    return statistics.median(sums) * 1e9


def _ns(value: float) -> str:
    return f"{value:.1f}"
