"""Logs as users have them, scanned from the shell with an empty and a full cache, next to other engines."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import measure
from benchmarks.logs import UserLog
from benchmarks.measure import Measured
from benchmarks.tables import spread, table

__all__ = ["UserRuns", "per_turn", "user_runs", "users_section"]

SCAN, COLD, LINEAR, PER_TURN, FLOOR = "scan", "scan, empty cache", "linear", "every turn", "reading"
Engine = tuple[str, int]
"""What ran, and in how many processes."""


@dataclass(frozen=True, slots=True)
class UserRuns:
    """Runs on one log, round by round."""

    log: UserLog
    runs: Mapping[Engine, Sequence[Measured]]

    def faster(self, name: str, jobs: int) -> list[float]:
        """How many times faster than an engine with the same number of processes, in each round."""
        pairs = zip(self.runs[SCAN, jobs], self.runs.get((name, jobs), ()), strict=False)
        return [mine.rate / its.rate for mine, its in pairs if its.rate]


def user_runs(
    logs: Sequence[UserLog], cache: Path, jobs: Sequence[int], rounds: int, say: Callable[[str], None]
) -> list[UserRuns]:
    """All runs; engines take turns on each log. `cache` is the cache folder of the scans."""
    found = []
    for log in logs:
        measure.scan(log.path, Path(log.tokenizer), 1, cache=cache)  # fills the cache
        runs: dict[Engine, list[Measured]] = {}
        for _ in range(rounds):
            for engine, run in _engines(log, cache, jobs).items():
                runs.setdefault(engine, []).append(run())
        tokens = runs[SCAN, 1][0].tokens
        for engine in runs:
            if engine[0] in (FLOOR, PER_TURN):
                runs[engine] = [replace(one, tokens=tokens) for one in runs[engine]]
        found.append(UserRuns(log, runs))
        say(f"{log.name}: {statistics.median(one.rate for one in runs[SCAN, 1]):,.0f} tokens/s")
    return found


def _engines(log: UserLog, cache: Path, jobs: Sequence[int]) -> dict[Engine, Callable[[], Measured]]:
    tokenizer = Path(log.tokenizer)
    engines: dict[Engine, Callable[[], Measured]] = {(COLD, 1): partial(_cold, log)}
    for number in jobs:
        engines[SCAN, number] = partial(measure.scan, log.path, tokenizer, number, cache=cache)
    engines[FLOOR, 1] = lambda: measure.engine("floor", log.path, tokenizer)[0]
    for number in jobs if log.compared else ():
        engines[LINEAR, number] = partial(_linear, log, number)
        engines[PER_TURN, number] = partial(per_turn, log.path, tokenizer, log.prompt_tokens, number)
    return engines


def _cold(log: UserLog) -> Measured:
    with tempfile.TemporaryDirectory() as empty:
        return measure.scan(log.path, Path(log.tokenizer), 1, cache=Path(empty))


def _linear(log: UserLog, jobs: int) -> Measured:
    return measure.engine("linear", log.path, Path(log.tokenizer), jobs, 300_000)[0]


def per_turn(
    log: str, tokenizer: Path, prompt_tokens: Mapping[str, int], jobs: int, watch: bool = False, tokens: int = 0
) -> Measured:
    """The sampled time, scaled by length to the prompt tokens of all turns of a log.

    `tokens` are those of the log.
    """
    one, out = measure.engine("per-turn", log, tokenizer, jobs, watch=watch)
    scale = {length: prompt_tokens[length] / out["encoded"][length] for length in out["encoded"]}
    seconds = sum(out["spent"][length] * scale[length] for length in scale)
    return replace(one, tokens=tokens, seconds=seconds, wall=one.wall - out["seconds"] + seconds)


def users_section(found: Sequence[UserRuns], skipped: str | None) -> str:
    """A row for each log and number of processes."""
    head = (
        *("log", "ids", "processes", "from the shell, s", "with an empty cache, s", "start-up s", "ids/s"),
        *("CPU s a M ids", "reading alone takes", "faster than linear by", "than every turn by"),
    )
    rows = [_row(one, jobs) for one in found for name, jobs in one.runs if name == SCAN]
    lines = ["## Logs as users have them", "", table(head, rows), ""]
    lines += [f"- {one.log.name}: {one.log.note}." for one in found if one.log.note]
    lines += [f"- {skipped}"] if skipped else []
    lines += [
        "- Seconds are wall-clock time of the whole command; *start-up* is the part that is not scanning. "
        "*Reading alone* is its share of the scan's seconds, in one process. Linear and every turn are as above, "
        "with the same number of processes, on samples. Ids are those in the log: in a log of calls each prompt "
        "repeats what came before, so there are more ids than tokens in the conversations.",
        "- Copies of recorded rows differ in their digits and in the number that ends the first question; "
        "everything else in them repeats, so caches help more than on the built logs.",
        "",
    ]
    return "\n".join(lines)


def _row(one: UserRuns, jobs: int) -> list[object]:
    runs = one.runs[SCAN, jobs]
    reading = [floor.seconds / mine.seconds for floor, mine in zip(one.runs[FLOOR, 1], runs, strict=True)]
    faster = [one.faster(name, jobs) for name in (LINEAR, PER_TURN)]
    cold = [run.wall for run in one.runs.get((COLD, jobs), ())]
    return [
        one.log.name,
        f"{runs[0].tokens:,}",
        jobs,
        spread([run.wall for run in runs], 2),
        spread(cold, 2) if cold else "",
        spread([run.wall - run.seconds for run in runs], 2),
        spread([run.rate for run in runs]),
        f"{statistics.median(run.cpu / run.tokens * 1e6 for run in runs):.2f}",
        f"{statistics.median(reading):.0%}" if jobs == 1 else "",
        *(f"x{spread(ratios, 1)}" if ratios else "" for ratios in faster),
    ]
