"""The workflow of the tests: valid, and it runs what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkers import checked
from tests.world import ROOT
from tools import package

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra dev")
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
RELEASE = WORKFLOW.with_name("release.yml")
JOBS = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
COMMANDS = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in JOBS.items()}


@pytest.mark.parametrize("path", [WORKFLOW, RELEASE], ids=lambda path: path.stem)
def test_a_workflow_is_what_github_reads(path: Path) -> None:
    code, output = checked("check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path))
    assert code == 0, output


def test_the_workflow_runs_what_a_change_has_to_pass() -> None:
    commands = {name: COMMANDS[name] for name in ("test", "changed", "deep")}
    assert commands == {"test": [".ci/run"], "changed": ['make deep SINCE="origin/$BASE"'], "deep": ["make deep"]}
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


def test_a_tag_publishes_what_was_built_and_tried_without_a_token() -> None:
    release = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))
    assert release[True] == {"push": {"tags": ["v*"]}}, "`on` is a word of YAML 1.1 for true"
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert (release["permissions"], publish["permissions"]) == ({"contents": "read"}, {"id-token": "write"})
    assert "permissions" not in build, "what runs code of the repository cannot publish"
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands[-1] == 'python -m tools.package build/dist "$TAG"'
    assert not any("${{" in command for command in commands)
    uploaded = build["steps"][-1]
    assert uploaded["uses"].startswith("actions/upload-artifact@")
    assert uploaded["with"]["path"] == "build/dist"
    assert publish["needs"] == "build"
    download, push = publish["steps"]
    assert download["with"]["name"] == uploaded["with"]["name"]
    assert push["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in push, "it publishes dist/ and asks PyPI for a token of its own"
    assert download["with"]["path"] == "dist"
    assert "secrets" not in RELEASE.read_text(encoding="utf-8")


def test_a_tag_has_to_be_the_version_and_the_changelog_to_be_dated(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tito_audit-1.2.3-py3-none-any.whl").touch()
    (tmp_path / "tito_audit-1.2.3.tar.gz").touch()
    built = package.Package(tmp_path)
    monkeypatch.setattr(package, "ROOT", tmp_path)
    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changelog\n\n## 1.2.3 - 2026-11-28\n\n## 1.2.2 - unreleased\n")
    assert list(package.mistagged("v1.2.3", built)) == []
    assert list(package.mistagged("v1.2.4", built)) == [
        "The tag v1.2.4 is not v1.2.3, the version in tito_audit/version.py."
    ]
    log.write_text("# Changelog\n\n## 1.2.3 - unreleased\n")
    assert "'1.2.3 - unreleased'" in next(package.mistagged("v1.2.3", built))
