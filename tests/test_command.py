"""What tests call in place of the command: nothing of a run reaches the next, and what changed is read again."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from typer.testing import CliRunner

from tests.command import run, written
from tests.world import ROOT, TOY
from tito_audit.cli import app

LOG = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"
CALLS = (
    ("scan", LOG, "-t", TOY, "--report", "jsonl", "--fail-on", "never"),
    ("scan", LOG, "-t", TOY, "--template-arg", "enable_thinking=true", "--report", "jsonl"),
    ("scan", LOG, "--select", "SEQ", "--jobs", "1"),
    ("scan", LOG, "--report", "nonsense"),
    ("scan", "no-such-file", "-t", TOY),
    ("show", LOG, "-t", TOY, "--row", "1"),
    ("config", "-t", TOY, LOG),
    ("list", "rules"),
    ("scan", "--help"),
    (),
)


def alone(*arguments: object) -> tuple[int, str, str]:
    """What a run says that shares nothing with one before it but this process."""
    result = CliRunner().invoke(app, [str(word) for word in arguments])
    return result.exit_code, result.stdout, result.stderr


def state() -> tuple[object, ...]:
    """What a run could leave behind in its process."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    return (
        dict(os.environ),
        Path.cwd(),
        sys.stdin,
        sys.stdout,
        sys.stderr,
        handlers,
        logging.root.level,
        list(logging.root.handlers),
        sys.getrecursionlimit(),
        signal.getitimer(signal.ITIMER_REAL),
    )


def timeless(result: tuple[int, str, str]) -> tuple[int, str, str]:
    """What a run said without how long it took."""
    code, out, error = result
    return code, re.sub(r'[\d.]+ s(, [\d,]+ tokens/s)?|"seconds":[\d.e-]+', "", out), error


def test_a_call_says_what_it_says_alone_whatever_ran_before_it() -> None:
    expected = [timeless(alone(*call)) for call in CALLS]
    before = state()
    for calls in (CALLS, CALLS[::-1]):
        results = {call: timeless(run(*call)) for call in calls}
        assert [results[call] for call in CALLS] == expected
    assert state() == before


def test_a_call_takes_its_environment_and_leaves_it() -> None:
    before = state()
    narrow, wide = (
        run("show", LOG, "--row", 1, "-t", TOY, env={"COLUMNS": columns})[1] for columns in ("60", "150")
    )
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines())) <= 150
    assert state() == before


def test_a_tokenizer_whose_files_change_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(TOY, folder)
    log = written(tmp_path / "log.jsonl", [json.loads(LOG.read_text(encoding="utf-8").splitlines()[0])])
    call = ("scan", log, "-t", folder, "--report", "jsonl", "--fail-on", "never")
    before = timeless(run(*call))
    assert timeless(run(*call)) == before
    (folder / "chat_template.jinja").write_text("{{ messages | length }}", encoding="utf-8")
    other = timeless(run(*call))
    assert other != before
    assert other == timeless(alone(*call))
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    code, _, error = run(*call)
    assert code == 2
    assert "this is not a tokenizer" in error
