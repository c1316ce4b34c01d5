"""The audit as a user runs it: the command line, in a process of its own where all examples are tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import run as run_here
from tests.tiers import DEEP

from .source import ROOT, SHARED

__all__ = ["Finding", "Said", "ToolError", "repair", "scan"]

Json = dict[str, Any]


class ToolError(Exception):
    """The command itself failed."""


@dataclass(frozen=True)
class Finding:
    """One finding of a JSON report."""

    code: str
    severity: str
    cause: str
    message: str
    where: str
    start: int | None
    spans: tuple[tuple[int, int], ...] = ()
    """The tokens that it is about; of one that stands for several, those of all."""

    @property
    def loud(self) -> bool:
        """Whether it is more than a note."""
        return self.severity != "note"

    def __str__(self) -> str:
        return f"{self.severity} {self.code} {self.cause!r} at {self.start}"


@dataclass(frozen=True)
class Said:
    """A scan's findings: of samples by file, row and item, and of whole files."""

    samples: dict[tuple[str, int, int], list[Finding]]
    files: dict[str, list[Finding]]
    exit: int
    report: Json


def scan(logs: list[Path], tokenizer: str, out: Path, *flags: str) -> Said:
    """What a scan says of logs."""
    arguments = [*map(str, logs), "-t", str(SHARED / "tokenizers" / tokenizer), "--report", f"json={out}"]
    arguments += ["--ignore", "REC009"]  # the same rollout is in the logs in several forms
    code = _run(out.parent, "scan", *arguments, "--no-config", "--quiet", "--jobs", "1", *flags)
    report = json.loads(out.read_text(encoding="utf-8"))
    samples: dict[tuple[str, int, int], list[Finding]] = defaultdict(list)
    files: dict[str, list[Finding]] = defaultdict(list)
    for entry in report["findings"]:
        places = entry["folded"]["places"] if entry.get("folded") else [[None, entry["start"], entry["end"]]]
        spans = tuple((start, end) for _, start, end in places if start is not None)
        facts = (entry[name] for name in ("code", "severity", "cause", "message", "where", "start"))
        finding = Finding(*facts, spans)
        name = Path(entry["file"] or "").name
        if entry["where"] == "log" or entry["row"] is None:
            files[name].append(finding)
        else:
            samples[name, entry["row"], entry["item"]].append(finding)
    return Said(samples, files, code, report)


def repair(logs: list[Path], tokenizer: str, out: Path, *flags: str) -> None:
    """Repaired logs, in a folder."""
    target = out if len(logs) > 1 else out / logs[0].name
    out.mkdir(parents=True, exist_ok=True)
    arguments = [*map(str, logs), "-o", str(target), "-t", str(SHARED / "tokenizers" / tokenizer)]
    arguments += ["--jobs", "1"]
    _run(out.parent, "repair", *arguments, "--no-config", "--quiet", "--force", *flags)


def _run(folder: Path, *arguments: str) -> int:
    """The exit code, 0 or 1. What the audit keeps between runs stays in the folder."""
    if not DEEP:
        code, _, errors = run_here(*arguments)
    else:
        command = [sys.executable, "-m", "tito_audit", *arguments]
        environment = {**os.environ, "TITO_AUDIT_CACHE": str(folder / "cache")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        code, errors = done.returncode, done.stderr
    if code not in (0, 1) or "Traceback" in errors:
        raise ToolError(f"{' '.join(arguments)[:300]}\nexit {code}\n{errors[-3000:]}")
    return code
