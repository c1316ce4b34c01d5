"""What two runs gave, and where they differ."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

__all__ = ["MASKS", "Difference", "Ran", "Step", "differences", "masked", "snapshot"]

MASKS = (
    (
        "seconds in the head of a text",
        re.compile(rb"\xc2\xb7\s+[\d.]+ s\b(?:,\s+[\d,]+ tokens/s)?"),
        b"\xc2\xb7 N s",
    ),
    ("seconds in a JSON report", re.compile(rb'"seconds":\s*[\d.e+-]+'), b'"seconds":N'),
    ("seconds in an HTML report", re.compile(rb"<dt>took</dt><dd>[^<]*</dd>"), b"<dt>took</dt><dd>N s</dd>"),
    ("seconds in a JUnit report", re.compile(rb'(<testsuites [^>]*)time="[\d.]+"'), rb'\1time="N"'),
    ("frames of a traceback", re.compile(rb"(?m)(^Traceback .*\n)(?:^ .*\n)+"), rb"\1"),
)
"""What differs from run to run, seconds and tokens a second, and where in the code a crash was. Masked in what is
printed and in reports only."""
_REPORT = "report."
"""How the names of written reports begin; nothing is masked in other files."""
_SHOWN = 160
"""How much of a line is shown around its first difference."""
_MOST_LINES = 20_000
"""Texts of more lines are not matched line by line where they differ in length."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command line and how it ended."""

    command: str
    code: int
    out: bytes
    err: bytes


@dataclass(frozen=True, slots=True)
class Ran:
    """What a case did: its steps, and the files that stood there in the end, by path."""

    steps: tuple[Step, ...]
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Difference:
    """One output that is not the same: `lines` begin with - as it was before, with + as it is now."""

    command: str
    place: str
    lines: tuple[str, ...]

    def shown(self, most: int) -> Iterator[str]:
        """The difference for people."""
        yield f"{self.command}\n    {self.place}"
        yield from (f"      {line}" for line in self.lines[:most])
        if len(self.lines) > most:
            yield f"      … {len(self.lines) - most} more lines"


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its rights; links as where they point, and not followed."""
    contents: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            contents[f"{name} (link)"] = str(path.readlink()).encode()
        elif stat.S_ISREG(mode):
            contents[name] = path.read_bytes()
            contents[f"{name} (rights)"] = oct(stat.S_IMODE(mode)).encode()
        else:
            contents[f"{name} (kind)"] = oct(stat.S_IFMT(mode)).encode()
    return contents


def masked(data: bytes) -> bytes:
    """Output without what differs from run to run."""
    for _, pattern, put in MASKS:
        data = pattern.sub(put, data)
    return data


def differences(old: Ran, new: Ran) -> Iterator[Difference]:
    """Every output that is not the same."""
    for before, now in zip(old.steps, new.steps, strict=True):
        if before.code != now.code:
            yield Difference(now.command, "exit code", (f"-{before.code}", f"+{now.code}"))
        for place, earlier, later in (("stdout", before.out, now.out), ("stderr", before.err, now.err)):
            yield from _output(now.command, place, masked(earlier), masked(later))
    whole = " && ".join(step.command for step in new.steps)
    for name in sorted(old.files.keys() | new.files.keys()):
        if name not in new.files:
            yield Difference(whole, name, ("-file written", "+no file"))
        elif name not in old.files:
            yield Difference(whole, name, ("-no file", "+file written"))
        else:
            earlier, later = old.files[name], new.files[name]
            is_report = Path(name).name.startswith(_REPORT)
            yield from _output(whole, name, *((masked(earlier), masked(later)) if is_report else (earlier, later)))


def _output(command: str, place: str, old: bytes, new: bytes) -> Iterator[Difference]:
    if old == new:
        return
    try:
        lines = tuple(_changed(old.decode().split("\n"), new.decode().split("\n")))
    except UnicodeDecodeError:
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        lines = (f"-{len(old)} bytes: {old[at : at + 24]!r} at {at}", f"+{len(new)} bytes: {new[at : at + 24]!r}")
    yield Difference(command, place, lines)


def _changed(old: list[str], new: list[str]) -> Iterator[str]:
    """Lines that are not in both, each cut to what stands around its first difference."""
    if len(old) == len(new) or max(len(old), len(new)) > _MOST_LINES:
        for a, b in zip(old, new, strict=False):
            if a != b:
                yield from _pair(a, b)
        yield from (f"-{line[:_SHOWN]}" for line in old[len(new) :])
        yield from (f"+{line[:_SHOWN]}" for line in new[len(old) :])
        return
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "replace" and b - a == d - c:
            for left, right in zip(old[a:b], new[c:d], strict=True):
                yield from _pair(left, right)
        elif kind != "equal":
            yield from (f"-{line[:_SHOWN]}" for line in old[a:b])
            yield from (f"+{line[:_SHOWN]}" for line in new[c:d])


def _pair(old: str, new: str) -> Iterator[str]:
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - _SHOWN // 2) if max(len(old), len(new)) > _SHOWN else 0
    yield f"-{old[start : start + _SHOWN]}"
    yield f"+{new[start : start + _SHOWN]}"
