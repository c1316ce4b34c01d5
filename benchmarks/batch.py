"""`make bench-batch`: how long the audit of a batch in a training loop takes, by rows as trainers hold them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ROOT, tokenizer_folder
from benchmarks.results import busy, heading
from benchmarks.tables import table

__all__ = ["KINDS", "Batches", "Timed", "main", "page", "timed"]

ROWS = 64
SHAPES = ((1, 2_048), (8, 3_072), (16, 4_096), (16, 16_384))
"""Turns and tokens of a row."""
KINDS = ("lists", "arrays", "padded arrays")
ROUNDS, QUICK_ROUNDS = 50, 3
_WORDS = 100_000

METHOD = (
    "Rows of a seed: turns of equal length, each a quarter of given tokens and then sampled ones with logprobs. "
    "In *rows with faults*, every eighth row has a logprob above zero, and another has all of them shifted.",
    "CPU milliseconds a row, from the call of `audit_batch` to its return, all threads together: of batches of "
    f"{ROWS} rows, and of single rows. Rules and tokenizer were loaded by a batch before.",
    "*With a tokenizer*: the ids are those of text that was not audited before, and nothing differs.",
)


@dataclass(frozen=True, slots=True)
class Batches:
    """What the batches of a measurement are."""

    turns: int
    tokens: int
    kind: str = "arrays"
    faults: bool = False
    tokenizer: Path | None = None

    def batch(self, seed: int, rows: int = ROWS) -> dict[str, Any]:
        """The columns of one batch."""
        random = np.random.default_rng(seed)
        length = self.tokens // self.turns
        mask = np.tile(np.arange(length) >= length // 4, self.turns).astype(np.int64)
        ids = self._ids(random, rows, mask.size)
        logprobs = np.where(mask, -random.exponential(0.6, ids.shape), 0.0)
        if self.faults:
            logprobs[::8, -2] = 0.5
            logprobs[1::8, -3] = np.nan
        columns = {"token_ids": ids, "loss_mask": np.tile(mask, (rows, 1)), "logprobs": logprobs}
        if self.kind == "lists":
            return {name: column.tolist() for name, column in columns.items()}
        if self.kind == "padded arrays":
            padding = ((0, 0), (self.tokens // 16, self.tokens // 8))
            columns["attention_mask"] = np.ones_like(ids)
            return {name: np.pad(column, padding) for name, column in columns.items()}
        return columns

    def _ids(self, random: np.random.Generator, rows: int, size: int) -> np.ndarray:
        """Ids at random; with a tokenizer, those of text."""
        if self.tokenizer is None:
            return random.integers(0, _WORDS, (rows, size))
        words = np.array(["the", "of", "and", "run", "token", "model", "sample", "loop"])
        texts = (" ".join(random.choice(words, size + 8).tolist()) for _ in range(rows))
        return np.stack([_tokenizer(self.tokenizer).encode(text)[:size] for text in texts])


@cache
def _tokenizer(folder: Path) -> Any:
    from tito_audit.tokens.load import load_tokenizer

    return load_tokenizer(str(folder))


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU milliseconds a row."""

    of: Batches
    whole: np.ndarray
    """Of each batch."""
    single: np.ndarray
    """Of each call with a single row."""
    failing: int
    """Rows that failed, in all batches."""

    def cells(self, *, of_single: bool) -> tuple[str, str]:
        """The median and the 99th percentile."""
        values = self.single if of_single else self.whole
        return f"{np.percentile(values, 50):.2f}", f"{np.percentile(values, 99):.2f}"


def timed(of: Batches, rounds: int) -> Timed:
    """Audit so many batches, and a row of each alone."""
    from tito_audit import BatchAuditor

    auditor = BatchAuditor(tokenizer=None if of.tokenizer is None else str(of.tokenizer))
    auditor.audit(**of.batch(0, 4))
    whole, single, failing = [], [], 0
    for number in range(rounds):
        batch, row = of.batch(1 + number), of.batch(1 + rounds + number, 1)
        seconds, audit = _seconds(lambda batch=batch: auditor.audit(**batch))
        whole.append(seconds / ROWS)
        failing += int(audit.failing_rows.sum())
        single.append(_seconds(lambda row=row: auditor.audit(**row))[0])
    return Timed(of, 1e3 * np.array(whole), 1e3 * np.array(single), failing)


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def page(runs: Sequence[Timed], tokenizer: Path, warning: str | None) -> str:
    """All measurements, as Markdown."""
    title = "How long the audit of a batch takes"
    parts = [heading(tokenizer, warning, title=title, command="make bench-batch")]
    parts += [f"- {line}" for line in METHOD]
    head = ("turns", "tokens", "as", "", "batch: median", "99 %", "single row: median", "99 %")
    rows = [
        (
            run.of.turns,
            f"{run.of.tokens:,}",
            run.of.kind,
            "rows with faults" if run.of.faults else "with a tokenizer" if run.of.tokenizer else "",
            *run.cells(of_single=False),
            *run.cells(of_single=True),
        )
        for run in runs
    ]
    return "\n".join([*parts, "", table(head, rows), ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    asked = _parser().parse_args(argv)
    warning, runs = busy(), list[Timed]()
    output = asked.output or (ROOT / "build" / "BATCH.md" if asked.quick else Path(__file__).with_name("BATCH.md"))
    output.parent.mkdir(parents=True, exist_ok=True)
    for of in _wanted(asked.tokenizer):
        rounds = QUICK_ROUNDS if asked.quick else ROUNDS
        runs.append(timed(of, rounds if of.tokenizer is None else max(rounds // 5, 1)))
        output.write_text(page(runs, asked.tokenizer, warning), encoding="utf-8")
        print(of, runs[-1].cells(of_single=False), file=sys.stderr, flush=True)
    print(f"written to {output}", file=sys.stderr)


def _wanted(tokenizer: Path) -> Iterator[Batches]:
    for turns, tokens in SHAPES:
        yield Batches(turns, tokens)
    turns, tokens = SHAPES[1]
    for kind in KINDS:
        if kind != "arrays":
            yield Batches(turns, tokens, kind)
    yield Batches(turns, tokens, faults=True)
    yield Batches(turns, tokens, tokenizer=tokenizer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some seconds; not written to BATCH.md")
    parser.add_argument("--tokenizer", type=Path, default=tokenizer_folder(), metavar="DIR", help="[qwen3]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="[default: benchmarks/BATCH.md]")
    return parser


if __name__ == "__main__":
    main()
