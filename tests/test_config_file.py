"""The configuration file: what it may say, who wins, and that every mistake in it is one message."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pytest
import typer
from test_cli import BROKEN, CLEAN, run, written

from tito_audit.cli import app
from tito_audit.config_file import COMMAND_LINE_ONLY, KEYS, find_config, read_config
from tito_audit.errors import SetupError

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"


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


def test_the_nearest_file_above_holds_and_the_report_says_which_and_what(project: Path) -> None:
    says(project.parent, 'ignore = ["LPR504"]')
    code, out, _ = run("scan", "run.jsonl")
    assert code == 0
    assert f"Settings from {project.parent / 'tito-audit.toml'}: ignore." in " ".join(out.split())
    says(project, 'fail-on = "note"')
    code, out, _ = run("scan", "run.jsonl")
    assert code == 1
    assert "Settings from tito-audit.toml: fail-on." in out


def test_a_table_of_pyproject_counts_and_one_without_it_is_passed_over(project: Path) -> None:
    says(project.parent, '[tool.tito-audit]\nselect = ["TOK"]\n', "pyproject.toml")
    says(project, '[project]\ndependencies = ["tito-audit"]\n', "pyproject.toml")
    assert find_config(project) == project.parent / "pyproject.toml"
    assert run("scan", "run.jsonl")[0] == 0
    says(project.parent, "", "tito-audit.toml")
    assert find_config(project) == project.parent / "tito-audit.toml"
    assert run("scan", "run.jsonl")[0] == 1


def test_a_flag_stands_in_place_of_the_value_of_the_file(project: Path) -> None:
    says(project, 'ignore = ["LPR504"]\nfail-on = "never"\nformat = "slime"')
    arguments = ("scan", "run.jsonl", "--format", "auto")
    assert run(*arguments)[0] == 0
    assert run(*arguments, "--fail-on", "error")[0] == 0
    code, out, _ = run(*arguments, "--ignore", "TOK", "--fail-on", "error")
    assert code == 1
    assert "LPR504" in out
    assert "Settings from" not in out


def test_no_config_reads_none_and_config_reads_that_one(project: Path, tmp_path: Path) -> None:
    says(project, 'ignore = ["LPR504"]')
    other = says(tmp_path, 'ignore = ["LPR"]', "other.toml")
    assert run("scan", "run.jsonl")[0] == 0
    assert run("scan", "run.jsonl", "--no-config")[0] == 1
    code, out, _ = run("scan", "run.jsonl", "--config", other)
    assert code == 0
    assert f"Settings from {other}: ignore." in " ".join(out.split())
    for both in (("--config", other, "--no-config"), ("--no-config", "--config", other)):
        code, _, err = run("scan", "run.jsonl", *both)
        assert code == 2
        assert "exclude each other" in err
    code, _, err = run("scan", "run.jsonl", "--config", "gone.toml")
    assert code == 2
    assert "gone.toml: the configuration file cannot be read" in err


def test_paths_in_the_file_are_relative_to_the_file(project: Path) -> None:
    folder = os.path.relpath(TOKENIZER, project.parent)
    says(project.parent, f"tokenizer = '{folder}'\nchat-template = 'own.jinja'\ntemplate-args = {{think = false}}")
    (project.parent / "own.jinja").write_text("{{ think }}", encoding="utf-8")
    values = read_config(project.parent / "tito-audit.toml").values
    assert Path(values["tokenizer"]).resolve() == TOKENIZER
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


def test_a_mapping_of_the_file_reads_a_log_of_own_columns(project: Path) -> None:
    rows = [{"seq": CLEAN["token_ids"], "train": CLEAN["loss_mask"], "score": BROKEN["logprobs"]}]
    written(project / "own.jsonl", rows)
    assert "no known format has these columns" in " ".join(run("scan", "own.jsonl")[1].split())
    says(project, '[map]\ntoken_ids = "seq"\nloss_mask = "train"\nlogprobs = "score"')
    code, out, _ = run("scan", "own.jsonl", "--report", "json")
    assert code == 1
    summary = json.loads(out)["summary"]
    assert list(summary["findings"]) == ["LPR504"]
    assert summary["taken"]["own.jsonl"]["generic"]["told_by"] == ["token_ids", "loss_mask", "logprobs"]


def test_repair_and_show_read_the_file_too(project: Path) -> None:
    says(project, 'with = ["mask"]\nprovenance = false\nselect = ["LPR504"]\njobs = 2\nlimit = 9')
    code, _, _ = run("repair", "run.jsonl", "-o", "out.jsonl")
    assert code == 0
    row = json.loads((project / "out.jsonl").read_text(encoding="utf-8").splitlines()[3])
    assert row["loss_mask"] == [0, 0, 0, 1]
    assert "tito_audit" not in row
    says(project, 'format = "slimy"')
    for command in (("show", "run.jsonl", "--row", "3"), ("inspect", "run.jsonl")):
        code, _, err = run(*command)
        assert code == 2
        assert "--format slimy: no such format" in err
        assert "format may come from tito-audit.toml." in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokeniser = 'x'", "there is no key 'tokeniser'.\nDid you mean tokenizer?"),
        ("fail_on = 'error'", "there is no key 'fail_on'.\nDid you mean fail-on?"),
        ("zzz = 1", "there is no key 'zzz'.\nKeys: tokenizer, "),
        ("unsafe = true", "unsafe is not set in a file: it gives up a safeguard"),
        ("trust-remote-code = true", "trust-remote-code is not set in a file: it lets code run"),
        ("jobs = true", "jobs is true.\nIt takes a number of processes, 1 or more."),
        ("jobs = 0", "jobs is the number 0.\n"),
        ("limit = 1.5", "limit is the number 1.5.\n"),
        ("template-seconds = nan", "template-seconds is the number nan.\n"),
        (
            "fail-on = 'sometimes'",
            "fail-on is the text 'sometimes'.\nIt takes one of error, warning, note, never.",
        ),
        ("fail-on = ['error']", "fail-on is a list.\n"),
        ("select = ['TOK', 3]", "select is a list with the number 3 in it.\n"),
        ("select = ''", "select is the text ''.\n"),
        ("map = ['token_ids=tokens']", "map is a list.\nIt takes a table of our columns and the log's"),
        ("[map]\ntoken_ids = 3", "map is a table (token_ids is the number 3).\n"),
        ("[template-args]\nday = 2026-01-01", "template-args is a table (one of its values is a date"),
        ("chat-template = 3", "chat-template is the number 3.\nIt takes the path of a Jinja file."),
        ("sentinel = 'none'", "sentinel is the text 'none'.\nIt takes a number, or \"null\"."),
        ("provenance = 'no'", "provenance is the text 'no'.\nIt takes true or false."),
        ("jobs = ", "this is not TOML ("),
        ("a = " + "[" * 5000, "this is not TOML ("),
        ('"\\u001b[31m" = 1', "there is no key '\\x1b[31m'"),
    ],
    ids=lambda value: value[:24],
)
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


def test_a_mistake_in_a_pyproject_names_the_table(project: Path) -> None:
    path = says(project, "[tool.tito-audit]\njobs = 'all'\n", "pyproject.toml")
    with pytest.raises(SetupError, match=r"pyproject.toml: tool.tito-audit.jobs is the text 'all'"):
        read_config(path)
    says(project, "tool = {tito-audit = 3}\n", "pyproject.toml")
    with pytest.raises(SetupError, match=r"tool.tito-audit is the number 3"):
        read_config(path)


def test_every_value_that_a_key_takes_reaches_its_option(tmp_path: Path) -> None:
    text = """
tokenizer = "org/model"
template-name = "default"
template-args = {think = false, level = "high"}
template-seconds = 2
tool-arguments = "object"
encoder = "tokenizers"
format = "generic"
messages = "chats.jsonl"
tools = "tools.json"
select = ["TOK", "LPR"]
ignore = "SEQ"
fail-on = "warning"
limit = 7
max-row-bytes = 1000
jobs = 3
with = ["mask", "fork"]
mask-by = "turn"
sentinel = 0.0
mask-style = "binary"
padding = "none"
provenance = false
[map]
token_ids = "tokens"
[on]
id = "uid"
"""
    config = read_config(says(tmp_path, text))
    assert config.parameters == {
        "tokenizer": "org/model",
        "template_name": "default",
        "template_arg": ["think=false", 'level="high"'],
        "template_seconds": 2.0,
        "tool_arguments": "object",
        "encoder": "tokenizers",
        "format": "generic",
        "select": ["TOK", "LPR"],
        "ignore": ["SEQ"],
        "fail_on": "warning",
        "limit": 7,
        "max_row_bytes": 1000,
        "jobs": 3,
        "strategies": ["mask", "fork"],
        "mask_by": "turn",
        "sentinel": "0.0",
        "mask_style": "binary",
        "padding": "none",
        "provenance": False,
        "columns": ["token_ids=tokens"],
        "messages": str(tmp_path / "chats.jsonl"),
        "tools": str(tmp_path / "tools.json"),
        "on": ["id=uid"],
    }
    assert set(KEYS) - set(config.values) == {"chat-template"}


def test_every_flag_of_scan_and_repair_is_a_key_or_says_why_not() -> None:
    command = typer.main.get_command(app)
    flags: dict[str, str] = {}
    for name in ("scan", "repair"):
        for parameter in command.commands[name].params:  # type: ignore[attr-defined]
            long = [option for option in parameter.opts if option.startswith("--")]
            if long and parameter.name != "help":
                flags[long[0].removeprefix("--")] = parameter.name or ""
    by_parameter = {key.target for key in KEYS.values()}
    left = {flag for flag, parameter in flags.items() if parameter not in by_parameter} - set(COMMAND_LINE_ONLY)
    assert left == set(), "add each to KEYS or to COMMAND_LINE_ONLY in config_file.py"
    assert by_parameter <= set(flags.values()), "a key that no command has"
    assert set(COMMAND_LINE_ONLY) <= set(flags)


def test_what_the_readme_says_of_the_file_can_be_read(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("## Configuration")[1].split("```toml\n")[1].split("```")[0]
    assert read_config(says(tmp_path, block, "pyproject.toml")).values
    assert inspect.cleandoc(block).startswith("[tool.tito-audit]")
