"""The exit codes: every one that is documented comes out of a real run, and no other is documented."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import run, written
from tests.ready import program
from tests.tiers import some
from tests.world import BROKEN, FORMATS, ROOT, TOKENIZERS
from tito_audit.cli._exit import EXIT_CODES, epilog

TOY = ("-t", str(TOKENIZERS / "toy_bpe"))
DRIFTED = str(FORMATS / "nemo_gym.jsonl")
CLEAN = str(FORMATS / "tito_sample.jsonl")

RUNS = {
    "scan of a clean log": (0, ("scan", CLEAN, *TOY)),
    "scan of a drifted log": (1, ("scan", DRIFTED, *TOY)),
    "scan of a drifted log that may fail nothing": (0, ("scan", DRIFTED, *TOY, "--fail-on", "never")),
    "scan of no log": (2, ("scan", "no-such.jsonl")),
    "scan without a log": (2, ("scan",)),
    "a flag that there is not": (2, ("scan", CLEAN, "--no-such-flag")),
    "a command that there is not": (2, ("no-such-command",)),
    "no command": (2, ()),
    "help": (0, ("--help",)),
    "repair with nothing left": (0, ("repair", DRIFTED, *TOY, "--dry-run", "--select", "SEQ,TOK,TPL")),
    "repair with errors left": (1, ("repair", DRIFTED, *TOY, "--dry-run", "--with", "normalize")),
    "repair to nowhere": (2, ("repair", DRIFTED, *TOY)),
    "convert that loses": (1, ("convert", DRIFTED, "--to", "rows", "--dry-run")),
    "convert that may lose": (
        0,
        ("convert", str(FORMATS / "atropos_group.jsonl"), "--to", "rows", "--dry-run", "--lossy"),
    ),
    "convert into no form": (2, ("convert", DRIFTED, "--to", "no-such-form", "--dry-run")),
    "show": (0, ("show", DRIFTED, "--row", "1", *TOY)),
    "show of no row": (2, ("show", DRIFTED, "--row", "999", *TOY)),
    "identify": (0, ("identify", str(FORMATS / "vllm.jsonl"), *TOY)),
    "identify of what is not sure": (1, ("identify", str(FORMATS / "generic.jsonl"), *TOY)),
    "identify of no log": (2, ("identify", "no-such.jsonl")),
    "inspect": (0, ("inspect", DRIFTED)),
    "inspect of no log": (2, ("inspect", "no-such.jsonl")),
    "template that only appends": (0, ("template", str(TOKENIZERS / "toy_metaspace"))),
    "template that changes history": (1, ("template", str(TOKENIZERS / "toy_bpe"))),
    "template of nothing": (2, ("template", "--no-config")),
    "explain": (0, ("explain", "TOK101")),
    "explain of nothing": (2, ("explain", "XYZ")),
    "list": (0, ("list", "reports")),
    "list of nothing": (2, ("list", "nothing")),
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tito_audit", *arguments]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_the_documented_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, arguments = RUNS[name]
    ended, _, complaint = run(*arguments)
    assert ended == code, complaint
    assert code in EXIT_CODES


@pytest.mark.parametrize("name", some([*RUNS], 5))
def test_a_process_ends_with_the_documented_code(name: str, tmp_path: Path) -> None:
    code, arguments = RUNS[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*program(), *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stderr
    assert code in EXIT_CODES
    assert bool(done.stderr) == (code == 2) or "Traceback" not in done.stderr


def opened_by_its_reader(pipe: Path, reader: subprocess.Popen[bytes]) -> int:
    """The end to write to, once the process reads the other."""
    while reader.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.02)
    raise AssertionError(f"it ended with {reader.returncode}: {reader.communicate()[1]!r}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize(("number", "code"), some([(signal.SIGINT, 130), (signal.SIGTERM, 143)], 1))
def test_a_run_that_is_stopped_ends_with_the_code_of_its_signal(number: int, code: int, tmp_path: Path) -> None:
    pipe = tmp_path / "log.jsonl"
    os.mkfifo(pipe)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command("scan", str(pipe), "--report", f"json={tmp_path / 'report.json'}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    writer = opened_by_its_reader(pipe, run)
    try:
        os.write(writer, b"{")
        run.send_signal(number)
        run.communicate(timeout=60)
    finally:
        os.close(writer)
    # A shell calls the end by a signal 128 and its number.
    assert (128 - run.returncode if run.returncode < 0 else run.returncode) == code
    assert code in EXIT_CODES
    assert not (tmp_path / "report.json").exists()


def test_a_run_whose_reader_went_away_ends_as_the_shell_counts_it(tmp_path: Path) -> None:
    script = '"$@" | head -1 >/dev/null; echo "${PIPESTATUS[0]}"'
    log = written(tmp_path / "log.jsonl", [BROKEN] * 400)  # whose findings do not fit into the pipe
    words = command("scan", str(log), "--report", "jsonl", "--jobs", "1")
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["141"]
    assert 141 in EXIT_CODES


def test_the_help_names_every_code() -> None:
    assert epilog() in " ".join(run("--help")[1].split())
    assert all(f"{code} {word}" in epilog() for code, (word, _) in EXIT_CODES.items())
