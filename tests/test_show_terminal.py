"""`show` on a terminal of its own: when a pager is called, how it ends, colours, width."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.command import become, run
from tests.ready import program
from tests.tables import table
from tests.tiers import some
from tests.world import ROOT

pty = pytest.importorskip("pty")

SHORT = ["fixtures/formats/slime.jsonl:0"]
LONG = ["fixtures/formats/nemo_gym.jsonl:4", "-t", "fixtures/tokenizers/toy_bpe", "--full", "--ids"]
COLOR = "\x1b["
SECONDS = 60.0


@dataclass
class Terminal:
    """A process that has a terminal of this size to itself."""

    pid: int
    master: int
    screen: str = ""
    _data: bytes = field(default=b"", repr=False)

    def read(self, until: Callable[[str], bool] = lambda _: False) -> str:
        """All that was written, until that holds of it or the process closed the terminal."""
        end = time.monotonic() + SECONDS
        while not until(self.screen):
            assert time.monotonic() < end, f"nothing more came after {self.screen!r}"
            if not select.select([self.master], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError:  # how Linux says that nobody has the other end any more
                break
            if not data:
                break
            self._data += data
            self.screen = self._data.decode("utf-8", "replace").replace("\r\n", "\n")
        return self.screen

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        """The exit code, once it has ended."""
        self.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def loaded(loaded_once: None) -> None:
    """What a page needs is loaded here, so that a fork of this process need not load it."""
    assert run("show", ROOT / LONG[0], "-t", ROOT / LONG[2])[0] == 0


@pytest.fixture
def terminals(loaded: None) -> Iterator[Callable[..., Terminal]]:
    """Starts `tito-audit show` on a terminal; what still runs at the end is ended."""
    started: list[Terminal] = []

    def start(*arguments: str, rows: int = 24, columns: int = 80, **environment: str) -> Terminal:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment = {
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "TITO_AUDIT_CACHE": "off",
            "PYTHONPATH": str(ROOT),
            **inherited,
            **environment,
        }
        pid, master = pty.fork()
        if pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(ROOT)
            become("show", *arguments, env=environment)
        started.append(Terminal(pid, master))
        return started[-1]

    yield start
    for terminal in started:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        os.close(terminal.master)


def pager(folder: Path, body: str) -> str:
    """A pager of our own, as $PAGER names it."""
    script = folder / "pager"
    script.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{body}", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


MARKED = "for line in sys.stdin:\n    print('PAGED', line, end='', flush=True)\n"


def test_a_page_longer_than_the_screen_goes_through_the_pager(terminals, tmp_path):
    terminal = terminals(*LONG, PAGER=pager(tmp_path, MARKED))
    assert terminal.ended() == 0
    lines = terminal.screen.splitlines()
    assert all(line.startswith("PAGED ") for line in lines)
    assert len(lines) > 24
    assert "explain fork" in lines[-2]


def test_a_page_that_fits_the_screen_does_not(terminals, tmp_path):
    terminal = terminals(*SHORT, PAGER=pager(tmp_path, MARKED), rows=60)
    assert terminal.ended() == 0
    assert "PAGED" not in terminal.screen
    count = len(terminal.screen.splitlines())
    just = terminals(*SHORT, PAGER=pager(tmp_path, MARKED), rows=count + 1)
    assert "PAGED" not in just.read()
    above = terminals(*SHORT, PAGER=pager(tmp_path, MARKED), rows=count)
    assert "PAGED" in above.read()


@pytest.mark.parametrize(*table(__file__, "a_pager_that_is_not_wanted_or_not_there_is_done_without"), ids=str)
def test_a_pager_that_is_not_wanted_or_not_there_is_done_without(terminals, tmp_path, arguments, environment):
    terminal = terminals(*LONG, *arguments, **{"PAGER": pager(tmp_path, MARKED), **environment})
    assert terminal.ended() == 0
    assert "PAGED" not in terminal.screen
    assert "explain fork" in terminal.screen
    assert "Traceback" not in terminal.screen
    assert terminal.screen.count("format nemo_gym") == 1


def test_less_gets_the_defaults_of_git_unless_the_user_has_some(terminals, tmp_path):
    code = "print(sys.argv[1:], os.environ.get('LESS'), os.environ.get('LESSCHARSET'))\nsys.stdin.read()\n"
    less = tmp_path / "less"
    Path(pager(tmp_path, code)).rename(less)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for environment, says in (
        ({}, "['-R'] FRX utf-8"),
        ({"PAGER": "less -S"}, "['-S', '-R'] FRX utf-8"),
        ({"LESS": "iM"}, "['-R'] iM utf-8"),
        ({"PAGER": "A=1 less"}, "[] FRX utf-8"),
    ):
        terminal = terminals(*LONG, PATH=path, **environment)
        assert terminal.ended() == 0
        assert terminal.screen.strip() == says


def test_a_pager_that_is_quit_early_is_no_error(terminals, tmp_path):
    body = "print(sys.stdin.readline(), end='', flush=True)\nos.close(0)\ntime.sleep(0.2)\nsys.exit(3)\n"
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"token_ids": list(range(50_000))}) + "\n", encoding="utf-8")
    terminal = terminals(str(long), "--full", PAGER=pager(tmp_path, body))
    assert terminal.ended() == 0
    assert len(terminal.screen.splitlines()) == 1


@pytest.mark.skipif(shutil.which("less") is None, reason="there is no less here")
def test_less_shows_the_first_screen_and_goes_at_q(terminals):
    terminal = terminals(*LONG)
    terminal.read(lambda screen: screen.rstrip(" \x1b[0K\x07").endswith(":") and "format nemo_gym" in screen)
    assert "│" in terminal.screen
    assert f"{COLOR}1m" in terminal.screen
    assert "ESC" not in terminal.screen
    terminal.press("q")
    assert terminal.ended() == 0
    assert "explain fork" not in terminal.screen


def test_ctrl_c_is_for_the_pager_while_there_is_one(terminals, tmp_path):
    body = (
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(os.write(1, b'STOPPED')))\n"
        "print('READY', flush=True)\nwhile not seen:\n    time.sleep(0.02)\n" + MARKED
    )
    terminal = terminals(*LONG, PAGER=pager(tmp_path, body))
    terminal.read(lambda screen: "READY" in screen)
    terminal.press("\x03")
    assert terminal.ended() == 0
    assert "STOPPED" in terminal.screen
    assert "explain fork" in terminal.screen
    assert "Traceback" not in terminal.screen


def opened_to_write(pipe: Path) -> int:
    """A pipe opened as soon as somebody reads it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.02)
    raise AssertionError(f"nobody reads {pipe}")


def test_ctrl_c_before_the_page_ends_the_run_without_a_traceback(terminals, tmp_path):
    log = tmp_path / "pipe.jsonl"
    os.mkfifo(log)
    terminal = terminals(str(log), "--row", "0")
    writing = opened_to_write(log)  # the run has begun: it opens the pipe, then waits for the first row
    time.sleep(0.2)  # a signal between the two calls would wait for the row as well
    terminal.press("\x03")
    assert terminal.ended() == 130
    os.close(writing)
    assert "interrupted" in terminal.screen
    assert "Traceback" not in terminal.screen


@pytest.mark.parametrize(*table(__file__, "colours_are_for_terminals_that_want_them"), ids=str)
def test_colours_are_for_terminals_that_want_them(terminals, environment, colored):
    terminal = terminals(*SHORT, "--no-pager", **environment)
    assert terminal.ended() == 0
    assert (COLOR in terminal.screen) == colored
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", terminal.screen)


@pytest.mark.parametrize(
    ("environment", "colored"), [({}, False), ({"FORCE_COLOR": ""}, False), ({"FORCE_COLOR": "1"}, True)], ids=str
)
def test_a_pipe_gets_neither_pager_nor_colours_unless_they_are_forced(tmp_path, environment, colored):
    done = subprocess.run(
        [*program(), "show", *LONG],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "TERM": "xterm", "PAGER": pager(tmp_path, MARKED), **environment},
        check=True,
    )
    assert "PAGED" not in done.stdout
    assert (COLOR in done.stdout) == colored
    assert done.stderr == ""


@pytest.mark.parametrize("columns", some([60, 80, 120, 160], 2))
def test_the_page_is_as_wide_as_the_terminal(terminals, columns):
    plain = {"NO_COLOR": "1", "PAGER": "cat"}
    by_size = terminals(*LONG, columns=columns, **plain).read()
    by_name = terminals(*LONG, columns=90, COLUMNS=str(columns), **plain).read()
    widths = [cell_len(line) for line in by_size.splitlines()]
    assert columns - 16 <= max(widths) <= columns
    assert by_name.splitlines() == by_size.splitlines()
