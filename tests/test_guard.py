"""A rule, repair or report that fails ends the run with one message, which says how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tito_audit.repairs import repair_named
from tito_audit.reports import report_named
from tito_audit.rules import rule_of

BUG = "This is a bug in tito-audit, not a fault of the log. To go on, "
_Break = Callable[..., None]


def _fails(*_: Any) -> Any:
    raise ValueError("no values are left")


@pytest.fixture
def broken() -> Iterator[_Break]:
    """A function that makes one function of a plugin fail, until the test ends."""
    before: list[tuple[Any, str, Any]] = []

    def make(plugin: Any, name: str) -> None:
        before.append((plugin, name, getattr(plugin, name)))
        object.__setattr__(plugin, name, _fails)

    yield make
    for plugin, name, function in before:
        object.__setattr__(plugin, name, function)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, 0.5]}
    return written(tmp_path / "log.jsonl", [row, row])


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_rule_that_fails_is_named_with_its_row_and_can_be_turned_off(
    log: Path, broken: _Break, jobs: str
) -> None:
    broken(rule_of("LPR504"), "check")
    code, out, err = run("scan", log, "--jobs", jobs)
    assert (code, out) == (2, "")
    assert f"{log}:0: rule LPR504 failed: ValueError no values are left" in err
    assert f"{BUG}turn the rule off: `--ignore LPR504`." in err
    assert run("scan", log, "--jobs", jobs, "--ignore", "LPR504")[0] == 0


def test_a_repair_goes_on_without_a_rule_that_fails(log: Path, broken: _Break) -> None:
    broken(rule_of("LPR504"), "check")
    code, _, err = run("repair", log, "--dry-run")
    assert code == 2
    assert f"{log}:0: rule LPR504 failed: ValueError no values are left" in err
    assert run("repair", log, "--dry-run", "--ignore", "LPR504")[0] == 0


def test_a_repair_that_fails_is_named_with_its_row(tmp_path: Path, broken: _Break) -> None:
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [0.0, -1.0, -0.5]}
    log = written(tmp_path / "log.jsonl", [row])
    broken(repair_named("drop"), "mend")
    options = ("--with", "drop", "--unsafe", "--quarantine", tmp_path / "dropped.jsonl")
    code, out, err = run("repair", log, "-o", tmp_path / "out.jsonl", *options)
    assert (code, out) == (2, "")
    assert f"{log}:0: repair `drop` failed: ValueError no values are left" in err
    assert "`--with NAME`" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("more", [(), ("-f", "json")])
def test_a_report_that_fails_is_named(log: Path, tmp_path: Path, broken: _Break, more: tuple[str, ...]) -> None:
    broken(report_named("concise"), "write")
    code, _, err = run("scan", log, "--report", f"concise={tmp_path / 'report'}", *more)
    assert code == 2
    assert "report `concise` failed: ValueError no values are left" in err
    assert f"{BUG}choose another report: `-f NAME`" in err
    assert not (tmp_path / "report").exists()


def test_a_failing_rule_is_not_blamed_on_the_report(log: Path, broken: _Break) -> None:
    broken(rule_of("LPR504"), "check")
    assert "report" not in run("scan", log, "-f", "json")[2]
