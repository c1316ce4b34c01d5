"""The workflow of the tests: valid, and it runs what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkers import checked

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra dev")

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
COMMANDS = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in JOBS.items()}


def test_the_workflow_is_what_github_reads() -> None:
    code, said = checked("check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW))
    assert code == 0, said


def test_the_workflow_runs_what_a_change_has_to_pass() -> None:
    made = {name: COMMANDS[name] for name in ("test", "changed", "deep")}
    assert made == {"test": [".ci/run"], "changed": ['make deep SINCE="origin/$BASE"'], "deep": ["make deep"]}
    assert "make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"test", "deep"} <= set(targets)


def test_the_package_is_installed_with_each_python_that_it_is_for_and_the_container_scans() -> None:
    assert JOBS.keys() == {"test", "changed", "deep", "package", "container"}
    assert COMMANDS["package"][-1] == "python -m tools.package build/dist"
    oldest = re.findall(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert JOBS["package"]["strategy"]["matrix"]["python"][:1] == oldest
    build, scan = COMMANDS["container"]
    assert build == "docker build -t tito-audit ."
    assert f"$ {build}\n" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    words = scan.partition(" tito-audit ")[2].split()
    assert words[0] == "scan"
    assert all((ROOT / word).exists() for word in words if "/" in word)


def test_a_job_has_no_more_than_it_needs() -> None:
    whole = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert whole["permissions"] == {"contents": "read"}
    for name, job in JOBS.items():
        assert job["timeout-minutes"] <= 240, name
        for command in COMMANDS[name]:
            assert "${{" not in command, "what others can name is handed over in the environment, never as code"


def test_what_changed_is_found_in_a_checkout_with_its_history() -> None:
    checkout = JOBS["changed"]["steps"][0]
    assert checkout["with"]["fetch-depth"] == 0, "the commit that a branch began at is in no shallow checkout"
