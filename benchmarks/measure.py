"""One run of one engine in a separate process: time, CPU seconds, memory."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT",
    "SHARED",
    "TOY",
    "Measured",
    "alternately",
    "engine",
    "knows_jobs",
    "run",
    "scan",
    "tokenizer_folder",
]

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
"""Real tokenizers and logs, if they are next to the checkout."""
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
WATCH_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """Time and memory of one run."""

    tokens: int
    rows: int
    different: int
    """Rows with tokens that re-encode differently (per turn: prompts that differ)."""
    seconds: float
    """From the moment everything is loaded to the last row."""
    wall: float
    """From the start of the process to its end."""
    cpu: float
    """Of all processes, loading included."""
    process_mb: float
    """The peak of the largest process."""
    all_mb: float | None
    """The peak of all processes together, shared pages counted once; None if it was not watched."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def tokenizer_folder(name: str = "qwen3") -> Path:
    """The folder of a real tokenizer, or of the toy one if that is missing."""
    places = (SHARED / "tokenizers" / name, ROOT / ".cache" / "tokenizers" / name)
    return next((folder for folder in places if folder.is_dir()), TOY)


Runner = Callable[[bool], Measured]
"""Runs an engine once; with True, watches the memory of all its processes."""


def alternately(
    runners: Mapping[str, Runner], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Measured]]:
    """Time and memory of each engine in each round; they take turns, so that a busy minute hits all of them.

    An extra round runs first, to warm file caches and watch the memory, and is left out of the times; with one
    round there is none. The first entry of each list is the watched run.
    """
    found: dict[str, list[Measured]] = {name: [] for name in runners}
    for number in range(rounds + 1 if rounds > 1 else 1):
        for name, runner in runners.items():
            one = runner(number == 0)
            found[name].append(one)
            say(f"round {number}: {name}: {one.rate:,.0f} tokens/s")
    return found


def scan(
    log: str,
    tokenizer: Path,
    jobs: int | None,
    watch: bool = False,
    cache: Path | None = None,
    options: Sequence[str] = (),
) -> Measured:
    """One `tito-audit scan` as a user runs it, with a JSON report of every finding.

    With None, it chooses the number of processes. Only `cache` is kept from run to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tito_audit", "scan", log, "-t", str(tokenizer), "--quiet"]
        command += ["--fail-on", "never", "--report", f"json={report}"]
        command += ["--jobs", str(jobs)] if jobs is not None and knows_jobs() else []
        command += options
        kept = {"TITO_AUDIT_CACHE": str(cache) if cache is not None else "off"}
        _, wall, spent, together = run(command, watch, kept)
        with report.open("rb") as file:
            found: dict[str, Any] = json.load(file)
    summary = found["summary"]
    rows = {finding["row"] for finding in found["findings"] if finding["code"].startswith("TOK")}
    return Measured(
        tokens=summary["tokens"],
        rows=summary["rollouts"],
        different=len(rows),
        seconds=summary["seconds"],
        wall=wall,
        cpu=spent.ru_utime + spent.ru_stime,
        process_mb=_mb(spent.ru_maxrss),
        all_mb=together,
    )


def engine(
    name: str, log: str, tokenizer: Path, workers: int = 1, tokens: int | None = None, watch: bool = False
) -> tuple[Measured, dict[str, Any]]:
    """One run of an engine of `engines.py`, and what it printed."""
    command = [sys.executable, "-m", "benchmarks.engines", name, log, "--tokenizer", str(tokenizer)]
    command += ["--workers", str(workers)] + (["--tokens", str(tokens)] if tokens else [])
    printed, wall, spent, together = run(command, watch)
    out: dict[str, Any] = json.loads(printed)
    measured = Measured(
        tokens=out["tokens"],
        rows=out["rows"],
        different=out["different"],
        seconds=out["seconds"],
        wall=wall,
        cpu=spent.ru_utime + spent.ru_stime,
        process_mb=_mb(spent.ru_maxrss),
        all_mb=together,
    )
    return measured, out


def knows_jobs() -> bool:
    """True if this scan can use several processes."""
    from tito_audit.cli.scan import scan as command

    return "jobs" in inspect.signature(command).parameters


def run(
    command: Sequence[str], watch: bool = False, variables: Mapping[str, str] | None = None
) -> tuple[bytes, float, Any, float | None]:
    """A command's output, wall seconds, resources used with its children, and their memory if watched.

    It keeps the byte code of its modules, as it does for users, even if this process may not.
    """
    environment = {**os.environ, **(variables or {}), "PYTHONDONTWRITEBYTECODE": ""}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    peak = [0.0]
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, ended, peak))
    if watch:
        watcher.start()
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, spent = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    ended.set()
    if watch:
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return printed, wall, spent, peak[0] or None


def _watch(pid: int, ended: threading.Event, peak: list[float]) -> None:
    while not ended.wait(WATCH_SECONDS):
        peak[0] = max(peak[0], sum(_held(one) for one in _family(pid)))


def _family(pid: int) -> list[int]:
    """A process and all its descendants, on Linux."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def _held(pid: int) -> float:
    """Megabytes of a process, shared pages divided among their processes; 0.0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _mb(maxrss: int) -> float:
    """Megabytes of the system's maxrss, which is in kilobytes, or in bytes on macOS."""
    return maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
