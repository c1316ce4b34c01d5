"""The baseline: what it holds, when a finding is known, when one is gone, and that it is never lost."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run, written
from tests.world import BROKEN, CLEAN, ROOT, TOY
from tito_audit import Finding, Gate, GateSettings, Hit, Place, Settings, Severity, Side, Where, gate_rollouts
from tito_audit.errors import SetupError, StorageError
from tito_audit.gate.baseline import (
    Baseline,
    BaselineEntry,
    EntryCounts,
    LogNames,
    baseline_entry,
    read_baseline,
    write_baseline,
)
from tito_audit.terminal.escape import escaped_json

BLIND = {key: value for key, value in CLEAN.items() if key != "logprobs"}
"""A row that no rule of logprobs can look at."""
SHIFTED = {**CLEAN, "logprobs": [0.0, 0.0, -0.5, 0.25]}
"""Another LPR504 than that of BROKEN."""


class Folder:
    """Logs `a.jsonl`, … and a baseline beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.baseline = path / "accepted" / "known.json"
        self.baseline.parent.mkdir()

    def writes(self, **logs: Sequence[dict[str, Any]]) -> None:
        for name, rows in logs.items():
            written(self.path / f"{name}.jsonl", rows)

    def gates(self, *logs: str, update: bool = False, **settings: Any) -> tuple[list[tuple[str, int]], Gate]:
        """File and row of each finding that is not known, and what the gate says."""
        names = [self.path / (log if "." in log else f"{log}.jsonl") for log in logs] or [self.path]
        gate = GateSettings(baseline=str(self.baseline), update_baseline=update)
        scan = gate_rollouts(names, Settings(**settings), gate)
        new = [
            (Path(finding.place.file).stem, finding.place.row)
            for result in scan
            for finding in result.findings
            if not finding.known
        ]
        assert scan.summary.gate is not None
        return new, scan.summary.gate

    def accepts(self, *logs: str, **settings: Any) -> Gate:
        """Update the baseline."""
        return self.gates(*logs, update=True, **settings)[1]

    def holds(self) -> list[tuple[str, int, int]]:
        """File, row and times of each entry."""
        return [(Path(entry.file).stem, entry.row, entry.times) for entry in read_baseline(self.baseline)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def made_up(place: Place, severity: Severity = Severity.ERROR, **changes: Any) -> Finding:
    hit = Hit(Where.COMPLETION, 3, 5, "two tokens", turn=1, cause="merge", recorded=Side((1, 2), ("a", "b")))
    return Finding("TOK101", severity, place, replace(hit, **changes))


@given(st.integers(0, 10**9), st.text(max_size=20), st.sampled_from(Severity), st.text(max_size=20))
def test_a_fingerprint_says_nothing_of_file_row_severity_words_and_tokenizer(
    row: int, file: str, severity: Severity, message: str
) -> None:
    plain = made_up(Place("a", 0))
    other = made_up(Place(file, row), severity, message=message, recorded=Side((1, 2)))
    assert other.fingerprint == plain.fingerprint


def test_a_fingerprint_tells_findings_apart_by_all_that_makes_them() -> None:
    place = Place("a", 0)
    changes: list[dict[str, Any]] = [
        {},
        {"start": 2},
        {"end": 6},
        {"turn": 0},
        {"turn": None},
        {"where": Where.PROMPT},
        {"cause": "split"},
        {"recorded": Side((1, 3), ("a", "b"))},
        {"recorded": Side((), ("a", "c"))},
        {"recorded": Side((), ("a", "d"))},
        {"canonical": Side((9,))},
    ]
    several = [made_up(place, **change) for change in changes]
    several += [made_up(replace(place, item=1)), replace(several[0], code="TOK102")]
    assert len({finding.fingerprint for finding in several}) == len(several)


@pytest.mark.parametrize("part", [{"limit": 1}, {"sample": 0.5}, {"row": 0}])
def test_of_a_part_of_the_rows_nothing_is_said_to_be_fixed(folder: Folder, part: dict[str, Any]) -> None:
    folder.writes(a=[CLEAN] * 40 + [BROKEN])
    folder.accepts()
    before = folder.baseline.read_bytes()
    folder.writes(a=[SHIFTED] * 40 + [CLEAN])
    assert folder.gates(**part)[1].fixed == ()
    gate = folder.accepts(**part)
    assert gate.added > 0
    assert gate.fixed == ()
    last_row, *_ = sorted(folder.holds(), key=lambda entry: entry[1] != 40)
    assert last_row == ("a", 40, 1)
    assert before.splitlines()[1].rstrip(b",") in folder.baseline.read_bytes()
    assert folder.gates()[0] != []


def test_a_scan_without_the_tokenizer_keeps_what_needs_one(folder: Folder) -> None:
    lines = (ROOT / "fixtures" / "formats" / "nemo_gym.jsonl").read_text(encoding="utf-8").splitlines()
    folder.writes(a=[json.loads(line) for line in lines])
    codes = ("TOK", "TPL", "REC004", "LPR501")
    folder.accepts(tokenizer=str(TOY), select=codes)
    assert {entry.code for entry in read_baseline(folder.baseline)} >= {"TOK101", "TPL203", "REC004", "LPR501"}
    before = folder.baseline.read_bytes()
    gate = folder.accepts(select=codes)
    assert (gate.fixed, gate.added) == ((), 0)
    assert folder.baseline.read_bytes() == before


def test_what_lies_in_or_behind_a_row_that_cannot_be_read_stays(folder: Folder) -> None:
    rows = [BROKEN, SHIFTED, CLEAN, {**BROKEN, "token_ids": [5, 6, 9, 8]}]
    folder.writes(a=rows)
    folder.accepts(ignore=("REC",))
    log = folder.path / "a.jsonl"
    log.write_text('{"token_ids": [\n' + "".join(json.dumps(CLEAN) + "\n" for _ in rows[1:]), encoding="utf-8")
    assert [entry.row for entry in folder.gates(ignore=("REC",))[1].fixed] == [1, 3]
    whole = "".join(json.dumps(CLEAN) + "\n" for _ in range(500)).encode()
    log.unlink()
    packed = gzip.compress(whole)
    (folder.path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    entries = read_baseline(folder.baseline)
    for entry in entries:
        entry.file += ".gz"
        entry.row += 498 * (entry.row == 3)
    write_baseline(folder.baseline, entries)
    assert [entry.row for entry in folder.gates("a.jsonl.gz", ignore=("REC",))[1].fixed] == [0, 1]


def test_the_same_tokens_as_a_note_use_up_no_error(tmp_path: Path) -> None:
    error, note = made_up(Place("a", 4)), made_up(Place("a", 3), Severity.NOTE)
    write_baseline(tmp_path / "b.json", [baseline_entry(error, error.fingerprint, "a")])
    baseline = Baseline(tmp_path / "b.json", [tmp_path / "a"])
    assert not baseline.use_up(note, "a")
    assert baseline.use_up(error, "a")
    assert not baseline.use_up(error, "a")


def test_only_what_would_fail_is_taken(folder: Folder) -> None:
    lines = (ROOT / "fixtures" / "formats" / "nemo_gym.jsonl").read_text(encoding="utf-8").splitlines()
    folder.writes(a=[json.loads(line) for line in lines])

    def severities(fail_on: str) -> set[str]:
        folder.baseline.unlink(missing_ok=True)
        folder.accepts(tokenizer=str(TOY), fail_on=fail_on)
        return {entry.severity.word for entry in read_baseline(folder.baseline)}

    assert [severities(fail_on) for fail_on in ("error", "warning", "note", "never")] == [
        {"error"},
        {"error", "warning"},
        {"error", "warning", "note"},
        {"error", "warning"},
    ]


def test_a_run_of_several_processes_says_the_same(folder: Folder) -> None:
    folder.writes(a=[BROKEN, CLEAN, SHIFTED] * 20)
    folder.accepts()
    folder.writes(a=[CLEAN, BROKEN, SHIFTED, BLIND, BROKEN] * 20)
    outcomes = []
    for jobs in (1, 3):
        gate = GateSettings(baseline=str(folder.baseline))
        gated = gate_rollouts(folder.path, Settings(jobs=jobs), gate)
        gated.scan.chunk_bytes = 500 if jobs > 1 else None
        outcomes.append(([result.findings for result in gated], gated.summary.gate))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] is not None
    assert outcomes[0][1].failing == 20


def test_a_run_that_fails_leaves_the_baseline_as_it_was(folder: Folder) -> None:
    folder.writes(a=[BROKEN])
    folder.accepts()
    before = folder.baseline.read_bytes()
    folder.writes(a=[CLEAN])
    (folder.path / "z.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(StorageError):
        folder.accepts()
    scan = gate_rollouts(folder.path / "a.jsonl", None, GateSettings(baseline=str(folder.baseline)))
    next(iter(scan))
    assert folder.baseline.read_bytes() == before
    assert [path.name for path in folder.baseline.parent.iterdir()] == ["known.json"]


def test_the_file_is_the_same_for_the_same_findings_and_has_one_a_line(folder: Folder) -> None:
    folder.writes(b=[SHIFTED, BROKEN, BROKEN], a=[CLEAN, BROKEN])
    folder.accepts()
    first = folder.baseline.read_bytes()
    folder.accepts()
    assert folder.baseline.read_bytes() == first
    head, *lines, last = first.decode().splitlines()
    assert (head, last) == ('{"what": "tito-audit baseline", "version": 1, "findings": [', "]}")
    values = [json.loads(line.rstrip(",")) for line in lines]
    assert [(entry["file"], entry["row"], entry["times"]) for entry in values] == [
        ("../a.jsonl", 1, 1),
        ("../b.jsonl", 0, 1),
        ("../b.jsonl", 1, 2),
    ]
    assert list(values[0]) == ["fingerprint", "times", "code", "severity", "file", "row", "message"]


texts = st.text(st.characters(codec=None), max_size=300)


@given(texts, texts, st.lists(st.tuples(st.sampled_from(Severity), st.integers(0, 9), st.sampled_from("ab"))))
def test_what_is_written_is_read_again_whatever_a_log_says(
    tmp_path_factory: pytest.TempPathFactory, message: str, name: str, places: list[tuple[Severity, int, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "read-again.json"
    entries = EntryCounts()
    for severity, start, file in places:
        entries.add(made_up(Place("x", start), severity, start=start, message=message), name + file)
    write_baseline(path, entries)
    assert sorted(map(repr, read_baseline(path))) == sorted(map(repr, entries))
    text = path.read_bytes().decode()
    assert escaped_json(text) == text
    assert len(text.splitlines()) == len(list(entries)) + 2
    assert all(len(entry.message) <= 120 for entry in entries)


def test_what_two_branches_accepted_is_accepted_once_after_a_merge(folder: Folder) -> None:
    folder.writes(a=[BROKEN])
    folder.accepts()
    head, line, last = folder.baseline.read_text(encoding="utf-8").splitlines()
    moved = line.replace('"row": 0', '"row": 1').replace('"times": 1', '"times": 3')
    for lines in ((line + ",", line), (line, moved + ","), (moved, line), (line + ",", moved, line + ",")):
        folder.baseline.write_text("\n".join((head, *lines, last)), encoding="utf-8")
        assert folder.holds() == ([("a", 1, 3)] if moved in ",".join(lines) else [("a", 0, 1)])
    folder.accepts()
    assert folder.holds() == [("a", 0, 1)]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_branches_that_each_accept_something_are_merged_by_git_line_by_line(folder: Folder) -> None:
    def git(*arguments: str) -> int:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *names, *arguments], cwd=folder.path, capture_output=True, check=False)
        return done.returncode

    def row(number: int) -> dict[str, Any]:
        return {**BROKEN, "token_ids": [5, 6, number, 8]}

    def commits(branch: str, rows: Sequence[dict[str, Any]]) -> None:
        git("checkout", "-q", "-b", branch, *(("main",) if branch != "main" else ()))
        folder.writes(a=rows)
        folder.accepts()
        git("add", "-A")
        assert git("commit", "-q", "-m", branch) == 0

    git("init", "-q")
    (folder.path / ".gitattributes").write_text("*.json merge=union\na.jsonl -merge\n", encoding="utf-8")
    start = [CLEAN] * 8
    commits("main", [row(1), *start])
    commits("one", [row(1), *start, row(2), row(3)])
    commits("two", [row(1), row(4), *start, row(3)])
    git("merge", "-q", "one")
    folder.writes(a=[row(1), row(4), *start, row(2), row(3)])
    assert "<<<" not in folder.baseline.read_text(encoding="utf-8")
    new, gate = folder.gates()
    assert (new, gate.known, gate.fixed) == ([], 4, ())
    folder.writes(a=[row(1), row(4), *start, row(2), row(3), row(3)])
    assert [at for _, at in folder.gates(ignore=("REC009",))[0]] == [12]
    folder.writes(a=[row(1), row(4), *start, row(2), row(3)])
    folder.accepts()
    assert [(at, times) for _, at, times in folder.holds()] == [(0, 1), (1, 1), (10, 1), (11, 1)]


ENTRY = {
    "fingerprint": "0123456789abcdef",
    "times": 1,
    "code": "TOK101",
    "severity": "error",
    "file": "a.jsonl",
    "row": 0,
    "message": "",
}


def holding(**changes: Any) -> str:
    return json.dumps({"what": "tito-audit baseline", "version": 1, "findings": [ENTRY, {**ENTRY, **changes}]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("{", "line 1, column 2"),
        (holding().replace("[", "[\n").replace("]", "\nx\n]"), "line 3, column 1"),
        (holding().replace("[", "[\n=======\n"), "line 2 is an unresolved merge conflict"),
        (holding().replace("]", "\n>>>>>>> main\n]"), "Keep the lines of both sides"),
        (holding().replace("[", "[\n<<<<<<< main\n"), "line 2 is an unresolved merge conflict"),
        ("[]", 'not an object with "what"'),
        ('{"summary": {}, "findings": []}', 'not an object with "what"'),
        (holding().replace('"version": 1', '"version": 2'), "it has version 2"),
        (holding().replace('"version": 1', '"version": true'), "its version is True"),
        (holding(times=0), "times of finding 2 in it is 0"),
        (holding(times=True), "times of finding 2 in it is True"),
        (holding(row=-1), "row of finding 2"),
        (holding(row=1.5), "row of finding 2 in it is 1.5"),
        (holding(severity="bad"), "severity of finding 2 in it is 'bad'"),
        (holding(fingerprint="xyz"), "fingerprint of finding 2 in it is 'xyz'"),
        (holding(file=None), "file of finding 2 in it is missing"),
        (holding(message=["x"]), "message of finding 2 in it is a list"),
        (holding().replace(json.dumps(ENTRY), "7", 1), "finding 1 in it is 7"),
        ('{"what": ' + "[" * 100_000, "nested too deeply"),
        (b"\xff{}", "byte 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("update", [False, True])
def test_a_file_that_is_no_baseline_is_refused_in_words_and_left_alone(
    folder: Folder, text: str | bytes, says: str, update: bool
) -> None:
    folder.writes(a=[BROKEN])
    data = text if isinstance(text, bytes) else text.encode()
    folder.baseline.write_bytes(data)
    with pytest.raises(SetupError) as error:
        folder.gates(update=update)
    assert says in str(error.value)
    assert str(folder.baseline) in str(error.value)
    assert folder.baseline.read_bytes() == data


def test_a_log_is_named_as_seen_from_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LogNames(Path("b.json")).of("logs/../logs/a.jsonl") == "logs/a.jsonl"
    assert LogNames(Path("ci/b.json")).of(str(tmp_path / "logs" / "a.jsonl")) == "../logs/a.jsonl"
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    assert LogNames(Path("b.json")).of("link/a.jsonl") == "link/a.jsonl"


def test_a_log_has_one_name_however_its_folder_is_reached(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    project = folder.path / "project"
    (project / "logs").mkdir(parents=True)
    written(project / "logs" / "a.jsonl", [BROKEN])
    (folder.path / "link").symlink_to(project)
    reached = [Path("logs/a.jsonl"), project / "logs", folder.path / "link" / "logs", Path("../link/logs/a.jsonl")]
    monkeypatch.chdir(project)
    for baseline in (Path("known.json"), folder.path / "link" / "known.json", folder.path / "far.json"):
        Path("known.json").unlink(missing_ok=True)
        for number, log in enumerate(reached if baseline.name == "known.json" else [reached[0]]):
            gate = GateSettings(baseline=str(baseline), update_baseline=not number)
            scan = gate_rollouts(log, None, gate)
            assert [finding.known for result in scan for finding in result.findings] == [number > 0]
            assert scan.summary.gate is not None
            assert scan.summary.gate.fixed == ()


def test_a_link_to_a_baseline_stays_a_link(folder: Folder) -> None:
    folder.writes(a=[BROKEN])
    folder.accepts()
    target = folder.baseline
    folder.baseline = folder.path / "link"
    folder.baseline.symlink_to(os.path.relpath(target, folder.path))
    folder.writes(a=[CLEAN])
    folder.gates("a", update=True)
    assert folder.baseline.is_symlink()


def test_a_baseline_keeps_one_small_thing_for_all_that_are_alike() -> None:
    entries = EntryCounts()
    for row in range(5000):
        entries.add(made_up(Place("a", row)), "a")
    assert entries.total == 5000
    assert list(entries) == [
        BaselineEntry(made_up(Place("a", 0)).fingerprint, "TOK101", Severity.ERROR, "a", 0, "two tokens", 5000)
    ]


@pytest.mark.parametrize("report", ["text", "markdown", "junit", "github", "concise", "html", "sarif", "json"])
def test_a_report_counts_what_is_known_apart_from_what_is_new(report: str, folder: Folder) -> None:
    folder.writes(a=[BROKEN] * 57)
    folder.accepts()
    command = ("scan", folder.path, "--baseline", folder.baseline, "-f", report)
    code, out, _ = run(*command)
    assert code == 0
    folder.writes(a=[BROKEN] * 95)
    code, page, _ = run(*command)
    assert code == 1
    if report in ("sarif", "json"):
        for text, new in ((out, 0), (page, 38)):
            whole = json.loads(text)
            summary = whole["runs"][0]["properties"] if report == "sarif" else whole["summary"]
            assert summary["new"]["error"] == new
            assert (summary["known"] if report == "sarif" else summary["gate"]["known"]) == 57
    elif report == "github":
        assert "::error" not in out
        assert "57 known" in out
    else:
        assert "0 new errors (57 known)" in out
        assert "ew errors in 38 of 95 rollouts (40 %) (57 known): logprobs above zero" in page
    assert report != "html" or '<td class="n error">38</td>' in page
    assert re.search(r"57 (new )?errors?|errors? 57", out) is None
