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

from tests.tables import stored

from .picture import pictures
from .plant import HELD_OUT, Planted, cause_of, log

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "mismatch.md"
Mixtures = dict[str, tuple[list[tuple[str, int]], dict[str, Any]]]
"""Settings with how many rows of each, and what else was planted."""


def _mixtures(name: str) -> Mixtures:
    """The logs of several settings that stand under a name."""
    logs = stored("test_mismatch.py", name).items()
    return {words: ([tuple(pair) for pair in log["rows"]], log.get("planted", {})) for words, log in logs}


CASES = tuple(stored("test_mismatch.py", "chosen")["cases"])
"""Settings of the data on which the thresholds were chosen."""
ROWS = 12
MIXTURES: Mixtures = _mixtures("mixtures")
UNTOLD = {"weights 8 versions old in 8 of 16 rows, versions not logged"}
"""Mixtures of which the log lacks what would tell the cause."""
HELD_OUT_MIXTURES: Mixtures = _mixtures("held_out")
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


def held_out_cases() -> list[tuple[str, bool]]:
    """The settings of the held-out data, and whether the log names them."""
    names = [name for name in HELD_OUT if not name.startswith(("lengths", "changed", "both"))]
    mixed = [name for name in names if "+" in name or name.endswith("temperature=1.3")]
    return [*((name, False) for name in names), *((name, True) for name in mixed)]


def confusion(
    scan: Scan = in_a_process, seed: int = 1
) -> Iterator[tuple[str, bool, str, int, dict[str, float], dict[str, float], dict[str, Any]]]:
    """Each held-out setting alone, and whether the log names it: its cause, its tokens, the planted shares, those
    that the tool gives, and its whole verdict.
    """
    for number, (case, stated) in enumerate(held_out_cases()):
        rng = np.random.default_rng((seed, number))
        of_versions = "versions" in case
        settings = [("float32/float32", ROWS), (case, ROWS)] if of_versions else [(case, ROWS)]
        planted = log(settings, rng, source=HELD_OUT, stated=stated, versions=of_versions)
        cause = "temperature and truncated sampling" if stated and "+" in case else cause_of(case)
        mismatch = verdict(planted, scan)
        yield case, stated, cause, mismatch["tokens"], planted.shares, shares_of(mismatch), mismatch


def mixtures(scan: Scan = in_a_process, seed: int = 1) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Each held-out mixture: the planted shares, and the shares that the tool gives."""
    for number, (name, (settings, more)) in enumerate(HELD_OUT_MIXTURES.items()):
        planted = log(settings, np.random.default_rng((seed, 100 + number)), source=HELD_OUT, **more)
        shares = planted.shares
        if name in UNTOLD:
            shares["cannot tell"] = shares.get("cannot tell", 0.0) + shares.pop("stale weights")
        yield name, shares, shares_of(verdict(planted, scan))


def lines(scan: Scan = in_a_process) -> Iterator[str]:
    yield "| one side has | it is | tokens | named | cannot tell | another cause | the verdict says |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case, stated, cause, tokens, planted, shares, mismatch in confusion(scan):
        untold = 0.0 if cause == "cannot tell" else shares.get("cannot tell", 0.0)
        others = sorted(shares.items(), key=lambda item: -item[1])
        rest = ", ".join(
            f"{100 * share:.0f} % {name}"
            for name, share in others
            if name not in (cause, "cannot tell") and share >= 0.005 and cause != "routing"
        )
        named = f"{100 * shares.get(cause, 0):.0f} %"
        if cause == "routing":
            named += f" of {100 * planted[cause]:.0f} %"
        words = f"{shown(case)}{', named in the log' if stated else ''}"
        cells = (f"{tokens:,}", named, f"{100 * untold:.0f} %", rest or "–", estimate(mismatch) or "–")
        yield f"| {words} | {cause} | {' | '.join(cells)} |"
    yield ""
    yield "| log | planted | in the report |"
    yield "| --- | --- | --- |"
    for name, planted_shares, shares in mixtures(scan):
        yield f"| {name} | {listed(planted_shares)} | {listed(shares)} |"


def shown(case: str) -> str:
    """`temperature 0.7 and top-p 0.9`, `top-p 0.9, both in bfloat16`."""
    if case.startswith("experts"):
        return f"a mixture of experts: {case.removeprefix('experts ')}"
    engines, _, setting = case.rpartition(" ") if " " in case else ("", "", case)
    if "/" in setting:
        engines, setting = setting, ""
    where = {"bfloat16/float32": "sampled in bfloat16", "bfloat16/bfloat16": "both in bfloat16"}.get(engines, "")
    words = setting.replace("+", " and ").replace("=", " ").replace("_", "-")
    words = {"": "two engines", "drift": "pairs of tokens encoded otherwise"}.get(words, words)
    words = words.replace("versions", "weights older by")
    where = where or (engines if engines.startswith("small") else "")
    return f"{words}, {where}" if where else words


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
        for name, svg in pictures():
            (ROOT / "docs" / "pictures" / name).write_text(svg, encoding="utf-8")
