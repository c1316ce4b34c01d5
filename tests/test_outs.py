"""What reports are written to: files whole or not at all, pipes and devices as they are, inputs never.

What is no place for a report is said in `tests/transcripts/outs.txt`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.command import run, written
from tests.ready import program
from tests.world import BROKEN, CLEAN, ROOT
from tito_audit.cli._outputs import open_report
from tito_audit.errors import SetupError


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "run.jsonl", [CLEAN, BROKEN])


def command(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, stdout and stderr apart."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*([sys.executable, "-m", "tito_audit"] if more else program()), *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **more,
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_report_goes_through_a_pipe_and_leaves_it_a_pipe(log: Path) -> None:
    pipe = log.parent / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert run("scan", log, "--quiet", "--report", f"json={pipe}")[0] == 1
    reader.join(60)
    assert json.loads(got[0])["summary"]["gate"]["failed"] is True
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_report_goes_into_a_descriptor_that_the_shell_opened(log: Path) -> None:
    read, write = os.pipe()
    done = command("scan", log, "--quiet", "--report", f"concise=/dev/fd/{write}", pass_fds=(write,))
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as lines:
        assert "LPR504" in lines.read()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is full")
def test_a_device_is_written_to_and_never_replaced(log: Path) -> None:
    before = [Path(device).stat().st_rdev for device in ("/dev/null", "/dev/full")]
    (log.parent / "nothing").symlink_to("/dev/null")
    assert run("scan", log, "--quiet", "--report", "json=nothing")[0] == 1
    files = ("--report", "concise=lines.txt", "--report", "html=page.html")
    for first in (True, False):
        full = ("--report", "json=full")
        (log.parent / "full").unlink(missing_ok=True)
        (log.parent / "full").symlink_to("/dev/full")
        code, out, err = run("scan", log, "--quiet", *(full + files if first else files + full))
        assert (code, out) == (2, "")
        assert "--report: full cannot be written: No space left on device" in err
    assert sorted(path.name for path in log.parent.iterdir()) == ["full", "nothing", "run.jsonl"]
    assert [Path(device).stat().st_rdev for device in ("/dev/null", "/dev/full")] == before


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_stdout_has_several_names(log: Path, name: str) -> None:
    code, out, err = run("scan", log, "--report", f"json={name}")
    assert (code, err) == (1, "")
    assert out.startswith('{"summary"')


def test_stderr_may_take_a_report(log: Path) -> None:
    done = command("scan", log, "--output-format", "json", "--report", "concise=/dev/stderr")
    assert json.loads(done.stdout)["summary"]["gate"]["failed"] is True
    assert "LPR504" in done.stderr


def test_a_report_follows_a_link_and_keeps_the_permissions_of_what_it_replaces(log: Path) -> None:
    real, link = log.parent / "real.json", log.parent / "link.json"
    real.write_text("old", encoding="utf-8")
    real.chmod(0o640)
    link.symlink_to(real.name)
    assert run("scan", log, "--quiet", "--report", f"json={link}")[0] == 1
    assert link.is_symlink()
    assert json.loads(real.read_text(encoding="utf-8"))["summary"]
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/report.json", "loop/report.json", "loop"])
def test_a_place_that_cannot_be_is_said_in_words(log: Path, name: str) -> None:
    (log.parent / "loop").symlink_to("loop")
    code, out, err = run("scan", log, "--quiet", "--report", f"json={name}")
    assert (code, out) == (2, "")
    assert "--report: " in err
    assert sorted(path.name for path in log.parent.iterdir()) == ["loop", "run.jsonl"]


def test_a_report_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    def breaks() -> None:
        with open_report(tmp_path / "page.txt") as out:
            out.write("half")
            raise SetupError("no more")

    with pytest.raises(SetupError, match="no more"):
        breaks()
    assert list(tmp_path.iterdir()) == []


EAGER = """
from tito_audit.cli import main
from tito_audit.terminal import terminal
terminal._REDRAW_SECONDS = terminal._EARLY_SECONDS = 0.002
main()
"""
"""The command, which says all the time how far it is: a fast machine would be done before."""


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no terminals to open")
@pytest.mark.parametrize("command", [("scan", "-f", "json"), ("repair", "--dry-run", "--report", "json")])
def test_progress_on_a_terminal_leaves_stdout_to_the_report(log: Path, command: tuple[str, ...]) -> None:
    import pty

    main, side = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        try:
            while data := os.read(main, 4096):
                seen.append(data)
        except OSError:  # nobody has the other end open any more
            pass

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run_ = subprocess.Popen(
        [sys.executable, "-c", EAGER, *command, str(written(log, [CLEAN, BROKEN] * 40))],
        stdout=subprocess.PIPE,
        stderr=side,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(side)
    out, _ = run_.communicate(timeout=120)
    watcher.join(60)
    os.close(main)
    assert json.loads(out)
    assert "rows" in b"".join(seen).decode()
    assert "LPR504" not in b"".join(seen).decode()
