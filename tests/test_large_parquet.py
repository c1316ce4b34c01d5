"""A Parquet file of large row groups written again: each becomes several, and no row, type or form is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.test_parquet_output import (
    assert_only_changed,
    form_of,
    put,
    rewritten,
    rich_table,
    same_values,
    store,
    table_of,
)
from tito_audit.errors import StorageError
from tito_audit.storage import open_log, parquet
from tito_audit.storage.parquet import ParquetOutput


@pytest.fixture(autouse=True, params=[1, 3000])
def small_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of more than so many bytes are large; they are read a few rows at a time."""
    monkeypatch.setattr(parquet, "LARGE_GROUP", request.param)
    monkeypatch.setattr("tito_audit.storage.parquet.BATCH_BYTES", 64)


def open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    places = Path("/proc/self/fd")
    return sum(1 for _ in places.iterdir()) if places.is_dir() else 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": {"ids.list.element": "zstd", "text": "gzip"}},
        {"use_dictionary": False, "compression": "none"},
        {"write_page_index": True, "data_page_version": "2.0", "write_page_checksum": True},
        {"store_schema": False},
    ],
    ids=str,
)
def test_only_the_changed_value_is_another_one(tmp_path: Path, options: dict[str, Any]) -> None:
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=8, **options)
    after = rewritten(path, put(6, "ids", value=[7, 8, 9]))
    table = assert_only_changed(path, after, {"ids"})
    assert [list(v) if v is not None else v for v in table["ids"].to_pylist()][6] == [7, 8, 9]
    assert [group[0] for group in form_of(after)[4]] != [group[0] for group in form_of(path)[4]]
    assert form_of(after)[:3] == form_of(path)[:3]


def test_a_row_group_becomes_equal_parts_and_none_holds_rows_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"ids": pa.array(range(20), pa.int64())})
    path = store(tmp_path / "a.parquet", table, rows_per_group=16, use_dictionary=False)
    monkeypatch.setattr(parquet, "LARGE_GROUP", 160)
    after = rewritten(path, put(6, "ids", value=60), added=())
    assert [group[0] for group in form_of(after)[4]] == [8, 8, 4]
    assert table_of(after)["ids"].to_pylist() == [*range(6), 60, *range(7, 20)]


def test_a_new_column_is_null_but_where_a_row_has_it(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=4)
    after = rewritten(path, put(5, "tito_audit", value={"repaired": 1}))
    table = table_of(after)
    assert table["tito_audit"].to_pylist() == [None] * 5 + ['{"repaired":1}'] + [None] * 6
    assert table.drop_columns(["tito_audit"]).num_columns == rich_table().num_columns
    assert [row.value["place"] for row in open_log(after)] == list(range(12))


def test_rows_are_left_out_and_forked_as_without_large_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "a.parquet", rich_table(4), rows_per_group=8)

    def change(index: int, row: Any) -> list[Any]:
        return {1: [], 2: [row, {**row, "place": 50}], 15: []}.get(index, [row])

    split = table_of(rewritten(path, change))
    monkeypatch.setattr(parquet, "LARGE_GROUP", 1 << 30)
    whole = table_of(rewritten(path, change))
    assert split["place"].to_pylist() == whole["place"].to_pylist() == [0, 2, 50, *range(3, 15)]
    assert all(same_values(split[name], whole[name]) for name in whole.column_names)


def test_all_rows_of_a_row_group_may_be_left_out(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(2), rows_per_group=4)
    after = rewritten(path, lambda index, row: [] if index < 4 else [row])
    assert table_of(after)["place"].to_pylist() == [4, 5, 6, 7]


def test_a_value_that_does_not_fit_is_one_clear_error_and_closes_all_files(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table())
    before = open_files()
    with (tmp_path / "out").open("wb") as out:
        output, log = ParquetOutput(path, out, ()), open_log(path)
        row = next(iter(log))
        output.replace(row, [{**row.value, "ids": ["text"]}])
        with pytest.raises(StorageError, match="row 0, column 'ids': the repaired value does not fit"):
            output.finish(log)
        output.abandon()
    assert open_files() == before
