"""`make bench`: build the logs, run the engines, write the table and the figure."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import ROOT, tokenizer_folder
from benchmarks.plan import FULL, NORMAL, QUICK, Plan
from benchmarks.plot import plot
from benchmarks.results import busy, cold_section, comparison_section, growth_section, heading, huge_section
from benchmarks.studies import Comparison, Growth, Studies

__all__ = ["main"]

STUDIES = ("compare", "sizes", "lengths", "cold")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what was asked for and write it down; a study that is done is on the page at once."""
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
    figure = output.with_suffix(".svg") if output.name != "RESULTS.md" else output.with_name("results.svg")
    page = [heading(plan, tokenizer, warning)]
    compared, lengths = _measured(studies, asked.studies, plan, page, output)
    if compared is not None and plot(compared, lengths, figure):
        page.insert(1, f"![Rates of the engines, and how they change with longer conversations]({figure.name})\n")
    elif compared is not None:
        say("no figure: matplotlib is not installed (pip install -e '.[bench]')")
    text = _written(page, output)
    print(text)
    say(f"written to {output}")


def _measured(
    studies: Studies, wanted: Sequence[str], plan: Plan, page: list[str], output: Path
) -> tuple[Comparison | None, Growth | None]:
    """Run the studies, adding each to the page when it is done; the first comparison, and the lengths."""
    compared: list[Comparison] = []
    lengths: Growth | None = None
    for kind in plan.kinds if "compare" in wanted else ():
        compared.append(studies.comparison(kind))
        page.append(comparison_section(compared[-1]))
        _written(page, output)
    for jobs in studies.jobs if "sizes" in wanted else ():
        page.append(growth_section(studies.sizes(jobs)))
        _written(page, output)
    if "lengths" in wanted:
        lengths = studies.lengths()
        page.append(growth_section(lengths))
        _written(page, output)
    if "cold" in wanted:
        page.append(cold_section(studies.cold()))
    if plan.huge_gb:
        page.append(huge_section(*studies.huge()))
    return (compared[0] if compared else None), lengths


def _written(page: Sequence[str], output: Path) -> str:
    text = "\n".join(page).rstrip() + "\n"
    output.write_text(text, encoding="utf-8")
    return text


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
    size.add_argument("--quick", action="store_true", help="a minute: 1 M tokens, one round; not into RESULTS.md")
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
        help="memory on a Parquet file of so many GB [10]",
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
