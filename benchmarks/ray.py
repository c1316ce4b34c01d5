"""`make bench-ray`: what a Ray cluster costs and gives, against processes of this machine, on the same logs."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import Factory, Shape
from benchmarks.measure import ROOT, TOY
from benchmarks.results import busy, heading
from benchmarks.tables import table

__all__ = ["Run", "main", "page"]

SHAPE = Shape(turns=(2, 10), words=60)
TOKENS, SHARDS = 3_000_000, 2_000
QUICK_TOKENS, QUICK_SHARDS = 400_000, 100
LOCAL, RAY = "processes of one machine", "Ray"

METHOD = (
    "The same rows as one log, and as a folder of many small logs. Each way scans them twice in one process: the "
    "first time loads everything, the second shows the steady speed.",
    "Ray is a cluster on this machine with one node for each worker, each with one CPU; the run joins it. Its "
    "nodes and the run share the cores, so two workers cannot be twice as fast as one here.",
    "*Run, CPU s* is the CPU time of the process that hands out chunks and merges results, which is the only part "
    "that more workers do not share.",
)


@dataclass(frozen=True, slots=True)
class Run:
    """Two scans of the same logs, one after the other."""

    logs: str
    way: str
    workers: int
    connect: float
    """Seconds until Ray could be used; 0 for processes."""
    first: float
    second: float
    """Seconds of the scans."""
    cpu: float
    """CPU seconds of the process that merges, in the second scan."""
    rows: int
    findings: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    asked = _parser().parse_args(argv)
    if asked.once:
        print(json.dumps(_once(**json.loads(asked.once))))
        return
    warning = busy()
    tokens, shards = (QUICK_TOKENS, QUICK_SHARDS) if asked.quick else (TOKENS, SHARDS)
    output = asked.output or (asked.scratch / "RAY.md" if asked.quick else Path(__file__).with_name("RAY.md"))
    asked.scratch.mkdir(parents=True, exist_ok=True)
    log = Path(Factory(asked.tokenizer, asked.scratch).corpus(SHAPE, tokens).jsonl)
    logs = {"one log": str(log), f"{shards:,} logs": str(_split(log, shards, asked.scratch))}
    runs: list[Run] = []
    for jobs in (1, 2):
        runs += [_measured(name, path, LOCAL, jobs, asked.tokenizer) for name, path in logs.items()]
    for nodes in (1, 2):
        with _cluster(nodes) as address:
            runs += [_measured(name, path, RAY, nodes, asked.tokenizer, address) for name, path in logs.items()]
    output.write_text(page(runs, asked.tokenizer, warning), encoding="utf-8")
    print(f"written to {output}", file=sys.stderr)


def page(runs: Sequence[Run], tokenizer: Path, warning: str | None) -> str:
    """The page with all runs."""
    lines = [heading(tokenizer, warning, "What a Ray cluster costs and gives", "make bench-ray")]
    lines += ["## How to read the table", "", *(f"- {one}" for one in METHOD), ""]
    for name in dict.fromkeys(run.logs for run in runs):
        mine = [run for run in runs if run.logs == name]
        assert len({(run.rows, run.findings) for run in mine}) == 1, "every way finds the same"
        lines += [f"## {name}: {mine[0].rows:,} rows, {mine[0].findings:,} findings", ""]
        head = ("way", "workers", "connect, s", "first scan, s", "second scan, s", "rows/s", "run, CPU s")
        lines += [table((*head, "rows per CPU s of the run"), map(_row, mine)), ""]
    return "\n".join(lines)


def _row(run: Run) -> tuple[object, ...]:
    return (
        run.way,
        run.workers,
        f"{run.connect:.1f}" if run.way == RAY else "",
        f"{run.first:.1f}",
        f"{run.second:.1f}",
        f"{run.rows / run.second:,.0f}",
        f"{run.cpu:.1f}",
        f"{run.rows / run.cpu:,.0f}" if run.way == RAY else "",
    )


def _measured(name: str, path: str, way: str, workers: int, tokenizer: Path, address: str | None = None) -> Run:
    """One way, in a process of its own."""
    asked = {"path": path, "tokenizer": str(tokenizer), "jobs": workers, "address": address}
    command = [sys.executable, "-m", "benchmarks.ray", "--once", json.dumps(asked)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = Run(name, way, workers, **json.loads(ended.stdout))
    print(f"{name}, {way}, {workers}: {found.first:.1f} s, {found.second:.1f} s", file=sys.stderr)
    return found


def _once(path: str, tokenizer: str, jobs: int, address: str | None) -> dict[str, Any]:
    """Two scans by this process."""
    from tito_audit import Settings, scan_rollouts
    from tito_audit.run.ray_tasks import connect_to_cluster

    settings = Settings(tokenizer=tokenizer, jobs=jobs)
    if address is not None:
        settings = Settings(tokenizer=tokenizer, engine="ray", address=address)
    found: dict[str, Any] = {}
    started = time.perf_counter()
    with ExitStack() as stack:
        if address is not None:
            stack.enter_context(connect_to_cluster(address))
        found["connect"] = time.perf_counter() - started
        for name in ("first", "second"):
            started, cpu, count, findings = time.perf_counter(), _cpu(), 0, 0
            for result in scan_rollouts(path, settings):
                count += not result.of_log
                findings += len(result.findings)
            found |= {name: time.perf_counter() - started, "cpu": _cpu() - cpu, "rows": count}
            found["findings"] = findings
    return found


def _cpu() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def _split(log: Path, shards: int, folder: Path) -> Path:
    """A folder with the rows of a log in many logs."""
    target = folder / f"{log.stem}-{shards}"
    target.mkdir(exist_ok=True)
    lines = log.read_bytes().splitlines(keepends=True)
    for number in range(shards):
        mine = lines[len(lines) * number // shards : len(lines) * (number + 1) // shards]
        (target / f"{number:05}.jsonl").write_bytes(b"".join(mine))
    return target


@contextmanager
def _cluster(nodes: int) -> Iterator[str]:
    """A cluster on this machine with so many nodes, of one CPU each; its address."""
    with tempfile.TemporaryDirectory(prefix="tb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        Path(folder, "ray").mkdir()
        from ray.cluster_utils import Cluster

        how = {"num_cpus": 1, "object_store_memory": 200 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**how, "include_dashboard": False})
        try:
            for _ in range(nodes - 1):
                cluster.add_node(**how)
            yield str(cluster.address)
        finally:
            cluster.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes; not written to RAY.md")
    parser.add_argument("--tokenizer", type=Path, default=TOY, metavar="DIR", help="[default: the toy one]")
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build" / "bench", help="where logs are built and kept"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="[default: benchmarks/RAY.md]")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
