"""A Parquet file of large row groups written again: what no change touches is copied as it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.test_parquet_output import (
    Change,
    assert_only_changed,
    form_of,
    put,
    rich_table,
    same_values,
    store,
    table_of,
)
from tito_audit.errors import StorageError
from tito_audit.storage import large_parquet_output, open_log
from tito_audit.storage._parquet_footer import Footer
from tito_audit.storage._parquet_pages import BOUNDS, OFFSETS, read_index
from tito_audit.storage._thrift import Reader
from tito_audit.storage.large_parquet_output import LargeParquetOutput, parquet_output
from tito_audit.storage.parquet_output import ParquetOutput


@pytest.fixture(autouse=True, params=["one part", "several"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row group counts as large; changed columns are encoded in one part, or in a part for each batch."""
    monkeypatch.setattr(large_parquet_output, "LARGE", -1)
    if request.param == "several":
        monkeypatch.setattr(large_parquet_output, "_PART", 0)
        monkeypatch.setattr("tito_audit.storage.parquet.BATCH_BYTES", 64)
        monkeypatch.setattr("tito_audit.storage._changed_rows._HELD", 0)


def rewritten(path: Path, change: Change, added: tuple[str, ...] = ()) -> Path:
    """The file with `change` made to every row, written beside it."""
    return with_notices(path, change, added)[0]


def with_notices(path: Path, change: Change, added: tuple[str, ...] = ()) -> tuple[Path, list[str]]:
    """The rewritten file, and what of its form was not kept."""
    target = path.with_name(f"out-{path.name}")
    with target.open("wb") as out:
        output, log = parquet_output(path, out, added), open_log(path)
        assert isinstance(output, LargeParquetOutput)
        for raw in log:
            output.replace(raw, change(raw.index, raw.value))
        output.finish(log)
    return target, list(output.not_kept)


def written_at_once(path: Path, change: Change) -> Path:
    """The file as it is written if no row group counts as large."""
    target = path.with_name(f"plain-{path.name}")
    with target.open("wb") as out:
        output, log = ParquetOutput(path, out, ()), open_log(path)
        for raw in log:
            output.replace(raw, change(raw.index, raw.value))
        output.finish(log)
    return target


def statistics(path: Path) -> list[Any]:
    """The statistics of every column chunk."""
    meta = pq.ParquetFile(path).metadata
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    held = [(one.path_in_schema, one.num_values, one.statistics) for one in chunks]
    return [
        (name, values, one and (one.null_count, one.has_min_max, one.min_raw, one.max_raw))
        for name, values, one in held
    ]


def open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    places = Path("/proc/self/fd")
    return sum(1 for _ in places.iterdir()) if places.is_dir() else 0


def stored(path: Path, name: str) -> list[bytes]:
    """The bytes of a column's pages, by row group."""
    meta, data, found = pq.ParquetFile(path).metadata, path.read_bytes(), []
    for number in range(meta.num_row_groups):
        for at in range(meta.num_columns):
            chunk = meta.row_group(number).column(at)
            if chunk.path_in_schema.split(".")[0] == name:
                start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                found.append(data[start : start + chunk.total_compressed_size])
    return found


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
def test_one_column_changes_and_all_others_keep_their_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=4, **options)
    after = rewritten(path, put(6, "ids", value=[7, 8, 9]))
    table = assert_only_changed(path, after, {"ids"})
    assert [list(v) if v is not None else v for v in table["ids"].to_pylist()][6] == [7, 8, 9]
    for name in table.column_names:
        old, new = stored(path, name), stored(after, name)
        assert (old == new) == (name != "ids"), name
        assert old[0] == new[0], "a row group without changes is copied"
    codecs = [[(c[0], c[2]) for c in group] for group in form_of(path)[3]]
    assert [[(c[0], c[2]) for c in group] for group in form_of(after)[3]] == codecs


def test_a_new_column_is_null_but_where_a_row_has_it(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=4)
    after = rewritten(path, put(5, "tito_audit", value={"repaired": 1}), added=("tito_audit",))
    table = table_of(after)
    assert table["tito_audit"].to_pylist() == [None] * 5 + ['{"repaired":1}'] + [None] * 6
    assert table.drop_columns(["tito_audit"]).num_columns == rich_table().num_columns
    assert [row.value["place"] for row in open_log(after)] == list(range(12))
    again = rewritten(after, put(7, "place", value=99), added=("tito_audit",))
    assert table_of(again)["tito_audit"].equals(table["tito_audit"])


def test_rows_are_left_out_and_forked_as_without_large_row_groups(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(4), rows_per_group=8)

    def change(index: int, row: Any) -> list[Any]:
        return {1: [], 2: [row, {**row, "place": 50}], 15: []}.get(index, [row])

    ours = rewritten(path, change)
    mine, plain = table_of(ours), table_of(written_at_once(path, change))
    assert mine["place"].to_pylist() == plain["place"].to_pylist() == [0, 2, 50, *range(3, 15)]
    assert all(same_values(mine[name], plain[name]) for name in plain.column_names)
    assert [group[0] for group in form_of(ours)[4]] == [8, 7]


def leave_out_first(index: int, row: Any) -> list[Any]:
    """Every column is encoded again, as a row is left out."""
    return [row] if index else []


@pytest.mark.parametrize("dictionary", [True, False])
def test_statistics_are_those_of_all_rows(tmp_path: Path, dictionary: bool) -> None:
    table = rich_table(3).append_column("negative", pa.array([*range(-6, 5), None], pa.decimal128(30, 1)))
    path = store(tmp_path / "a.parquet", table, rows_per_group=9, use_dictionary=dictionary)
    ours = statistics(rewritten(path, leave_out_first))
    assert repr(ours) == repr(statistics(written_at_once(path, leave_out_first)))
    assert sum(bool(one and one[1]) for _, _, one in ours) > 30


def test_page_indexes_lead_to_every_page(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(3), write_page_index=True)
    after = rewritten(path, leave_out_first)
    with after.open("rb") as file:
        for chunk in next(Footer(file).groups()).get(1).values:
            offsets, bounds = read_index(file, chunk, OFFSETS), read_index(file, chunk, BOUNDS)
            assert offsets is not None
            pages, about = offsets.get(1).values, chunk.get(3)
            assert [page.get(3) for page in pages] == sorted({page.get(3) for page in pages}), "first rows"
            assert pages[0].get(3) == 0
            assert pages[-1].get(3) < 11
            end = max(page.get(1) + page.get(2) for page in pages)
            assert end == min(about.get(9), about.get(11) or about.get(9)) + about.get(7)
            for page in pages:
                file.seek(page.get(1))
                reader = Reader(file.read(page.get(2)))
                header = reader.struct()
                assert header.get(1) in (0, 3)
                assert reader.at + header.get(3) == page.get(2)
            assert bounds is None or len(bounds.get(1).values) == len(pages)
    assert table_of(after).num_rows == 11


def test_what_a_column_loses_is_said(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    table = pa.table({"ids": pa.array([[1, 2], [1], [2, 2], [1, 1]] * 4), "text": ["a", "b"] * 8})
    path = store(tmp_path / "a.parquet", table, use_dictionary=True)
    said = with_notices(path, put(3, "ids", value=[2, 1]))[1]
    several = "several" in request.node.name
    assert said == (["dictionary of later pages of ids.list.element"] if several else [])
    plain = store(tmp_path / "b.parquet", table, use_dictionary=False)
    assert with_notices(plain, put(3, "ids", value=[2, 1]))[1] == []


def test_all_rows_of_a_row_group_may_be_left_out(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table(2), rows_per_group=4)
    after = rewritten(path, lambda index, row: [] if index < 4 else [row])
    assert table_of(after)["place"].to_pylist() == [4, 5, 6, 7]


def test_a_file_that_claims_an_order_or_old_times_is_left_to_the_plain_output(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "at": pa.array([1, 2], pa.timestamp("us"))})
    for options in ({"sorting_columns": [pq.SortingColumn(0)]}, {"use_deprecated_int96_timestamps": True}):
        path = store(tmp_path / "a.parquet", table, **options)
        with (tmp_path / "out").open("wb") as out:
            assert isinstance(parquet_output(path, out, ()), ParquetOutput)


def test_a_value_that_does_not_fit_is_one_clear_error_and_closes_all_files(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", rich_table())
    held = open_files()
    with (tmp_path / "out").open("wb") as out:
        output, log = parquet_output(path, out, ()), open_log(path)
        for raw in log:
            output.replace(raw, [{**raw.value, "ids": ["text"]}])
        with pytest.raises(StorageError, match="row 0, column 'ids': the repaired value does not fit"):
            output.finish(log)
        output.abandon()
    assert open_files() == held
