"""Logs with every fault of the catalogue, scanned by the command's engine and by the reference engine.

    python -m benchmarks.planted --tokens 200000000

A piece is one log: training rows or calls, JSONL or Parquet, with a fault of `benchmarks/faults` in 10 % of rows.
Both engines must report exactly the same findings, each planted fault must be reported, and correct rows must have
no errors or warnings. A finished piece leaves a note and no log, so a stopped run resumes; a change of the package
or of the benchmark starts over.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson

from benchmarks.faults import CATALOGUE
from benchmarks.measure import ROOT, tokenizer_folder
from benchmarks.planter import planted_log

__all__ = ["FORMS", "Order", "Piece", "main", "piece"]

FORMS = ("rows.jsonl", "calls.parquet", "rows.parquet", "foreign.jsonl", "calls.jsonl")
"""The kinds of logs, in turn; the one of another vocabulary is small."""
FOREIGN = "ids of another tokenizer"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Order:
    """The settings of the pieces."""

    tokenizer: str
    scratch: str
    tokens: int
    """Approximate tokens of a piece, as a scan counts them."""
    rate: float
    """The share of rows with a fault."""
    seed: int
    jobs: int

    def form(self, number: int) -> str:
        """The kind of log of a piece."""
        return FORMS[number % len(FORMS)]

    def size(self, number: int) -> int:
        """The number of tokens of a piece."""
        return self.tokens // 20 if "foreign" in self.form(number) else self.tokens

    def note(self, number: int) -> Path:
        """The file with the result of a piece."""
        return Path(self.scratch) / f"{self._key()}-{number}.json"

    def _key(self) -> str:
        made = f"{self.tokens} {self.rate} {self.seed} {_version(self.tokenizer)}"
        return hashlib.sha256(made.encode()).hexdigest()[:12]


@cache
def _version(tokenizer: str) -> str:
    """A hash of the package, the benchmark and a tokenizer, computed once."""
    sources = sorted((*(ROOT / "tito_audit").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")))
    read = (path.read_bytes() for path in (*sources, Path(tokenizer) / "tokenizer.json"))
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in read)).hexdigest()


@dataclass(slots=True)
class Piece:
    """The result of a piece."""

    number: int
    form: str
    tokens: int = 0
    rows: int = 0
    findings: int = 0
    difference: str | None = None
    """Where the two engines first differ."""
    planted: dict[str, int] = field(default_factory=dict)
    """By fault: rows."""
    named: dict[str, int] = field(default_factory=dict)
    """Rows in which a rule of the fault finds it, by fault."""
    told: dict[str, int] = field(default_factory=dict)
    """Rows with any finding, by fault."""
    false: list[str] = field(default_factory=list)
    """Errors and warnings in correct rows."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether the engines differ, a fault was missed, or a correct row has findings."""
        return self.difference is not None or bool(self.false) or self.planted != self.told


def piece(order: Order, number: int) -> Piece:
    """Build a log, scan it both ways, compare, and remove it."""
    found = Piece(number, order.form(number))
    log = Path(order.scratch) / f"{order.seed}-{number}-{found.form}"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        started = time.perf_counter()
        size, seed = order.size(number), (order.seed, number)
        truth = planted_log(log, order.tokenizer, tokens=size, rate=order.rate, seed=seed, jobs=order.jobs)
        found.seconds["written"] = time.perf_counter() - started
        found.rows = len(truth)
        _compare(log, order, found, truth)
    finally:
        log.unlink(missing_ok=True)
    return found


def _compare(log: Path, order: Order, found: Piece, truth: Sequence[str]) -> None:
    """Compare the findings of both engines, and with the planted faults."""
    from benchmarks.reference import by_reference, said
    from tito_audit.run.scan import scan_rollouts
    from tito_audit.settings.model import Settings

    settings = Settings(tokenizer=order.tokenizer, jobs=order.jobs)
    started = time.perf_counter()
    fast = list(said(scan_rollouts(log, settings)))
    between = time.perf_counter()
    for number, (mine, theirs) in enumerate(zip_longest(fast, by_reference(log, settings))):
        if repr(mine) != repr(theirs):
            found.difference = f"result {number}:\n  scan       {mine}\n  reference  {theirs}"
            break
    found.seconds |= {"scan": between - started, "reference": time.perf_counter() - between}
    found.tokens = sum(one[3].get("tokens", 0) for one in fast)
    found.findings = sum(len(one[1]) for one in fast)
    _judge(fast, truth, found)


def _judge(fast: Sequence[tuple[Any, ...]], truth: Sequence[str], found: Piece) -> None:
    if "foreign" in found.form:
        told = any(finding.code == "REC007" for one in fast for finding in one[1])
        found.planted = {FOREIGN: 1}
        found.told = found.named = {FOREIGN: int(told)}
        return
    by_row: dict[int, list[Any]] = {}
    for place, findings, *_ in fast:
        if place.row is not None:
            by_row.setdefault(place.row, []).extend(findings)
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("planted", "named", "told")}
    for row, name in enumerate(truth):
        codes = {one.code for one in by_row.get(row, ())}
        if name:
            counts["planted"][name] += 1
            counts["told"][name] += bool(codes)
            counts["named"][name] += bool(codes & set(CATALOGUE[name].codes))
            continue
        loud = [one for one in by_row.get(row, ()) if one.severity.word != "note"]
        found.false += [f"row {row}: {one.code} {one.hit.cause}" for one in loud]
    found.planted, found.named, found.told = (dict(counts[name]) for name in counts)


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run pieces until there are this many tokens; 1 if any of them is bad."""
    asked = _parser().parse_args(argv)
    order = Order(
        str(asked.tokenizer.resolve()),
        str(asked.scratch.resolve()),
        min(asked.piece, asked.tokens // 4),  # at least one of each form
        asked.rate,
        asked.seed,
        asked.jobs,
    )
    done: list[Piece] = []
    for number in count():
        one, known = _noted(order, number)
        done.append(one)
        _say(one, known, sum(piece.tokens for piece in done))
        if sum(piece.tokens for piece in done) >= asked.tokens:
            break
    print("\n".join(_table(done)))
    return int(any(one.bad for one in done))


def _noted(order: Order, number: int) -> tuple[Piece, bool]:
    """A piece, and whether it was already done; made by a separate process, to bound memory."""
    note = order.note(number)
    if note.is_file():
        return Piece(**orjson.loads(note.read_bytes())), True
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        one = pool.submit(piece, order, number).result()
    note.write_bytes(orjson.dumps(asdict(one)))
    return one, False


def _say(one: Piece, known: bool, tokens: int) -> None:
    took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in one.seconds.items())
    said = "no difference" if one.difference is None else f"DIFFERS at {one.difference}"
    print(
        f"piece {one.number} ({one.form}{', done before' * known}): {one.tokens:,} tokens, {one.rows:,} rows, "
        f"{one.findings:,} findings, {said} ({took}); {tokens:,} tokens so far",
        flush=True,
    )
    for line in one.false[:SHOWN]:
        print(f"  finding in a correct row: {line}", flush=True)


def _table(pieces: Sequence[Piece]) -> Iterator[str]:
    """A table of planted faults and findings, with totals."""
    sums = {name: Counter[str]() for name in ("planted", "named", "told")}
    for one in pieces:
        for name, counts in sums.items():
            counts.update(getattr(one, name))
    yield f"{'fault':36}{'planted':>9}{'by rule':>9}{'found':>9}"
    for name in (*CATALOGUE, FOREIGN):
        yield f"{name:36}" + "".join(f"{counts[name]:9,}" for counts in sums.values())
    differing = sum(one.difference is not None for one in pieces)
    false, silent = sum(len(one.false) for one in pieces), sums["planted"].total() - sums["told"].total()
    yield (
        f"{sum(one.tokens for one in pieces):,} tokens, {sum(one.rows for one in pieces):,} rows, "
        f"{sum(one.findings for one in pieces):,} findings in {len(pieces)} pieces: {differing} pieces differ, "
        f"{silent} planted faults were missed, {false} findings on rows that are right"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__)
    parser.add_argument("--tokens", type=int, default=5_000_000, metavar="N", help="in all [5,000,000]")
    parser.add_argument("--piece", type=int, default=6_000_000, metavar="N", help="tokens of a log [6,000,000]")
    parser.add_argument("--rate", type=float, default=0.1, help="share of rows with a fault [0.1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes [2]")
    parser.add_argument("--tokenizer", type=Path, default=tokenizer_folder(), metavar="DIR")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "planted", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
