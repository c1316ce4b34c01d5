"""`--help` of every command: whole sentences, one way to name values, a default once."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest
import typer

from tests.ready import program
from tito_audit.cli import app
from tito_audit.cli._command import PANELS, SUMMARIES
from tito_audit.settings.options import OPTIONS, options_of

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@cache
def help_of(*command: str, columns: int = 80) -> str:
    """What `--help` prints on a terminal of a width."""
    done = subprocess.run(
        [*program(), *command, "--help"],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={"COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"},
    )
    return done.stdout.replace("python -m tito_audit", "tito-audit")


def test_the_list_of_commands_cuts_no_sentence() -> None:
    page = help_of()
    assert "..." not in page.replace("[ARGS]...", "")
    assert sorted(SUMMARIES) == COMMANDS
    for name, summary in SUMMARIES.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", page, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_names_values_in_one_way_and_says_a_default_once(command: str) -> None:
    page = help_of(command)
    assert not re.search(r"[<>{}]|x>=|default: no-|range", page.replace("$PAGER", ""))
    for entry in re.split(r"\n(?=  -)", page):
        words = " ".join(entry.split())
        assert words.count("[default") <= 1
        assert "] [" not in words.partition("  ")[2]
    assert max(len(line) for line in page.splitlines()) <= 80


def test_what_has_to_be_given_stands_bare_in_the_usage() -> None:
    assert help_of("scan").startswith("Usage: tito-audit scan [OPTIONS] LOG...\n")
    assert help_of("config").startswith("Usage: tito-audit config [OPTIONS] [LOG]...\n")
    assert help_of("list").startswith("Usage: tito-audit list [OPTIONS] [KIND]\n")


def test_bounds_are_words_and_a_switch_that_is_on_says_so() -> None:
    scan, repair = (" ".join(help_of(name, columns=200).split()) for name in ("scan", "repair"))
    assert "[default: one per core; at least 1]" in scan
    assert "[default: 3.0; at least 0.01]" in scan
    assert "the repair of each fixed finding. [default: on]" in repair
    assert "-q, --quiet / --no-quiet No progress line, and only the reports that you name." in repair
    assert "that you name. [" not in repair


def sections_of(command: str) -> list[str]:
    """The headings of a page, in order."""
    return re.findall(r"^([A-Z][\w ]*):$", help_of(command), re.M)


def test_flags_are_listed_under_headings() -> None:
    scan = ["Tokenizer and template", "Input", "Rules", "Gate", "Reports", "Running"]
    assert sections_of("scan") == ["Arguments", *scan]
    shared = [heading for heading in scan if heading != "Gate"]
    assert sections_of("show") == ["Arguments", "Place", "View", *shared]
    assert sections_of("list") == ["Arguments", "Options"], "a page of few flags needs no headings"
    headings = {"Arguments", "Options", *PANELS}
    assert {title for command in COMMANDS for title in sections_of(command)} <= headings


def test_every_option_has_a_heading() -> None:
    assert [option.flag for option in OPTIONS if option.panel not in PANELS] == []


def test_a_help_names_no_old_spelling() -> None:
    for command in COMMANDS:
        words = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", help_of(command)))
        for option in options_of(command):
            old = {*option.aliases, *([option.flag] if option.hidden else [])}
            assert not old & words
