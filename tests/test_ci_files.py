"""The GitHub Action and the pre-commit hooks: valid, and really run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkers import checked
from tests.ready import program
from tests.tables import stored, table
from tests.tiers import DEEP
from tests.world import FORMATS, ROOT, TOY

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra dev")

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
DRIFTED = "nemo_gym.jsonl"
CLEAN = "tito_sample.jsonl"
BIN = Path(sys.executable).parent
HOSTILE: list[str] = stored(__file__, "HOSTILE")


@dataclass(frozen=True)
class Run:
    """What a run of the action's steps left behind."""

    code: int
    outputs: Mapping[str, str]
    summary: str
    stdout: str
    stderr: str
    place: Path


def with_command(folder: Path) -> Path:
    """The folder, with the command in its `bin`."""
    command = folder / "bin" / "tito-audit"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec {shlex.join(program())} "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout of somebody's: two logs, one of them with a space in its name, and the command on the path."""
    (tmp_path / "logs of May").mkdir()
    shutil.copy(FORMATS / DRIFTED, tmp_path / "logs of May")
    shutil.copy(FORMATS / CLEAN, tmp_path / "clean.jsonl")
    return with_command(tmp_path)


def filled(text: str, inputs: Mapping[str, str]) -> str:
    """The text as GitHub hands it to a step; an expression that the test does not know is an error."""
    values = {"github.action_path": str(ROOT), **{f"inputs.{name}": value for name, value in inputs.items()}}
    return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda match: values[match[1]], text)


def steps(place: Path, **inputs: str) -> Run:
    """The shell steps of the action, each run by bash as GitHub runs it, until one fails."""
    stated = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()}
    names = {name.replace("-", "_"): name for name in stated}
    values = stated | {"install": "none"} | {names[name]: value for name, value in inputs.items()}
    files = {name: place / f".{name}" for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_PATH")}
    for file in files.values():
        file.touch()
    code, stdout, complained = 0, "", ""
    for step in ACTION["runs"]["steps"]:
        if "run" not in step:
            assert step["if"] == "inputs.python-version != ''"
            continue
        script = place / ".step.sh"
        script.write_text(step["run"])
        environment = {name: filled(text, values) for name, text in step.get("env", {}).items()}
        environment |= {name: str(file) for name, file in files.items()}
        path = [*files["GITHUB_PATH"].read_text().split(), str(place / "bin"), str(BIN), os.environ["PATH"]]
        environment |= {"PATH": ":".join(path), "RUNNER_TEMP": str(place)}
        environment |= {"HOME": str(place), "TITO_AUDIT_CACHE": "off"}
        assert step["shell"] == "bash"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            env=environment,
            cwd=place / filled(step.get("working-directory", "."), values),
            capture_output=True,
            text=True,
        )
        code, stdout, complained = done.returncode, stdout + done.stdout, complained + done.stderr
        if code:
            break
    written = files["GITHUB_OUTPUT"].read_text()
    outputs = {name: text for name, _, text in re.findall(r"^([\w-]+)<<(\w+)\n(.*?)\n\2$", written, re.M | re.S)}
    outputs |= dict(re.findall(r"^([\w-]+)=(.*)$", written, re.M))
    return Run(code, outputs, files["GITHUB_STEP_SUMMARY"].read_text(), stdout, complained, place)


def test_the_action_is_one_by_the_schema_of_github() -> None:
    code, page = checked("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml"))
    assert code == 0, page


def test_no_input_of_the_action_reaches_a_shell_as_code() -> None:
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    assert scripts
    for script in scripts:
        assert "${{" not in script
        assert not re.search(r"\beval\b|\bbash -c\b|\bsh -c\b", script)


def test_every_input_of_the_action_is_used_and_every_output_is_written() -> None:
    steps_text = json.dumps(ACTION["runs"])
    for name in ACTION["inputs"]:
        assert f"inputs.{name} " in steps_text, name
    (scan,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "scan")
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.scan.outputs.{name} }}}}"
        assert re.search(rf"{name}(=|<<)", scan["run"]), name


def test_the_action_passes_logs_that_pass(place: Path) -> None:
    run = steps(place, logs="clean.jsonl\n", tokenizer=str(TOY))
    assert run.code == 0, run.stderr
    assert run.outputs["exit-code"] == "0"
    assert run.outputs["failing"] == "0"
    assert run.outputs["findings"] == "2"
    assert "tito-audit" in run.summary
    assert "::error" not in run.stdout
    sarif = json.loads(Path(run.outputs["sarif"]).read_text())
    assert len(sarif["runs"][0]["results"]) == 2


def test_the_action_fails_for_logs_that_drifted_and_says_where(place: Path) -> None:
    run = steps(place, logs="clean.jsonl\r\n\nlogs of May/nemo_gym.jsonl\n", tokenizer=str(TOY))
    assert run.code == 1, run.stderr
    assert run.outputs["exit-code"] == "1"
    assert int(run.outputs["findings"]) > int(run.outputs["failing"]) > 0
    assert re.search(r"^::error file=logs of May/nemo_gym.jsonl,line=\d+,", run.stdout, re.M)
    assert "failed" in run.summary
    assert Path(run.outputs["sarif"]) == place / "tito-audit.sarif"
    assert json.loads(Path(run.outputs["sarif"]).read_text())["version"] == "2.1.0"


def test_globs_are_given_to_the_command_as_they_are(place: Path) -> None:
    run = steps(place, logs="logs of May/*.jsonl", tokenizer=str(TOY), sarif_file="", summary="false")
    assert run.code == 1
    assert (run.summary, run.outputs.get("sarif")) == ("", None)


def test_the_inputs_of_the_action_are_the_flags_that_they_stand_for(place: Path) -> None:
    (place / "gate.toml").write_text(f'tokenizer = "{TOY}"\n')
    log, flags = "logs of May/nemo_gym.jsonl", {"config": "gate.toml"}
    assert steps(place, logs=log, fail_on="never", **flags).code == 0
    assert steps(place, logs=log, args="--select MSK403", **flags).code == 0
    assert steps(place, logs=log, args="--select 'TOK,SEQ' --report \"json=a report.json\"", **flags).code == 1
    assert (place / "a report.json").is_file()
    for level, code in (("L0", 0), ("L4", 1)):
        gated = steps(place, logs="clean.jsonl", fail_on="never", require_level=level, **flags)
        assert (gated.code, "L4 required" in gated.stdout + gated.stderr) == (code, bool(code))
    accepted = steps(place, logs=log, baseline="known.json", args="--update-baseline", **flags)
    assert accepted.code == 0, accepted.stderr
    again = steps(place, logs=log, baseline="known.json", **flags)
    assert (again.code, again.outputs["failing"]) == (0, "0")
    assert again.outputs["findings"] != "0"
    assert steps(place, logs="nemo_gym.jsonl", working_directory="logs of May", tokenizer=str(TOY)).code == 1


INPUTS = ("logs", "tokenizer", "config", "fail_on", "require_level", "baseline", "args", "sarif_file", "summary")
TRICKS = " ".join(HOSTILE)


@pytest.mark.parametrize(
    ("name", "value"),
    # Quotes are balanced in each trick, so that one value with all of them has to do where time is short, and
    # for what is installed, which makes a virtual environment first.
    [
        *product(INPUTS, [TRICKS]),
        *(product(INPUTS, HOSTILE) if DEEP else []),
        *([("install", TRICKS)] if DEEP else []),
    ],
)
def test_an_input_is_never_run(name: str, value: str, place: Path) -> None:
    run = steps(place, **{"logs": "clean.jsonl", "args": "--select REC", name: value})
    assert not list(place.rglob("pwned")), run.stderr
    if name == "sarif_file" and "/" not in value:
        assert (place / value).is_file()
    elif name != "summary":
        assert run.code != 0
        assert "Traceback" not in run.stderr or name == "install"


def test_a_run_that_cannot_be_made_ends_with_2_and_says_why(place: Path) -> None:
    run = steps(place, logs="no-such.jsonl")
    assert (run.code, run.outputs) == (2, {"exit-code": "2"})
    assert "no-such.jsonl" in run.stderr
    run = steps(place, logs="clean.jsonl", args="--select 'TOK")
    assert run.code == 2
    assert "a quote is not closed" in run.stderr


@pytest.mark.skipif(
    not os.environ.get("TITO_AUDIT_INDEX"), reason="TITO_AUDIT_INDEX=1 installs from a package index"
)
def test_the_action_installs_itself_and_scans_with_that(place: Path) -> None:
    (place / "bin" / "tito-audit").write_text("#!/bin/sh\nexit 99\n")
    run = steps(place, logs="clean.jsonl", tokenizer=str(TOY), install="")
    assert (place / ".GITHUB_PATH").read_text() == f"{place}/tito-audit/bin\n"
    assert run.outputs["exit-code"] == "0", run.stderr


# pre-commit


def git(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command of git, by nobody's settings."""
    identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.invalid"]
    environment = {
        "PATH": f"{place / 'bin'}:{BIN}:{os.environ['PATH']}",
        "HOME": str(place / "home"),
        "PRE_COMMIT_HOME": str(place / "home" / "pre-commit"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "TITO_AUDIT_CACHE": "off",
    }
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=place / "repository", env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which the hooks of this project are installed and run with what is on the path."""
    pytest.importorskip("pre_commit", reason="pre-commit is in the extra dev")
    place = with_command(tmp_path_factory.mktemp("hooked"))
    (place / "home").mkdir()
    folder = place / "repository"
    folder.mkdir()
    local: list[dict[str, Any]] = [{**hook, "language": "system"} for hook in HOOKS.values()]
    config = {"repos": [{"repo": "local", "hooks": local}]}
    (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    (folder / "tito-audit.toml").write_text(f'tokenizer = "{TOY}"\n')
    assert git(place, "init", "-q").returncode == 0
    installed = subprocess.run(
        [sys.executable, "-m", "pre_commit", "install"],
        cwd=folder,
        env={**os.environ, "HOME": str(place / "home"), "PRE_COMMIT_HOME": str(place / "home" / "pre-commit")},
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    git(place, "add", ".")
    first = git(place, "commit", "-q", "-m", "The gate")
    assert first.returncode == 0, first.stdout + first.stderr
    git(place, "tag", "gate")
    return folder


@pytest.fixture
def repository(hooked: Path) -> Path:
    """It, at its first commit."""
    assert git(hooked.parent, "reset", "-q", "--hard", "gate").returncode == 0
    return hooked


def test_the_hooks_are_a_manifest_of_pre_commit() -> None:
    code, page = checked("pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"))
    assert code == 0, page


def test_a_commit_of_a_log_that_drifted_is_refused_and_one_of_a_log_that_passes_is_not(repository: Path) -> None:
    place = repository.parent
    shutil.copy(FORMATS / DRIFTED, repository / "new rollouts.jsonl")
    git(place, "add", ".")
    refused = git(place, "commit", "-m", "Rollouts")
    assert refused.returncode == 1
    assert re.search(r"^new rollouts\.jsonl:\d+\S* \w+ error: ", refused.stderr + refused.stdout, re.M)
    git(place, "rm", "-q", "--cached", "new rollouts.jsonl")
    (repository / "new rollouts.jsonl").unlink()
    shutil.copy(FORMATS / CLEAN, repository / "good.jsonl")
    (repository / "package.json").write_text('{"name": "no log"}')
    git(place, "add", ".")
    commit = git(place, "commit", "-m", "Rollouts")
    assert commit.returncode == 0, commit.stdout + commit.stderr
    assert git(place, "log", "--format=%s").stdout.split("\n")[:2] == ["Rollouts", "The gate"]


def test_a_commit_of_a_configuration_that_cannot_be_is_refused(repository: Path) -> None:
    place = repository.parent
    (repository / "tito-audit.toml").write_text('tokeniser = "models/toy"\n')
    git(place, "add", ".")
    refused = git(place, "commit", "-m", "A setting")
    assert refused.returncode == 1
    assert "tokenizer" in refused.stderr + refused.stdout


@pytest.mark.parametrize(*table(__file__, "the_hook_takes_what_is_surely_a_log"))
def test_the_hook_takes_what_is_surely_a_log(name: str, taken: bool) -> None:
    assert bool(re.search(HOOKS["tito-audit"]["files"], name)) == taken
