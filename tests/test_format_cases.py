"""What each format reads, refuses and writes, case by case: the cases are in `tests/data/formats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.format_cases import CASES, FOLDER, cases_of, expected, outcome, shapes_of, shown, text_of
from tito_audit.formats import all_formats


@pytest.mark.parametrize(("path", "case"), CASES, ids=[f"{path.stem}: {case['case']}" for path, case in CASES])
def test_a_row_is_read_and_written_as_its_case_says(path: Path, case: dict[str, Any]) -> None:
    for row in shapes_of(path, case):
        assert shown(outcome(case, row)) == shown(expected(path, case))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_cases_is_laid_out_as_it_is_written_anew(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == text_of(list(cases_of(path).values()))


def test_every_format_has_cases() -> None:
    assert {form.name for form in all_formats()} - {path.stem for path, _ in CASES} == set()
