"""What stands beside tokens, in every form of the frameworks: right columns are clean, and faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers import examples, some
from tests.truth.beside import WRITERS, cases, run_beside
from tests.truth.source import MODELS, SHARED

if not (SHARED / "rollouts").is_dir():
    pytest.skip("the real rollouts are not beside this checkout", allow_module_level=True)


@pytest.mark.parametrize("seed", some((11, 12, 13, 14), 1))
def test_right_columns_are_clean_and_faults_are_found(tmp_path: Path, seed: int) -> None:
    outcome = run_beside(examples(150, 2500), tmp_path, seed, MODELS[0])
    assert {what: [str(each) for each in many[:3]] for what, many in outcome.violations.items()} == {}


def test_every_writer_has_right_rows_and_faults() -> None:
    drawn = {(case.writer, bool(case.code)) for case in cases(examples(300, 600), 1, MODELS[0])}
    assert drawn == {(name, fault) for name in (*WRITERS, "pairs") for fault in (False, True)}
