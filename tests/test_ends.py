"""Runs that the system ends: closed streams, links, pipes, logs that change, signals, limits; always one line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import run, written
from tests.ready import program
from tests.test_outs import log as log
from tests.tiers import some
from tests.world import BROKEN, CLEAN, FORMATS, ROOT
from tito_audit.cli._exit import system_error_words
from tito_audit.errors import StorageError
from tito_audit.run.repair import repair_rollouts
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.settings.values import expand_user
from tito_audit.storage import path_identity
from tito_audit.storage.watch import FileWatch

TOY = ("-t", str(ROOT / "fixtures" / "tokenizers" / "toy_bpe"))


def process(script: str, *arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    """A shell's script, in which `"$@"` is the command, in an interpreter of its own."""
    words = ["bash", "-c", script, "bash", sys.executable, "-m", "tito_audit", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False, **more)  # type: ignore[call-overload, no-any-return]


# Names


def test_a_file_whose_name_begins_with_a_tilde_is_that_file(log: Path) -> None:
    log.rename(log.with_name("~x.jsonl"))
    assert run("scan", "~x.jsonl", "-q")[0] == 1
    assert run("repair", "~x.jsonl", "-q", "-o", "out.jsonl")[0] == 0
    assert Path("out.jsonl").is_file()
    code, _, err = run("scan", "~no-such-user/x.jsonl")
    assert (code, err.count("\n")) == (2, 1)
    assert "~no-such-user/x.jsonl: no such file or folder" in err
    code, _, err = run("scan", "~x.jsonl", "-t", "~no-such-user/x")
    assert code == 2
    assert "~no-such-user/x: no such folder" in err


def test_a_tilde_is_the_home_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_user("~/x") == tmp_path / "x"
    assert expand_user("~no-such-user/x") == Path("~no-such-user/x")
    assert expand_user("a/~/x") == Path("a/~/x")


def hard(log: Path, name: str) -> str:
    os.link(log, name)
    return name


def soft(log: Path, name: str) -> str:
    Path(name).symlink_to(log)
    return name


def opened(log: Path, name: str) -> str:
    """A descriptor of the log, which stays open as long as the tests run."""
    return f"/dev/fd/{os.open(log, os.O_RDWR | os.O_APPEND)}"


WRITING = {
    "a report": ("scan", "run.jsonl", "-q", "-r", "json={}"),
    "a journal": ("scan", "run.jsonl", "-q", "--journal", "{}", "--resume"),
    "a baseline": ("scan", "run.jsonl", "-q", "--baseline", "{}", "--update-baseline"),
    "a repaired log": ("repair", "run.jsonl", "-q", "-o", "{}", "--force"),
    "a quarantine": ("repair", "run.jsonl", "-q", "-o", "out.jsonl", "--quarantine", "{}", "--force"),
    "a report of a repair": ("repair", "run.jsonl", "-q", "--dry-run", "-r", "json={}"),
    "a converted log": ("convert", "run.jsonl", "--to", "calls", "-o", "{}", "--force", "--lossy"),
    "a configuration": ("identify", "run.jsonl", *TOY, "--write", "{}"),
}


@pytest.mark.parametrize("way", [hard, soft, opened], ids=lambda way: way.__name__)
@pytest.mark.parametrize("what", WRITING)
def test_no_output_is_an_input_under_another_name(log: Path, what: str, way: Callable[[Path, str], str]) -> None:
    if way is opened and not Path("/dev/fd").is_dir():
        pytest.skip("no names for open files")
    name, before = way(log, "other.json"), (log.read_bytes(), log.stat().st_mtime_ns)
    there = sorted(path.name for path in log.parent.iterdir())
    code, out, err = run(*(word.replace("{}", name) for word in WRITING[what]))
    assert (code, out) == (2, "")
    assert "one of the logs" in err or "is the log" in err
    assert (log.read_bytes(), log.stat().st_mtime_ns) == before
    assert sorted(path.name for path in log.parent.iterdir()) == there


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/fd names files only on Linux")
def test_stdout_is_no_log_that_holds_something(log: Path) -> None:
    before = log.read_bytes()
    done = process('"$@" >> run.jsonl', "scan", log)
    assert (done.returncode, log.read_bytes()) == (2, before)
    assert "stdout: it is one of the logs" in done.stderr


def test_a_place_has_one_key_whatever_leads_to_it(log: Path) -> None:
    os.link(log, "hard")
    Path("soft").symlink_to("hard")
    assert path_identity("hard") == path_identity("soft") == path_identity(log) == path_identity("./run.jsonl")
    assert path_identity("other") != path_identity(log)
    shutil.copy(log, "copy")
    assert path_identity("copy") != path_identity(log)


def test_a_tokenizer_is_no_place_for_a_repaired_log(log: Path) -> None:
    shutil.copytree(TOY[1], "toy")
    for name in ("tokenizer.json", "chat_template.jinja"):
        Path("toy", name).touch()
        code, _, err = run("repair", log, "-q", "-t", "toy", "-o", f"toy/{name}", "--force")
        assert code == 2
        assert "is read by this run" in err


# Pipes and devices


@pytest.mark.parametrize("name", ["pipe", "-"])
def test_a_pipe_that_nobody_writes_to_is_named_while_it_is_waited_for(log: Path, name: str) -> None:
    os.mkfifo("pipe")
    words = [sys.executable, "-m", "tito_audit", "scan", name, "-q"]
    run = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stderr is not None
    line = f"tito-audit: {name}: waiting for a program to write to this pipe; Ctrl-C stops the run.\n"
    assert run.stderr.readline().decode() == line
    if name == "pipe":
        Path("pipe").write_bytes(log.read_bytes())
    assert run.communicate(log.read_bytes() if name == "-" else None, timeout=60)[1] == b""
    assert run.returncode == 1


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device")
def test_a_device_is_no_log_and_the_null_device_is_empty(log: Path) -> None:
    code, _, err = run("scan", "/dev/zero")
    assert code == 2
    assert "/dev/zero: this is a device, not a log" in err
    assert run("scan", os.devnull, "-q")[0] == 0


# Logs that change


def cut(log: Path) -> None:
    os.truncate(log, 100)


def replaced(log: Path) -> None:
    shutil.copy(log, "copy")
    Path("copy").replace(log)


def grown(log: Path) -> None:
    with log.open("ab") as out:
        out.write(log.read_bytes())


def overwritten(log: Path) -> None:
    before = log.stat().st_mtime_ns
    with log.open("r+b") as out:
        out.write(b"{")
    os.utime(log, ns=(before + 1, before + 1))


CHANGES = {Path.unlink: "was deleted", cut: "shrank", replaced: "was replaced", overwritten: "was written to"}


@pytest.mark.parametrize("how", [*CHANGES, grown], ids=lambda how: how.__name__)
def test_a_log_that_changes_while_it_is_read_is_one_line(log: Path, how: Callable[[Path], None]) -> None:
    scan = Scan([str(log)], Settings())
    results = iter(scan)
    next(results)
    how(log)
    if how is grown:
        assert list(results)
        assert any("grew while it was read" in notice for notice in scan.summary.notices)
        return
    with pytest.raises(StorageError, match=CHANGES[how]):
        list(results)


@pytest.mark.parametrize("how", [*CHANGES, grown], ids=lambda how: how.__name__)
def test_a_log_that_changes_while_it_is_repaired_has_no_repaired_log(
    log: Path, how: Callable[[Path], None]
) -> None:
    outcomes = iter(repair_rollouts(log, "out.jsonl", Settings()))
    next(outcomes)
    how(log)
    with pytest.raises(StorageError, match=CHANGES.get(how, "grew")):
        list(outcomes)
    assert not Path("out.jsonl").exists()


def test_what_is_not_on_disk_is_not_watched(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    watch = FileWatch([tmp_path / "pipe", tmp_path / "missing"])
    assert watch.grown() == []


# Streams

PRINTING = ("scan run.jsonl", "--help", "repair run.jsonl --dry-run --diff", f"identify run.jsonl {' '.join(TOY)}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize("words", some((*PRINTING, "show run.jsonl:0", "list rules", "config"), 3))
def test_a_full_stdout_is_one_line_and_no_verdict(log: Path, words: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*program(), *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("tito-audit: stdout: it cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


def test_streams_that_are_closed_are_no_place_for_a_file(log: Path) -> None:
    before = log.read_bytes()
    done = process('"$@" >&-', "scan", log)
    assert done.returncode == 2
    assert "stdout: it cannot be written (Bad file descriptor)" in done.stderr
    done = process('"$@" <&- >&- 2>&-', "scan", log, "-q", "-r", "json=report.json")
    assert done.returncode == 1
    assert Path("report.json").read_bytes().startswith(b'{"summary"')
    assert process('"$@" 2>&-', "scan", "missing").returncode == 2
    assert log.read_bytes() == before


def test_a_reader_that_goes_away_once_the_result_is_known_gets_its_verdict(log: Path) -> None:
    many = written(log, [CLEAN, BROKEN] * 40)
    script = '"$@" | head -c 10 >/dev/null; echo "${PIPESTATUS[0]}"'
    for report in some(["html", "text"], 1):
        done = process(script, "scan", many, "-f", report, "-r", "jsonl=all.jsonl")
        assert done.stdout == "1\n"
        assert Path("all.jsonl").read_bytes().endswith(b"}\n")
        if report != "text":  # all of that fits into the pipe
            assert done.stderr.startswith(
                "tito-audit: stdout was closed before all was printed; failed: errors in 40 of 80 rollouts"
            )
            assert done.stderr.count("\n") == 1


# Signals and limits


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "the terminal is gone")],
)
def test_a_signal_is_one_line_and_leaves_no_process(log: Path, number: int, code: int, reason: str) -> None:
    os.mkfifo("pipe")
    words = [sys.executable, "-m", "tito_audit", "scan", "pipe", "-q", "-r", "json=report.json"]
    run = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the tests may have been started by nohup
    )
    assert run.stderr is not None
    run.stderr.readline()  # it waits for the pipe
    run.send_signal(number)
    assert run.communicate(timeout=120)[1] == f"tito-audit: {reason}; no report was finished\n"
    assert run.returncode == code
    assert not Path("report.json").exists()


def test_a_run_without_a_terminal_outlives_it() -> None:
    done = process(
        'nohup "$@" >/dev/null & sleep 0.1; kill -HUP $!; wait $!', "scan", FORMATS / "nemo_gym.jsonl", *TOY
    )
    assert done.returncode == 1


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback() -> None:
    loading = "import signal, os, sys; sys.argv = ['x', 'list']; import tito_audit.__main__ as m;"
    loading += (
        " sys.meta_path.insert(0, type('F', (), {'find_spec': lambda *a: os.kill(os.getpid(), 2)})()); m.main()"
    )
    done = process(f'"$1" -c "{loading}"')
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "") or done.returncode == 130
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']"), "TMPDIR"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "x: Permission denied"),
        (ValueError("a bug"), None),
        (OSError("without a number"), None),
    ],
)
def test_what_the_system_refuses_is_said_with_what_to_do(error: BaseException, words: str | None) -> None:
    message = system_error_words(error)
    assert (message is None) == (words is None)
    assert words is None or words in (message or "")


def test_too_few_open_files_are_one_message(log: Path) -> None:
    codes = []
    for most in some((5, 6, 9), 2):
        done = process(f'ulimit -n {most}; "$@"', "scan", log, *TOY, "-q", "-r", "json=r.json")
        assert done.returncode in (1, 2)
        assert "Traceback" not in done.stderr
        assert (done.returncode == 2) == done.stderr.startswith("tito-audit: ")
        codes.append(done.returncode)
    assert set(codes) == {1, 2}, "one of the limits is too low, one is not"
