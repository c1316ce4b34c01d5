"""The proof of `proof.py` in a process of its own: what reads broken files may break."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.torture.proof import lost
from tests.torture.sources import ROOT

__all__ = ["proven"]

_provers = threading.local()


def proven(original: Path, repaired: Path, report: Path) -> dict[str, Any]:
    """`lost`: what a repair lost. Where the proof itself fails: `failed`, the place, and `why`."""
    prover = getattr(_provers, "one", None)
    if prover is None or prover.poll() is not None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        prover = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.prover"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        _provers.one = prover
        atexit.register(prover.communicate)
    assert prover.stdin is not None
    assert prover.stdout is not None
    prover.stdin.write(json.dumps([str(original), str(repaired), str(report)]).encode() + b"\n")
    prover.stdin.flush()
    answer = prover.stdout.readline()
    if not answer:
        return {"failed": f"the prover ended with {prover.wait()}", "why": ""}
    losses: dict[str, Any] = json.loads(answer)
    return losses


def _answer(order: str) -> dict[str, Any]:
    original, repaired, report = map(Path, json.loads(order))
    try:
        return {"lost": lost(original, repaired, json.loads(report.read_bytes()))}
    except Exception as error:  # what the proof cannot read is to be seen, and is no proof
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"failed": f"{Path(frame.filename).name}:{frame.name} {type(error).__name__}", "why": str(error)}


if __name__ == "__main__":
    for order in sys.stdin:
        print(json.dumps(_answer(order)), flush=True)
