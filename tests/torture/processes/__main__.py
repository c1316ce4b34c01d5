"""`python -m tests.torture.processes --kills 1000 --attacks 500 --seed 1`: exits 1 on any failure."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.torture.processes.attack import KINDS, Undisturbed, attacked, digest, undisturbed
from tests.torture.processes.works import PRINTING, WORKS, Work, make_logs
from tests.torture.processes.world import load

__all__ = ["campaign", "main"]

_SHOWN = 20
Case = tuple[str, int]
"""The stream of an attack, and its number in it."""


def main() -> int:
    """Make the attacks, and print the counts by kind and what failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.processes", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--attacks", type=int, help="others than kills; half as many as kills if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--of", choices=[*KINDS], help="make only attacks of this kind, in place of others")
    parser.add_argument("--case", help="kill:NUMBER or attack:NUMBER: only this one")
    chosen = parser.parse_args()
    others = chosen.kills // 2 if chosen.attacks is None else chosen.attacks
    cases = [*(("kill", number) for number in range(chosen.kills))]
    cases += [("attack", number) for number in range(others)]
    if chosen.case:
        stream, _, number = chosen.case.partition(":")
        cases = [(stream, int(number))]
    started = time.monotonic()
    done = list(campaign(chosen.seed, cases, chosen.jobs, kind=chosen.of))
    counts = Counter((attack["kind"], attack["came"]) for attack in done)
    for (kind, came), count in sorted(counts.items()):
        print(f"{kind:8}{came:20}{count:6,}")
    failed = [attack for attack in done if attack["failures"]]
    for attack in failed[:_SHOWN]:
        print(f"\n{attack['stream']}:{attack['number']} of seed {chosen.seed}, {attack['work']}: {attack['what']}")
        print("\n".join(f"  {failure}" for failure in attack["failures"]))
    kills = sum(attack["kind"] == "kill" for attack in done)
    seconds = time.monotonic() - started
    print(f"\n{kills:,} kills and {len(done) - kills:,} other attacks, seed {chosen.seed}: ", end="")
    print(f"{len(failed):,} failed ({seconds:,.0f} s)")
    return int(bool(failed) or len(done) < len(cases))


def campaign(
    seed: int,
    cases: Sequence[Case],
    jobs: int = 1,
    *,
    kind: str | None = None,
    works: Sequence[Work] = (*WORKS, *PRINTING),
) -> Iterator[dict[str, Any]]:
    """What came of each attack on these commands.

    The processes that make them are forked from this one once it has loaded the tool.
    """
    with tempfile.TemporaryDirectory(prefix="tito-torture-logs-") as aside:
        logs, warm = Path(aside) / "logs", Path(aside) / "warm"
        make_logs(logs)
        shutil.copytree(logs, warm)
        os.environ["TITO_AUDIT_CACHE"] = "off"
        load(warm, works)
        before, whole = digest(logs), undisturbed(logs, works)
        outs = [Path(aside) / f"{number}.jsonl" for number in range(jobs)]
        workers = [_forked(seed, cases[number::jobs], whole, logs, out, kind) for number, out in enumerate(outs)]
        for worker in workers:
            os.waitpid(worker, 0)
        for out in outs:
            with out.open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)
        if digest(logs) != before:
            raise AssertionError("the logs beside the attacks were changed")


def _forked(
    seed: int, cases: Sequence[Case], whole: dict[str, Undisturbed], logs: Path, out: Path, kind: str | None
) -> int:
    """A process that makes these attacks and writes what came of them."""
    sys.stdout.flush()
    worker = os.fork()
    if worker:
        return worker
    try:
        with out.open("w", encoding="utf-8") as lines:
            for stream, number in cases:
                line: dict[str, Any] = {"stream": stream, "number": number}
                try:
                    attack = attacked(seed, stream, number, whole, logs, kind=kind)
                    line |= {"kind": attack.kind, "work": attack.work.name, "what": attack.what}
                    line |= {"came": attack.came or "?", "failures": attack.failures}
                except Exception:
                    broken = {"kind": stream, "work": "?", "what": "the attack itself failed", "came": "?"}
                    line |= {**broken, "failures": [traceback.format_exc()]}
                lines.write(json.dumps(line) + "\n")
                lines.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
