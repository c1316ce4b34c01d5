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
from tests.tables import stored
from tests.tiers import some
from tests.world import BROKEN, FORMATS, ROOT, TOKENIZERS, TOY
from tito_audit.cli._exit import EXIT_CODES, epilog

COMMAND = (sys.executable, "-m", "tito_audit")
WORDS = {
    "TOY": str(TOY),
    "OTHER": str(TOKENIZERS / "toy_metaspace"),
    **{path.name: str(path) for path in FORMATS.glob("*.jsonl")},
}
RUNS = {
    name: (code, [WORDS.get(word, word) for word in line.split()])
    for name, (code, line) in stored(__file__, "RUNS").items()
}


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
        [*COMMAND, "scan", str(pipe), "--report", f"json={tmp_path / 'report.json'}"],
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
    log = written(tmp_path / "log.jsonl", [BROKEN] * 2000)  # whose findings do not fit into the pipe
    words = [*COMMAND, "scan", str(log), "--report", "jsonl"]
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (["141"], "")
    assert 141 in EXIT_CODES


def test_the_help_names_every_code() -> None:
    assert epilog() in " ".join(run("--help")[1].split())
    assert all(f"{code} {word}" in epilog() for code, (word, _) in EXIT_CODES.items())
