"""Logs with every fault of the catalogue, scanned as they are and by the reference engine, piece by piece.

    python -m benchmarks.planted --tokens 200000000

A piece is one log: training rows or calls, JSONL or Parquet, in one row of ten a fault of `benchmarks/faults`.
What both engines say of it must be the same to the last finding, something must be said of what was planted, and
rows that are right must stay without errors and warnings. A piece that is done leaves a note and no log, so that a
run that was stopped goes on where it was; a change of the package or of the bench makes all of them anew.
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
"""What the logs are, in turn; that of another vocabulary is small."""
FOREIGN = "ids of another tokenizer"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Order:
    """What pieces are made of."""

    tokenizer: str
    scratch: str
    tokens: int
    """Of a piece, about, as a scan counts them."""
    rate: float
    """The share of rows with a fault."""
    seed: int
    jobs: int

    def form(self, number: int) -> str:
        """What kind of log a piece is."""
        return FORMS[number % len(FORMS)]

    def size(self, number: int) -> int:
        """How many tokens a piece has."""
        return self.tokens // 20 if "foreign" in self.form(number) else self.tokens

    def note(self, number: int) -> Path:
        """Where it is noted what became of a piece."""
        return Path(self.scratch) / f"{self._key()}-{number}.json"

    def _key(self) -> str:
        made = f"{self.tokens} {self.rate} {self.seed} {_version(self.tokenizer)}"
        return hashlib.sha256(made.encode()).hexdigest()[:12]


@cache
def _version(tokenizer: str) -> str:
    """The package, the bench and a tokenizer as they are when it is first asked for."""
    sources = sorted((*(ROOT / "tito_audit").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")))
    read = (path.read_bytes() for path in (*sources, Path(tokenizer) / "tokenizer.json"))
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in read)).hexdigest()


@dataclass(slots=True)
class Piece:
    """What became of a piece."""

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
    """By fault: rows in which a rule of the fault names it."""
    told: dict[str, int] = field(default_factory=dict)
    """By fault: rows of which anything is said."""
    false: list[str] = field(default_factory=list)
    """Errors and warnings of rows that are right."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether something is not as it must be."""
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
    """What both engines say of a log, and of what was planted."""
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
    """Pieces until there are so many tokens; 1 when any of them is not as it must be."""
    asked = _parser().parse_args(argv)
    order = Order(
        str(asked.tokenizer.resolve()),
        str(asked.scratch.resolve()),
        min(asked.piece, asked.tokens // 4),  # one of each form at least
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
    """A piece, and whether it was there already; made by a process of its own, so that memory stays bounded."""
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
        print(f"  said of a row that is right: {line}", flush=True)


def _table(pieces: Sequence[Piece]) -> Iterator[str]:
    """What was planted and what was said of it, and the sum of all."""
    sums = {name: Counter[str]() for name in ("planted", "named", "told")}
    for one in pieces:
        for name, counts in sums.items():
            counts.update(getattr(one, name))
    yield f"{'fault':36}{'planted':>9}{'named':>9}{'told':>9}"
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
