"""What makes a house grow is counted as it stands in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables import stored
from tools.habits import House

SOURCES = stored(__file__, "SOURCES")


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name, text in SOURCES.items():
        path = tmp_path / "tito_audit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House.of(tmp_path)


def test_lines_of_a_room_are_counted_with_all_that_is_in_them(house: House) -> None:
    rows = sum(len(text.splitlines()) for name, text in SOURCES.items() if name.startswith("rows/"))
    assert house.lines == {"(root)": 0, "rows": rows, "rules": 1}


def test_code_is_what_is_no_comment_docstring_or_blank_line(house: House) -> None:
    assert house.code_lines == 20 + 2 + 4 + 1


def test_a_private_function_used_once_is_one_that_a_single_place_calls(house: House) -> None:
    assert house.private_functions_used_once == [
        f"tito_audit.rows.read.{name}" for name in ("_row", "_long", "_private")
    ]
    short = [f"tito_audit.rows.read.{name}" for name in ("_row", "_private")]
    assert house.short_private_functions_used_once == short


def test_a_number_used_once_is_not_worth_its_name(house: House) -> None:
    assert house.numbers_used_once == ["tito_audit.rows.read._LIMIT"]


def test_a_module_with_one_importer_is_counted_only_if_both_share_a_room(house: House) -> None:
    assert house.modules_with_one_importer_in_their_room == ["tito_audit.rows.only_here"]


def test_a_class_name_that_stands_twice_is_named(house: House) -> None:
    assert house.class_names_that_stand_twice == {"Row": 2}


def test_pronouns_are_counted_where_a_name_is_bound(house: House) -> None:
    assert house.pronouns == {"one": 1, "found": 1}
