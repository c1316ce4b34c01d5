"""The pages that people see first: short, causes and rows in front, and everything else an option away."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.ready import program
from tests.report_results import finding, result
from tests.test_gate import clean, merged
from tests.world import ROOT, TOY, json_lines
from tito_audit.record.finding import Result, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.summary import Summary
from tito_audit.terminal.verdict import cause_lines, verdict

WIDTHS = ("80", "100", "120")
NOTED = [merged(clean(f"r{number}"), 2, "Ġgood") for number in range(6)]
"""Rollouts whose last answer would change if it were re-encoded; no prompt follows it."""
BROKEN = [merged(clean(f"r{number}"), 1, "Ġand") for number in range(6)]
"""Rollouts whose second answer the third prompt holds re-tokenized."""


def page(folder: Path, rows: list[dict[str, Any]], *options: str, width: str = "100") -> list[str]:
    """The lines that a scan prints."""
    log = folder / "log.jsonl"
    log.write_bytes(json_lines(rows))
    code, out, err = run("scan", str(log), "-t", str(TOY), "--no-config", *options, env={"COLUMNS": width})
    assert (code in (0, 1), err) == (True, "")
    return out.splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_passed_log_is_a_dozen_lines_and_one_of_them_counts_its_notes(width: str, tmp_path: Path) -> None:
    lines = page(tmp_path, NOTED, width=width)
    assert len(lines) <= 12
    assert [line for line in lines if "note" in line] == [
        "passed: no errors; 6 notes in 6 of 6 rollouts (100 %): see --notes"
    ]


def test_notes_are_shown_when_asked_for_and_when_they_decide(tmp_path: Path) -> None:
    for options in (["--notes"], ["--fail-on", "note"], ["--fail-on", "never", "--max-rate", "TOK=0"]):
        lines = page(tmp_path, NOTED, *options)
        assert any(line.startswith("note     6 rollouts (100 %): turn 2 of each, which would") for line in lines)
        assert any(line.startswith("note TOK101 ") for line in lines)
        assert "see --notes" not in lines[-1]


def test_the_key_of_the_configuration_does_what_the_flag_does(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(json_lines(NOTED))
    config = tmp_path / "tito-audit.toml"
    config.write_text("notes = true\nnot-checked = true\n")
    _, out, _ = run("scan", str(tmp_path / "log.jsonl"), "-t", str(TOY), "--config", str(config))
    assert "\nnote TOK101 " in out
    assert "\nNot checked\n" in out


def test_a_failing_page_leads_with_its_causes_and_ends_with_the_rollouts_and_the_turn(tmp_path: Path) -> None:
    lines = page(tmp_path, [*BROKEN, *(clean(f"c{number}") for number in range(6))])
    cause = "turn 1 of each was re-tokenized in the next prompt"
    assert lines[5] == f"error    6 rollouts (50 %): {cause}  SEQ301, TOK101"
    assert lines[-1] == f"failed: errors in 6 of 12 rollouts (50 %): {cause}"
    assert "Next" in lines
    assert len(lines) < 30


def test_turns_that_differ_are_not_told_as_one(tmp_path: Path) -> None:
    lines = page(tmp_path, [*BROKEN[:2], merged(clean("a"), 0, "weather")])
    assert lines[-1] == "failed: errors in 3 of 3 rollouts (100 %): 3 prompts re-tokenized"


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


@pytest.mark.parametrize("width", ["60", *WIDTHS])
def test_what_was_not_checked_is_five_lines_and_complete_when_asked_for(width: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(json_lines([{"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}]))
    _, out, _ = run("scan", str(log), env={"COLUMNS": width})
    (part,) = [part for part in out.split("\n\n") if part.startswith("Not checked")]
    assert len(part.splitlines()) <= 5
    left_out = re.search(r"--not-checked lists (\d+) more$", " ".join(part.split()))
    assert left_out is not None
    _, whole, _ = run("scan", str(log), "--not-checked", env={"COLUMNS": "160"})
    (listed,) = [part for part in whole.split("\n\n") if part.startswith("Not checked\n")]
    assert len(listed.splitlines()) == 1 + 3 + int(left_out[1])
    reports = [run("scan", str(log), "-f", "json", *options)[1] for options in ([], ["--not-checked", "--notes"])]
    skipped = [json.loads(report)["summary"]["skipped"] for report in reports]
    assert skipped[0] == skipped[1]
    assert set(re.findall(r"\b[A-Z]{3}\d{3}\b", listed)) <= skipped[0].keys()


def test_a_baseline_accepts_the_notes_that_are_shown_and_the_next_run_is_quiet(tmp_path: Path) -> None:
    baseline = tmp_path / "known.json"
    with_baseline = ("--baseline", str(baseline))
    assert page(tmp_path, NOTED, *with_baseline, "--update-baseline")[-1].startswith("passed: 0 findings accepted")
    assert page(tmp_path, NOTED, "--notes", *with_baseline, "--update-baseline")[-1].startswith(
        "passed: 6 findings accepted"
    )
    for options in ([], ["--notes"]):
        lines = page(tmp_path, NOTED, *with_baseline, *options)
        assert len(lines) <= 12
        assert lines[-1] == "passed: 0 new errors (6 known)"
    new = page(tmp_path, [*NOTED, merged(clean("new"), 1, "Ġdegrees")], "--notes", *with_baseline)
    assert new[-1].startswith("failed: new errors in 1 of 7 rollouts (14 %) (6 known): ")
    assert [entry["times"] for entry in json.loads(baseline.read_text())["findings"]] == [6]


def test_a_repair_counts_no_notes_unless_asked_to(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(json_lines([*BROKEN, *NOTED]))
    pages = []
    for options in ([], ["--notes"]):
        code, out, _ = run(
            "repair",
            str(tmp_path / "log.jsonl"),
            "-t",
            str(TOY),
            "-o",
            str(tmp_path / "out.jsonl"),
            "--force",
            *options,
        )
        assert code == 0
        pages.append(out)
    assert pages[0].splitlines()[-1] == "fixed: errors in 6 of 12 rollouts → 0"
    assert "TOK101  " not in pages[0]
    assert pages[1].splitlines()[-1] == "fixed: errors in 6 of 12 rollouts → 0, 6 notes → 12"
    assert "TOK101" in pages[1]


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
