"""What is wrong with a run, seen from outside: its exit code, what it printed, what it wrote and what it took."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.torture.attack import OUT, Attack
from tests.torture.mutants.pickles import TRAP
from tests.torture.prover import proven
from tests.torture.sources import ROOT

__all__ = ["MEMORY", "Failure", "Outcome", "judged"]

MEMORY = 1 << 30
"""A run that takes more than this over what the process held before fails."""
_FRAME = re.compile(r'File "([^"]+)", line \d+,? in (.+)')
_WARNING = re.compile(r"^(\S*?):\d+: (\w*Warning): (.*)", re.MULTILINE)
_BUG = re.compile(r" failed: (\w+).* in (\S+) \((\w+)\)\.\nThis is a bug in tito-audit")
_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = ("text", "concise", "github", "markdown")
_VALIDATED = 8
"""One of so many reports is held against its schema."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `ended` is exit, hang or died; seconds, and bytes of memory over what was held before."""

    stdout: bytes
    stderr: bytes
    code: int
    seconds: float
    ended: str
    cpu: float = 0.0
    peak: int = 0
    idle: int = 0


@dataclass(frozen=True)
class Failure:
    """Something that must not be: its kind, the place by which alike failures are told, and what was seen."""

    kind: str
    place: str
    said: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What alike failures have in common."""
        return self.kind, self.place

    def __str__(self) -> str:
        return f"{self.kind}: {self.place}"


def judged(attack: Attack, outcome: Outcome, folder: Path, memory: int = MEMORY) -> Iterator[Failure]:
    """Everything that is wrong with a run of an attack in a room's folder, with so many bytes of memory."""
    errors = outcome.stderr.decode("utf-8", "surrogateescape")
    yield from _ended(attack, outcome, errors, memory)
    yield from _input(attack, folder)
    yield from _left(attack, outcome, folder)
    if outcome.ended == "exit" and "Traceback (most recent call last)" not in errors:
        yield from _exit(attack, outcome, errors)
        yield from _printed(attack, outcome, errors)
        yield from _written(attack, outcome, folder)


def _ended(attack: Attack, outcome: Outcome, errors: str, memory: int) -> Iterator[Failure]:
    if outcome.ended == "hang":
        yield Failure("hang", f"{attack.command} {_first_of_ours(errors)}", f"{outcome.seconds:.0f} s")
    elif outcome.ended == "died":
        name = signal.Signals(-outcome.code).name if outcome.code < 0 else f"exit {outcome.code}"
        yield Failure("died", f"{attack.command} {name} {_first_of_ours(errors)}", errors[-2000:])
    if "Traceback (most recent call last)" in errors:
        yield Failure("traceback", _innermost(errors), errors[-4000:])
    bug = _BUG.search(errors)
    if bug:
        yield Failure("bug", f"{bug.group(2)}:{bug.group(3)} {bug.group(1)}", errors[-2000:])
    for path, kind, text in _WARNING.findall(errors):
        short = "/".join(Path(path).parts[-2:])
        yield Failure("warning", f"{short} {kind} {re.sub('[0-9]+', 'N', text)[:60]}", errors[-2000:])
    if outcome.peak > memory:
        yield Failure(
            "memory", f"{attack.command} {re.sub('[0-9]+', 'N', attack.made)[:60]}", f"{outcome.peak >> 20} MB"
        )


def _innermost(errors: str) -> str:
    """The innermost frame of the package, and the kind of the error."""
    shown = errors[errors.rindex("Traceback (most recent call last)") :]
    frames = _ours(shown)
    error = [
        line for line in shown.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit|Warning|Interrupt)\b", line)
    ]
    kind = (error or ["?"])[-1].split(":")[0]
    return f"{frames[-1] if frames else 'outside'} {kind}"


def _first_of_ours(errors: str) -> str:
    """The innermost frame of the package in a list that begins with it."""
    return next(iter(_ours(errors)), "outside")


def _ours(text: str) -> list[str]:
    frames = [(Path(path), name) for path, name in _FRAME.findall(text)]
    package = [(path, name) for path, name in frames if "tito_audit" in path.parts]
    return [f"{'/'.join(path.parts[path.parts.index('tito_audit') + 1 :])}:{name}" for path, name in package]


def _exit(attack: Attack, outcome: Outcome, errors: str) -> Iterator[Failure]:
    if outcome.code not in (0, 1, 2):
        yield Failure("exit", f"{attack.command} {outcome.code}", errors[-500:])
    if outcome.code == 2 and len(errors.strip()) < 20:
        yield Failure("silent", f"{attack.command} exit 2", errors)
    quiet = "-q" in attack.words  # its reports are in files
    if outcome.code == 1 and not quiet and not (outcome.stdout.strip() or errors.strip()):
        yield Failure("silent", f"{attack.command} exit 1")


def _input(attack: Attack, folder: Path) -> Iterator[Failure]:
    folder_in = folder / "in"
    for name, data in attack.files.items():
        path = folder_in / name
        if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
            yield Failure("input changed", attack.command, name)
    inputs = {folder_in / name for name in attack.files}
    for path in folder_in.rglob("*"):
        if path not in inputs and not path.is_dir():
            yield Failure("left over", f"{attack.command} beside the input", str(path.relative_to(folder)))


def _outputs(attack: Attack) -> set[str]:
    """The files that a run may write."""
    return {word.partition(OUT)[2].strip("/") for word in attack.words if OUT in word}


def _left(attack: Attack, outcome: Outcome, folder: Path) -> Iterator[Failure]:
    if (folder / "work" / TRAP).exists():
        yield Failure("code ran", attack.command, attack.made)
    if outcome.ended != "exit":
        return
    named = _outputs(attack)
    for place in ("out", "tmp", "work"):
        for path in (folder / place).rglob("*"):
            name = str(path.relative_to(folder / place))
            if (
                place == "out"
                and (name in named or name.split("/")[0] == "repaired")
                and not _unmade(outcome, name)
            ):
                continue
            if path.is_file() and path.name != TRAP:
                yield Failure("left over", f"{attack.command} exit {outcome.code} in {place}", name)


def _unmade(outcome: Outcome, name: str) -> bool:
    """Whether a run that says that it made nothing has made a file."""
    return outcome.code == 2 and name.split("/")[0] not in ("repaired", "journal")


def _report_of(attack: Attack) -> str:
    return attack.words[attack.words.index("-f") + 1] if "-f" in attack.words else "text"


def _printed(attack: Attack, outcome: Outcome, errors: str) -> Iterator[Failure]:
    control = _CONTROL.search(errors)
    if control:
        around = errors[max(0, control.start() - 60) : control.end() + 20]
        yield Failure("control character", f"{attack.command} stderr", repr(around))
    kind = _report_of(attack)
    try:
        printed = outcome.stdout.decode()
    except UnicodeDecodeError as error:
        yield Failure("report", f"{attack.command} {kind} no UTF-8", str(error))
        return
    control = _CONTROL.search(printed) if kind in _PLAIN else None
    if control:
        around = printed[max(0, control.start() - 60) : control.end() + 20]
        yield Failure("control character", f"{attack.command} stdout {kind}", repr(around))
    if outcome.code in (0, 1):
        fault = invalid(kind, printed, attack)
        if fault:
            yield Failure("report", f"{attack.command} {kind} {fault.splitlines()[0][:60]}", fault[:500])


def invalid(kind: str, printed: str, attack: Attack) -> str:
    """What is wrong with a report; empty if nothing."""
    try:
        if kind in ("json", "sarif"):
            value = _parsed(printed)
            if kind == "json" and attack.command == "scan" and len(printed) % _VALIDATED == 0:
                return _against_schema(value)
        elif kind == "jsonl":
            for line in printed.splitlines():
                _parsed(line)
        elif kind == "junit":
            ElementTree.fromstring(printed)
        elif kind == "html" and "</html>" not in printed[-200:]:
            return "an unfinished page"
    except (ValueError, ElementTree.ParseError, RecursionError) as error:
        return re.sub("[0-9]+", "N", f"{type(error).__name__} {error}")
    return ""


def _parsed(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@cache
def _schema() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads((ROOT / "tito_audit/schemas/report.schema.json").read_text()))


def _against_schema(value: Any) -> str:
    error = next(iter(_schema().iter_errors(value)), None)
    return (
        f"against the schema: {'/'.join(map(str, error.absolute_schema_path))[:50]} {error.message}"
        if error
        else ""
    )


def _written(attack: Attack, outcome: Outcome, folder: Path) -> Iterator[Failure]:
    if outcome.code not in (0, 1) or "-o" not in attack.words:
        return
    name = attack.words[attack.words.index("-o") + 1].partition(OUT)[2].strip("/")
    path = folder / "out" / name
    if attack.command == "convert" and path.name.endswith(".jsonl") and path.exists():
        for line in path.read_bytes().splitlines():
            try:
                json.loads(line.decode())  # with infinity as Python writes it, which logs hold
            except (ValueError, RecursionError) as error:
                yield Failure("output", f"convert {type(error).__name__}", str(error))
    if attack.command != "repair" or len(attack.files) != 1:
        return
    if not path.exists() and "--diff" not in attack.words:
        yield Failure("output", f"repair exit {outcome.code} without its file", name)
    report = folder / "out" / "report.json"
    if path.exists() and report.exists():
        yield from _proven(folder / "in" / next(iter(attack.files)), path, report)


def _proven(original: Path, repaired: Path, report: Path) -> Iterator[Failure]:
    """What the proof says of a repair."""
    answer = proven(original, repaired, report)
    if "failed" in answer:
        yield Failure("proof failed", answer["failed"], answer["why"])
    for loss in answer.get("lost", [])[:3]:
        words = re.sub(r"'[^']*'|\"[^\"]*\"|[0-9]+|/\S+", "N", loss)
        yield Failure("changed", words[:90], loss)
