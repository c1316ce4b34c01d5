"""`make bench`: build the logs, run the engines, write the table and the figure."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.budget import budget_section
from benchmarks.goals import Reached, goals_section
from benchmarks.logs import real_logs
from benchmarks.measure import ROOT, tokenizer_folder
from benchmarks.ordinary import ordinary_section
from benchmarks.plan import FULL, NORMAL, QUICK, Plan
from benchmarks.plot import plot
from benchmarks.results import (
    busy,
    cold_section,
    comparison_section,
    growth_section,
    heading,
    huge_section,
    method,
)
from benchmarks.studies import Growth, Studies
from benchmarks.users import users_section

__all__ = ["main"]

STUDIES = ("ordinary", "compare", "budget", "users", "sizes", "lengths", "cold")
NO_REAL_LOGS = "No recorded rollouts next to this checkout, so logs that models sampled are left out."


def main(argv: Sequence[str] | None = None) -> None:
    """Run the studies; the page is written after each of them."""
    asked = _parser().parse_args(argv)
    plan = _plan(asked)
    tokenizer = asked.tokenizer or tokenizer_folder()
    output = asked.output or (
        asked.scratch / "RESULTS.md" if asked.quick else Path(__file__).parent / "RESULTS.md"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    warning = busy()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {line}", file=sys.stderr, flush=True)

    studies = Studies(plan, tokenizer.resolve(), asked.scratch.resolve(), say)
    page = _Page(heading(tokenizer, warning), method(plan), output)
    lengths = _measured(studies, asked.studies, plan, page)
    figure = output.with_suffix(".svg") if output.name != "RESULTS.md" else output.with_name("results.svg")
    compared = page.reached.compared
    if compared and plot(compared[0], lengths, figure):
        page.figure = f"![Rates of the engines, and how they change with longer conversations]({figure.name})\n"
    elif compared:
        say("no figure: matplotlib is not installed (pip install -e '.[bench]')")
    page.add(f"The whole run took {(time.perf_counter() - started) / 60:.0f} minutes.")
    print(page.text())
    say(f"written to {output}")


@dataclass(slots=True)
class _Page:
    """The page so far: goals, how to read the rest, then each study."""

    heading: str
    method: str
    output: Path
    figure: str = ""
    sections: list[str] = field(default_factory=list)
    reached: Reached = field(default_factory=Reached)

    def text(self) -> str:
        """The page."""
        parts = [self.heading, goals_section(self.reached), self.method, self.figure, *self.sections]
        return "\n".join(part for part in parts if part).rstrip() + "\n"

    def add(self, section: str) -> None:
        """Add a section and write the page."""
        self.sections.append(section)
        self.output.write_text(self.text(), encoding="utf-8")


def _measured(studies: Studies, wanted: Sequence[str], plan: Plan, page: _Page) -> Growth | None:
    """Run the studies, adding each to the page when it is done; returns the study of lengths."""
    lengths: Growth | None = None
    if "ordinary" in wanted:
        page.add(ordinary_section(studies.ordinary()))
    for kind in plan.kinds if "compare" in wanted else ():
        page.reached.compared.append(studies.comparison(kind))
        page.add(comparison_section(page.reached.compared[-1]))
    if "budget" in wanted:
        page.reached.budgets = studies.budgets()
        page.add(budget_section(page.reached.budgets))
    if "users" in wanted:
        page.add(users_section(studies.users(), None if any(real_logs()) else NO_REAL_LOGS))
    for jobs in studies.jobs if "sizes" in wanted else ():
        page.add(growth_section(studies.sizes(jobs)))
    if "lengths" in wanted:
        lengths = studies.lengths()
        page.add(growth_section(lengths))
    if "cold" in wanted:
        page.reached.cold = studies.cold()
        page.add(cold_section(page.reached.cold))
    if plan.huge_gb:
        page.add(huge_section(*studies.huge()))
    return lengths


def _plan(asked: argparse.Namespace) -> Plan:
    plan = QUICK if asked.quick else FULL if asked.full else NORMAL
    if asked.max_tokens:
        plan = plan.up_to(asked.max_tokens)
    if asked.rounds:
        plan = replace(plan, rounds=asked.rounds)
    return replace(plan, huge_gb=asked.huge or 0.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="two minutes: 1 M tokens, one round; not written to RESULTS.md"
    )
    size.add_argument("--full", action="store_true", help="growth up to 50 M tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the largest log [default: 10,000,000]")
    parser.add_argument("--rounds", type=int, metavar="N", help="that are timed [default: 5]")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="[default: all]")
    parser.add_argument(
        "--huge",
        type=float,
        nargs="?",
        const=10.0,
        metavar="GB",
        help="memory for a Parquet file of this many GB [10]",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="[default: Qwen3 if found, else the toy one]"
    )
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build" / "bench", help="where logs are built and kept"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="[default: benchmarks/RESULTS.md]")
    return parser


if __name__ == "__main__":
    main()
