"""Every fault in every family, as calls and as rows, through the command line; what was named and what not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tests import command
from tests.causes.families import MARKS, family
from tests.causes.faults import FAULTS, Fault, with_fault
from tests.causes.talks import Talk, by_hand, sampled, with_tools
from tests.tiers import DEEP

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("calls", "row")
Written = tuple[Fault, Talk, dict[str, Any]]
"""A row, its fault and the conversation that it is of."""


@dataclass
class Tally:
    """What came of one family."""

    right: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def written(name: str, form: str, talks: Sequence[Talk]) -> list[Written]:
    """All rows of one family and form; in the quick tier the first and the last of each fault."""
    out: list[Written] = []
    numbered = list(enumerate(talks))
    for fault in FAULTS:
        if DEEP:
            out += _rows(fault, name, form, numbered)
            continue
        ends = [
            *islice(_rows(fault, name, form, numbered), 1),
            *islice(_rows(fault, name, form, numbered[::-1]), 1),
        ]
        out += ends if len(ends) == 2 and ends[0][1] is not ends[1][1] else ends[:1]
    return out


def _rows(fault: Fault, name: str, form: str, numbered: Iterable[tuple[int, Talk]]) -> Iterator[Written]:
    own = family(name)
    for seed, talk in numbered:
        fits = fault.any_talk or fault.tool_talks == talk.takes_tools
        if form not in fault.forms or not fits or (talk.takes_tools and not own.marks.tools):
            continue
        recorded = with_fault(fault, own, talk)
        if recorded is not None:
            yield fault, talk, recorded.calls(seed) if form == "calls" else recorded.row(seed)


def audited(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """The findings of each row, by the command line."""
    log, report = command.written(folder / "log.jsonl", rows), folder / "report.json"
    words = ["scan", str(log), "-t", str(family(name).folder)]
    # Each talk is in the log once for each fault; and what a template does to any row is no fault of one.
    words += ["--ignore", "REC009,TPL213"]
    words += ["--report", f"json={report}", "-q", "--no-config", "--fail-on", "never", "-j", "1"]
    if DEEP:
        subprocess.run([sys.executable, "-m", "tito_audit", *words], check=True, cwd=ROOT, capture_output=True)
    else:
        code, _, err = command.run(*words)
        assert code == 0, err
    out: list[list[dict[str, Any]]] = [[] for _ in rows]
    for finding in json.loads(report.read_text())["findings"]:
        if finding.get("row") is not None:
            out[finding["row"]].append(finding)
    return out


def named(fault: Fault, findings: Sequence[dict[str, Any]]) -> bool:
    """Whether the findings of a row name its fault and nothing else."""
    if fault.code is None and not fault.cause and "PADDING" not in fault.also:
        return not findings
    matching = [finding for finding in findings if _is(fault, finding)]
    rest = [finding for finding in findings if not _is(fault, finding)]
    return bool(matching) and all(finding["code"] in fault.also for finding in rest)


def _is(fault: Fault, finding: dict[str, Any]) -> bool:
    cause = (finding["cause"] or "").lower()
    if "PADDING" in fault.also:
        return finding["code"] == "REC004" and cause in ("padding in the prompt ids", "padding in the row")
    return finding["code"] == fault.code and any(word in cause for word in fault.cause.split("|"))


def run(names: Sequence[str], count: int, only: str = "", forms: Sequence[str] = FORMS) -> Tally:
    """Everything, counted."""
    tally = Tally()
    for name in names:
        talks = [*by_hand(), *sampled(count), *with_tools()]
        for form in forms:
            rows = [row for row in written(name, form, talks) if only in row[0].name]
            with tempfile.TemporaryDirectory() as folder:
                audits = audited(name, [row for _, _, row in rows], Path(folder))
            for (fault, talk, _), findings in zip(rows, audits, strict=True):
                key = (name, f"{fault.name} [{form}]")
                tally.total[key] += 1
                if named(fault, findings):
                    tally.right[key] += 1
                else:
                    shown = [
                        f"{f['code']}/{f['severity'][0]}/{f['cause']}/{f['where']}{f['turn']}:{f['start']}-{f['end']}"
                        for f in findings
                    ]
                    tally.wrong.append(f"{name} [{form}] {fault.name} ({talk.name}): {shown[:6]}")
    return tally


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", action="append")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--wrong", type=int, default=60)
    args = parser.parse_args()
    tally = run(args.family or list(MARKS), args.count, args.only)
    names = list(dict.fromkeys(name for name, _ in tally.total))
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for (name, fault), total in tally.total.items():
        table[fault][name] = f"{tally.right[name, fault]}/{total}"
    print(f"{'':58}" + " ".join(f"{name:>14}" for name in names))
    for fault, cells in table.items():
        print(f"{fault:58}" + " ".join(f"{cells.get(name, '-'):>14}" for name in names))
    print(f"{sum(tally.right.values())} of {sum(tally.total.values())}")
    kinds: Counter[str] = Counter()
    for line in tally.wrong:
        kind = line.split(" (")[0]
        kinds[kind] += 1
        if kinds[kind] <= 2 and sum(1 for n in kinds.values()) <= args.wrong:
            print(line)


if __name__ == "__main__":
    main()
