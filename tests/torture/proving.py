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
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.command import run
from tests.torture.forms_tables import arrow_log, parquet_log, table_of
from tests.torture.forms_text import text_log
from tests.torture.proof import lost

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
REPAIRS = ("splice", "mask", "fork", "realign", "normalize", "canonical", "drop", "once")


@cache
def logs() -> dict[str, list[Any]]:
    """The rows of every fixture."""
    found = {}
    for path in sorted([*(ROOT / "fixtures" / "formats").iterdir(), *(ROOT / "fixtures" / "tutorials").iterdir()]):
        if path.suffix == ".parquet":
            found[path.name] = pq.ParquetFile(path).read().to_pylist()
        elif path.suffix in (".jsonl", ".json"):
            found[path.name] = list(_values(path.read_text(encoding="utf-8")))
    return found


def _values(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def mutant(seed: int, number: int, folder: Path) -> tuple[Path, list[str]] | None:
    """A log in an odd form, and the options of its repair; None where the rows do not fit the form."""
    rng = random.Random(f"{seed}:{number}")
    name = rng.choice(sorted(logs()))
    rows = logs()[name]
    count = min(len(rows), rng.choice((1, 3, 8, 20)))
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
    made = mutant(seed, number, folder)
    if made is None:
        return "no such form", []
    log, flags = made
    before = log.read_bytes()
    out = folder / f"out{''.join(log.suffixes)}"
    try:
        code, said, errors = run("repair", log, "-o", out, "-t", TOKENIZER, "--report", "json", "--quiet", *flags)
    except Exception as error:
        return "traceback", [f"{type(error).__name__}: {error}"]
    if log.read_bytes() != before:
        return "input changed", ["the input changed"]
    if code == 2:
        if out.exists():
            return "refused", ["refused, and a file is there"]
        return f"refused: {errors.splitlines()[0].split(': ', 1)[-1][:60] if errors else '?'}", []
    report = json.loads(said)
    found = lost(log, out, report)
    return ("changed" if report["changed"] else "unchanged"), found


def main() -> int:
    """Run the mutants; 1 if anything was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs that failed")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    failures, started = 0, time.perf_counter()
    for number in range(given.first, given.first + given.mutants):
        with tempfile.TemporaryDirectory(prefix="proving") as place:
            word, found = attempt(given.seed, number, Path(place))
            counts[word] += 1
            if found:
                failures += 1
                print(f"{given.seed}:{number} {word}: {len(found)}: {found[0][:400]}", flush=True)
    print(f"{sum(counts.values())} mutants, {failures} failures, {time.perf_counter() - started:.0f} s")
    for word, count in counts.most_common():
        print(f"{count:7} {word}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
