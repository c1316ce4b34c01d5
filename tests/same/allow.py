"""Differences that are wanted, from a TOML file of `[[allow]]` tables: command, line, reason.

`command` and `line` are regular expressions that are searched for. A difference is allowed once each of its lines
is, the old ones and the new ones; so a file names what changed, and nothing else passes with it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from .compare import Difference

__all__ = ["Allowed", "allowed_from", "is_allowed"]


@dataclass
class Allowed:
    """One difference that is wanted, and how many were met."""

    command: re.Pattern[str]
    line: re.Pattern[str]
    reason: str
    met: int = field(default=0, compare=False)

    def covers(self, difference: Difference, line: str) -> bool:
        """Whether it names this line of this difference."""
        return bool(self.command.search(difference.command) and self.line.search(line))


def allowed_from(path: Path) -> list[Allowed]:
    """The entries of a file. ValueError for one without a reason."""
    read = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("allow", []):
        if not str(entry.get("reason", "")).strip():
            raise ValueError(f"{path}: an entry without a reason: {entry}")
        read.append(Allowed(re.compile(entry["command"]), re.compile(entry["line"]), entry["reason"]))
    return read


def is_allowed(difference: Difference, entries: list[Allowed]) -> bool:
    """Whether each line of a difference is wanted; counts what was met."""
    met = [[entry for entry in entries if entry.covers(difference, line)] for line in difference.lines]
    if not met or not all(met):
        return False
    for entry in {id(entry): entry for covering in met for entry in covering}.values():
        entry.met += 1
    return True
