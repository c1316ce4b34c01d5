"""Very large logs, scanned and repaired: memory of every process, speed, and whether the results are right.

    python -m benchmarks.large --parquet 50000000000 --jsonl 20000000000 --scratch FOLDER

A block of rows with planted faults is repeated with other digits in its texts and tokens, so that each row trains
something else and all copies of a row have the same findings. Beside tokens and messages a row has an image, as
rows of vision models do. The logs are removed when they are checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.large_logs import Block, write_arrow, write_gzip, write_lines, write_parquet
from benchmarks.measure import ROOT, TOY
from benchmarks.results import busy, heading

WATCH = 0.2


# Runs


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of the command."""

    name: str
    megabytes: tuple[float, ...]
    """The peak of each process, the command's own first."""
    seconds: float
    cpu: float
    report: dict[str, Any]
    bytes: int
    """Of the log."""


def command(name: str, log: Path, *options: str) -> Ran:
    """Scan or repair a log, and watch the memory of each process."""
    with tempfile.TemporaryDirectory(dir=log.parent) as folder:
        report = Path(folder) / "report.json"
        words = [
            sys.executable,
            "-m",
            "tito_audit",
            name,
            str(log),
            "-t",
            str(TOY),
            "--quiet",
            "--fail-on",
            "never",
        ]
        words += ["--report", f"json={report}", *options]
        started, before = time.perf_counter(), os.times()
        process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "TITO_AUDIT_CACHE": "off"})
        peaks: dict[int, float] = {}
        while process.poll() is None:
            for pid in family(process.pid):
                peaks[pid] = max(peaks.get(pid, 0.0), high_water(pid))
            time.sleep(WATCH)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with exit code {process.returncode}")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        said = orjson.loads(report.read_bytes())
    wall = time.perf_counter() - started
    return Ran(name, tuple(peaks.values()), wall, cpu, said, log.stat().st_size)


def family(pid: int) -> list[int]:
    """A process and all its descendants, on Linux."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def high_water(pid: int) -> float:
    """The most megabytes that a process has held so far; 0.0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


# Checks


def counts(summary: dict[str, Any]) -> Counter[str]:
    """Findings by code and severity."""
    found: Counter[str] = Counter()
    for code, of_code in summary["findings"].items():
        for severity in ("error", "warning", "note"):
            found[f"{code} {severity}"] = of_code.get(severity, 0)
    return Counter({name: count for name, count in found.items() if count})


def missed(block: Block, copies: int, report: dict[str, Any]) -> int:
    """How many planted faults have no finding in their row."""
    found = {finding["row"] for finding in report["findings"]}
    places = [at for at, fault in enumerate(block.faults) if fault]
    return sum(copy * len(block.rows) + at not in found for copy in range(copies) for at in places)


def differing(log: Path, repaired: Path, changed: Sequence[dict[str, Any]]) -> list[str]:
    """Columns of the repaired table with a change that the report does not name, by pyarrow alone."""
    from pyarrow import parquet

    named: dict[str, set[int]] = {}
    for kind in changed:
        rows = {row for start, stop in kind["rows"] for row in range(start, stop)}
        for column in kind["columns"]:
            named.setdefault(column.split(".")[0].split("[")[0], set()).update(rows)
    files = [parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) for path in (log, repaired)]
    about = [file.metadata for file in files]
    if about[0].num_row_groups != about[1].num_row_groups:
        return ["row groups"]
    wrong: set[str] = set()
    row = 0
    for group in range(about[0].num_row_groups):
        for name in _stored_anew(log, repaired, [one.row_group(group) for one in about]):
            old, new = (
                file.iter_batches(64, row_groups=[group], columns=[name], use_threads=False) for file in files
            )
            if any(at not in named.get(name, ()) for at in _differing_rows(old, new, name, row)):
                wrong.add(name)
        row += about[0].row_group(group).num_rows
    return sorted(wrong)


def _stored_anew(log: Path, repaired: Path, groups: Sequence[Any]) -> list[str]:
    """The columns of a row group that are not stored in the same bytes."""
    found: dict[str, None] = {}
    with log.open("rb", 0) as old, repaired.open("rb", 0) as new:
        for at in range(groups[0].num_columns):
            chunks = [group.column(at) for group in groups]
            parts = [_blocks(file, chunk) for file, chunk in zip((old, new), chunks, strict=True)]
            sizes = {chunk.total_compressed_size for chunk in chunks}
            if len(sizes) > 1 or any(one != other for one, other in zip(*parts, strict=True)):
                found[chunks[0].path_in_schema.split(".")[0]] = None
    return list(found)


def _blocks(file: Any, chunk: Any) -> Iterator[bytes]:
    """The bytes of a column chunk."""
    start, left = chunk.data_page_offset, chunk.total_compressed_size
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    while left > 0:
        file.seek(start)
        block = file.read(min(left, _BLOCK))
        yield block
        start, left = start + _BLOCK, left - _BLOCK


def _differing_rows(old: Iterator[Any], new: Iterator[Any], name: str, row: int) -> Iterator[int]:
    for one, other in zip(old, new, strict=True):
        if not one.equals(other):
            yield from (row + at for at in range(len(one)) if one[name][at] != other[name][at])
        row += len(one)


_Writer = Callable[[Path, Block, int, int], int]


def _large_parquet(path: Path, block: Block, size: int, image_bytes: int) -> int:
    return write_parquet(path, block, size, image_bytes * 2, size // 9)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the logs one by one, scan and repair each, check the results, and print a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=main.__doc__)
    parser.add_argument("--parquet", type=int, default=50_000_000_000, help="bytes of the Parquet file; 0: none")
    parser.add_argument("--jsonl", type=int, default=20_000_000_000, help="bytes of the JSONL.gz file; 0: none")
    parser.add_argument("--others", type=int, default=2_000_000_000, help="bytes of .zst, .json, Arrow; 0: none")
    parser.add_argument("--quick", action="store_true", help="logs of 1 GB and of 250 MB")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build", help="a folder with room for two copies")
    parser.add_argument("--jobs", default="2")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.parquet, asked.jsonl, asked.others = 1_000_000_000, 1_000_000_000, 250_000_000
    logs: list[tuple[str, int, _Writer]] = [
        ("large.parquet", asked.parquet, _large_parquet),
        ("large.jsonl.gz", asked.jsonl, write_gzip),
        ("large.jsonl.zst", asked.others, write_lines),
        ("large.json", asked.others, write_lines),
        ("large.arrow", asked.others, write_arrow),
        ("large.arrows", asked.others, write_arrow),
    ]
    asked.scratch.mkdir(parents=True, exist_ok=True)
    print(heading(TOY, busy(), "Very large logs", "make bench-large"), *_HEAD, *_TABLE, sep="\n")
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        for name, size, write in logs:
            for line in _measured(Path(folder) / name, size, write, asked.jobs) if size else ():
                print(line, flush=True)


def _measured(log: Path, size: int, write: _Writer, jobs: str) -> Iterator[str]:
    """The lines of the page about one log."""
    block, out = Block(), log.with_name(f"out-{log.name}")
    copies = write(log, block, size, _IMAGE)
    scanned = command("scan", log, "-j", jobs)
    planted, whole = copies * sum(map(bool, block.faults)), log.suffix != ".json"
    lost = missed(block, copies, scanned.report) if whole else 0
    found = f"{planted - lost:,} of {planted:,}" if whole else ""
    yield _line(log.name, scanned, found, ())
    repaired = command("repair", log, "-o", str(out), "-j", jobs)
    before, seen = (counts(one) for one in (repaired.report["before"], scanned.report["summary"]))
    same = before == Counter({name: count for name, count in seen.items() if not name.startswith(_OF_ALL_LOGS)})
    wrong = differing(log, out, repaired.report["changed"]) if log.suffix == ".parquet" else []
    yield _line(log.name, repaired, found if same else "others than the scan", wrong)
    log.unlink()
    out.unlink()


_IMAGE = 170_000
_OF_ALL_LOGS = "REC009"
"""The rule that compares rows with each other, which a repair does only when asked."""
_BLOCK = 4 << 20
_HEAD = (
    "Parquet has one large row group, JSONL.gz many gzip members, Arrow record batches of a thousand rows. A row",
    "has an image beside its tokens. Each log is scanned and repaired; the repaired Parquet file is compared with",
    "the log by pyarrow alone. Memory is the peak of the largest process (VmHWM).",
    "",
)
_TABLE = (
    "| log | run | GB | largest process | minutes | CPU minutes | MB/CPU s | faults found | changed unasked |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
)


def _line(name: str, ran: Ran, found: str, wrong: Sequence[str]) -> str:
    peak, minutes, cpu = f"{max(ran.megabytes):,.0f} MB", f"{ran.seconds / 60:.1f}", f"{ran.cpu / 60:.1f}"
    speed = f"{ran.bytes / 1e6 / ran.cpu:.0f}"
    cells = (
        name,
        ran.name,
        f"{ran.bytes / 1e9:.1f}",
        peak,
        minutes,
        cpu,
        speed,
        found,
        ", ".join(wrong) or "none",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
