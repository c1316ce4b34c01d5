"""What the command line said of the files of a plan, and wrote, held against the truth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .expect import after_repair, before_repair, cured, loud, named, of_scan, said_undecided, wrong_places
from .forms import Columns, read_rows, write_rows
from .plan import Case, File
from .tool import Finding, Said, repair, scan

__all__ = ["FLAGS", "Outcome", "Violation", "run"]

FLAGS = {
    "default": (),
    "warning": ("--fail-on", "warning"),
    "realign": ("--with", "realign"),
    "mask": ("--with", "mask"),
}
"""The repairs that are run."""
Written = dict[tuple[str, int, int], Columns]


@dataclass(frozen=True)
class Violation:
    """Something that is not right, of one sample or file."""

    what: str
    place: str
    case: str
    said: str

    def __str__(self) -> str:
        return f"{self.place}: {self.case}\n      said: {self.said}"


@dataclass
class Outcome:
    """All counts of a run."""

    cells: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By form and kind of fault."""
    loud_codes: Counter[str] = field(default_factory=Counter)
    """What is loud on clean rows."""
    violations: dict[str, list[Violation]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, violation: Violation) -> None:
        """Count a violation."""
        self.violations[what].append(violation)

    def merge(self, other: Outcome) -> None:
        """Count what another run found."""
        for place, counts in other.cells.items():
            self.cells[place].update(counts)
        self.loud_codes.update(other.loud_codes)
        for what, found in other.violations.items():
            self.violations[what] += found


def run(plan: list[File], folder: Path, flags: list[str]) -> Outcome:
    """Scan and repair the files, one process a model and command."""
    outcome = Outcome()
    for model in dict.fromkeys(file.model for file in plan):
        outcome.merge(_model([file for file in plan if file.model == model], folder / model, flags))
    return outcome


def _model(plan: list[File], folder: Path, flags: list[str]) -> Outcome:
    logs, model, outcome = folder / "logs", plan[0].model, Outcome()
    logs.mkdir(parents=True, exist_ok=True)
    for file in plan:
        rows = [file.form.write([case.sample for case in row], file.form.fill) for row in file.rows]
        write_rows(logs / file.name, rows)
    paths = [logs / file.name for file in plan]
    said = scan(paths, model, folder / "scan.json")
    written = {}
    for name in flags:
        repair(paths, model, folder / name, *FLAGS[name])
        written[name] = _written(plan, folder / name)
    again = None
    if "default" in written:
        again = scan([folder / "default" / file.name for file in plan], model, folder / "again.json")
    for file in plan:
        judge_file(file, said, written, again, outcome)
    return outcome


def _written(plan: list[File], folder: Path) -> Written:
    """Every sample as it stands in what a repair wrote."""
    found: Written = {}
    for file in plan:
        for number, row in enumerate(read_rows(folder / file.name)):
            for item, columns in enumerate(file.form.read(row)):
                found[file.name, number, item] = columns
    return found


def judge_file(file: File, said: Said, written: dict[str, Written], again: Said | None, outcome: Outcome) -> None:
    """Count what was said of a file, and made of it."""
    wrong_file = [one for one in said.files[file.name] if one.loud]
    if wrong_file and (file.same is None or file.same.kind == "clean"):
        words = "; ".join(map(str, wrong_file))
        outcome.add("loud on a whole file", Violation("", file.name, "its rows have no fault in common", words))
    for row, item, case in file.cases:
        place = (file.name, row, item)
        now = {name: samples[place] for name, samples in written.items() if place in samples}
        findings = said.samples[place]
        whole = file.same is not None
        broken = list(of_scan(case, findings, whole=whole))
        for name, columns in now.items():
            broken += [f"{what} ({name})" for what in after_repair(case, columns, name)]
        broken += _missing(written, now) + _between(case, now)
        broken += _silenced(case, findings, now, again, place)
        told = said_undecided(findings) or any(one.cause == "undecided" for one in said.files[file.name])
        quiet = case.fault.kind != "clean" and not (told or loud(findings))
        if quiet and case.stated_verdict == "open" and file.same is None:
            broken.append("an undecided row is not said to be so")
        _count(outcome, case, findings, now, broken, told=told)
        for what in broken:
            outcome.add(what, Violation(what, _place(place), described(case), _words(findings)))


def _missing(written: dict[str, Written], now: dict[str, Columns]) -> list[str]:
    return [f"repair lost the row ({name})" for name in written if name not in now]


def _between(case: Case, now: dict[str, Columns]) -> list[str]:
    """What is wrong between two repairs."""
    if {"default", "warning"} <= now.keys() and cured(case, now["default"]) and not cured(case, now["warning"]):
        return ["--fail-on warning repaired less"]
    return []


def _silenced(
    case: Case,
    findings: list[Finding],
    now: dict[str, Columns],
    again: Said | None,
    place: tuple[str, int, int],
) -> list[str]:
    """Whether a repair left wrong tokens behind and nothing that says so."""
    if again is None or "default" not in now or not loud(findings) or case.verdict in ("clean", "open"):
        return []
    if wrong_places(case, now["default"]) and not loud(again.samples[place]):
        return ["repair removed the last witness of a fault"]
    return []


def _count(
    outcome: Outcome,
    case: Case,
    findings: list[Finding],
    now: dict[str, Columns],
    broken: list[str],
    *,
    told: bool,
) -> None:
    cell = outcome.cells[case.form.name, case.fault.kind]
    verdict = case.verdict
    cell["rows"] += 1
    cell[verdict] += 1
    cell["wrong before"] += bool(wrong_places(case, before_repair(case)))
    cell["named"] += verdict == "fault" and named(case, findings)
    cell["said"] += verdict == "open" and told and not loud(findings)
    cell["told"] += verdict == "open fault" and loud(findings)
    cell["cured"] += verdict == "fault" and "default" in now and cured(case, now["default"])
    cell["harmed"] += any(what.startswith(("repair harmed", "repair trains", "repair changed")) for what in broken)
    cell["violations"] += bool(broken)
    if case.fault.kind == "clean":
        cell["loud"] += loud(findings)
        codes = {f"{one.severity} {one.code} {one.cause}" for one in findings if one.loud}
        outcome.loud_codes.update(codes)


def described(case: Case) -> str:
    """A sample and its fault, on one line."""
    chat = case.chat
    with_messages = "with messages" if case.sample.messages else "without messages"
    reasons = ",".join(turn.reason for turn in chat.turns)
    spans = [(turn.start, turn.end) for turn in chat.turns]
    stated = f", states reasons ({case.sample.reasons})" if case.sample.reasons else ""
    return (
        f"{case.form.name} {case.fault} is {case.verdict}; {with_messages}{stated}; turns {reasons}; "
        f"sampled {spans} of {len(chat.ids)}"
    )


def _place(place: tuple[str, int, int]) -> str:
    return f"{place[0]}:{place[1]}.{place[2]}"


def _words(findings: list[Finding]) -> str:
    order = sorted(findings, key=lambda one: (not one.loud, one.code))
    kept: Iterator[str] = (str(one) for one in order[:8] if one.loud or one.code[:3] in ("MSK", "LPR"))
    return "; ".join(kept) or "nothing"
