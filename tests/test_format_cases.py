"""What each format reads, refuses and writes, case by case: the cases are in `tests/data/formats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.format_cases import CASES, expected, outcome, shapes_of, shown
from tito_audit.formats import all_formats


@pytest.mark.parametrize(("path", "case"), CASES, ids=[f"{path.stem}: {case['case']}" for path, case in CASES])
def test_a_row_is_read_and_written_as_its_case_says(path: Path, case: dict[str, Any]) -> None:
    for row in shapes_of(path, case):
        assert shown(outcome(case, row)) == shown(expected(path, case))


def test_every_format_has_cases() -> None:
    assert {form.name for form in all_formats()} - {path.stem for path, _ in CASES} == set()
