"""The command line: exit codes, what goes where, and that no mistake of a user ends in a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.command import run, written
from tests.world import BROKEN, CLEAN, ROOT, TOY
from tito_audit.cli import _Commands, main
from tito_audit.cli._outputs import ReportTarget, write_reports
from tito_audit.errors import SetupError
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.repairs import all_repairs
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.reports import report_named
from tito_audit.rules import all_rules
from tito_audit.summary import Summary


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Ten rows; row 3 has a logprob above zero where it trains."""
    return written(tmp_path / "run.jsonl", [BROKEN if row == 3 else CLEAN for row in range(10)])


def test_several_reports_come_from_one_pass_and_agree(log: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "jsonl")}
    reports = [f"--report={name}={path}" for name, path in files.items()]
    code, out, _ = run("scan", log, *reports, "--report", "text")
    assert code == 1
    assert "LPR504" in out
    whole = json.loads(files["json"].read_text(encoding="utf-8"))
    *lines, last = files["jsonl"].read_text(encoding="utf-8").splitlines()
    assert whole["findings"] == [json.loads(line) for line in lines]
    assert whole["summary"]["rollouts"] == json.loads(last)["summary"]["rollouts"] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.jsonl", "run.jsonl"]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_explain_prints_the_manual_of_every_rule(rule: Any) -> None:
    by_code, by_name = run("explain", rule.code.lower()), run("explain", rule.name)
    assert by_code == by_name
    assert by_code[0] == 0
    assert rule.doc in by_code[1]


@pytest.mark.parametrize("repair", all_repairs(), ids=lambda repair: repair.name)
def test_explain_and_list_print_the_safety_of_every_repair(repair: Any) -> None:
    code, page, _ = run("explain", repair.name)
    assert code == 0
    assert f"Safety: {repair.safety}" in page
    assert repair.doc in page
    listed = run("list", "repairs")[1]
    assert repair.name in listed
    assert str(repair.safety).split()[0] in listed


@pytest.mark.parametrize("kind", ["formats", "rules", "repairs", "reports"])
def test_list_prints_a_table_and_markdown_a_table_of_pipes(kind: str) -> None:
    assert run("list", kind)[0] == 0
    lines = run("list", kind, "--markdown")[1].splitlines()
    assert set(lines[1]) <= set("| -")
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=ROOT)


LOADED = """
import sys
from tito_audit.cli import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
names = ("transformers", "torch", "pyarrow", "numpy", "tokenizers", "rich", "jinja2")
print(*[name for name in names if name in sys.modules], file=sys.stderr)
"""


def test_help_imports_nothing_heavy() -> None:
    done = python(LOADED, "--help")
    assert "scan" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize("command", ["scan", "repair", "convert"])
def test_the_help_names_every_kind_of_file(command: str) -> None:
    shown = " ".join(run(command, "--help")[1].replace("│", " ").split())
    for suffix in (".jsonl", ".json", ".parquet", ".gz", ".zst", ".pt"):
        assert re.search(rf"{re.escape(suffix)}\b", shown.partition("Options")[0]), suffix


def test_a_scan_never_imports_transformers(log: Path) -> None:
    done = python(LOADED, "scan", log, "-t", TOY)
    assert "LPR504" in done.stdout
    assert "numpy" in done.stderr
    assert "transformers" not in done.stderr
    assert "torch" not in done.stderr


def test_reports_for_machines_load_neither_what_pages_are_set_with_nor_charts(log: Path, tmp_path: Path) -> None:
    files = [f"--report={name}={tmp_path / name}" for name in ("json", "jsonl", "github", "sarif", "junit")]
    done = python(LOADED, "scan", log, "-f", "concise", *files)
    assert "LPR504" in done.stdout
    assert done.stderr.split() == ["numpy"]


def ended_by(error: BaseException) -> Any:
    """How a command ends that this is raised in."""
    small = typer.Typer(cls=_Commands)

    def fail() -> None:
        raise error

    small.command("fail")(fail)
    small.command("other")(lambda: None)
    return CliRunner().invoke(small, ["fail"])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SetupError("bad\x1b[31m\nsecond line"), 2, "tito-audit: bad␛[31m\nsecond line"),
    ],
)
def test_an_expected_end_has_its_exit_code_and_one_message(error: BaseException, code: int, says: str) -> None:
    result = ended_by(error)
    assert result.exit_code == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_before_the_command_has_begun_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tito_audit.cli.app", interrupted)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "reconfigure", lambda **how: None, raising=False)
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "tito-audit: interrupted; no report was finished\n"


def test_a_bug_is_a_traceback() -> None:
    assert isinstance(ended_by(ZeroDivisionError()).exception, ZeroDivisionError)


def failing_after(rows: int, error: BaseException) -> Iterator[Result]:
    for row in range(rows):
        yield Result(Place("a", row), None)
    raise error


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SetupError("gone"), ZeroDivisionError()])
def test_a_run_that_fails_leaves_no_file_and_no_thread(tmp_path: Path, error: BaseException, others: int) -> None:
    names = ["json", "jsonl", "text"][: others + 1]
    wanted = [ReportTarget(report_named(name), tmp_path / name) for name in names]
    threads = set(threading.enumerate())
    (tmp_path / "json").write_text("the report of an earlier run", encoding="utf-8")
    with pytest.raises(type(error)):
        write_reports(failing_after(500, error), Summary(), wanted, ReportOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
    assert (tmp_path / "json").read_text(encoding="utf-8") == "the report of an earlier run"
    assert set(threading.enumerate()) <= threads


def test_a_report_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    def fail(*_: object) -> ResultSink[None]:
        yield
        raise BrokenPipeError

    wanted = {Report("made-up", "", fail): None, report_named("jsonl"): tmp_path / "out"}
    endless = (Result(Place("a", row), None) for row in count())
    with pytest.raises(BrokenPipeError):
        write_reports(endless, Summary(), [ReportTarget(*each) for each in wanted.items()], ReportOptions())
    assert list(tmp_path.iterdir()) == []
