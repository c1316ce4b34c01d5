"""Tab in a real shell: commands, flags, names of plugins, and files."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tables import stored
from tests.world import ROOT
from tito_audit.cli._command import COMPLETIONS
from tito_audit.cli.repair import REPORTS
from tito_audit.convert.makers import all_makers
from tito_audit.formats import all_formats
from tito_audit.repairs import all_repairs
from tito_audit.reports import all_reports
from tito_audit.rules import FAMILIES, all_rules

COMMAND = f"""#!/bin/sh
test -n "$_TITO_AUDIT_COMPLETE" || {{ printf '<%s>' "$@"; echo done; exit; }}
PYTHONPATH='{ROOT}' exec '{sys.executable}' -c 'import sys; from tito_audit.cli import main
sys.argv[0] = "tito-audit"
main()' "$@"
"""
"""The command where the shell asks what completes; else what the line says."""
BEGIN = {"bash": "source complete.bash", "zsh": "autoload -U compinit; compinit -u; source complete.zsh"}
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
LINES = stored(__file__, "LINES")
HEAVY = {"numpy", "rich", "orjson", "tito_audit.rules", "tito_audit.formats", "tito_audit.reports"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command, what shells read to complete it, and two logs."""
    folder = tmp_path_factory.mktemp("completed")
    command = folder / "bin" / "tito-audit"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        (folder / f"complete.{shell}").write_text(printed(folder, _TITO_AUDIT_COMPLETE=f"source_{shell}"))
    (folder / "rollouts of May.jsonl").touch()
    (folder / "sampled.parquet").touch()
    return folder


def environment(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(place), "TERM": "dumb", "LC_ALL": "C.UTF-8", **more}


def printed(place: Path, **more: str) -> str:
    """What the command says to a shell that asks."""
    words = [str(place / "bin" / "tito-audit")]
    return subprocess.run(words, env=environment(place, **more), capture_output=True, text=True, check=True).stdout


def typed(terminal: int, line: str, pattern: str) -> str:
    """What a terminal shows, up to this pattern, when a line is typed into it."""
    os.write(terminal, f"{line}\n".encode())
    seen, ends = "", time.monotonic() + 30
    while not re.search(pattern, seen) and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    assert re.search(pattern, seen), seen
    return seen


def entered(shell: str, place: Path, lines: Iterable[str]) -> dict[str, list[str]]:
    """The arguments that an interactive shell calls the command with, when Tab and Enter follow each line."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(place)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], environment(place))
    called = {}
    try:
        typed(terminal, f"{BEGIN[shell]}; echo rea''dy", r"ready\r")
        for line in lines:
            seen = typed(terminal, f"{line}\t", r"<.*>done\r")
            called[line] = re.findall(r"<([^<>]*)>", seen[seen.rindex("\n", 0, seen.rindex(">done")) :])
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    return called


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_the_last_word(shell: str, place: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    assert entered(shell, place, LINES) == LINES


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed here")
@pytest.mark.parametrize("line", LINES)
def test_fish_offers_the_last_word(line: str, place: Path) -> None:
    command = ["fish", "--no-config", "-c", "source complete.fish; complete -C $argv[1]", line]
    done = subprocess.run(command, env=environment(place), cwd=place, capture_output=True, text=True, check=True)
    offered = [offer.partition("\t")[0].replace("\\ ", " ") for offer in done.stdout.splitlines()]
    assert LINES[line][-1] in offered


def test_every_name_is_offered() -> None:
    assert COMPLETIONS["formats"]("") == ["auto", *sorted(format.name for format in all_formats())]
    assert COMPLETIONS["reports"]("") == [report.name for report in all_reports()]
    assert COMPLETIONS["repair_reports"]("") == list(REPORTS)
    assert COMPLETIONS["repairs"]("") == sorted(repair.name for repair in all_repairs())
    assert COMPLETIONS["codes"]("") == [*sorted(FAMILIES), *sorted(rule.code for rule in all_rules())]
    assert set(COMPLETIONS["manuals"]("")) == {*COMPLETIONS["codes"](""), *COMPLETIONS["repairs"]("")}
    assert set(COMPLETIONS["forms"]("")) == set(all_makers())


def test_a_name_that_stands_in_the_list_is_not_offered_again() -> None:
    assert "TOK,SEQ" in COMPLETIONS["codes"]("TOK,")
    assert "TOK,TOK" not in COMPLETIONS["codes"]("TOK,")
    assert all(name.startswith("mask,splice,") for name in COMPLETIONS["repairs"]("mask,splice,"))


ASKS = """
import os, sys
from contextlib import suppress
from tito_audit.cli import main
for line in sys.argv[1:]:
    os.environ.update(COMP_WORDS=f"tito-audit {line}", COMP_CWORD=str(len(line.split())))
    sys.argv = ["tito-audit"]
    with suppress(SystemExit):
        main()
    print(f"-- {line}:", *sys.modules, flush=True)
"""


def test_a_shell_that_asks_for_names_imports_no_plugins(place: Path) -> None:
    lines = ("scan --format n", "scan --report j", "scan --select TOK,", "repair --with m", "explain T")
    asking = environment(place, _TITO_AUDIT_COMPLETE="complete_bash")
    words = [sys.executable, "-c", ASKS, *lines]
    page = subprocess.run(words, env=asking, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    answers = re.findall(r"((?:^\w.*\n)+)-- (.*?): (.*)$", page, re.MULTILINE)
    assert [line for _, line, _ in answers] == list(lines), "each is offered something"
    for _, line, modules in answers:
        assert not HEAVY & set(modules.split()), line
