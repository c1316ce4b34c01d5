"""Repair mutants: logs in odd forms, repaired with all kinds of options, each proven by `lost`.

`python -m tests.torture.proving --mutants 1000 --seed 1`; a mutant is a pure function of seed and number.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.planter import rows_of
from tests.command import run
from tests.torture.forms_tables import arrow_log, parquet_log, table_of
from tests.torture.forms_text import text_log
from tests.torture.proof import lost
from tests.torture.sources import ROOT, documents

TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
REPAIRS = ("splice", "mask", "fork", "realign", "normalize", "canonical", "drop", "once")


@cache
def logs() -> dict[str, list[Any]]:
    """The rows of every fixture, and rows with every fault of the benchmarks' catalogue planted."""
    rows = {}
    for path in sorted([*(ROOT / "fixtures" / "formats").iterdir(), *(ROOT / "fixtures" / "tutorials").iterdir()]):
        if path.suffix == ".parquet":
            rows[path.name] = pq.ParquetFile(path).read().to_pylist()
        elif path.suffix in (".jsonl", ".json"):
            values = documents(path.read_text(encoding="utf-8"))
            rows[path.name] = [row for value in values for row in (value if isinstance(value, list) else [value])]
    for calls in (False, True):
        planted = rows_of(str(TOKENIZER), 1, 64, 100, 0.9, calls=calls)
        rows["planted calls" if calls else "planted rows"] = [_plain(row) for row, _ in planted]
    return rows


def _plain(value: Any) -> Any:
    """A value with lists in place of arrays."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def mutant(seed: int, number: int, folder: Path) -> tuple[Path, list[str]] | None:
    """A log in an odd form, and the options of its repair; None where the rows do not fit the form."""
    rng = random.Random(f"{seed}:{number}")
    name = rng.choice((*sorted(logs()), *("planted rows", "planted calls") * 12))
    rows = logs()[name]
    count = min(len(rows), rng.choice((1, 3, 4) if "planted" in name else (1, 3, 8, 20)))
    start = rng.randrange(len(rows) - count + 1)
    rows = rows[start : start + count]
    kind = rng.choice(("text", "text", "text", "parquet", "parquet", "arrow"))
    if kind == "text":
        data, suffix = text_log(rows, rng)
        path = folder / f"log{suffix}"
        path.write_bytes(data)
    else:
        table = table_of(rows, rng)
        path = folder / (
            "log.parquet" if kind == "parquet" else rng.choice(("log.arrow", "log.arrows", "log.feather"))
        )
        if table is None or not (parquet_log if kind == "parquet" else arrow_log)(table, path, rng):
            return None
    return path, options(rng, folder)


def options(rng: random.Random, folder: Path) -> list[str]:
    """Flags of a repair."""
    flags = rng.choice(([], ["--fail-on", "note"], ["--fail-on", "warning"]))
    if rng.random() < 0.6:
        flags = [*flags, "--unsafe"]
    if rng.random() < 0.5:
        named = rng.sample(REPAIRS, rng.randrange(1, 4))
        flags = [*flags, "--with", ",".join(named)]
        if {"drop", "canonical"} & {*named} and "--unsafe" not in flags:
            flags.append("--unsafe")
        if "drop" in named:
            flags += ["--quarantine", str(folder / "quarantine.jsonl")]
    elif rng.random() < 0.3:
        flags = [*flags, "--quarantine", str(folder / "quarantine.jsonl")]
    if rng.random() < 0.1:
        flags = [*flags, "--no-provenance"]
    if rng.random() < 0.05:
        flags = [*flags, "--no-join"]
    return [*flags, "--jobs", "2" if rng.random() < 0.03 else "1"]


def attempt(seed: int, number: int, folder: Path) -> tuple[str, list[str]]:
    """What came of a mutant: a word for the count, and what is wrong."""
    logs_in, out = folder / "logs", folder / "out"
    logs_in.mkdir()
    drawn = mutant(seed, number, logs_in)
    if drawn is None:
        return "no such form", []
    log, flags = drawn
    rng = random.Random(f"more {seed}:{number}")
    how = rng.choice(("file", "file", "file", "file", "folder", "resumed"))
    target = out if how == "folder" else folder / f"out{''.join(log.suffixes)}"
    if how == "folder":  # a second log beside the first
        (logs_in / "second.jsonl").write_bytes(text_log(logs()["nemo_gym.jsonl"][:6], rng)[0])
    if how == "resumed":
        flags = [*flags, "--resume"]
    files = {path: path.read_bytes() for path in logs_in.iterdir() if path.name != "quarantine.jsonl"}
    command = (
        "repair",
        logs_in if how == "folder" else log,
        "-o",
        target,
        "-t",
        TOKENIZER,
        "--report",
        "json",
        "--quiet",
    )
    try:
        code, printed, errors = run(*command, *flags)
    except Exception as error:
        return "traceback", [f"{type(error).__name__}: {error}"]
    if any(path.read_bytes() != data for path, data in files.items()):
        return "input changed", ["the input changed"]
    if code == 2:
        word = "refused: " + (errors.splitlines()[0].split(": ", 2)[-1][:60] if errors else "?")
        return word, ["refused, and a file is there"] if target.is_file() else []
    report = json.loads(printed)
    losses = [loss for file in report["files"] for loss in lost(Path(file["log"]), Path(file["written"]), report)]
    if how == "resumed":
        again = json.loads(run(*command, *flags)[1])
        losses += [
            f"resumed, {key} is another" for key in ("changed", "rows", "files") if again[key] != report[key]
        ]
    return f"{how}, {'changed' if report['changed'] else 'unchanged'}", losses


def main() -> int:
    """Run the mutants; 1 if anything was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs that failed")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    failures, started = 0, time.perf_counter()
    for number in range(chosen.first, chosen.first + chosen.mutants):
        with tempfile.TemporaryDirectory(prefix="proving") as place:
            word, losses = attempt(chosen.seed, number, Path(place))
            counts[word] += 1
            if losses:
                failures += 1
                print(f"{chosen.seed}:{number} {word}: {len(losses)}: {losses[0][:400]}", flush=True)
    print(f"{sum(counts.values())} mutants, {failures} failures, {time.perf_counter() - started:.0f} s")
    for word, count in counts.most_common():
        print(f"{count:7} {word}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
