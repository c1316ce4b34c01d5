"""`python -m tests.mismatch [--write]`: the tables and pictures of the guide; `--write` puts them there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .picture import pictures
from .plant import COLUMNS, Planted, cause_of, log

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "mismatch.md"
TEMPERATURES = tuple(f"temperature={value}" for value in (0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4))
CASES = (
    *TEMPERATURES,
    "bfloat16 temperature=0.6",
    "bfloat16 temperature=1.2",
    *(f"top_p={value}" for value in (0.7, 0.9, 0.95, 0.99)),
    "bfloat16 top_p=0.9",
    "top_k=10",
    "top_k=50",
    "min_p=0.05",
    "temperature=0.7+top_p=0.9",
    "temperature=0.8+top_p=0.95",
    "float32",
    "bfloat16",
    "vllm bfloat16",
)
ROWS = 12
MIXTURES: dict[str, tuple[tuple[tuple[str, int], ...], dict[str, Any]]] = {
    "temperature 0.7 in 4 of 16 rows, top-p 0.9 in 4, 2 % of the tokens drifted in 4": (
        (("vllm bfloat16", 8), ("temperature=0.7", 4), ("top_p=0.9", 4)),
        {"drift": 0.02},
    ),
    "temperature 1.4 in 2 of 20 rows, 1 % drift in 9, fills in 18": (
        (("float32", 18), ("temperature=1.4", 2)),
        {"drift": 0.01, "fills": 6},
    ),
    "a column one place late in 2 of 16 rows, top-k 20 in 4": (
        (("bfloat16", 12), ("top_k=20", 4)),
        {"shifted": 2},
    ),
    "weights 2, 4 and 8 versions old in 4 rows each, 8 rows of the newest, versions logged": (
        (("float32", 8), ("versions=2", 4), ("versions=4", 4), ("versions=8", 4)),
        {"versions": True},
    ),
    "the same beside temperature 0.8 in 4 rows and drift": (
        (("float32", 8), ("versions=2", 4), ("versions=8", 4), ("temperature=0.8", 4)),
        {"versions": True, "drift": 0.01},
    ),
    "weights 8 versions old in 8 of 16 rows, versions not logged": ((("float32", 8), ("versions=8", 8)), {}),
    "a token of confident disagreement in each of 8 rows": ((("vllm bfloat16", 8),), {"confident": 1}),
}
UNTOLD = {"weights 8 versions old in 8 of 16 rows, versions not logged"}
"""Mixtures of which the log lacks what would tell the cause."""
Scan = Callable[[Path], str]
"""The JSON report on a log."""


def in_a_process(path: Path) -> str:
    command = [sys.executable, "-m", "tito_audit", "scan", str(path), "--report", "json", "--jobs", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout


def verdict(planted: Planted, scan: Scan) -> dict[str, Any]:
    """What a scan of the log says of its trainer's column; {} if it compared nothing."""
    with tempfile.TemporaryDirectory() as folder:
        printed = scan(planted.write(Path(folder) / "log.jsonl"))
    mismatches: dict[str, dict[str, Any]] = json.loads(printed)["summary"].get("mismatches", {})
    return mismatches.get("old_log_probs", {})


def shares_of(mismatch: dict[str, Any]) -> dict[str, float]:
    return {cause: part["share"] for cause, part in mismatch.get("causes", {}).items()}


def confusion(
    scan: Scan = in_a_process, seed: int = 0
) -> Iterator[tuple[str, str, dict[str, float], dict[str, Any]]]:
    """Each setting alone: its cause, the shares that the tool gives, and its whole verdict."""
    for number, case in enumerate(CASES):
        mismatch = verdict(log([(case, ROWS)], np.random.default_rng((seed, number))), scan)
        yield case, cause_of(case), shares_of(mismatch), mismatch


def mixtures(scan: Scan = in_a_process, seed: int = 0) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Each mixture: the planted shares, and the shares that the tool gives."""
    for number, (name, (settings, more)) in enumerate(MIXTURES.items()):
        planted = log(settings, np.random.default_rng((seed, 100 + number)), **more)
        shares = planted.shares
        if name in UNTOLD:
            shares["cannot tell"] = shares.get("cannot tell", 0.0) + shares.pop("stale weights")
        yield name, shares, shares_of(verdict(planted, scan))


def lines() -> Iterator[str]:
    yield "| one side has | it is | named | what the verdict says |"
    yield "| --- | --- | --- | --- |"
    for case, cause, shares, mismatch in confusion():
        rest = ", ".join(
            f"{100 * share:.0f} % {name}" for name, share in shares.items() if name != cause and share >= 0.005
        )
        named = f"{100 * shares.get(cause, 0):.0f} %"
        yield f"| {shown(case)} | {cause} | {named} | {estimate(mismatch) or rest or '–'} |"
    yield ""
    yield "| log | planted | in the report |"
    yield "| --- | --- | --- |"
    for name, planted, shares in mixtures():
        yield f"| {name} | {listed(planted)} | {listed(shares)} |"


def shown(case: str) -> str:
    """`temperature 0.7 and top-p 0.9`, `top-p 0.9, in bfloat16`."""
    dtype, _, setting = case.rpartition(" ")
    words = setting.replace("+", " and ").replace("=", " ").replace("_", "-")
    words = {"float32": "two engines in float32", "bfloat16": "bfloat16 against float32"}.get(words, words)
    return f"{words}, sampled by vLLM" if dtype == "vllm" else f"{words}, in {dtype}" if dtype else words


def estimate(mismatch: dict[str, Any]) -> str:
    heat, mass = mismatch.get("temperature"), mismatch.get("mass")
    if heat:
        return f"{heat['best']:.2f} ({heat['low']:.2f} to {heat['high']:.2f})"
    kinds = mismatch.get("truncations") or {}
    kind = max(kinds, key=lambda name: kinds[name], default="")
    if mass:
        return f"top-p {mass['best']:.3f} ({mass['low']:.3f} to {mass['high']:.3f})"
    return f"{kind} in {kinds[kind]} of {mismatch['rollouts']} rows" if kind else ""


def listed(shares: dict[str, float]) -> str:
    large = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * share:.0f} % {name}" for name, share in large if share >= 0.005)


if __name__ == "__main__":
    table = "\n".join(lines())
    print(table)
    if "--write" in sys.argv:
        before, _, rest = GUIDE.read_text(encoding="utf-8").partition("<!-- python -m tests.mismatch -->\n")
        _, _, after = rest.partition("\n<!-- end -->")
        text = f"{before}<!-- python -m tests.mismatch -->\n{table}\n<!-- end -->{after}"
        GUIDE.write_text(text, encoding="utf-8")
        for name, svg in pictures(COLUMNS):
            (ROOT / "docs" / "pictures" / name).write_text(svg, encoding="utf-8")
