"""Whether rows of a log change what is said of one another, or what a repair makes of them.

A log of right rows is run without an odd row and with it, and the odd row is run alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conventions import CONVENTIONS
from .forms import FORMS, Form, write_rows
from .judge import FLAGS, Outcome, Violation, described
from .plan import FAULTS, Case, case_of, fault_of
from .tool import Said, repair, scan

__all__ = ["KINDS", "Beside", "Ran", "differing", "logs_beside", "run_odd"]

KINDS = (*(kind for kind in FAULTS if kind != "clean"), "convention", "another fill", "no mask", "no logprobs")
RIGHT = 6
Json = dict[str, Any]


@dataclass(frozen=True)
class Beside:
    """A log of right rows, and the same log with an odd row at some place."""

    name: str
    model: str
    kind: str
    right: list[Case]
    rows: list[Json]
    odd: Json
    at: int

    odd_case: Case

    def side(self, name: str) -> list[tuple[Json, Case]]:
        """The rows of the log `without` the odd row or `with` it, or that row `only`, each with its truth."""
        right = list(zip(self.rows, self.right, strict=True))
        odd = [(self.odd, self.odd_case)]
        return {"without": right, "with": [*right[: self.at], *odd, *right[self.at :]], "only": odd}[name]


def logs_beside(count: int, forms: Sequence[str], seed: int, models: Sequence[str]) -> Iterator[Beside]:
    """So many logs; their kinds of odd rows and their conventions take turns."""
    dice = random.Random(seed)
    shift = dice.randrange(len(CONVENTIONS))
    for number in range(count):
        kind, convention = KINDS[number % len(KINDS)], CONVENTIONS[(number + shift) % len(CONVENTIONS)]
        form, model, messages = FORMS[dice.choice(forms)], dice.choice(models), dice.random() < 0.5
        messages = messages and form.name != "packed"
        right = [
            case_of(form, fault_of("clean", dice), convention, model, dice, messages=messages)
            for _ in range(RIGHT)
        ]
        if convention.recomputed and kind.startswith(("logprobs", "both", "fill")):
            convention = CONVENTIONS[0]
        fault = fault_of(kind if kind in FAULTS else "clean", dice)
        if kind == "convention":
            convention = dice.choice([other for other in CONVENTIONS if other != convention])
        strange = case_of(form, fault, convention, model, dice, messages=messages)
        rows = [_row(form, case) for case in right]
        name = f"odd-{number}-{form.name}-{model}.jsonl"
        odd = _odd(form, strange, kind)
        yield Beside(name, model, kind, right, rows, odd, dice.randint(0, RIGHT), strange)


def _row(form: Form, case: Case) -> Json:
    # A pack has two samples or more.
    return form.write([case.sample] * (2 if form.name == "packed" else 1), form.fill)


def _odd(form: Form, case: Case, kind: str) -> Json:
    if kind == "another fill":
        return form.write([case.sample] * (2 if form.name == "packed" else 1), 1.0 if form.fill == 0.0 else 0.0)
    row = _row(form, case)
    if kind.startswith("no "):
        wanted = ("mask",) if kind == "no mask" else ("logprob", "log_prob")
        return {name: value for name, value in row.items() if not any(part in name for part in wanted)}
    return row


def run_odd(logs: Sequence[Beside], folder: Path, flags: Sequence[str]) -> Outcome:
    """Scan and repair all logs without their odd rows and with them, and compare."""
    outcome = Outcome()
    for model in dict.fromkeys(log.model for log in logs):
        chosen = [log for log in logs if log.model == model]
        runs = {side: _ran(chosen, model, folder / model / side, flags) for side in ("with", "without", "only")}
        for log in chosen:
            for side in ("without", "only"):
                for violation in differing(log, side, runs[side], runs["with"]):
                    outcome.add(violation)
    return outcome


@dataclass(frozen=True)
class Ran:
    """What was said of logs and written by each repair, line by line."""

    scanned: Said
    lines: dict[tuple[str, str], list[str]]


def _ran(logs: Sequence[Beside], model: str, folder: Path, flags: Sequence[str]) -> Ran:
    (folder / "logs").mkdir(parents=True)
    paths = []
    for log in logs:
        paths.append(folder / "logs" / log.name)
        write_rows(paths[-1], [row for row, _ in log.side(folder.name)])
    lines = {}
    for name in flags:
        repair(paths, model, folder / name, *FLAGS[name])
        for log in logs:
            lines[log.name, name] = (folder / name / log.name).read_text(encoding="utf-8").split("\n")
    return Ran(scan(paths, model, folder / "scan.json"), lines)


def differing(log: Beside, side: str, alone: Ran, together: Ran) -> Iterator[Violation]:
    """What is otherwise of a row because others are in its log."""
    was, now = _findings(log, alone.scanned), _findings(log, together.scanned)
    whose = "an odd row changes" if side == "without" else "right rows change"
    which = "a right one" if side == "without" else "an odd one"
    places = [number for number in range(RIGHT + 1) if (number == log.at) == (side == "only")]
    for number, at in enumerate(places):
        case = log.side("with")[at][1]
        place, about = f"{log.name}:{at}", f"{log.kind} at {log.at}: {described(case)}"
        if was[number] != now[at]:
            words = f"alone {_words(was[number])}; together {_words(now[at])}"
            yield Violation(f"{whose} what is said of {which}", place, about, words)
        for (name, flag), lines in alone.lines.items():
            if name == log.name and lines[number] != together.lines[name, flag][at]:
                yield Violation(f"{whose} the repair of {which} ({flag})", place, about, "")


def _findings(log: Beside, scanned: Said) -> dict[int, list[Json]]:
    """The findings of each row, but for where it stands."""
    rows: dict[int, list[Json]] = defaultdict(list)
    for finding in scanned.report["findings"]:
        if (
            Path(finding["file"] or "").name == log.name
            and finding["where"] != "log"
            and finding["row"] is not None
        ):
            facts = {key: value for key, value in finding.items() if key not in ("file", "row", "fingerprint")}
            rows[finding["row"]].append(facts)
    return rows


def _words(findings: list[Json]) -> str:
    return ", ".join(f"{each['severity']} {each['code']} {each['cause']!r}" for each in findings[:4]) or "nothing"
