"""CPU time of the command line, run in this process: up to the first result, after it, and by stage.

    python -m benchmarks.stages LOG TOKENIZER [--clocks | --start]

The package knows nothing about it: functions are wrapped by name (`STAGES`), and a missing name is an
error. A stage's time is that of its functions, without calls to other stages. Clocks cost time
themselves, so the time of a whole scan is taken from a run without them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

__all__ = ["REST", "ROW_STAGES", "STAGES", "Clock", "Marks", "MissingName", "main", "named", "wrap"]

READING, FORMAT, RENDERING = "reading", "format", "rendering"
ENCODING, COMPARING, RULES, REST = "encoding", "comparing", "rules", "the rest"
STAGES: dict[str, tuple[str, ...]] = {
    READING: ("tito_audit.run.rows:LogGroup.rows",),
    FORMAT: ("tito_audit.run.rows:LogGroup.read_row",),
    RENDERING: (
        "tito_audit.render.fast.render:FastTemplate.run",
        "tito_audit.render.template:Template.run",
        "tito_audit.evidence.rendered:render_fast",
        "tito_audit.render.renderer:Renderer.render_chat_fast",
        "tito_audit.render.renderer:Renderer.render",
    ),
    ENCODING: (
        "tito_audit.tokens.encoders:FastEncoder.encode_batch",
        "tito_audit.tokens.encoders:ReferenceEncoder.encode_batch",
        "tito_audit.tokens.encoders:ReferenceEncoder.encode_single_threaded",
        "tito_audit.tokens.tokenizer:Tokenizer.encode_fast_batch",
    ),
    COMPARING: ("tito_audit.run.auditor:gather",),
    RULES: (
        "tito_audit.run.auditor:explain_differences",
        "tito_audit.run.auditor:check_explained",
        "tito_audit.run.auditor:witness",
        "tito_audit.run.auditor:count_rollout",
    ),
}
"""The functions of each stage, `module:name` or `module:class.name`; those of reading return rows one by one."""
ROW_STAGES = (*STAGES, REST)


class MissingName(LookupError):
    """A function that should be timed does not exist."""


@dataclass(slots=True)
class Marks:
    """CPU seconds of one run of the command line, all threads."""

    tokens: int = 0
    """Rows after the first result."""
    rows: int = 0
    start: float = 0.0
    """From the interpreter's start to the first result."""
    scan: float = 0.0
    """From the first result to the last."""
    end: float = 0.0
    """From the last result to the end of the command: writing the cache and the report."""
    stages: dict[str, float] = field(default_factory=dict)
    """Time of rows without findings by stage, scaled to the tokens of all rows."""
    faulty: float = 0.0
    """What rows with findings took beyond rows of the same length without."""


class Clock:
    """Charges CPU time to the stage whose function was entered last."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._stage, self._since = REST, process_time()

    def switch(self, stage: str) -> str:
        """Switch to this stage; returns the previous one."""
        now, before = process_time(), self._stage
        self.spent[before] += now - self._since
        self._stage, self._since = stage, now
        return before

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted for a stage."""

        @wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            before = self.switch(stage)
            try:
                return function(*given, **named)
            finally:
                self.switch(before)

        return timed

    def around_rows(self, stage: str, function: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """A function that returns an iterator, with the time of each step counted for a stage."""

        @wraps(function)
        def timed(*given: Any, **named: Any) -> Iterator[Any]:
            step = self.around(stage, iter(function(*given, **named)).__next__)
            while True:
                try:
                    value = step()
                except StopIteration:
                    return
                yield value

        return timed


def named(name: str) -> tuple[Any, str, Any]:
    """The owner of a function, its name there, and the function; raises MissingName if it does not exist."""
    module, _, path = name.partition(":")
    try:
        owner: Any = import_module(module)
        *above, last = path.split(".")
        for one in above:
            owner = getattr(owner, one)
        return owner, last, vars(owner)[last]
    except (ImportError, AttributeError, KeyError):
        raise MissingName(
            f"{name} is timed by benchmarks/stages.py but does not exist: name its replacement in STAGES"
        ) from None


def wrap(clock: Clock) -> Callable[[], None]:
    """Put a clock around the functions of all stages; returns a function that takes it away."""
    plain = [(stage, *named(name)) for stage, names in STAGES.items() for name in names]
    for stage, owner, name, function in plain:
        around = clock.around_rows if stage == READING else clock.around
        setattr(owner, name, around(stage, function))

    def unwrap() -> None:
        for _, owner, name, function in plain:
            setattr(owner, name, function)

    return unwrap


def watch(clock: Clock | None, only_start: bool = False) -> Marks:
    """Record the times of this process's scan; they are complete when it ends."""
    from tito_audit.run.scan import Scan

    marks, plain = Marks(), Scan.__iter__
    rows = _RowTimes(clock) if clock is not None else None

    def watched(scan: Scan) -> Iterator[Any]:
        for result in plain(scan):
            if not marks.start:
                marks.start = process_time()
                if only_start:
                    yield result
                    return
                if rows is not None:
                    rows.begin()
            else:
                marks.rows += 1
                marks.tokens += result.counts.get("tokens", 0)
                marks.scan = process_time() - marks.start
                if rows is not None:
                    rows.add(result)
            yield result
        if rows is not None:
            rows.settle(marks)

    Scan.__iter__ = watched
    return marks


class _RowTimes:
    """The times of rows, with and without findings separately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums = {True: defaultdict[str, float](float), False: defaultdict[str, float](float)}
        self._tokens = {True: 0, False: 0}

    def begin(self) -> None:
        """The first row is done."""
        self._clock.switch(REST)
        self._clock.spent.clear()

    def add(self, result: Any) -> None:
        """The next row is done."""
        self._clock.switch(REST)
        tokens = result.counts.get("tokens", 0)
        faulty = bool(result.findings) or not tokens
        self._tokens[faulty] += tokens
        for stage, seconds in self._clock.spent.items():
            self._sums[faulty][stage] += seconds
        self._clock.spent.clear()

    def settle(self, marks: Marks) -> None:
        """All rows are done."""
        right, all_tokens = max(self._tokens[False], 1), sum(self._tokens.values())
        marks.stages = {stage: self._sums[False][stage] * all_tokens / right for stage in ROW_STAGES}
        whole = sum(sum(sums.values()) for sums in self._sums.values())
        marks.faulty = whole - sum(marks.stages.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and print its times as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=main.__doc__)
    parser.add_argument("log")
    parser.add_argument("tokenizer")
    parser.add_argument("--clocks", action="store_true", help="by stage too")
    parser.add_argument("--start", action="store_true", help="end after the first result")
    asked = parser.parse_args(argv)
    clock = Clock() if asked.clocks else None
    if clock is not None:
        wrap(clock)
    marks = watch(clock, asked.start)
    with tempfile.TemporaryDirectory() as folder:
        _command(asked.log, asked.tokenizer, Path(folder) / "report.json")
    marks.end = process_time() - marks.start - marks.scan
    print(json.dumps(asdict(marks)))


def _command(log: str, tokenizer: str, report: Path) -> None:
    from tito_audit.cli import main as command

    sys.argv[1:] = ["scan", log, "-t", tokenizer, "--quiet", "--jobs", "1", "--fail-on", "never"]
    sys.argv[1:] += ["--no-config", "--report", f"json={report}"]
    os.environ.setdefault("TITO_AUDIT_CACHE", "off")
    try:
        command()
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    main()
