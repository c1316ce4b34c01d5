"""`python -m tests.torture --mutants N --seed S`: attacks the command line; exits 1 on any failure."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tests.torture.attack import Attack
from tests.torture.commands import COMMANDS, attack_of, some_attacks
from tests.torture.judge import Failure
from tests.torture.keep import keep, kept
from tests.torture.minimise import minimised
from tests.torture.runner import Room, Trial

_SPOKEN = 1000
"""After so many numbers a campaign says how far it is."""


@dataclass
class Tally:
    """Counts of a campaign."""

    runs: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: dict[tuple[str, str], list[tuple[str, Failure]]] = field(default_factory=lambda: defaultdict(list))
    failed: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")
    lock: Lock = field(default_factory=Lock)

    def add(self, where: str, attack: Attack, trial: Trial) -> list[Failure]:
        """Count a trial; the failures that are the first of their kind and place."""
        with self.lock:
            self.runs[attack.command, trial.outcome.code] += 1
            self.slowest = max(self.slowest, (trial.outcome.seconds, where))
            self.largest = max(self.largest, (trial.outcome.peak, where))
            self.failed += bool(trial.failures)
            new = [failure for failure in trial.failures if failure.key not in self.failures]
            for failure in trial.failures:
                self.failures[failure.key].append((where, failure))
            return new

    def lines(self, seed: str) -> Iterator[str]:
        """The counts, for people."""
        total = sum(self.runs.values())
        for command in dict.fromkeys(command for command, _ in sorted(self.runs)):
            codes = {code: many for (name, code), many in sorted(self.runs.items()) if name == command}
            yield f"{command:10} {sum(codes.values()):7,}  " + ", ".join(
                f"exit {k}: {v:,}" for k, v in codes.items()
            )
        yield (
            f"{total:,} mutants of seed {seed}: {self.failed:,} failed in {len(self.failures)} ways; "
            f"{self.seconds:.0f} s, "
            f"slowest {self.slowest[0]:.1f} s ({self.slowest[1]}), "
            f"most memory {self.largest[0] >> 20:,} MB ({self.largest[1]})"
        )
        for (kind, place), cases in sorted(self.failures.items(), key=lambda item: (item[0][0], -len(item[1]))):
            yield f"  {len(cases):5,}  {kind}: {place}  [--case {', '.join(where for where, _ in cases[:3])}]"


def main() -> int:
    """Run a campaign, one case, or the kept cases of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--of", default="", help=f"some of {','.join(COMMANDS)}")
    parser.add_argument("--jobs", type=int, default=1, help="workers")
    parser.add_argument("--case", help="SEED:NUMBER: run one, and print all of it")
    parser.add_argument("--replay", type=Path, help="run the kept cases of a folder")
    parser.add_argument("--keep", type=Path, help="a folder for minimised cases of new failures")
    parser.add_argument("--without-real", action="store_true", help="leave out real rollouts")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torture.") as aside:
        if chosen.case:
            return one_case(chosen.case, Path(aside), chosen.keep, with_real=not chosen.without_real)
        if chosen.replay:
            return replayed(chosen.replay, Path(aside))
        return campaign(chosen, Path(aside))


def campaign(chosen: argparse.Namespace, aside: Path) -> int:
    """Run mutants with some workers and print the counts."""
    tally, started = Tally(), time.monotonic()
    of = chosen.of.split(",") if chosen.of else []
    numbered = some_attacks(chosen.seed, chosen.first + chosen.mutants, of, with_real=not chosen.without_real)
    lock = Lock()

    def work(job: int) -> None:
        with Room(aside / f"room{job}") as room:
            while True:
                with lock:
                    drawn = next(numbered, None)
                if drawn is None:
                    return
                number, attack = drawn
                if number < chosen.first:
                    continue
                where = f"{chosen.seed}:{number}"
                if number and not number % _SPOKEN:
                    print(f"{number:,} mutants, {time.monotonic() - started:.0f} s", flush=True)
                for failure in tally.add(where, attack, room.attempt(attack)):
                    print(f"{where} {failure}", flush=True)
                    if chosen.keep:
                        keep(smallest(room, attack, failure), failure, where, chosen.keep)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        for future in [pool.submit(work, job) for job in range(chosen.jobs)]:
            future.result()
    tally.seconds = time.monotonic() - started
    print("\n".join(tally.lines(str(chosen.seed))))
    return int(bool(tally.failures))


def smallest(room: Room, attack: Attack, failure: Failure) -> Attack:
    """The attack with the least that still fails so; as it is where each try takes too long."""
    if failure.kind in ("hang", "memory") or attack.seconds > 5:
        return attack
    return minimised(attack, lambda smaller: failure.key in {each.key for each in room.attempt(smaller).failures})


def one_case(case: str, aside: Path, folder: Path | None, *, with_real: bool) -> int:
    """Run one attack and print everything about it."""
    seed, _, number = case.partition(":")
    attack = attack_of(int(seed), int(number), with_real=with_real)
    copies = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-{number}."))
    for name, data in attack.files.items():
        path = copies / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with Room(aside) as room:
        trial = room.attempt(attack)
        print(f"{attack.made}\ntito-audit {' '.join(attack.words)}\nthe files are in {copies}")
        print(trial.outcome.stdout.decode(errors="replace")[:4000], end="")
        print(trial.outcome.stderr.decode(errors="replace")[-6000:], end="")
        print(f"exit {trial.outcome.code}, {trial.outcome.seconds:.2f} s, {trial.outcome.peak >> 20} MB")
        for failure in trial.failures:
            print(f"{failure}  {failure.said[:300] if failure.kind != 'traceback' else ''}")
            if folder:
                print(keep(smallest(room, attack, failure), failure, case, folder))
    return int(bool(trial.failures))


def replayed(folder: Path, aside: Path) -> int:
    """Run kept cases and print which still fail."""
    failed = 0
    with Room(aside) as room:
        for name, attack in kept(folder):
            trial = room.attempt(attack)
            failed += bool(trial.failures)
            print(f"{name}: {'; '.join(map(str, trial.failures)) or 'withstood'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
