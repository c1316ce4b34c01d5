"""The studies of the benchmark, each made of runs that take turns.

ordinary    what a further row of the logs that users have costs
comparison  the scan against the frameworks' way, a linear way and the floor, on one log
sizes       time and memory as the log grows
lengths     time as conversations grow and the log does not
cold        ten rows, from the shell
budgets     where the time of a scan goes
users       logs as users have them
huge        memory for a file that is far larger than it
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import log
from pathlib import Path

from benchmarks import measure
from benchmarks.budget import Budget, budget_of
from benchmarks.corpus import Corpus, Shape, built
from benchmarks.logs import logs_of_users
from benchmarks.measure import Measured
from benchmarks.ordinary import Cost, ordinary_study
from benchmarks.plan import Plan
from benchmarks.users import UserRuns, per_turn, user_runs

__all__ = ["LOADING", "Cold", "Comparison", "Growth", "Studies", "exponent"]

PER_TURN, LINEAR, FLOOR = "every turn, transformers", "linear, tokenizers", "floor: reading"
SCAN = "tito-audit scan"
CALLS = 10
"""Calls per conversation in the log of calls."""
LOADING = "loading the tokenizer alone"
FULL_CACHE = "with a full cache"
_STARTS = {
    "the interpreter with numpy": "import numpy",
    "importing all that a scan asks": "import tito_audit.run.scan; from tito_audit.rules import all_rules; "
    "from tito_audit.repairs import all_repairs; from tito_audit.formats import all_formats; "
    "all_rules(); all_repairs(); all_formats()",
    LOADING: "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])",
}
"""The parts of a scan's start-up, as code."""
Engine = tuple[str, int]
"""Its name and its number of processes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engines on one log, round by round; the first round is the watched one."""

    kind: str
    corpus: Corpus
    runs: Mapping[Engine, list[Measured]]
    disagreements: tuple[str, ...]
    """Engines that did not find exactly the rows that the builder had changed."""

    @property
    def shown(self) -> str:
        """The kind of file, for a title."""
        return "JSONL" if self.kind == "jsonl" else self.kind.title()

    def timed(self, engine: Engine) -> list[Measured]:
        """The rounds that count."""
        return _timed(self.runs[engine])

    def ratios(self, engine: Engine) -> list[float]:
        """How many times faster the scan was in each round, with the same number of processes."""
        ours = self.timed((SCAN, engine[1])) if (SCAN, engine[1]) in self.runs else []
        return [mine.rate / its.rate for mine, its in zip(ours, self.timed(engine), strict=False) if its.rate]


@dataclass(frozen=True, slots=True)
class Growth:
    """A scan, and optionally the frameworks' way, on corpora that differ in one quantity."""

    what: str
    at: tuple[int, ...]
    """Tokens of each corpus, or turns of each conversation."""
    processes: int
    scans: tuple[list[Measured], ...]
    per_turn: tuple[list[Measured], ...] = ()


@dataclass(frozen=True, slots=True)
class Cold:
    """Scans of a few rows, and the parts of the start-up separately."""

    rows: int
    tokens: int
    spent: Mapping[str, list[tuple[float, float]]]
    """CPU and wall seconds of each round, by what was run."""

    @property
    def without_cache(self) -> str:
        """The name of a scan without a cache."""
        return f"{_few(self.rows, 'JSONL')}, without a cache"

    @property
    def warm(self) -> list[float]:
        """CPU seconds of scans with a full cache."""
        return [cpu for cpu, _ in self.spent[f"{_few(self.rows, 'JSONL')}, {FULL_CACHE}"]]


def _few(rows: int, kind: str) -> str:
    return f"{SCAN} of {rows} rows, {kind}"


class Studies:
    """Runs the studies of a plan in a folder, where corpora are kept."""

    def __init__(self, plan: Plan, tokenizer: Path, scratch: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.scratch = scratch
        self.say = say
        self.jobs = (1, 2) if measure.knows_jobs() else (1,)
        sizes = [(Shape(), size) for size in dict.fromkeys((*plan.sizes, plan.tokens, plan.user_tokens))]
        lengths = [(Shape(turns=(turns,)), plan.turn_tokens) for turns in plan.turns]
        calls = Shape(turns=(CALLS,), calls=True), plan.tokens // 8  # each prompt repeats the last
        started = time.perf_counter()
        made = built([*sizes, *lengths, calls], tokenizer, scratch, jobs=2)
        say(
            f"corpora of {sum(corpus.tokens for corpus in made):,} tokens in {time.perf_counter() - started:.0f} s"
        )
        self._by_size = made[: len(plan.sizes)]
        self._by_length = made[len(sizes) : -1]
        self._calls = made[-1]
        by_size = {size: corpus for corpus, (_, size) in zip(made, sizes, strict=False)}
        self._main, self._user = by_size[plan.tokens], by_size[plan.user_tokens]

    def ordinary(self) -> dict[str, list[Cost]]:
        """What a further row of each ordinary log costs."""
        return ordinary_study(self.plan.ordinary_rows, self.plan.rounds, self.scratch / "ordinary", self.say)

    def comparison(self, kind: str) -> Comparison:
        """All engines on the main corpus as JSONL or Parquet; the quadratic one gives the same for both."""
        corpus, plan = self._main, self.plan
        path = corpus.jsonl if kind == "jsonl" else corpus.parquet
        runners: dict[Engine, measure.Runner] = {
            (SCAN, jobs): partial(measure.scan, path, self.tokenizer, jobs) for jobs in self.jobs
        }
        for name, word, tokens in ((LINEAR, "linear", plan.linear_tokens), (FLOOR, "floor", None)):
            for workers in (1, 2):
                runners[name, workers] = partial(self._engine, word, path, workers, tokens)
        if kind == "jsonl":
            for jobs in self.jobs:
                runners[PER_TURN, jobs] = partial(self._per_turn, corpus, jobs)
        named = {f"{kind}, {name}, {workers}": runner for (name, workers), runner in runners.items()}
        runs = measure.alternately(named, plan.rounds, self.say)
        by_engine = dict(zip(runners, runs.values(), strict=True))
        return Comparison(kind, corpus, by_engine, tuple(_disagreements(corpus, by_engine)))

    def sizes(self, jobs: int) -> Growth:
        """Scans of logs of growing size in this many processes."""
        at = tuple(one.tokens for one in self._by_size)
        return Growth("tokens", at, jobs, self._scans(self._by_size, jobs))

    def lengths(self) -> Growth:
        """Scans, and the frameworks' way, on logs of the same size with ever longer conversations."""
        runners: dict[str, measure.Runner] = {
            f"{turns} turns, every turn": partial(self._per_turn, corpus, 1)
            for turns, corpus in zip(self.plan.turns, self._by_length, strict=True)
        }
        theirs = measure.alternately(runners, self.plan.rounds, self.say)
        ours = self._scans(self._by_length, 1)
        return Growth("turns", self.plan.turns, 1, ours, tuple(theirs.values()))

    def cold(self, rows: int = 10) -> Cold:
        """Scans of a few rows from the shell, with no, an empty and a full cache, and parts of the start-up."""
        logs = self._first(rows)
        full = self.scratch / "cache"
        for _ in range(2):  # the second one fills it, with what only pays off for a tokenizer that is used again
            tokens = measure.scan(logs["JSONL"], self.tokenizer, None, cache=full).tokens
        spent: dict[str, list[tuple[float, float]]] = {}
        for _ in range(self.plan.rounds):
            for what, code in _STARTS.items():
                command = [sys.executable, "-c", code, str(self.tokenizer / "tokenizer.json")]
                _, wall, used, _ = measure.run(command, variables={"OPENBLAS_NUM_THREADS": "1"})
                spent.setdefault(what, []).append((used.ru_utime + used.ru_stime, wall))
            for kind, few in logs.items():
                with tempfile.TemporaryDirectory() as empty:
                    for kept, cache in (
                        ("without a cache", None),
                        ("with an empty cache", Path(empty)),
                        (FULL_CACHE, full),
                    ):
                        one = measure.scan(few, self.tokenizer, None, cache=cache)
                        spent.setdefault(f"{_few(rows, kind)}, {kept}", []).append((one.cpu, one.wall))
        return Cold(rows, tokens, spent)

    def _first(self, rows: int) -> dict[str, str]:
        """Logs of the first rows of the smallest corpus and of the calls."""
        found = {}
        for kind, source in (("JSONL", self._by_size[0]), ("calls", self._calls)):
            few = self.scratch / f"{rows}-{kind}.jsonl"
            with Path(source.jsonl).open("rb") as file:
                few.write_bytes(b"".join(islice(file, rows)))
            found[kind] = str(few)
        return found

    def budgets(self) -> list[Budget]:
        """Where the time goes, for training rows and for calls, as JSONL and Parquet."""
        cache = self.scratch / "cache"
        measure.scan(self._main.jsonl, self.tokenizer, 1, cache=cache)  # fills it
        logs = [
            (f"{what}, {kind}", log)
            for what, corpus in (("training rows", self._main), ("calls", self._calls))
            for kind, log in (("JSONL", corpus.jsonl), ("Parquet", corpus.parquet))
        ]
        return [budget_of(name, log, self.tokenizer, cache, self.plan.rounds, self.say) for name, log in logs]

    def users(self) -> list[UserRuns]:
        """Logs as users have them."""
        corpora = [(what, one.jsonl, one.parquet) for what, one in (("rows", self._user), ("calls", self._calls))]
        plan = self.plan
        logs = logs_of_users(corpora, self.tokenizer, self.scratch, plan.user_tokens)
        return user_runs(logs[:: plan.every], self.scratch / "cache", self.jobs, plan.rounds, self.say)

    def huge(self) -> tuple[int, Measured]:
        """The size of a Parquet file that repeats the main corpus, and one watched scan of it."""
        path = self.scratch / "huge.parquet"
        size = int(self.plan.huge_gb * 1e9)
        try:
            command = [sys.executable, "-m", "benchmarks.huge", self._main.parquet, str(path), str(size)]
            subprocess.run(command, cwd=measure.ROOT, check=True)
            written = path.stat().st_size
            self.say(f"a file of {written:,} bytes is there")
            return written, measure.scan(str(path), self.tokenizer, self.jobs[-1], watch=True)
        finally:
            path.unlink(missing_ok=True)

    def _scans(self, corpora: Sequence[Corpus], jobs: int) -> tuple[list[Measured], ...]:
        runners: dict[str, measure.Runner] = {
            f"{SCAN}, {jobs}, {Path(corpus.jsonl).stem}": partial(measure.scan, corpus.jsonl, self.tokenizer, jobs)
            for corpus in corpora
        }
        return tuple(measure.alternately(runners, self.plan.rounds, self.say).values())

    def _engine(self, word: str, log: str, workers: int, tokens: int | None, watch: bool) -> Measured:
        return measure.engine(word, log, self.tokenizer, workers, tokens, watch)[0]

    def _per_turn(self, corpus: Corpus, jobs: int, watch: bool) -> Measured:
        return per_turn(corpus.jsonl, self.tokenizer, corpus.prompt_tokens, jobs, watch, corpus.tokens)


def exponent(at: Sequence[float], seconds: Sequence[float]) -> float:
    """The b of the best fit seconds = a * at ** b: 1 is linear, 2 quadratic, 0 constant."""
    return statistics.linear_regression([log(x) for x in at], [log(y) for y in seconds]).slope


def _timed(runs: list[Measured]) -> list[Measured]:
    """The rounds that count: without the watched first one, if there are others."""
    return runs[1:] or runs


def _disagreements(corpus: Corpus, runs: Mapping[Engine, list[Measured]]) -> list[str]:
    """Where an engine's findings differ from the known faults of a log."""
    found = []
    for (name, workers), measured in runs.items():
        if name not in (SCAN, LINEAR):
            continue
        one = measured[0]
        expected = sum(row < one.rows for row in corpus.faulty)
        if one.different != expected:
            found.append(
                f"{name} ({workers}) found {one.different} of {one.rows} rows whose tokens differ from what "
                f"template and tokenizer write; {expected} were changed"
            )
    return found
