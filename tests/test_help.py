"""`--help` of every command: whole sentences, one way to name values, a default once."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

import pytest
import typer

from tito_audit.cli import app
from tito_audit.cli._help import SUMMARIES

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@cache
def help_of(*command: str, columns: int = 80) -> str:
    """What `--help` prints on a terminal of a width."""
    done = subprocess.run(
        [sys.executable, "-m", "tito_audit", *command, "--help"],
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
    assert help_of("list").startswith("Usage: tito-audit list [OPTIONS] KIND\n")


def test_bounds_are_words_and_a_switch_that_is_on_says_so() -> None:
    scan, repair = (" ".join(help_of(name, columns=200).split()) for name in ("scan", "repair"))
    assert "[default: one per core; at least 1]" in scan
    assert "[default: 10.0; at least 0.01]" in scan
    assert "which repair cured which findings. [default: on]" in repair
    assert "-q, --quiet / --no-quiet No progress, and no report that --report did not ask for." in repair
    assert "did not ask for. [" not in repair
