"""Runs attacks: a room of folders with a worker in it, watched for time and memory."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.torture.attack import IN, OUT, ROOT_WORD, Attack
from tests.torture.judge import MEMORY, Failure, Outcome, judged
from tests.torture.sources import ROOT

__all__ = ["Room", "Trial"]

SECONDS = 10.0
"""A run that takes longer hangs."""
_STARVED = 6
"""So many times the limit may pass while a worker waits for a processor that is busy with other things."""
_RUNS = 3000
"""Runs of one worker."""
_IDLE = 900 << 20
"""A worker that holds more between runs is replaced."""
_MOST = 24 << 20
"""What is read of a run's output."""


@dataclass(frozen=True)
class Trial:
    """What came of an attack."""

    outcome: Outcome
    failures: tuple[Failure, ...]


class Room:
    """A folder where attacks run, one after the other. Close it, or use it as a context."""

    def __init__(
        self,
        folder: Path,
        *,
        worker: str = "tests.torture.worker",
        seconds: float = SECONDS,
        memory: int = MEMORY,
    ) -> None:
        self.folder = folder.resolve()
        self.seconds = seconds
        self.memory = memory
        self._module = worker
        self._worker: subprocess.Popen[bytes] | None = None
        self._runs = 0
        for name in ("in", "out", "tmp", "work", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            _end(self._worker)
            self._worker = None

    def attempt(self, attack: Attack) -> Trial:
        """Run an attack and judge what came of it."""
        self._furnish(attack)
        outcome = self._alone(attack) if attack.process else self._in_worker(attack)
        return Trial(outcome, tuple(judged(attack, outcome, self.folder, self.memory)))

    def words(self, attack: Attack) -> list[str]:
        """The words of a run in this room."""
        places = {IN: self.folder / "in", OUT: self.folder / "out", ROOT_WORD: ROOT}
        words = list(attack.words)
        for word, place in places.items():
            words = [part.replace(word, str(place)) for part in words]
        return words

    def _furnish(self, attack: Attack) -> None:
        """Only the files of an attack, and no traces of another."""
        for name in ("in", "out", "tmp", "work"):
            _empty(self.folder / name)
        for name, data in attack.files.items():
            path = self.folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _environment(self) -> dict[str, str]:
        keep = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {
            **{name: os.environ[name] for name in keep if name in os.environ},
            "PYTHONPATH": path,
            "PYTHONIOENCODING": "utf-8",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "TITO_AUDIT_CACHE": "off",
            "HF_HUB_OFFLINE": "1",
        }

    def _in_worker(self, attack: Attack) -> Outcome:
        """The run in the worker."""
        if self._worker is None or self._runs >= _RUNS:
            self.close()
            self._start()
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._runs += 1
        stdin = str(self.folder / "in" / attack.stdin) if attack.stdin else None
        limit, started = self.seconds + attack.seconds, time.monotonic()
        try:
            self._worker.stdin.write(json.dumps({"words": self.words(attack), "stdin": stdin}).encode() + b"\n")
            self._worker.stdin.flush()
            answer = self._worker.stdout.readline() if _in_time(self._worker, limit) else None
        except BrokenPipeError:
            answer = b""
        if answer:
            outcome: dict[str, Any] = json.loads(answer)
            if outcome["idle"] + outcome["peak"] > _IDLE:
                self.close()
            return Outcome(**self._printed(), **outcome, ended="exit")
        ended = "hang" if answer is None else "died"
        if answer is None:
            with suppress(ProcessLookupError):
                self._worker.send_signal(signal.SIGUSR1)  # the worker writes where it is
            time.sleep(0.5)
        code = _end(self._worker)
        self._worker = None
        return Outcome(**self._printed(), code=code, seconds=time.monotonic() - started, ended=ended)

    def _start(self) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._runs = 0
        assert self._worker.stdout is not None
        self._worker.stdout.readline()  # once it has loaded the command

    def _alone(self, attack: Attack) -> Outcome:
        """The run as a process, as a shell starts it."""
        limit, started = 2 * self.seconds + attack.seconds, time.monotonic()
        stdin = self.folder / "in" / attack.stdin if attack.stdin else Path(os.devnull)
        with (
            stdin.open("rb") as source,
            (self.folder / "stdout").open("wb") as printed,
            (self.folder / "stderr").open("wb") as errors,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "tito_audit", *self.words(attack)],
                cwd=self.folder / "work",
                env=self._environment(),
                stdin=source,
                stdout=printed,
                stderr=errors,
                start_new_session=True,
            )
            ended, code, peak = "exit", 0, 0
            while True:
                peak = max(peak, _peak(process.pid))
                done, status = os.waitpid(process.pid, os.WNOHANG)
                if done:
                    process.returncode = code = os.waitstatus_to_exitcode(status)
                    break
                if time.monotonic() - started > limit:
                    ended = "hang"
                    _end(process)
                    break
                time.sleep(0.02)
        if code < 0 and ended == "exit":
            ended = "died"
        return Outcome(
            **self._printed(),
            code=code,
            seconds=time.monotonic() - started,
            peak=max(0, peak - (150 << 20)),
            ended=ended,
        )

    def _printed(self) -> dict[str, bytes]:
        read = {}
        for name in ("stdout", "stderr"):
            with (self.folder / name).open("rb") as file:
                read[name] = file.read(_MOST)
        return read


def _in_time(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether a worker answers or ends within so many seconds, but for time that others have the processor."""
    started = time.monotonic()
    begun = before = _processor(process.pid)[1]
    wait = limit
    while not select.select([process.stdout], [], [], wait)[0]:
        running, used = _processor(process.pid)
        waits = not running and used == before
        if waits or used - begun > limit or time.monotonic() - started > _STARVED * limit:
            return False
        before = used
        wait = limit / 10
    return True


def _peak(number: int) -> int:
    """The most memory in bytes that a process has had; 0 once it has ended.

    `ru_maxrss` would count what the process that started it had.
    """
    try:
        lines = Path(f"/proc/{number}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _processor(number: int) -> tuple[bool, float]:
    """Whether a process or one that it started wants the processor, and the seconds for which they had it."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    except OSError:
        return False, 0.0
    running, used = fields[0] == "R", sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for child in map(_processor, map(int, children)):
        running, used = running or child[0], used + child[1]
    return running, used


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and those that it started; how it had ended, or was ended."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(0.05)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _empty(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)  # noqa: PTH108  an entry, and many of them
