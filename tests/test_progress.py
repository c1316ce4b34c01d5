"""The line that shows how far a run is: on a terminal only, with share, rows, speed and the time left."""

from __future__ import annotations

import gzip
import os
import pty
import re
from pathlib import Path

import pytest

from tests.command import become, run
from tests.tiers import DEEP
from tito_audit.terminal import terminal

TOY = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers" / "toy_bpe"
ROWS = (TOY.parents[1] / "formats" / "generic.jsonl").read_bytes()


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz"] if DEEP else ["a.jsonl.gz"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A log that takes a moment."""
    path, data = tmp_path / request.param, ROWS * (200 if DEEP else 8)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is drawn for each row; a process that `make deep` starts draws it ten times a second."""
    monkeypatch.setattr(terminal, "_EVERY", -1.0)


def on_terminal(*arguments: object) -> str:
    """What the command writes to a terminal, with a few lines of its own at the end."""
    pid, end = pty.fork()
    if not pid:
        become(*arguments, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    said = b""
    while True:
        try:
            block = os.read(end, 1 << 16)
        except OSError:
            break
        if not block:
            break
        said += block
    os.waitpid(pid, 0)
    os.close(end)
    return said.decode()


LINE = r"\d+% · (?:\w[\w ()]* · )?[\d,]+ rows · [\d,]+ rows/s · [\d,.]+ MB/s · (?:\d+:)?\d+:\d\d left"


def test_a_scan_shows_share_rows_speed_and_the_time_left(log: Path) -> None:
    said = on_terminal("scan", log, "-t", TOY, "--jobs", 1, "--fail-on", "never", "--worst", 0)
    lines = re.findall(LINE, said)
    assert lines, said[-2000:]
    shares = [int(line.split("%")[0]) for line in lines]
    assert shares == sorted(shares)
    assert shares[-1] > 50, "the share is of the bytes as they are stored"


def test_a_repair_shows_its_phase_and_goes_on_while_the_result_is_scanned(log: Path, tmp_path: Path) -> None:
    out = tmp_path / f"out-{log.name}"
    said = on_terminal("repair", log, "-o", out, "-t", TOY, "--jobs", 1, "--fail-on", "never")
    found = re.findall(LINE, said)
    phases = list(dict.fromkeys(line.split(" · ")[1] for line in found))
    assert phases == ["repairing (1 of 2)", "scanning the result (2 of 2)"], said[-2000:]


def test_a_dry_run_has_one_phase(log: Path) -> None:
    said = on_terminal("repair", log, "--dry-run", "-t", TOY, "--jobs", 1, "--fail-on", "never")
    assert {line.split(" · ")[1] for line in re.findall(LINE, said)} == {"repairing"}


def test_nothing_is_drawn_without_a_terminal_or_when_quiet(log: Path) -> None:
    options = ("-t", TOY, "--jobs", 1, "--fail-on", "never", "--worst", 0)
    assert run("scan", log, *options)[2] == ""
    assert "rows/s" not in on_terminal("scan", log, *options, "--quiet")
