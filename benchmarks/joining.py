"""`make bench-joining`: how fast calls in rows of their own are joined, and in how much memory."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.call_logs import CallLog, Shape, call_log
from benchmarks.measure import ROOT, TOY, Measured, run, scan
from benchmarks.results import busy, heading
from benchmarks.studies import exponent
from benchmarks.tables import table

__all__ = ["Joining", "main", "page", "study"]

SHORT, LONG = Shape(turns=3, words=2), Shape(turns=8, words=340)
SIZES = (10_000, 100_000, 500_000, 2_000_000)
HUGE = 500_000
"""Larger logs are only read as plain lines."""
LONG_SIZES = (1_000, 4_000, 16_000)
QUICK_SIZES, QUICK_LONG_SIZES = (2_000, 10_000), (100, 400)
WHOLE = 10_000
"""Logs with up to this many rows are also scanned, joined and not."""
KINDS = ("jsonl", "jsonl.gz", "parquet")
FEW = 50
MB = 1 << 20

METHOD = (
    "Calls are rows of generic columns: ids of the whole prompt and of the sampled answer, without messages. Two "
    "thousand conversations are open at a time, four begin with the same prompt, and one answer in twenty comes "
    "back in other tokens.",
    "Joining is the first pass, which reads all rows and finds their conversations. It runs in a separate process "
    "that has joined a few rows before: CPU seconds, and the peak memory beyond what the process held before.",
    "*Its part of a scan* compares the CPU time of two whole scans, with `--no-join` and without; on the same "
    "log, one audits single calls and the other conversations.",
)


@dataclass(frozen=True, slots=True)
class Joining:
    """Time and memory to join one log."""

    log: CallLog
    found: str
    """What the command says about it."""
    seconds: float
    """Of CPU."""
    held: int
    """Bytes of memory."""
    scans: tuple[Measured, Measured] | None = None
    """The whole scan, joined and not; None if it was not run."""

    @property
    def share(self) -> float | None:
        """The additional CPU time of a scan that joins, as a share of it."""
        if self.scans is None:
            return None
        joined, apart = self.scans
        return 1 - apart.cpu / joined.cpu


def study(log: CallLog, warm: CallLog, tokenizer: Path, *, whole: bool) -> Joining:
    """Join one log, a small one before it; with `whole`, also scan all of it, joined and not."""
    printed, _, _, _ = run([sys.executable, "-m", "benchmarks.joining", "--once", str(log.path), str(warm.path)])
    found: dict[str, Any] = json.loads(printed)
    scans = None
    if whole:
        joined, apart = (scan(str(log.path), tokenizer, 1, options=more) for more in ((), ("--no-join",)))
        scans = joined, apart
    return Joining(log, found["found"], found["seconds"], found["held"], scans)


def _once(log: Path, warm: Path) -> dict[str, object]:
    """Join one log in this process, after another."""
    _joined(warm)
    before, began = _memory("VmRSS"), time.process_time()
    found = _joined(log)
    return {"found": found, "seconds": time.process_time() - began, "held": _memory("VmHWM") - before}


def _joined(path: Path) -> str:
    """Join a log; returns what the summary of a scan would say about it."""
    from tito_audit.join import Join
    from tito_audit.settings.model import Settings
    from tito_audit.storage import open_log

    join = Join.for_run(Settings(), [path])
    if join is None:
        raise RuntimeError(f"{path}: nothing is joined")
    next(iter(join.rows(open_log(path))))
    return " ".join(join.joined_notices()).replace(f"{path.parent}/", "")


def _memory(name: str) -> int:
    """Bytes that this process holds (`VmRSS`) or held at its peak (`VmHWM`), on Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# The page


def page(studies: Sequence[Joining], tokenizer: Path, warning: str | None) -> str:
    """All measurements, as Markdown."""
    head = heading(tokenizer, warning, title="How fast calls are joined", command="make bench-joining")
    parts = [head, "## How to read the tables", "", *(f"- {line}" for line in METHOD), ""]
    for (kind, keyed, long), some in _alike(studies).items():
        by = "by their key" if keyed else "by their history"
        parts += [
            f"## {'Long' if long else 'Short'} calls joined {by}, {kind}",
            "",
            _table(some),
            "",
            *_growth(some),
            "",
        ]
    return "\n".join(parts)


def _alike(studies: Sequence[Joining]) -> dict[tuple[str, bool, bool], list[Joining]]:
    """Studies of logs that differ only in size."""
    found: dict[tuple[str, bool, bool], list[Joining]] = {}
    for one in studies:
        long = one.log.ids / one.log.rows > 1000
        found.setdefault((one.log.kind, one.log.keyed, long), []).append(one)
    return found


def _table(studies: Sequence[Joining]) -> str:
    head = ("calls", "ids a call", "CPU s", "calls/s", "ns an id", "MB", "bytes a call", "its part of a scan")
    return table(
        head,
        [
            (
                f"{one.log.rows:,}",
                f"{one.log.ids / one.log.rows:,.0f}",
                f"{one.seconds:.2f}",
                f"{one.log.rows / one.seconds:,.0f}",
                f"{one.seconds / one.log.ids * 1e9:,.0f}",
                f"{one.held / MB:,.0f}",
                f"{one.held / one.log.rows:,.0f}",
                "" if one.share is None else f"{one.share:.0%}",
            )
            for one in studies
        ],
    )


def _growth(studies: Sequence[Joining]) -> list[str]:
    """How time and memory grow."""
    if len(studies) < 2:
        return []
    rows = [one.log.rows for one in studies]
    grows = exponent([one.log.ids for one in studies], [one.seconds for one in studies])
    a_row = statistics.linear_regression(rows, [one.held for one in studies]).slope
    said = studies[-1].found.removeprefix(f"{studies[-1].log.path}: ")
    return [f"CPU seconds grow as ids^{grows:.2f}, memory by {a_row:,.0f} bytes a call. Of the largest: {said}"]


# The command


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the page after each log."""
    asked = _parser().parse_args(argv)
    if asked.once:
        print(json.dumps(_once(*asked.once)))
        return
    warning, started = busy(), time.perf_counter()
    output = asked.output or (
        asked.scratch / "JOINING.md" if asked.quick else Path(__file__).with_name("JOINING.md")
    )

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {line}", file=sys.stderr, flush=True)

    studies: list[Joining] = []
    for log, warm in _logs(asked):
        studies.append(study(log, warm, asked.tokenizer, whole=log.rows <= WHOLE))
        say(f"{log.path.name}: {studies[-1].seconds:.1f} s, {studies[-1].held / log.rows:,.0f} bytes a call")
        output.write_text(page(studies, asked.tokenizer, warning), encoding="utf-8")
    say(f"written to {output}")


def _logs(asked: argparse.Namespace) -> Iterator[tuple[CallLog, CallLog]]:
    """The logs, each with a small one of its kind, built when needed; large ones are removed afterwards."""
    sizes = QUICK_SIZES if asked.quick else [size for size in SIZES if size <= asked.most]
    long = QUICK_LONG_SIZES if asked.quick else LONG_SIZES
    wanted = [(SHORT, size, keyed) for keyed in (False, True) for size in sizes]
    for shape, rows, keyed in (*wanted, *((LONG, size, False) for size in long)):
        made = []
        for kind in asked.kinds or (KINDS[:1] if asked.quick or rows > HUGE else KINDS):
            log, warm = (call_log(shape, n, kind, asked.scratch, keyed=keyed) for n in (rows, FEW))
            made.append(log.path)
            yield log, warm
        for path in made if rows > WHOLE or shape is LONG else ():
            path.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joining", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute; not written to JOINING.md")
    parser.add_argument("--most", type=int, default=SIZES[-1], metavar="N", help="calls of the largest log [2 M]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="[default: all; jsonl with --quick]")
    parser.add_argument("--tokenizer", type=Path, default=TOY, metavar="DIR", help="[default: the toy one]")
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build" / "bench", help="where logs are built and kept"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="[default: benchmarks/JOINING.md]")
    parser.add_argument("--once", nargs=2, type=Path, metavar=("LOG", "WARM"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
