"""Which tests run whole for a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.since import changed_since, chosen
from tests.tables import stored, table
from tests.tiers import some

ROOT = Path(__file__).resolve().parents[1]
EVERY = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))
FILES = stored(__file__, "FILES")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of a few modules and their tests."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(*table(__file__, "a_change_chooses_the_tests_that_depend_on_it"))
def test_a_change_chooses_the_tests_that_depend_on_it(change: str, tests: list[str], project: Path) -> None:
    assert chosen([change], project) == [f"tests/test_{name}.py" for name in tests]


def test_changes_are_those_of_the_branch_and_of_the_folder(project: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.invalid"]
        subprocess.run(["git", *identity, *words], cwd=project, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "First")
    assert changed_since("main", project) == []
    git("checkout", "-qb", "other")
    (project / "tests" / "helper.py").write_text("x = 1\n")
    git("commit", "-qam", "Second")
    (project / "tito_audit" / "scan.py").write_text("y = 1\n")
    (project / "new.py").write_text("")
    assert changed_since("main", project) == ["tests/helper.py", "tito_audit/scan.py", "new.py"]
    git("stash", "-qu")
    git("checkout", "-q", "main")
    (project / "tests" / "test_alone.py").write_text("z = 1\n")
    git("commit", "-qam", "Third")
    git("checkout", "-q", "other")
    assert changed_since("main", project) == ["tests/helper.py"], "what others did meanwhile is no change of ours"


def test_every_module_of_the_package_is_tested_by_something() -> None:
    modules = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tito_audit").rglob("*.py"))
    untested = [name for name in some(modules, 12) if not chosen([name]) and not name.endswith("__main__.py")]
    assert len(modules) > 200
    assert not untested
    assert "tests/test_since.py" in chosen(["tests/since.py"])
    assert chosen(["pyproject.toml"]) == EVERY


def test_a_commit_that_git_does_not_know_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.since", "no-such-commit"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-commit" in done.stderr
