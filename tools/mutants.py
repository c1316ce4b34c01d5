"""How many faults the tests notice: one operator or constant of the package is changed at a time, and tests run.

    python -m tools.mutants --count 100 --rooms run,formats,rules,repairs,align --seed 1 --survivors FILE
    TITO_AUDIT_TIER=deep python -m tools.mutants --only FILE --seconds 300

Prints each mutant and the test that noticed it, or that none did, and the counts. FILE keeps those that none
noticed: the second line runs the tests on these with all of their examples.

It works on copies of the checkout. First all tests run once, without a fault, to record which of the changed
functions each calls and how long it takes; tests that fail there are left out. Then each mutant runs in a fork,
which writes the changed module (for tests that start processes) and replaces the code of the changed function in
memory. Tests that call the function run, then the others of their files, which may look at what a fixture
computed once; quick files that name the module come first, files that start processes last,
until one fails or the mutant's time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tools.mutant_changes import Mutant, mutants_of
from tools.mutant_runs import Reach, Work, worked

ROOT = Path(__file__).resolve().parents[1]


def _copied(to: Path) -> Path:
    """A copy of the checkout's files, with the files next to it that tests need."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    if (ROOT.parent / "shared").exists():
        (to.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return to


def _picked(chosen: argparse.Namespace) -> list[Mutant]:
    """The requested mutants, and a description."""
    if chosen.only:
        kept = json.loads(chosen.only.read_text(encoding="utf-8"))["mutants"]
        print(f"{len(kept)} mutants of {chosen.only}", flush=True)
        return [Mutant(**one) for one in kept]
    files = [path for room in chosen.rooms.split(",") for path in (ROOT / "tito_audit" / room).rglob("*.py")]
    every = [
        one
        for path in sorted(files)
        for one in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    print(f"{chosen.count} of {len(every)} mutants of {chosen.rooms}, seed {chosen.seed}", flush=True)
    return random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))


def _run(chosen: argparse.Namespace, aside: Path) -> int:
    """Distribute the mutants among processes with a copy each, and print the outcome."""
    mutants, children = _picked(chosen), []
    works = [
        Work(
            _copied(aside / str(number) / "checkout"),
            aside,
            number,
            chosen.jobs,
            mutants,
            chosen.seconds,
            chosen.only,
            chosen.tests,
        )
        for number in range(chosen.jobs)
    ]
    for work in works:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = worked(work)
            finally:
                os._exit(code)  # the folder is the parent's to remove
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    ended = [json.loads(line) for path in aside.glob("ended-*") for line in path.open(encoding="utf-8")]
    print(", ".join(f"{count} {word}" for word, count in Counter(word for word, _ in ended).most_common()))
    if chosen.survivors:
        reach = Reach()
        for path in works[0].reaches():
            reach.add(json.loads(path.read_text(encoding="utf-8")))
        kept = [mutant for word, mutant in ended if not word.startswith("noticed")]
        chosen.survivors.write_text(json.dumps({"mutants": kept, **asdict(reach)}, indent=1), encoding="utf-8")
    return int(any(codes))


def main() -> int:
    """Choose the mutants, run them, print the outcome."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rooms", default="run,formats,rules,repairs,align")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90, help="CPU seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--survivors", type=Path, help="where to keep the mutants that no test noticed")
    parser.add_argument("--only", type=Path, help="run those of such a file")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="run no tests but those in these files")
    chosen = parser.parse_args()
    for name in ("survivors", "only"):
        if getattr(chosen, name) is not None:
            setattr(chosen, name, getattr(chosen, name).resolve())
    with tempfile.TemporaryDirectory() as aside:
        return _run(chosen, Path(aside))


if __name__ == "__main__":
    sys.exit(main())
