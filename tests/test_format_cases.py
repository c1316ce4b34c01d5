"""What each format reads, refuses and writes, case by case: the cases are in `tests/data/formats`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.format_cases import CASES, FILES, Case, cases_of, shown, text_of
from tito_audit.formats import all_formats


@pytest.mark.parametrize("case", CASES, ids=[f"{case.path.stem}: {case.name}" for case in CASES])
def test_a_row_is_read_and_written_as_its_case_says(case: Case) -> None:
    for row in case.shapes():
        assert shown(case.outcome(row)) == shown(case.expected())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_cases_is_laid_out_as_it_is_written_anew(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == text_of(cases_of(path))


def test_every_format_has_cases_and_no_name_stands_for_two() -> None:
    assert {form.name for form in all_formats()} - {case.path.stem for case in CASES} == set()
    assert [name for name, times in Counter((case.path, case.name) for case in CASES).items() if times > 1] == []
