"""All cases in both checkouts, by several workers at once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from zlib import crc32

from .cases import Case
from .compare import Difference, Ran, differences
from .side import Side

__all__ = ["Outcome", "run", "samples"]


@dataclass
class Outcome:
    """What came out."""

    commands: int = 0
    equal: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    """How commands of the new checkout ended."""
    files: int = 0
    """Files that they wrote."""
    sampled: int = 0
    """Commands that were also run in processes of their own."""
    crashed: list[str] = field(default_factory=list)
    """Command lines that ended with a traceback in the new checkout."""
    different: list[Difference] = field(default_factory=list)
    unlike: list[Difference] = field(default_factory=list)
    """Where the driver gave something else than a process of its own."""


def samples(cases: list[Case]) -> set[int]:
    """The cases that are also run in processes of their own, by number: one of each kind, and every hundredth."""
    chosen: dict[str, int] = {}
    for number, case in enumerate(cases):
        if not case.alone and (case.kind not in chosen or _chance(case) < _chance(cases[chosen[case.kind]])):
            chosen[case.kind] = number
    return set(chosen.values()) | {number for number in range(99, len(cases), 100) if not cases[number].alone}


def _chance(case: Case) -> int:
    return crc32(repr(case.steps).encode())


def run(
    checkouts: tuple[Path, Path],
    cases: list[Case],
    folder: Path,
    inputs: Path,
    *,
    jobs: int,
    tell: Callable[[int, int], None],
) -> Outcome:
    """Run every case in the old and the new checkout, one after the other in the same folder."""
    outcome, lock, twice = Outcome(), threading.Lock(), samples(cases)
    queue, done = deque(enumerate(cases)), count(1)

    def work(number: int) -> None:
        slot = folder / f"slot{number}"
        cwd = slot / "run"
        sides = [
            Side(path, cwd, inputs, slot / name) for path, name in zip(checkouts, ("old", "new"), strict=True)
        ]
        try:
            while queue:
                try:
                    at, case = queue.popleft()
                except IndexError:
                    break
                old, new = (side.run_alone(case) if case.alone else side.run(case) for side in sides)
                again = [side.run_alone(case) for side in sides] if at in twice else []
                with lock:
                    _count(outcome, case, old, new, folder / "different" / str(at))
                    for ran, alone in zip((old, new), again, strict=False):
                        outcome.sampled += len(alone.steps)
                        outcome.unlike += differences(ran, alone)
                    tell(next(done), len(outcome.different) + len(outcome.unlike))
        finally:
            for side in sides:
                side.close()

    with ThreadPoolExecutor(jobs) as pool:
        for worker in [pool.submit(work, number) for number in range(jobs)]:
            worker.result()
    return outcome


def _count(outcome: Outcome, case: Case, old: Ran, new: Ran, aside: Path) -> None:
    unequal = list(differences(old, new))
    outcome.different += unequal
    if unequal:
        _write(old, aside / "old")
        _write(new, aside / "new")
    outcome.commands += len(case.steps)
    outcome.equal += len(case.steps) if not unequal else 0
    outcome.crashed += [step.command for step in new.steps if b"Traceback (most recent" in step.err]
    outcome.codes.update(step.code for step in new.steps)
    outcome.files += sum(not name.endswith(")") for name in new.files) - len(case.files)


def _write(ran: Ran, folder: Path) -> None:
    """Everything that a case gave, to look at."""
    for number, step in enumerate(ran.steps):
        outputs = {
            "command": step.command.encode(),
            "exit": str(step.code).encode(),
            "out": step.out,
            "err": step.err,
        }
        for name, data in outputs.items():
            _put(folder / f"{number}.{name}", data)
    for name, data in ran.files.items():
        if not name.endswith(")"):
            _put(folder / "files" / name, data)


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
