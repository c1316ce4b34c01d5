"""`python -m tests.same OLD NEW`: runs many commands in two checkouts, and exits 1 if anything differs.

`python -m tests.same --lines CHECKOUT` prints the figures of a checkout's structure.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import inputs as corpus
from .allow import Allowed, allowed_from, is_allowed
from .cases import cases, rules_of
from .compare import MASKS
from .lines import figures
from .runner import Outcome, run

_MOST = 8
"""Lines of a difference that are shown."""


def main() -> int:
    """Compare, and say what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.same", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="the old and the new one")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="some of everything (the default)")
    size.add_argument("--whole", action="store_true", help="everything")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs, and all that differs in `different`")
    parser.add_argument("--allow", type=Path, help="a TOML file of the differences that are wanted")
    parser.add_argument("--only", default="", help="only cases whose command lines hold this")
    parser.add_argument("--show", type=int, default=40, help="differences that are printed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--lines", type=Path, metavar="CHECKOUT", help="print the figures of its structure instead"
    )
    chosen = parser.parse_args()
    if chosen.lines:
        print("\n".join(figures(chosen.lines)))
        return 0
    if len(chosen.checkouts) != 2:
        parser.error("two checkouts are needed")
    entries = allowed_from(chosen.allow) if chosen.allow else []
    with tempfile.TemporaryDirectory(prefix="same-") as aside:
        return _compared(chosen, (chosen.keep or Path(aside)).resolve(), entries)


def _compared(chosen: argparse.Namespace, folder: Path, entries: list[Allowed]) -> int:
    began = time.monotonic()
    old, new = (path.resolve() for path in chosen.checkouts)
    for left in (folder / "inputs", folder / "different", *folder.glob("slot*")):
        shutil.rmtree(left, ignore_errors=True)
    inputs = corpus.make(old, folder / "inputs", whole=chosen.whole)
    before = _stamps(inputs.folder)
    todo = cases(inputs, _codes(old, folder), whole=chosen.whole)
    todo = [case for case in todo if any(chosen.only in case.command(step) for step in case.steps)]
    # What takes long comes first, so that no worker is left with it alone.
    todo.sort(key=lambda case: not any("rollouts/" in part for step in case.steps for part in step))
    count = sum(len(case.steps) for case in todo)
    print(f"{count} commands over {len(inputs.logs)} logs in each checkout", flush=True)
    outcome = run((old, new), todo, folder, inputs.folder, jobs=chosen.jobs, tell=_progress(len(todo)))
    if _stamps(inputs.folder) != before:
        print("an input was changed, or a file written beside one")
        return 1
    return _summary(outcome, entries, inputs.notes, chosen.show, time.monotonic() - began)


def _codes(checkout: Path, folder: Path) -> list[str]:
    """Every rule of a checkout."""
    listed = subprocess.run(
        [sys.executable, "-m", "tito_audit", "list", "rules"],
        cwd=folder,
        env={"PYTHONPATH": str(checkout), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return rules_of(listed.stdout)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every input."""
    stamps = {}
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            stamps[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def _progress(total: int):
    part, shown = max(1, total // 10), 0

    def tell(done: int, different: int) -> None:
        nonlocal shown
        if done % part == 0 or different > shown:
            print(f"{done} of {total} cases, {different} outputs differ", file=sys.stderr, flush=True)
        shown = different

    return tell


def _summary(outcome: Outcome, entries: list[Allowed], notes: list[str], most: int, seconds: float) -> int:
    wanted = [difference for difference in outcome.different if is_allowed(difference, entries)]
    loud = [difference for difference in outcome.different if difference not in wanted]
    loud.sort(key=lambda difference: (difference.command, difference.place))
    for difference in loud[:most]:
        print("\n".join(difference.shown(_MOST)))
    for difference in outcome.unlike[:most]:
        print("the driver gives (-) what a process of its own does not (+):")
        print("\n".join(difference.shown(_MOST)))
    print("\n".join(notes))
    for entry in entries:
        print(f"allowed {entry.met} times: {entry.reason}" + ("" if entry.met else " (never met: remove it)"))
    print(f"masked: {'; '.join(what for what, _, _ in MASKS)}")
    if outcome.crashed:
        print(f"{len(outcome.crashed)} commands crashed in the new checkout, as {min(outcome.crashed, key=len)!r}")
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(outcome.codes.items()))
    print(f"{outcome.commands} commands (exit codes {codes}), {outcome.files} files written")
    print(
        f"{outcome.sampled} commands run as processes of their own as well: "
        f"{len(outcome.unlike)} outputs unlike the driver's"
    )
    print(
        f"{outcome.equal} commands equal, {outcome.commands - outcome.equal} different: "
        f"{len(loud)} outputs differ, {len(wanted)} more as wanted"
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU-s")
    return int(bool(loud or outcome.unlike))


if __name__ == "__main__":
    sys.exit(main())
