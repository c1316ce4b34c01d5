"""The configuration file: what it may say, who wins, and that every mistake in it is one message."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from tests.command import run, written
from tests.tables import stored, table
from tests.world import BROKEN, CLEAN, TOY
from tito_audit.cli import app
from tito_audit.errors import SetupError
from tito_audit.settings.file import read_config
from tito_audit.settings.model import Override, Settings
from tito_audit.settings.options import COMMANDS, FLAG_ONLY, KEYS


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a log of which row 3 has a logprob above zero."""
    folder = tmp_path / "project" / "runs"
    folder.mkdir(parents=True)
    written(folder / "run.jsonl", [BROKEN if row == 3 else CLEAN for row in range(5)])
    monkeypatch.chdir(folder)
    return folder


def says(folder: Path, text: str, name: str = "tito-audit.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def short(value: str) -> str:
    return value.replace("\n", " ")[:40]


def test_paths_in_the_file_are_relative_to_the_file(project: Path) -> None:
    folder = os.path.relpath(TOY, project.parent)
    says(project.parent, f"tokenizer = '{folder}'\nchat-template = 'own.jinja'\ntemplate-args = {{think = false}}")
    (project.parent / "own.jinja").write_text("{{ think }}", encoding="utf-8")
    values = read_config(project.parent / "tito-audit.toml").values
    assert Path(values["tokenizer"]).resolve() == TOY
    assert values["chat-template"] == str(project.parent / "own.jinja")
    assert values["template-args"] == ["think=false"]
    code, out, _ = run("scan", "run.jsonl", "--fail-on", "never")
    assert code == 0
    assert "toy_bpe" in out


def test_a_name_of_a_hub_stays_a_name(tmp_path: Path) -> None:
    assert read_config(says(tmp_path, 'tokenizer = "org/model"')).values["tokenizer"] == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert read_config(says(tmp_path, 'tokenizer = "org/model"')).values["tokenizer"] == str(
        tmp_path / "org/model"
    )
    assert read_config(says(tmp_path, 'tokenizer = "./gone"')).values["tokenizer"] == str(tmp_path / "gone")


@pytest.mark.parametrize(*table(__file__, "a_mistake_in_the_file_is_one_message_with_file_and_key"), ids=short)
def test_a_mistake_in_the_file_is_one_message_with_file_and_key(project: Path, text: str, message: str) -> None:
    path = says(project, text)
    with pytest.raises(SetupError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    code, out, err = run("scan", "run.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("tito-audit: ")
    assert "Traceback" not in err
    assert "\x1b" not in err


@pytest.mark.parametrize("name", ["tito-audit.toml", "pyproject.toml"])
def test_a_file_of_windows_is_read(project: Path, name: str) -> None:
    table = "[tool.tito-audit]\r\n" if name == "pyproject.toml" else ""
    (project / name).write_bytes(f"\ufeff# settings\r\n{table}jobs = 3\r\n".encode())
    assert read_config(project / name).values == {"jobs": 3}


def test_a_mistake_in_a_pyproject_names_the_table(project: Path) -> None:
    path = says(project, "[tool.tito-audit]\njobs = 'all'\n", "pyproject.toml")
    with pytest.raises(SetupError, match=r"pyproject.toml: tool.tito-audit.jobs is the text 'all'"):
        read_config(path)
    says(project, "tool = {tito-audit = 3}\n", "pyproject.toml")
    with pytest.raises(SetupError, match=r"tool.tito-audit is the number 3"):
        read_config(path)


def test_every_value_that_a_key_takes_reaches_its_option(tmp_path: Path) -> None:
    keys = stored(__file__, "EVERY_KEY")
    config = read_config(says(tmp_path, keys["file"]))
    wanted = json.loads(json.dumps(keys["options"]).replace("HERE", str(tmp_path)))
    assert config.parameters("config") == wanted
    commands = {name: config.parameters(name) for name in ("scan", "repair", "show", "inspect", "convert")}
    assert commands["scan"]["output_format"] == "github"
    other = {"report", "output_format", "worst"}  # what repair and inspect mean by them, no file says
    assert not other & {*commands["repair"], *commands["show"], *commands["inspect"], *commands["convert"]}
    together = {name: value for values in commands.values() for name, value in values.items()}
    assert together == {**wanted, "output_format": "github"}


def test_every_flag_of_a_command_that_reads_the_file_is_a_key_or_says_why_not() -> None:
    command = typer.main.get_command(app)
    flags: dict[str, set[str]] = {}
    for name in COMMANDS:
        for parameter in command.commands[name].params:  # type: ignore[attr-defined]
            for flag in parameter.opts:
                if flag.startswith("--") and parameter.name != "help":
                    flags.setdefault(flag, set()).add(name)
    keys = {option.flag: set(option.commands) for option in KEYS.values()}
    left = {flag.removeprefix("--") for flag in set(flags) - set(keys)} - set(FLAG_ONLY)
    assert left == set(), "give each a key in the table of options, or say why no file sets it"
    for flag, commands in keys.items():
        assert commands <= flags[flag], "a key that no command has"
    other = {flag: flags[flag] - commands for flag, commands in keys.items() if flags[flag] - commands}
    assert other == {flag: set(commands) for flag, commands in stored(__file__, "OTHERS").items()}
    assert {f"--{flag}" for flag in FLAG_ONLY} <= set(flags) - set(keys)


def test_own_keys_win_over_those_that_a_file_extends_and_later_ones_over_earlier(project: Path) -> None:
    says(
        project.parent,
        "jobs = 1\nlimit = 1\nsample = 0.5\nextend-select = ['TOK']\nmax-rate = {TOK = 1}",
        "root.toml",
    )
    says(project.parent, "extend = 'root.toml'\nlimit = 2\nignore = 'LPR'\nbaseline = 'known.json'", "base.toml")
    says(project.parent, "[tool.tito-audit]\nignore = 'SEQ'\nselect = 'TOK'", "pyproject.toml")
    path = says(
        project, "extend = ['../base.toml', '../pyproject.toml']\nextend-select = 'MSK'\nmax-rate = ['LPR=1%']"
    )
    config = read_config(path)
    assert config.values == {
        "jobs": 1,
        "limit": 2,
        "sample": 0.5,
        "ignore": ["SEQ"],
        "baseline": str(project.parent / "known.json"),
        "select": ["TOK"],
        "extend-select": ["MSK"],
        "max-rate": ["LPR=1%"],
    }
    assert {name: file.name for name, file in config.sources.items()} == {
        "jobs": "root.toml",
        "limit": "base.toml",
        "sample": "root.toml",
        "ignore": "pyproject.toml",
        "baseline": "base.toml",
        "select": "pyproject.toml",
        "extend-select": "tito-audit.toml",
        "max-rate": "tito-audit.toml",
    }
    base, root = project.parent / "base.toml", project.parent / "root.toml"
    assert config.extended_by == {base: path, root: base, project.parent / "pyproject.toml": path}


def test_a_table_is_taken_whole_and_not_key_by_key(project: Path) -> None:
    says(project.parent, "map = {token_ids = 'a', loss_mask = 'b'}\ntemplate-args = {x = 1}", "base.toml")
    config = read_config(says(project, "extend = '../base.toml'\nmap = {token_ids = 'c'}"))
    assert config.values == {"map": ["token_ids=c"], "template-args": ["x=1"]}


def test_two_files_may_extend_the_same_third(project: Path) -> None:
    says(project, "limit = 3\n[[overrides]]\npaths = 'x'\nformat = 'slime'", "root.toml")
    for name in ("a.toml", "b.toml"):
        says(project, "extend = 'root.toml'", name)
    config = read_config(says(project, "extend = ['a.toml', 'b.toml']"))
    assert config.values == {"limit": 3}
    assert len(config.overrides) == 1


def test_a_circle_of_extends_is_named_in_full(project: Path) -> None:
    says(project, "extend = 'b.toml'", "a.toml")
    says(project, "extend = '../runs/a.toml'", "b.toml")
    path = says(project, "extend = 'a.toml'")
    with pytest.raises(SetupError) as caught:
        read_config(path)
    way = " → ".join(str(project / name) for name in ("tito-audit.toml", "a.toml", "b.toml", "a.toml"))
    assert str(caught.value).splitlines()[0] == f"{project / 'b.toml'}: extend goes in a circle: {way}."


@pytest.mark.parametrize(*table(__file__, "a_file_to_extend_that_says_nothing_is_one_line_with_both_names"))
def test_a_file_to_extend_that_says_nothing_is_one_line_with_both_names(
    project: Path, base: str, message: str
) -> None:
    says(project.parent, "[project]\nname = 'tito-audit-user'\n", "pyproject.toml")
    path = says(project, f"extend = '{base}'")
    with pytest.raises(SetupError) as caught:
        read_config(path)
    expected = message.format(base=project / base, folder=project, parent=project.parent)
    assert str(caught.value).splitlines()[0] == f"{path}: {expected}"


@pytest.mark.parametrize(
    *table(__file__, "a_mistake_in_what_speaks_of_some_logs_or_other_files_is_one_message"),
    ids=lambda value: value.replace("\n", " ")[:40],
)
def test_a_mistake_in_what_speaks_of_some_logs_or_other_files_is_one_message(
    project: Path, text: str, message: str
) -> None:
    path = says(project, text)
    with pytest.raises(SetupError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    says(project, "")
    says(
        project,
        f"[tool.tito-audit]\n{text.replace('[overrides]', '[tool.tito-audit.overrides]')}",
        "pyproject.toml",
    )
    with pytest.raises(SetupError, match=r"pyproject\.toml: "):
        read_config(project / "pyproject.toml")


@pytest.mark.parametrize(*table(__file__, "a_pattern_of_the_file_starts_from_its_folder"))
def test_a_pattern_of_the_file_starts_from_its_folder(
    tmp_path: Path, pattern: str, those: list[str], not_those: list[str]
) -> None:
    home = tmp_path / "odd*[name]"
    home.mkdir()
    config = read_config(says(home, f"[[overrides]]\npaths = '{pattern}'\nformat = 'slime'"))
    settings = Settings(overrides=(Override(config.overrides[0].patterns, {"format": "slime"}),))
    assert [file for file in those if settings.at(home / file).format is None] == []
    assert [file for file in not_those if settings.at(home / file).format is not None] == []
    assert settings.at(tmp_path / "oddity[name]" / "legacy" / "a").format is None


def test_a_pattern_in_the_home_folder_is_of_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = read_config(says(tmp_path, "[[overrides]]\npaths = '~/runs/*'"))
    assert Override(config.overrides[0].patterns, {}).fits(tmp_path / "home" / "runs" / "a.jsonl")


def test_a_pattern_goes_through_links_as_the_log_does(project: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (project / "data").symlink_to(tmp_path / "disk")
    config = read_config(says(project, "[[overrides]]\npaths = 'data/**'"))
    override = Override(config.overrides[0].patterns, {})
    assert override.fits(project / "data" / "a.jsonl")
    assert override.fits(tmp_path / "disk" / "a.jsonl")


def test_what_a_file_turns_on_a_flag_turns_off(project: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    switches = {key.name for key in KEYS.values() if key.kind.schema.get("type") == "boolean"}
    for name in COMMANDS:
        for parameter in commands[name].params:
            assert parameter.name not in switches or parameter.secondary_opts, f"{name} --{parameter.name}"
    says(project, "quiet = true")
    assert run("scan", "run.jsonl")[1] == ""
    assert "LPR504" in run("scan", "run.jsonl", "--no-quiet")[1]
