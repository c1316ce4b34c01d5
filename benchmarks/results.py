"""The measurements as Markdown: tables, the method, and the machine."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measure import Measured
from benchmarks.plan import Plan
from benchmarks.studies import FLOOR, LINEAR, LOADING, PER_TURN, SCAN, Cold, Comparison, Growth, exponent
from benchmarks.tables import spread, table

__all__ = ["busy", "cold_section", "comparison_section", "growth_section", "heading", "huge_section", "method"]

PACKAGES = ("fastokens", "tokenizers", "transformers", "minijinja", "jinja2", "numpy", "orjson", "pyarrow")

METHOD = (
    "Engines run in separate processes and take turns. Ratios are taken within each round, between "
    "engines with the same number of processes; their median is given.",
    "Seconds count from when libraries and tokenizers are loaded. Start-up has a separate column; "
    "CPU seconds include it. The scan is the command line with a JSON report of every finding.",
    "Memory is the peak of the largest process, then of all processes together (shared pages counted once).",
    "Logs are built from a seed: messages, tools, token ids, mask and logprobs; prose, code, JSON, tool calls, "
    "Chinese, emoji; conversations of 2, 10, 40 and 128 answers, each length a quarter of the tokens. In 12 % of "
    "the rows, 0.05 % of the sampled tokens, at least one, re-encode differently. No text occurs twice, so caches "
    "get no help; real logs, with groups of samples of one prompt, repeat far more.",
    f"*{PER_TURN}*: `apply_chat_template` on the history of each answer, and ids compared with the recorded "
    "ones, as frameworks do it, in one process or several. It is quadratic, so it ran on a sample (some rows of "
    "each length, up to four turns of each per process), and its time is scaled to the prompt tokens of all "
    "turns. Reading the file is not included.",
)
"""How to read the figures."""


def busy() -> str | None:
    """A warning if the machine had more work than cores."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    return (
        f"The machine was busy when this run began (load {load:.1f}, {cores} cores): absolute rates are too low, "
        "ratios less so, since engines take turns."
    )


def heading(
    tokenizer: Path, warning: str | None, title: str = "How fast a scan is", command: str = "make bench"
) -> str:
    """Machine, versions and date."""
    versions = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)) is not None)
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}` on {datetime.now(UTC):%Y-%m-%d}. {_machine()}, Python "
        f"{platform.python_version()}, {versions}. Tokenizer: {tokenizer.name}.",
        "",
        *([f"**{warning}**", ""] if warning else []),
    ]
    return "\n".join(lines)


def method(plan: Plan) -> str:
    """How to read the tables."""
    rounds = (
        f"Medians of {plan.rounds} rounds, in brackets the slowest and the fastest. An untimed round before "
        "them warms the file caches."
        if plan.rounds > 1
        else "One round without warm-up: rough figures."
    )
    lines = [
        "## How to read the rest",
        "",
        *(f"- {line}" for line in (rounds, *METHOD)),
        f"- *{LINEAR}*: each rollout rendered once (compiled jinja2) and encoded once (`encode_batch_fast`), "
        f"arrays compared, on about the first {plan.linear_tokens:,} tokens. *{FLOOR}*: the file's columns, "
        "nothing else.",
        "",
    ]
    return "\n".join(lines)


def comparison_section(found: Comparison) -> str:
    """Every engine on one log, and how many times faster the scan is with the same number of processes."""
    corpus = found.corpus
    rows = []
    for name, workers in found.runs:
        engine = (name, workers)
        timed = found.timed(engine)
        ratios = found.ratios(engine)
        sampled = name == PER_TURN
        rows.append(
            (
                name,
                workers,
                f"{timed[0].rows:,} rows sampled" if sampled else f"{timed[0].tokens:,}",
                spread([one.rate for one in timed]),
                "" if sampled else f"{statistics.median(one.cpu / one.tokens * 1e6 for one in timed):.2f}",
                _memory(found.runs[engine]),
                "" if sampled else f"{statistics.median(one.wall - one.seconds for one in timed):.1f}",
                "" if name == SCAN or not ratios else f"x{spread(ratios, 2)}",
            )
        )
    head = (
        "engine",
        "processes",
        "tokens",
        "tokens/s",
        "CPU s a M tokens",
        "memory, MB",
        "start-up s",
        "the scan is faster by",
    )
    parts = [
        f"## {found.shown}: {corpus.tokens:,} tokens in {corpus.rows:,} rollouts",
        "",
        table(head, rows),
        "",
    ]
    if found.disagreements:
        parts += [*(f"**Disagreement: {one}.**" for one in found.disagreements), ""]
    else:
        parts += ["The scan and the linear engine found exactly the rows whose tokens had been changed.", ""]
    return "\n".join(parts)


def growth_section(found: Growth) -> str:
    """Time and memory as one quantity grows, with the best-fitting exponents."""
    scans = [runs[1:] or runs for runs in found.scans]
    medians = [statistics.median(one.seconds for one in runs) for runs in scans]
    a_token = [seconds / runs[0].tokens for seconds, runs in zip(medians, scans, strict=True)]
    theirs = [runs[1:] or runs for runs in found.per_turn]
    rows = []
    for number, (at, runs) in enumerate(zip(found.at, scans, strict=True)):
        row = [
            f"{at:,}",
            f"{medians[number]:.2f}",
            spread([one.rate for one in runs]),
            _memory(found.scans[number]),
        ]
        if theirs:
            other = statistics.median(one.rate for one in theirs[number])
            row += [f"{other:,.0f}", f"x{statistics.median(one.rate for one in runs) / other:.3g}"]
        rows.append(row)
    head = [found.what, "seconds", "tokens/s", "memory, MB"]
    if theirs:
        head += ["every turn, tokens/s", "faster by"]
    seconds = medians if found.what == "tokens" else a_token
    said = f"{'Seconds' if found.what == 'tokens' else 'Seconds a token'} grow as {found.what}^"
    line = f"{said}{exponent(found.at, seconds):.2f}" if len(found.at) > 1 else "Only one size, nothing to fit"
    if theirs and len(found.at) > 1:
        slow = [1 / statistics.median(one.rate for one in runs) for runs in theirs]
        line += f"; the frameworks' way as {found.what}^{exponent(found.at, slow):.2f}"
    title = "with the size of the log" if found.what == "tokens" else "with the length of conversations"
    title += f", {found.processes} process{'es' * (found.processes > 1)}"
    return "\n".join([f"## Growth {title}", "", table(head, rows), "", f"{line}.", ""])


def cold_section(found: Cold) -> str:
    """The section on a few rows from the shell."""
    rows = [
        (what, spread([cpu for cpu, _ in runs], 2), spread([wall for _, wall in runs], 2))
        for what, runs in found.spent.items()
    ]
    loading = statistics.median(cpu for cpu, _ in found.spent[LOADING])
    without = statistics.median(cpu for cpu, _ in found.spent[found.without_cache])
    tables = table(("what", "CPU s", "wall s"), rows)
    line = f"{found.tokens:,} tokens. Without a cache and without loading: {without - loading:.2f} CPU s."
    return "\n".join(
        [f"## {'Ten' if found.rows == 10 else found.rows} rows, from the shell", "", tables, "", line, ""]
    )


def huge_section(size: int, one: Measured) -> str:
    """The section on memory for a file far larger than it."""
    row = (f"{size / 1e9:.1f} GB", f"{one.tokens:,}", f"{one.rate:,.0f}", _memory([one]))
    shown = table(("Parquet file", "tokens", "tokens/s", "memory, MB"), [row])
    return "\n".join(["## A large file", "", shown, "", "One run; the file repeats the row groups above.", ""])


def _memory(runs: Sequence[Measured]) -> str:
    """Memory of the largest process of any run, and of all processes of the watched run."""
    together = runs[0].all_mb
    largest = f"{max(one.process_mb for one in runs):,.0f}"
    return largest if together is None else f"{largest} / {together:,.0f}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> str:
    """The processor, its cores, the memory and the system."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text(encoding="utf-8") if cpu.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {sys.platform}"
