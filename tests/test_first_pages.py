"""The pages that people see first: short, causes and rows in front, and everything else an option away."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import run, written
from tests.ready import program
from tests.report_results import finding, result
from tests.world import ROOT
from tito_audit.record.finding import Result, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.summary import Summary
from tito_audit.terminal.verdict import cause_lines, verdict


def counted(results: list[Result]) -> Summary:
    summary = Summary()
    for each in results:
        summary.add(each)
    return summary


def test_findings_of_one_turn_are_told_until_the_baseline_knows_them() -> None:
    rows = [Place("a", row) for row in range(3)]
    hits = [finding("TPL203", Severity.ERROR, place, turn=1, later_turn=2) for place in rows]
    results = [result(row, hit, file="a") for row, hit in enumerate(hits)]
    summary = counted(results)
    cause = "turn 2's prompt in each with a tool call rewritten by the template"
    assert verdict(summary).line == f"findings: errors in 3 of 3 rollouts (100 %): {cause}"
    summary.count_new(results[0], -1)
    assert cause_lines(summary)[0].words == f"2 rollouts (67 %): {cause}"


def test_what_a_template_does_to_reasoning_is_one_line() -> None:
    reasoning = [
        finding(code, severity, Place("a", row), turn=turn, later_turn=turn + 1, end=9)
        for code, severity in (("TPL204", Severity.ERROR), ("TPL205", Severity.ERROR))
        for row in range(2)
        for turn in (0, 1)
    ]
    of_log = finding("TPL213", Severity.NOTE, Place("a", 0), where=Where.LOG)
    results = [result(each.place.row, each, file="a") for each in reasoning]
    results.append(Result(Place("a", 0), None, (of_log,), of_log=True))
    (line,) = cause_lines(counted(results), least=Severity.WARNING)
    assert line.codes == ("TPL205", "TPL204", "TPL213")
    assert line.words.endswith(", 1 log rendered by a template that is not append-only")
    alone = cause_lines(counted(results[-1:]))
    assert [each.words for each in alone] == ["1 log rendered by a template that is not append-only"]
    assert len(cause_lines(counted([*results, result(5, finding("LPR504", Severity.ERROR, Place("a", 5)))]))) == 2


def test_reports_say_the_same_of_what_was_not_checked_whatever_a_page_lists(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [{"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}])
    options = ([], ["--not-checked", "--notes"])
    reports = [json.loads(run("scan", log, "-f", "json", *more)[1])["summary"]["skipped"] for more in options]
    assert reports[0] == reports[1]
    listed = run("scan", log, "--not-checked")[1].partition("\nNot checked\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"\b[A-Z]{3}\d{3}\b", listed)) <= reports[0].keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_shows_a_failing_log_its_repair_and_the_clean_rescan_in_forty_lines(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tito-audit"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(program())} "$@"\n')
    command.chmod(0o755)
    (tmp_path / ".installed").touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "MAKEFLAGS": ""}
    make_demo = ["make", "-s", "-C", str(ROOT), "demo", f"VENV={tmp_path}"]
    done = subprocess.run(make_demo, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert [line.split(":")[0] for line in lines if line.startswith(("failed", "fixed", "passed"))] == [
        "failed",
        "fixed",
        "passed",
    ]
    commands = [line.split()[2] for line in lines if line.startswith("$ tito-audit ")]
    assert commands == ["scan", "repair", "scan"]
    whole = subprocess.run([*make_demo, "-n", "ALL=1"], env=env, capture_output=True, text=True, check=True)
    assert "scan fixtures/formats " in whole.stdout
