"""`python -m tests.truth --rows 10000 --forms all`: exits 1 on any violation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .beside import run_beside
from .forms import FORMS
from .judge import FLAGS, Outcome, run
from .odd import logs_beside, run_odd
from .plan import files
from .source import MODELS, SHARED
from .table import lines

BATCH = 2500
"""Rows that are in memory at a time."""


def main() -> int:
    """Make the files, run the command line over them, print what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--forms", default="all", help=f"all, or some of {','.join(FORMS)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repairs", default=",".join(FLAGS), help="which repairs to run; none for a scan alone")
    parser.add_argument("--whole", type=float, default=0.3, help="share of rows in files of one convention")
    parser.add_argument(
        "--odd", type=int, help="how many logs are run with an odd row and without; else one in 100 rows"
    )
    parser.add_argument("--beside", type=int, help="how many rows have columns beside their tokens; else one in 2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the files")
    parser.add_argument("--show", type=int, default=3, help="violations of a kind that are printed")
    chosen = parser.parse_args()
    if not (SHARED / "rollouts").is_dir():
        sys.exit(f"no {SHARED / 'rollouts'}: the real rollouts are not beside this checkout")
    forms = list(FORMS) if chosen.forms == "all" else chosen.forms.split(",")
    flags = [] if chosen.repairs == "none" else chosen.repairs.split(",")
    outcome = Outcome()
    for number, start in enumerate(range(0, chosen.rows, BATCH)):
        size, seed = min(BATCH, chosen.rows - start), chosen.seed * 1000 + number
        plan = files(size, forms, seed, whole=chosen.whole, models=chosen.models.split(","))
        with tempfile.TemporaryDirectory() as aside:
            outcome.merge(run(plan, chosen.keep / str(number) if chosen.keep else Path(aside), flags))
    count = chosen.rows // 100 if chosen.odd is None else chosen.odd
    beside = list(logs_beside(count, forms, chosen.seed, chosen.models.split(",")))
    with tempfile.TemporaryDirectory() as aside:
        outcome.merge(run_odd(beside, chosen.keep / "odd" if chosen.keep else Path(aside), flags))
    models = chosen.models.split(",")
    columns = chosen.rows // 2 if chosen.beside is None else chosen.beside
    with tempfile.TemporaryDirectory() as aside:
        for model in models:
            folder = (chosen.keep / "beside" if chosen.keep else Path(aside)) / model
            outcome.merge(run_beside(columns // len(models), folder, chosen.seed, model))
    print("\n".join(lines(outcome, chosen.show)))
    return int(bool(outcome.violations))


if __name__ == "__main__":
    sys.exit(main())
