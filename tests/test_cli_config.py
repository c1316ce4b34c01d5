"""`tito-audit config`: every setting with where it comes from, for people and for machines."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.world import CLEAN
from tito_audit.settings.options import KEYS

SHIPPED = Path(__file__).resolve().parents[1] / "tito_audit" / "schemas" / "config.schema.json"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, `runs`, beneath one with a pyproject.toml that extends another file."""
    folder = tmp_path / "project" / "runs"
    (folder / "old").mkdir(parents=True)
    for name in ("a.jsonl", "old/b.jsonl", "old/c.jsonl"):
        written(folder / name, [CLEAN])
    says(
        folder.parent / "pyproject.toml",
        """[tool.tito-audit]
extend = "base.toml"
tokenizer = "./toy"
ignore = "LPR506,TOK"
report = ["text", "json=audit.json"]
[tool.tito-audit.map]
token_ids = "seq"
"loss mask" = "train"
[[tool.tito-audit.overrides]]
paths = "runs/old/**"
ignore = ["LPR"]
fail-on = "note"
""",
    )
    base = 'jobs = 2\ntokenizer = "org/model"\nmax-rate = {TOK = 0.001}\n'
    says(folder.parent / "base.toml", base + '[[overrides]]\npaths = ["*.gz"]\nformat = "slime"')
    monkeypatch.chdir(folder)
    return folder


def says(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def config_page(*arguments: object) -> dict[str, Any]:
    code, out, err = run("config", *arguments, "--output-format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_page_says_every_setting_once(project: Path) -> None:
    lines = run("config")[1].partition("[[overrides]]")[0].splitlines()
    for name in KEYS:
        assert sum(line.startswith((f"{name} = ", f"# {name} is not set")) for line in lines) == 1, name


def test_the_page_is_toml_that_says_the_same_from_the_working_folder(project: Path) -> None:
    out = run("config")[1]
    assert tomllib.loads(out)["tokenizer"] == "../toy"
    before = config_page()["settings"]
    says(project / "tito-audit.toml", out)
    after = config_page()["settings"]
    assert {name: setting["value"] for name, setting in after.items()} == {
        name: setting["value"] for name, setting in before.items()
    }
    assert {setting["file"] for setting in after.values()} == {"tito-audit.toml", None}


def test_logs_are_named_with_the_overrides_that_fit_them(project: Path) -> None:
    (project / "old" / "f.jsonl.gz").write_bytes(b"")
    logs = {log["file"]: log for log in config_page(".")["logs"]}
    assert logs["a.jsonl"]["overrides"] == []
    assert logs["old/f.jsonl.gz"]["overrides"] == [0, 1]
    assert logs["old/f.jsonl.gz"]["settings"]["format"] == {
        "value": "slime",
        "from": "file",
        "file": "../base.toml",
    }
    assert logs["old/b.jsonl"]["settings"]["ignore"]["value"] == ["LPR"]
    assert logs["old/b.jsonl"]["settings"]["jobs"]["value"] == 2


def test_machines_get_all_of_it(project: Path) -> None:
    told_all = config_page("--fail-on", "warning")
    assert told_all["file"] == "../pyproject.toml"
    assert told_all["folder"] == str(project)
    assert told_all["extended"] == [{"file": "../base.toml", "by": "../pyproject.toml"}]
    assert set(told_all["settings"]) == set(KEYS)
    assert told_all["settings"]["fail-on"] == {"value": "warning", "from": "flag", "file": None}
    assert told_all["settings"]["worst"] == {"value": 10, "from": "default", "file": None}
    assert told_all["settings"]["select"] == {"value": None, "from": "default", "file": None}
    assert told_all["overrides"][1] == {
        "name": "overrides[0]",
        "file": "../pyproject.toml",
        "paths": ["runs/old/**"],
        "settings": {"ignore": ["LPR"], "fail-on": "note"},
        "overruled_by_flags": ["fail-on"],
    }


def test_without_a_file_machines_get_what_was_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tmp_path / "pyproject.toml", "[project]\nname = 'x'\n")
    monkeypatch.chdir(tmp_path)
    assert config_page()["passed_over"] == ["pyproject.toml"]


def test_config_and_no_config_choose_the_file(project: Path) -> None:
    assert config_page("--no-config")["file"] is None
    assert config_page("--config", "../base.toml")["settings"]["tokenizer"]["value"] == "org/model"
    assert {setting["from"] for setting in config_page("--no-config")["settings"].values()} == {"default"}


def test_a_log_that_there_is_not_is_a_mistake(project: Path) -> None:
    code, _, err = run("config", "gone.jsonl")
    assert code == 2
    assert "gone.jsonl: no such file or folder." in err


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(project: Path) -> None:
    text = 'template-args = {"\\u001b[31m" = "\\u202e\\u0007"}\n[[overrides]]\npaths = "\\u001b]0;x"'
    says(project / "tito-audit.toml", text)
    for arguments in ((), ("--output-format", "json")):
        code, out, _ = run("config", *arguments)
        assert code == 0
        assert not set(out) & {"\x1b", "\x07", "\u202e"}


def test_the_schema_is_printed_as_it_ships(project: Path) -> None:
    says(project / "tito-audit.toml", "")
    code, out, _ = run("config", "--schema")
    assert code == 0
    assert out == SHIPPED.read_text(encoding="utf-8")
