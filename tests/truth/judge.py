"""What the command line said of the files of a plan, and wrote, held against the truth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from .expect import after_repair, before_repair, changed, cured, loud, named, noted, of_log, of_scan, wrong_places
from .forms import Columns, read_rows, write_rows
from .plan import Case, File
from .tool import Finding, Said, repair, scan

__all__ = ["FLAGS", "Outcome", "Place", "Violation", "Written", "judge_file", "run"]

FLAGS = {
    "default": (),
    "warning": ("--fail-on", "warning"),
    "realign": ("--with", "realign"),
    "mask": ("--with", "mask"),
}
"""The repairs that are run."""
Place = tuple[str, int, int]


@dataclass
class Written:
    """What a repair wrote."""

    samples: dict[Place, Columns] = field(default_factory=dict)
    touched: set[tuple[str, int]] = field(default_factory=set)
    """Rows that are no longer what they were, in a byte or a value."""
    files: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Violation:
    """Something that is not right, of one sample or file."""

    what: str
    place: str
    case: str
    words: str

    def __str__(self) -> str:
        return f"{self.place}: {self.case}\n      said: {self.words}"


@dataclass
class Outcome:
    """All counts of a run."""

    cells: dict[tuple[str, str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By form, convention and group of faults."""
    loud_codes: Counter[str] = field(default_factory=Counter)
    """What is loud on right rows."""
    violations: dict[str, list[Violation]] = field(default_factory=lambda: defaultdict(list))

    def add(self, violation: Violation) -> None:
        """Count a violation."""
        self.violations[violation.what].append(violation)

    def merge(self, other: Outcome) -> None:
        """Count what another run found."""
        for place, counts in other.cells.items():
            self.cells[place].update(counts)
        self.loud_codes.update(other.loud_codes)
        for what, violations in other.violations.items():
            self.violations[what] += violations


def run(plan: list[File], folder: Path, flags: Sequence[str]) -> Outcome:
    """Scan and repair the files: each by the first of the flags, every third by one of the others in turn."""
    outcome = Outcome()
    for model in dict.fromkeys(file.model for file in plan):
        outcome.merge(_model([file for file in plan if file.model == model], folder / model, flags))
    return outcome


def _model(plan: list[File], folder: Path, flags: Sequence[str]) -> Outcome:
    logs, model, outcome = folder / "logs", plan[0].model, Outcome()
    logs.mkdir(parents=True, exist_ok=True)
    for file in plan:
        rows = [file.form.write([case.sample for case in row], file.form.fill) for row in file.rows]
        write_rows(logs / file.name, rows)
    scanned = scan([logs / file.name for file in plan], model, folder / "scan.json")
    others = cycle([number for other in range(1, len(flags)) for number in (other, 0, 0)])
    turns = [next(others, 0) for _ in plan]
    written = {}
    for number, name in enumerate(flags):
        chosen = [file for file, turn in zip(plan, turns, strict=True) if number in (0, turn)]
        if chosen:
            repair([logs / file.name for file in chosen], model, folder / name, *FLAGS[name])
            written[name] = _written(chosen, logs, folder / name)
    again = None
    if "default" in written:
        again = _again(plan, written["default"], folder)
    for file in plan:
        judge_file(file, scanned, written, again, outcome)
    return outcome


def _written(plan: list[File], logs: Path, folder: Path) -> Written:
    """Every sample as it stands in what a repair wrote."""
    written = Written(files={file.name for file in plan})
    for file in plan:
        rows = read_rows(folder / file.name)
        for number, row in enumerate(rows):
            for item, columns in enumerate(file.form.read(row)):
                written.samples[file.name, number, item] = columns
        pairs = zip(_texts(logs / file.name), _texts(folder / file.name), strict=False)
        written.touched |= {(file.name, number) for number, (was, now) in enumerate(pairs) if was != now}
    return written


def _texts(path: Path) -> list[str]:
    """The rows of a file as they are written; of a table, what it shows of them."""
    if path.suffix == ".parquet":
        return [repr({**row, "tito_audit": row.get("tito_audit")}) for row in read_rows(path)]
    return path.read_text(encoding="utf-8").split("\n")


def _again(plan: list[File], written: Written, folder: Path) -> Said | None:
    """What a scan says of repaired files in which something changed and is wrong still."""
    left = {
        file.name
        for file in plan
        for row, item, case in file.cases
        if (now := written.samples.get((file.name, row, item))) is not None
        and changed(case, now)
        and wrong_places(case, now)
    }
    paths = [folder / "default" / name for name in sorted(left)]
    return scan(paths, plan[0].model, folder / "again.json") if paths else None


def judge_file(
    file: File, scanned: Said, written: dict[str, Written], again: Said | None, outcome: Outcome
) -> None:
    """Count what was said of a file, and made of it."""
    log = scanned.files[file.name]
    for what in of_log(log, [case for _, _, case in file.cases], convention=file.convention is not None):
        outcome.add(Violation(what, file.name, str(file.convention or "several conventions"), _words(log)))
    for row, item, case in file.cases:
        place = (file.name, row, item)
        ran = {name: repaired for name, repaired in written.items() if file.name in repaired.files}
        now = {name: repaired.samples[place] for name, repaired in ran.items() if place in repaired.samples}
        findings = scanned.samples[place]
        broken = list(of_scan(case, findings))
        for name, columns in now.items():
            broken += [f"{what} ({name})" for what in after_repair(case, columns, name)]
        if all(other.verdict == "clean" for other in file.rows[row]):
            names = [name for name, repaired in ran.items() if (file.name, row) in repaired.touched]
            broken += [f"repair changed a byte of a right row ({name})" for name in names]
        broken += [f"repair lost the row ({name})" for name in ran if name not in now]
        broken += _between(case, now)
        broken += _silenced(case, findings, now, again, place)
        _count(outcome, case, findings, now, broken)
        for what in broken:
            outcome.add(Violation(what, _place(place), described(case), _words(findings)))


def _between(case: Case, now: dict[str, Columns]) -> list[str]:
    """What is wrong between two repairs."""
    if {"default", "warning"} <= now.keys() and cured(case, now["default"]) and not cured(case, now["warning"]):
        return ["--fail-on warning repaired less"]
    return []


def _silenced(
    case: Case, findings: list[Finding], now: dict[str, Columns], again: Said | None, place: Place
) -> list[str]:
    """Whether a repair left wrong tokens behind and nothing that says so."""
    if again is None or "default" not in now or not loud(findings) or case.verdict in ("clean", "open"):
        return []
    columns = now["default"]
    if changed(case, columns) and wrong_places(case, columns) and not loud(again.samples[place]):
        return ["repair removed the last witness of a fault"]
    return []


def _count(
    outcome: Outcome, case: Case, findings: list[Finding], now: dict[str, Columns], broken: list[str]
) -> None:
    cell = outcome.cells[case.form.name, case.convention.name, case.fault.group]
    verdict = case.verdict
    cell["rows"] += 1
    cell[verdict] += 1
    cell["wrong before"] += bool(wrong_places(case, before_repair(case)))
    cell["named"] += verdict == "fault" and named(case, findings)
    cell["said"] += verdict == "open" and noted(findings) and not loud(findings)
    cell["told"] += verdict == "open fault" and loud(findings)
    cell["cured"] += verdict == "fault" and "default" in now and cured(case, now["default"])
    cell["harmed"] += any(
        what.startswith(("repair harmed", "repair trains", "repair changed ids")) for what in broken
    )
    cell["violations"] += bool(broken)
    if verdict == "clean":
        cell["loud"] += loud(findings)
        cell["noted"] += noted(findings) and not loud(findings)
        cell["changed"] += any(changed(case, columns) for columns in now.values())
        outcome.loud_codes.update(
            {f"{finding.severity} {finding.code} {finding.cause}" for finding in findings if finding.loud}
        )


def described(case: Case) -> str:
    """A sample and its fault, on one line."""
    chat = case.chat
    with_messages = "with messages" if case.sample.messages else "without messages"
    reasons = ",".join(turn.reason for turn in chat.turns)
    spans = [(turn.start, turn.end) for turn in chat.turns]
    stated = f", states reasons ({case.sample.reasons})" if case.sample.reasons else ""
    where = f" {case.sample.turn}" if case.fault.shape else ""
    slides = "; ".join(
        f"{each.mask:+d} {each.logprobs:+d} {each.shape} {each.turn}".strip() for each in case.decision.slides
    )
    return (
        f"{case.form.name}, {case.convention}, {case.fault}{where} is {case.verdict} [{slides}]; "
        f"{with_messages}{stated}; turns {reasons}; sampled {spans} of {len(chat.ids)}"
    )


def _place(place: Place) -> str:
    return f"{place[0]}:{place[1]}.{place[2]}"


def _words(findings: list[Finding]) -> str:
    order = sorted(findings, key=lambda finding: (not finding.loud, finding.code))
    shown: Iterator[str] = (str(each) for each in order[:8] if each.loud or each.code[:3] in ("MSK", "LPR"))
    return "; ".join(shown) or "nothing"
