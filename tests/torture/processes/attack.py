"""One attack: a pure function of (seed, stream, number), as far as the moments of processes permit.

It sets up a folder, attacks a run in it, looks at what is left, and starts the command once more;
`Attack.failures` says in words whatever should not be.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.processes.works import PRINTING, WORKS, Work, same
from tests.torture.processes.world import Ended, Started, children, live_in_session, start

__all__ = ["KINDS", "Attack", "Undisturbed", "attacked", "undisturbed"]

STAYS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted", signal.SIGHUP: "the terminal is gone"}
SAID = ("stdout was closed before all was printed", " were finished before")
"""What a run that comes to its end may say on stderr."""
_ORPHANS = 6.0
"""Seconds within which the processes of a run that was killed have ended."""
_LINES = 3
"""The most lines of a message."""


@dataclass(frozen=True)
class Undisturbed:
    """What a command comes to that nothing happens to."""

    ended: Ended
    seconds: float
    outputs: dict[str, bytes]


@dataclass
class Attack:
    """What is attacked, and what came of it."""

    kind: str
    work: Work
    whole: Undisturbed
    chance: random.Random
    folder: Path
    logs: Path
    """The folder with every log, which no run sees."""
    jobs: bool = False
    old: bool = False
    """Whether its outputs were there before."""
    real: bool = False
    what: str = ""
    """What was done, in words."""
    came: str = ""
    """What came of it, in a word."""
    failures: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    """The logs that the attack itself changes."""

    @property
    def box(self) -> Path:
        """The folder that the run works in."""
        return self.folder / "box"

    @property
    def env(self) -> dict[str, str]:
        """The environment of the run."""
        ours = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        here = {"TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder)}
        return {**ours, **here, "TITO_AUDIT_CACHE": "off", "COLUMNS": "100"}

    def fail(self, message: str) -> None:
        """Note what should not be."""
        self.failures.append(message)

    def set_up(self) -> None:
        """The folder, with the logs of the work and, at times, outputs of an earlier run."""
        (self.folder / "tmp").mkdir(parents=True)
        for name in self.work.logs:
            (self.box / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.logs / name, self.box / name)
        if self.old:
            for name in self.work.outputs:
                (self.box / name).parent.mkdir(parents=True, exist_ok=True)
                (self.box / name).write_bytes(self.old_of(name))

    def old_of(self, name: str) -> bytes:
        """What an output held before; a baseline is read, and so is a good one."""
        return self.whole.outputs[name] if name == "known.json" else b"old " + name.encode()

    def begin(self, *more: str, prepare: Callable[[], None] = lambda: None, stdout: int | None = None) -> Started:
        """Start the command."""
        if self.work in PRINTING:
            words = [*self.work.words, *more]
        else:
            first = ("--force",) if self.old and "--force" in self.work.again else ()
            resumes = ("--resume",) if self.old and "--resume" in self.work.again else ()
            force = ("--force",) if resumes and self.work.words[0] == "repair" else ()
            words = self.work.command(*(more or (*first, *resumes, *force)))
        return start(words, self.env, self.box, prepare=prepare, stdout=stdout, real=self.real)

    def moment(self) -> float:
        """A moment of a run, in seconds from its start."""
        slow = self.whole.seconds + (1.2 if self.real else 0.0)
        return slow * self.chance.uniform(0.0, 1.05)

    # What is looked at

    def check_end(self, ended: Ended, expected: set[int], says: tuple[str, ...] = ()) -> None:
        """The exit code is one of those expected, or the undisturbed one, and stderr holds one message at most."""
        if ended.code is None:
            self.fail("the run hangs")
            return
        if ended.code not in {*expected, self.whole.ended.code}:
            self.fail(f"exit code {ended.code}, stderr {ended.err[-400:]!r}")
        if "Traceback" in ended.err or "panicked" in ended.err or "Error:" in ended.err:
            self.fail(f"a traceback: {ended.err[-700:]!r}")
        lines = ended.err.splitlines()
        ours = [line for line in lines if line.startswith("tito-audit: ")]
        if ended.code == 2:
            if len(ours) != 1 or not 1 <= len(lines) <= _LINES or not lines[0].startswith("tito-audit: "):
                self.fail(f"exit code 2 with {len(lines)} lines: {ended.err[-400:]!r}")
            elif says and not any(text in ended.err for text in says):
                self.fail(f"the message names another cause: {ended.err!r}")
        elif ended.code == self.whole.ended.code and not all(any(text in line for text in SAID) for line in lines):
            self.fail(f"words without need: {ended.err[-400:]!r}")

    def check_logs(self) -> None:
        """No log has changed but by the attack."""
        for name in {*self.work.logs} - self.changed:
            file, first = self.box / name, self.logs / name
            if not file.is_file() or file.read_bytes() != first.read_bytes():
                self.fail(f"{name} was changed")
            elif file.stat().st_mtime_ns != first.stat().st_mtime_ns:
                self.fail(f"{name} was touched")

    def check_outputs(self, *, complete: bool) -> None:
        """Every output is absent, whole or as it was before; `complete`: all are whole."""
        for name, whole in self.whole.outputs.items():
            file = self.box / name
            if not file.is_file():
                if complete or self.old:
                    self.fail(f"{name} is missing")
                continue
            data = file.read_bytes()
            if same(name, data, whole) or (self.old and not complete and data == self.old_of(name)):
                continue
            self.fail(f"{name} has {len(data):,} bytes that are not those of an undisturbed run ({len(whole):,})")

    def check_left(self, *, killed: bool) -> None:
        """Nothing else is left, but of a run that was killed the files that did not have their names yet."""
        expected = {*self.work.logs, *self.work.outputs, *self.work.journals}
        for file in sorted(path for path in self.box.rglob("*") if not path.is_dir()):
            name = str(file.relative_to(self.box))
            if name in expected:
                continue
            if killed and name.endswith(".part"):
                file.unlink()
                continue
            self.fail(f"{name} is left, with {file.stat().st_size:,} bytes")
        for file in (self.folder / "tmp").rglob("*"):
            self.fail(f"{file.name} is left in the folder for temporary files")

    def check_orphans(self, run: Started, seconds: float) -> None:
        """No process of the run is left."""
        until = time.monotonic() + seconds
        while left := live_in_session(run.pid):
            if time.monotonic() > until:
                self.fail(f"processes are left: {left}")
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    def check_again(self) -> None:
        """The next run does what an undisturbed one does."""
        more = list(self.work.again)
        if self.old and "--resume" in more and self.work.words[0] == "repair":
            more.append("--force")
        real, self.real = self.real, False
        ended = self.begin(*more).wait()
        self.real = real
        if ended.code != self.whole.ended.code:
            self.fail(f"the next run ends with {ended.code}: {ended.err[-400:]!r}")
            return
        self.check_end(ended, set())
        self.check_outputs(complete=True)
        self.check_left(killed=False)
        self.check_logs()


# The attacks


def _killed(attack: Attack) -> None:
    """Main or one of its processes dies by SIGKILL."""
    of_worker = attack.work.jobs and attack.chance.random() < 0.5
    run, moment = attack.begin(), attack.moment()
    time.sleep(moment)
    workers = children(run.pid) if of_worker else []
    if workers:
        with suppress(ProcessLookupError):
            os.kill(attack.chance.choice(workers), signal.SIGKILL)
    elif not of_worker:
        run.kill(signal.SIGKILL)
    attack.what = f"SIGKILL of {'a worker' if of_worker else 'main'} after {moment:.3f} s"
    ended = run.wait()
    attack.came = {-9: "killed", 2: "one line"}.get(ended.code or 0, "done")
    attack.check_end(ended, {2} if of_worker else {-9}, ("killed by SIGKILL",))
    attack.check_orphans(run, _ORPHANS)
    _check_after(attack)


def _signalled(attack: Attack) -> None:
    """A signal reaches main, or all processes as from a terminal."""
    number = attack.chance.choice(list(STAYS))
    to_all = attack.chance.random() < 0.5
    run, moment = attack.begin(), attack.moment()
    time.sleep(moment)
    with suppress(ProcessLookupError):
        (os.killpg if to_all else os.kill)(run.pid, number)
    attack.what = f"{number.name} to {'all' if to_all else 'main'} after {moment:.3f} s"
    ended = run.wait()
    # Before the command is loaded, the signal ends the process as any other.
    attack.check_end(ended, {128 + number, -number, *({2} if to_all else ())}, ("was killed by", "ended"))
    attack.came = {128 + number: "one line", -number: "at once", 2: "a worker first"}.get(ended.code or 0, "done")
    if ended.code == 128 + number and ended.err != f"tito-audit: {STAYS[number]}; no report was finished\n":
        attack.fail(f"stderr {ended.err!r}")
    attack.check_orphans(run, 1.0)
    _check_after(attack)


def _full(attack: Attack) -> None:
    """The disk of the outputs, or of temporary files, is full."""
    chance = attack.chance
    sizes = sum(map(len, attack.whole.outputs.values()))
    room = int(2 ** chance.uniform(12, max(13.0, sizes.bit_length() + 1)))
    where = chance.choice(("limit", "disk", "disk", "temporary", "stdout"))
    if where == "stdout":
        full = os.open("/dev/full", os.O_WRONLY)
        run = attack.begin(stdout=full)
        os.close(full)
        ended = run.wait()
    elif where == "limit":
        run = attack.begin(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
        ended = run.wait()
    else:
        with _disk(attack.folder / "tmp" if where == "temporary" else attack.box, room, attack) as mounted:
            run = attack.begin()
            ended = run.wait()
            where = where if mounted else "no disk"
            _look_after(attack, ended, run)
    attack.what = f"{where}, {room:,} bytes"
    attack.came = "one line" if ended.code == 2 else "done"
    attack.check_end(ended, {2}, ("No space left on device", "File too large", "stdout"))
    if where in ("limit", "stdout", "no disk"):
        _check_after(attack)


def _look_after(attack: Attack, ended: Ended, run: Started) -> None:
    """What a disk holds before it goes."""
    attack.check_orphans(run, 1.0)
    attack.check_logs()
    attack.check_outputs(complete=ended.code != 2)
    attack.check_left(killed=False)


@contextmanager
def _disk(folder: Path, room: int, attack: Attack) -> Iterator[bool]:
    """A small file system in a folder, with what the folder holds; False where that is not permitted."""
    room += sum(file.stat().st_size + 8192 for file in folder.rglob("*") if file.is_file())
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", folder], capture_output=True)
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)
    try:
        yield not done.returncode
    finally:
        if not done.returncode:
            subprocess.run(["umount", "-l", folder], check=True)


def _vanished(attack: Attack) -> None:
    """A log is deleted, cut, replaced, added to or written to while it is read."""
    chance = attack.chance
    how, name = chance.choice(("deleted", "cut", "replaced", "grew", "written")), chance.choice(attack.work.logs)
    file, moment = attack.box / name, attack.moment()
    size = file.stat().st_size
    attack.changed.add(name)
    attack.what = f"{name} {how} after {moment:.3f} s"
    run = attack.begin()
    time.sleep(moment)
    if how == "deleted":
        file.unlink()
    elif how == "cut":
        os.truncate(file, chance.randrange(size))
    elif how == "replaced":
        shutil.copy(attack.logs / name, file.with_name("next"))
        file.with_name("next").rename(file)
    elif how == "grew":
        with file.open("ab") as out:
            out.write((attack.logs / "small.jsonl").read_bytes()[: chance.randrange(1, 4096)])
    else:
        with file.open("r+b") as out:
            out.seek(chance.randrange(size))
            out.write(b"\0\n\0")
    ended = run.wait()
    attack.came = "one line" if ended.code == 2 else "done"
    attack.check_end(ended, {0, 1, 2})
    attack.check_orphans(run, 1.0)
    attack.check_logs()
    attack.check_left(killed=False)
    if ended.code == 2:
        attack.check_outputs(complete=False)
    elif attack.work.words[0] != "scan":
        _check_either(attack)


def _check_either(attack: Attack) -> None:
    """What was written is what an undisturbed run makes of the log as it was, or as it is now."""
    before = len(attack.failures)
    attack.check_outputs(complete=False)
    if len(attack.failures) == before:
        return
    written = {
        name: (attack.box / name).read_bytes() for name in attack.work.outputs if (attack.box / name).is_file()
    }
    for name in (*attack.work.outputs, *attack.work.journals):
        (attack.box / name).unlink(missing_ok=True)
    old, attack.old = attack.old, False
    attack.begin().wait()
    attack.old = old
    now = {name: (attack.box / name).read_bytes() for name in attack.work.outputs if (attack.box / name).is_file()}
    if now == written:
        del attack.failures[before:]


def _twice(attack: Attack) -> None:
    """Two runs at once write to the same files."""
    moment = attack.moment() * 0.5
    first = attack.begin()
    time.sleep(moment)
    box, attack.what = attack.box, f"two runs, {moment:.3f} s apart"
    aside = box.with_name("box2")
    aside.symlink_to(box.name)  # its streams are beside it
    resumes = ("--resume",) if attack.work.journals else ()
    words = attack.work.command(*resumes, *(("--force",) if attack.old and attack.work.words[0] != "scan" else ()))
    second = start(words, attack.env, aside)
    ends = [first.wait(), second.wait()]
    codes = [end.code for end in ends]
    attack.came = "both" if codes == [attack.whole.ended.code] * 2 else "one"
    for run, ended in zip((first, second), ends, strict=True):
        attack.check_end(
            ended, {2}, ("exists", "another run is using", "is there", "this holds what", "was replaced")
        )
        attack.check_orphans(run, 1.0)
    if attack.whole.ended.code not in codes:
        attack.fail(f"neither run came to its end: {[end.err for end in ends]}")
    aside.unlink()
    attack.check_logs()
    attack.check_outputs(complete=attack.came == "both")
    attack.check_left(killed=False)
    attack.check_again()


def _piped(attack: Attack) -> None:
    """The reader of stdout goes away after some bytes."""
    read, write = os.pipe()
    run = attack.begin(stdout=write)
    os.close(write)
    wanted = attack.chance.randrange(int(len(attack.whole.ended.out) * 1.1) + 1)
    attack.what, left = f"{attack.work.name} | head -c {wanted}", wanted
    while left > 0 and (block := os.read(read, min(left, 4096))):
        left -= len(block)
    os.close(read)
    ended = run.wait()
    attack.came = {141: "141", attack.whole.ended.code: "the verdict"}.get(ended.code, "?")
    attack.check_end(ended, {141})
    attack.check_orphans(run, 1.0)
    attack.check_logs()
    attack.check_left(killed=False)


def _starved(attack: Attack) -> None:
    """Only a few files may be open."""
    most = attack.chance.randrange(3, 40)
    attack.what = f"at most {most} open files"
    run = attack.begin(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)))
    ended = run.wait()
    attack.came = "one line" if ended.code == 2 else "done"
    attack.check_end(ended, {2})
    attack.check_orphans(run, 1.0)
    _check_after(attack)


def _check_after(attack: Attack) -> None:
    attack.check_logs()
    attack.check_outputs(complete=False)
    attack.check_left(killed=attack.came == "killed")
    attack.check_again()


KINDS: dict[str, tuple[int, Callable[[Attack], None]]] = {
    "signal": (5, _signalled),
    "full": (4, _full),
    "vanish": (4, _vanished),
    "twice": (2, _twice),
    "pipe": (3, _piped),
    "files": (2, _starved),
}
"""The attacks besides kills, with how often they are made."""


def attacked(
    seed: int, stream: str, number: int, whole: dict[str, Undisturbed], logs: Path, *, kind: str | None = None
) -> Attack:
    """The attack of a number on one of the commands in `whole`: `stream` is `kill` or `attack`."""
    chance = random.Random(f"{seed}:{stream}:{number}")
    if stream == "kill":
        kind, act = "kill", _killed
    else:
        kind = kind or chance.choices([*KINDS], [often for often, _ in KINDS.values()])[0]
        act = KINDS[kind][1]
    work = chance.choice([work for work in (PRINTING if kind == "pipe" else WORKS) if work.name in whole])
    # Temporary files of a run that is killed are looked for beside its outputs, and where they should be.
    with tempfile.TemporaryDirectory(prefix="tito-torture-") as aside:
        attack = Attack(kind, work, whole[work.name], chance, Path(aside), logs)
        attack.old = bool(work.outputs) and chance.random() < 0.4
        attack.real = kind in ("kill", "signal") and chance.random() < 0.05
        attack.set_up()
        act(attack)
    return attack


def undisturbed(logs: Path, works: Sequence[Work]) -> dict[str, Undisturbed]:
    """What each command comes to, by name."""
    whole = {}
    for work in works:
        with tempfile.TemporaryDirectory(prefix="tito-torture-") as aside:
            nothing = Undisturbed(Ended(None, b"", ""), 0.0, {})
            attack = Attack("none", work, nothing, random.Random(0), Path(aside), logs)
            attack.set_up()
            started = time.monotonic()
            ended = attack.begin().wait(60)
            seconds = time.monotonic() - started
            outputs = {name: (attack.box / name).read_bytes() for name in work.outputs}
            assert ended.code in (0, 1), (work.name, ended)
            assert not ended.err, (work.name, ended)
            whole[work.name] = Undisturbed(ended, seconds, outputs)
    return whole


def digest(folder: Path) -> str:
    """A hash of every file below a folder, with its time."""
    hashed = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        hashed.update(f"{file.relative_to(folder)} {file.stat().st_mtime_ns}".encode() + file.read_bytes())
    return hashed.hexdigest()
