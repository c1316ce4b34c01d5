"""Very large logs, scanned and repaired: memory of every process, speed, and whether the results are right.

    python -m benchmarks.large --parquet 50000000000 --jsonl 20000000000 --scratch FOLDER

A block of rows with planted faults is repeated with other digits in its texts and tokens, so that each row trains
something else and all copies of a row have the same findings. Beside tokens and messages a row has an image, as
rows of vision models do. The logs are removed when they are checked.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.measure import ROOT, TOY
from benchmarks.planter import rows_of

ROWS = 300
"""Rows of a block."""
RATE = 0.2
_DIGITS = b"123456789"
_POOL = 16
_PATTERN = 4096
WATCH = 0.2
KINDS = {
    "token_ids": "int64",
    "loss_mask": "int64",
    "logprobs": "float64",
    "trainer_logprobs": "float64",
    "token_versions": "int64",
}
"""Lists of numbers and their types, as `datasets` writes them."""


class Block:
    """Rows with planted faults, and copies of them with other digits."""

    def __init__(self, tokenizer: str = str(TOY)) -> None:
        from tito_audit.tokens.load import load_tokenizer

        vocabulary = load_tokenizer(tokenizer).vocabulary
        digits = [vocabulary.ids_of_bytes(bytes([digit]))[0] for digit in _DIGITS]
        self._digits = np.array(digits)
        self._size = vocabulary.size
        made = [one for one in rows_of(tokenizer, 7, 0, ROWS, RATE, calls=False) if self._varies(one[0])]
        self.rows = [row for row, _ in made]
        self.faults = [fault for _, fault in made]
        """The fault of each row, or ""."""

    def _varies(self, row: dict[str, Any]) -> bool:
        """Whether other digits make another row of it."""
        return len(np.intersect1d(row["token_ids"], self._digits)) > 5

    def copy(self, number: int) -> list[dict[str, Any]]:
        """Copy `number` of all rows, whose messages are JSON text."""
        order = np.random.default_rng(number).permutation(9) if number else np.arange(9)
        ids = np.arange(1 << 20, dtype=np.int32)
        ids[self._digits] = self._digits[order]
        texts = bytes.maketrans(_DIGITS, bytes(_DIGITS[at] for at in order))
        return [self._copied(row, number, at, ids, texts) for at, row in enumerate(self.rows)]

    def _copied(self, row: dict[str, Any], number: int, at: int, ids: Any, texts: bytes) -> dict[str, Any]:
        said = row["messages"].encode().translate(texts).decode()
        return {**row, "id": f"{number}-{at}", "messages": said, "token_ids": ids[row["token_ids"]]}


def image(number: int, size: int, *, text: bool = False) -> bytes:
    """Bytes that stand for an image; a few different ones take turns.

    As text, they are base64 and cannot be compressed much further; else they repeat, so that a file system that
    compresses stores many of them.
    """
    draw = np.random.default_rng(number % _POOL)
    if text:
        return base64.b64encode(draw.bytes(size * 3 // 4))
    return (b"\x89PNG\r\n\x1a\n" + draw.bytes(_PATTERN - 8)) * (size // _PATTERN)


def table_of(block: Block, first: int, copies: int, image_bytes: int) -> Any:
    """Copies of the block as an Arrow table; images share their memory."""
    import pyarrow as pa

    rows = [row for number in range(first, first + copies) for row in block.copy(number)]
    words = [orjson.dumps(tools).decode() if (tools := row["tools"]) is not None else None for row in rows]
    columns = {
        "id": pa.array([row["id"] for row in rows]),
        "messages": pa.array([row["messages"] for row in rows]),
        "tools": pa.array(words),
        **{name: _lists(rows, name, kind) for name, kind in KINDS.items()},
    }
    if image_bytes:
        columns["image"] = _images(len(rows), image_bytes)
    return pa.table(columns)


def _lists(rows: Sequence[dict[str, Any]], name: str, kind: str) -> Any:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    return pa.array(values, pa.list_(getattr(pa, kind)()))


def _images(rows: int, size: int) -> Any:
    import pyarrow as pa

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pool = [pa.array([{"bytes": image(at, size), "path": f"{at}.png"}], kind) for at in range(_POOL)]
    return pa.chunked_array([pool[at % _POOL] for at in range(rows)], kind)


def write_parquet(path: Path, block: Block, size: int, image_bytes: int, large: int) -> int:
    """Write a Parquet file of about `size` bytes; returns how many copies of the block it has.

    A row group is one copy, and one is large: about `large` bytes.
    """
    from pyarrow import parquet

    done, writer, each = 0, None, 1
    tokens = [f"{name}.list.element" for name in KINDS]
    while writer is None or path.stat().st_size < size:
        copies = large // max(each, 1) if done == 2 else 1
        table = table_of(block, done, copies, image_bytes)
        if writer is None:
            codecs = {"messages": "zstd", "tools": "zstd", "id": "snappy"}
            codecs = {name: codecs.get(name, "none") for name in (*table.column_names, *tokens)}
            writer = parquet.ParquetWriter(path, table.schema, compression=codecs, use_dictionary=["tools"])
        writer.write_table(table, row_group_size=len(table))
        done += copies
        each = path.stat().st_size // done
    writer.close()
    return done


def write_gzip(path: Path, block: Block, size: int, image_bytes: int) -> int:
    """Write JSONL of about `size` compressed bytes, of many members; returns how many copies it has."""
    pool = [gzip.compress(image(at, image_bytes, text=True) + b'"}\n', 1, mtime=0) for at in range(_POOL)]
    done = 0
    with path.open("wb") as out:
        while out.tell() < size:
            for at, row in enumerate(block.copy(done)):
                out.write(gzip.compress(line_of(row)[:-1] + b',"image":"', 1, mtime=0))
                out.write(pool[at % _POOL])
            done += 1
    return done


def line_of(row: dict[str, Any]) -> bytes:
    """A row as JSON; messages that are not JSON break the whole line."""
    rest = orjson.dumps({**row, "messages": None}, option=orjson.OPT_SERIALIZE_NUMPY)
    return rest.replace(b'"messages":null', b'"messages":' + row["messages"].encode(), 1)


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


def expected(small: Sequence[Counter[str]], copies: int) -> Counter[str]:
    """The counts of a log of so many copies, from those of 1, 2 and 3 copies: a part of each is per log."""
    one, two, three = small
    names = {*one, *two, *three}
    uneven = {name for name in names if three[name] - two[name] != two[name] - one[name]}
    if uneven:
        raise RuntimeError(f"copies differ in {sorted(uneven)}")
    return Counter({name: one[name] + (copies - 1) * (two[name] - one[name]) for name in names})


def different(found: Counter[str], wanted: Counter[str]) -> list[str]:
    """Counts that are not as expected, in words."""
    return [
        f"{name}: {found[name]}, not {wanted[name]}"
        for name in sorted({*found, *wanted})
        if found[name] != wanted[name]
    ]


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
    wrong = [] if len({file.num_row_groups for file in files}) == 1 else ["row groups"]
    for name in files[0].schema_arrow.names:
        row = 0
        batches = [file.iter_batches(64, columns=[name], use_threads=False) for file in files]
        for old, new in zip(*batches, strict=True):
            apart = () if old.equals(new) else range(len(old))
            if any(row + at not in named.get(name, ()) and old[name][at] != new[name][at] for at in apart):
                wrong.append(name)
                break
            row += len(old)
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    """Write the logs, scan and repair them, check the results, and print a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=main.__doc__)
    parser.add_argument("--parquet", type=int, default=50_000_000_000, help="bytes of the Parquet file")
    parser.add_argument("--jsonl", type=int, default=20_000_000_000, help="bytes of the JSONL.gz file")
    parser.add_argument("--quick", action="store_true", help="logs of 1 GB")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build", help="a folder with room for both copies")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--page", type=Path, help="write the page here")
    asked = parser.parse_args(argv)
    sizes = (1_000_000_000, 1_000_000_000) if asked.quick else (asked.parquet, asked.jsonl)
    block, lines = Block(), [*_HEAD]
    asked.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        for name, size in zip(("large.parquet", "large.jsonl.gz"), sizes, strict=True):
            log, out = Path(folder) / name, Path(folder) / f"out-{name}"
            if log.suffix == ".parquet":
                copies = write_parquet(log, block, size, 340_000, size // 9)
            else:
                copies = write_gzip(log, block, size, 190_000)
            scanned = command("scan", log, "-j", asked.jobs)
            repaired = command("repair", log, "-o", str(out), "-j", asked.jobs)
            lost = missed(block, copies, scanned.report)
            same = counts(scanned.report["summary"]) == counts(repaired.report["before"])
            wrong = differing(log, out, repaired.report["changed"]) if log.suffix == ".parquet" else []
            planted = copies * sum(map(bool, block.faults))
            right = f"{planted - lost:,} of {planted:,}" + ("" if same else ", and repair sees others")
            lines += [_line(name, ran, right, wrong) for ran in (scanned, repaired)]
            log.unlink()
            out.unlink()
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.page is not None:
        asked.page.write_text(text)


_HEAD = (
    "# Very large logs",
    "",
    "`make bench-large` writes a Parquet file with one large row group and a JSONL file of many gzip members,",
    "scans and repairs both, and compares the repaired Parquet file with the log by pyarrow alone. A row has an",
    "image beside its tokens. Memory is the peak of the largest process (VmHWM).",
    "",
    "| log | run | GB | largest process | minutes | CPU minutes | planted faults found | changed unasked |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
)


def _line(name: str, ran: Ran, right: str, wrong: Sequence[str]) -> str:
    peak, minutes, cpu = f"{max(ran.megabytes):,.0f} MB", f"{ran.seconds / 60:.1f}", f"{ran.cpu / 60:.1f}"
    cells = (name, ran.name, f"{ran.bytes / 1e9:.1f}", peak, minutes, cpu, right, ", ".join(wrong) or "none")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
