"""The recipes of docs/ci.md: each does what it says, on logs and a tokenizer where the recipe has them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.test_ci_files import ACTION, steps, with_command
from tests.world import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra dev")
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(yaml|groovy|bash)\n(.*?)\n^```$", PAGE, re.MULTILINE | re.DOTALL)
KNOWN = "known-findings.json"


@dataclass(frozen=True)
class Recipe:
    """What a block of the page runs, and which files it keeps afterwards."""

    name: str
    commands: tuple[str, ...]
    """Calls of tito-audit as they are written."""
    action: Mapping[str, str] | None
    """Inputs of the action, if the block uses it."""
    keeps: tuple[str, ...]


def recipes() -> Iterator[Recipe]:
    """Every block that scans: not the configuration of pre-commit, which `test_ci_files.py` runs."""
    for number, (language, text) in enumerate(BLOCKS):
        if language == "yaml" and "repos:" not in text:
            yield _of_yaml(f"{number}-yaml", yaml.safe_load(text))
        elif language != "yaml":
            commands = re.findall(r"^\s*(?:sh ')?(tito-audit [^'\n]*)", text, re.MULTILINE)
            files = re.findall(
                r"(?:junit|archiveArtifacts) '([^']+)'|(?:html|prometheus)=(\S+?)'?$", text, re.MULTILINE
            )
            yield Recipe(f"{number}-{language}", tuple(commands), None, tuple("".join(pair) for pair in files))


def _of_yaml(name: str, value: dict[Any, Any]) -> Recipe:
    if "jobs" not in value:
        (job,) = value.values()
        calls = [line for line in job["script"] if line.startswith("tito-audit")]
        artifacts = job["artifacts"]
        return Recipe(name, tuple(calls), None, (*artifacts["paths"], *artifacts.get("reports", {}).values()))
    (job,) = value["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").split("\n")]
    used = [step["with"] for step in job["steps"] if step.get("uses") == "./tito-audit"]
    files = [step["with"]["path"] for step in job["steps"] if step.get("uses", "").startswith("actions/upload")]
    files += [word for line in lines for word in re.findall(r"^cat (\S+)", line)]
    calls = [line for line in lines if line.startswith("tito-audit")]
    return Recipe(name, tuple(calls), used[0] if used else None, tuple(files))


RECIPES = list(recipes())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as the recipes have it: logs with faults, all known, and the tokenizer of a model."""
    for folder in ("rollouts", "exports", "export"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "fixtures" / "formats" / "nemo_gym.jsonl", tmp_path / "rollouts")
    (parquet, *_) = sorted((ROOT / "fixtures").rglob("*.parquet"))
    shutil.copy(parquet, tmp_path / "exports")
    shutil.copy(parquet, tmp_path / "export")
    shutil.copytree(ROOT / "fixtures" / "tokenizers" / "toy_bpe", tmp_path / "models" / "policy")
    monkeypatch.chdir(tmp_path)
    return with_command(tmp_path)


def test_every_system_has_its_recipe() -> None:
    assert [recipe.action is not None for recipe in RECIPES].count(True) == 2
    assert sum(len(recipe.commands) for recipe in RECIPES) == 6
    assert all(recipe.commands or recipe.action for recipe in RECIPES)
    nightly = [recipe for recipe in RECIPES if "--sample" in str((recipe.commands, recipe.action))]
    assert len(nightly) == 2
    assert all(recipe.keeps == ("audit.html",) for recipe in nightly)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.commands], ids=lambda entry: entry.name)
def test_the_commands_of_a_recipe_scan_and_write_what_it_keeps(recipe: Recipe, place: Path) -> None:
    (accept,) = re.findall(r"`(tito-audit scan .* --update-baseline)`", PAGE, re.MULTILINE)
    assert run(*shlex.split(accept)[1:])[0] == 0
    assert (place / KNOWN).is_file()
    for command in recipe.commands:
        code, _, err = run(*shlex.split(command)[1:])
        assert code == (0 if KNOWN in command else 1), err
    assert recipe.keeps
    for file in recipe.keeps:
        assert (place / file).stat().st_size > 100, file


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.action], ids=lambda entry: entry.name)
def test_the_action_runs_as_a_recipe_calls_it(recipe: Recipe, place: Path) -> None:
    assert recipe.action is not None
    assert recipe.action.keys() <= ACTION["inputs"].keys()
    accept = ("-t", "models/policy", "--baseline", KNOWN, "--update-baseline")
    assert run("scan", *recipe.action["logs"].split(), *accept)[0] == 0
    done = steps(place, **{name.replace("-", "_"): value for name, value in recipe.action.items()})
    # Every finding is known, but the logs lack what a recipe requires.
    lacking = "--require" in recipe.action.get("args", "")
    assert (done.code, done.outputs["failing"]) == (int(lacking), "0"), done.stderr
    assert ("required" if lacking else "passed") in done.summary
    for file in recipe.keeps:
        assert (place / file).stat().st_size > 100, file
