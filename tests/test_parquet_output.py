"""A Parquet file written again: what no change touches survives type for type."""

from __future__ import annotations

import gc
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers import examples, some
from tito_audit.errors import StorageError
from tito_audit.record.edits import Edit, apply_edits
from tito_audit.storage import open_log, open_output
from tito_audit.storage.parquet import ParquetOutput

Row = Mapping[str, Any]
Change = Callable[[int, Row], Sequence[Row]]

MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("at", pa.timestamp("ns", "UTC")),
        pa.field("extra", pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])),
    ]
)
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a", None, "ü", ""]),
    "large_text": (pa.large_string(), ["a", None, "b", "c"]),
    "text_view": (pa.string_view(), ["a", None, "b" * 40, "c"]),
    "word": (pa.dictionary(pa.int32(), pa.string()), ["x", None, "y", "x"]),
    "flag": (pa.bool_(), [True, None, False, True]),
    "small": (pa.uint8(), [255, None, 0, 1]),
    "big": (pa.uint64(), [2**64 - 1, None, 0, 1]),
    "half": (pa.float16(), [np.float16(1.5), None, np.float16("nan"), np.float16(0)]),
    "single": (pa.float32(), [0.1, None, math.nan, -math.inf]),
    "money": (pa.decimal128(12, 3), [Decimal("1.250"), None, Decimal("-3"), Decimal("0")]),
    "bytes": (pa.binary(), [b"\xff\0", None, b"", b"a"]),
    "digest": (pa.binary(2), [b"ab", None, b"cd", b"\xff\0"]),
    "nothing": (pa.null(), [None] * 4),
    "day": (pa.date32(), [1, None, -5, 20000]),
    "clock": (pa.time64("ns"), [1, None, 86_399_999_999_999, 0]),
    "moment": (pa.timestamp("ns"), [1, None, 10**18 + 7, -1]),
    "zoned": (pa.timestamp("us", "Europe/Berlin"), [1, None, 10**15, -1]),
    "far": (pa.timestamp("us"), [2**62, None, -(2**62), 0]),
    "lasted": (pa.duration("ns"), [1, None, 2, 3]),
    "ids": (pa.list_(pa.int64()), [[1, 2, 3], None, [], [4, None]]),
    "large_ids": (pa.large_list(pa.int32()), [[1, 2, 3], None, [], [4, None]]),
    "view_ids": (pa.list_view(pa.int32()), [[1, 2, 3], None, [], [4, None]]),
    "pair": (pa.list_(pa.float32(), 2), [[1, 2], None, [3, None], [math.nan, 4]]),
    "logprobs": (pa.list_(pa.float32()), [[-0.1, None, -0.5], None, [], [-0.25]]),
    "values": (pa.list_(pa.float64()), [[math.nan, 1.0], None, [], [0.5, math.nan, math.nan]]),
    "mask": (pa.list_(pa.bool_()), [[True, False, True], None, [], [True]]),
    "grid": (pa.list_(pa.list_(pa.int32())), [[[1], [], None], None, [], [[2, 3]]]),
    "counts": (pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", None)], None, [], [("a", 1)]]),
    "times": (pa.list_(pa.timestamp("ns")), [[1, 2], None, [], [None, 3]]),
    "messages": (
        pa.list_(MESSAGE),
        [
            [
                {"role": "user", "ids": None, "logprobs": None, "at": 1, "extra": None},
                {"role": "bot", "ids": [1, 2], "logprobs": [None, -0.5], "at": None, "extra": {"a": 1, "b": None}},
            ],
            None,
            [],
            [{"role": "bot", "ids": [], "logprobs": [math.nan], "at": 7, "extra": {"a": None, "b": ["x", None]}}],
        ],
    ),
}


def rich_table(times: int = 1) -> pa.Table:
    fields = [
        pa.field(name, kind, metadata={"note": name} if name == "ids" else None)
        for name, (kind, _) in TYPES.items()
    ]
    metadata = {"huggingface": json.dumps({"info": {"features": {}}}), "pandas": "{}", "own": "x"}
    columns = [pa.array(values * times, kind) for kind, values in TYPES.values()]
    columns.append(pa.array(range(4 * times), pa.int64()))
    fields.append(pa.field("place", pa.int64(), nullable=False))
    return pa.table(columns, schema=pa.schema(fields, metadata=metadata))


def store(path: Path, table: pa.Table, rows_per_group: int | None = None, **options: Any) -> Path:
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=rows_per_group)
    return path


def rewritten(path: Path, change: Change, added: tuple[str, ...] = ("tito_audit",)) -> Path:
    """The file with `change` made to every row that can be read, written beside it."""
    target, log = path.with_name(f"out{path.suffix}"), open_log(path)
    with open_output(log, target, overwrite=True, added=added) as output:
        for raw in log:
            rows = change(raw.index, raw.value) if raw.value is not None else None
            if rows is None or (len(rows) == 1 and rows[0] is raw.value):
                output.keep(raw)
            else:
                output.replace(raw, rows)
        output.finish(log)
    return target


def put(row: int, *path: str | int, value: Any) -> Change:
    """One value put into one row."""
    return lambda index, old: [apply_edits(old, [Edit(path, value)])] if index == row else [old]


def table_of(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read()


def same_values(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    """Equal bit for bit, null and NaN told apart."""
    texts = [column.combine_chunks().to_string(window=10_000, container_window=10_000) for column in (a, b)]
    return a.type == b.type and texts[0] == texts[1]


def assert_only_changed(before: Path, after: Path, columns: set[str]) -> pa.Table:
    """The file in which no other column differs, as a table."""
    old, new = pq.ParquetFile(before), pq.ParquetFile(after)
    assert new.schema_arrow.equals(old.schema_arrow, check_metadata=True) or "tito_audit" in new.schema_arrow.names
    assert [str(new.schema.column(i)) for i in range(len(old.schema))] == [
        str(old.schema.column(i)) for i in range(len(old.schema))
    ]
    table = new.read()
    for name in old.schema_arrow.names:
        if name not in columns:
            assert table[name].equals(old.read()[name]) or same_values(table[name], old.read()[name]), name
    return table


def form_of(path: Path) -> list[Any]:
    """All that the footer says of how the row groups are stored."""
    meta = pq.ParquetFile(path).metadata
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    return [
        meta.format_version,
        {key: value for key, value in (meta.metadata or {}).items() if key != b"ARROW:schema"},
        b"ARROW:schema" in (meta.metadata or {}),
        [
            [
                (c.path_in_schema, c.physical_type, c.compression, c.encodings, c.is_stats_set, c.has_offset_index)
                for c in map(group.column, range(group.num_columns))
            ]
            for group in groups
        ],
        [(group.num_rows, group.sorting_columns) for group in groups],
    ]


def test_a_rich_table_survives_a_change_of_one_value(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table())
    after = rewritten(path, put(0, "place", value=9), added=())
    table = assert_only_changed(path, after, {"place"})
    assert table["place"].to_pylist() == [9, 1, 2, 3]
    assert form_of(after) == form_of(path)


def rebuilt(value: Any) -> Any:
    """An equal value of new objects."""
    if isinstance(value, Mapping):
        return {key: rebuilt(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rebuilt(entry) for entry in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def test_a_row_rebuilt_of_equal_values_is_no_change_and_the_file_stays_its_bytes(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table())
    target, log = tmp_path / "b.parquet", open_log(path)
    with open_output(log, target, overwrite=False) as output:
        for raw in log:
            output.replace(raw, [rebuilt(raw.value)])
        output.finish(log)
        assert not output.changed
    assert target.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("far", "nothing")])
@pytest.mark.parametrize("row", some(range(4), 1))
def test_every_type_can_be_built_anew_from_what_a_row_shows(tmp_path, name, row):
    """The value of another row is taken away and put back by way of a row that shows it."""
    path = store(tmp_path / "a.parquet", rich_table())
    shown = [raw.value[name] for raw in open_log(path)]
    after = rewritten(path, lambda i, old: [{**old, name: shown[row]}] if i != row else [old], added=())
    table = assert_only_changed(path, after, {name})
    expected = [TYPES[name][1][row]] * 4
    got, want = table[name].combine_chunks(), pa.array(expected, TYPES[name][0])
    if pa.types.is_dictionary(got.type):  # words that no row uses any more stay in the dictionary
        got, want = got.dictionary_decode(), want.dictionary_decode()
    # A list that took another's place has no null or NaN of its own to go by where it was empty.
    holes = {"pair", "values", "logprobs", "messages"}
    assert same_values(pa.chunked_array([got]), pa.chunked_array([want])) or name in holes
    shown_after = [raw.value[name] for raw in open_log(after)]
    assert repr(shown_after) == repr([shown[row]] * 4)


def only(column: str, values: list[Any], kind: pa.DataType, tmp_path: Path, **options: Any) -> Path:
    table = pa.table({column: pa.array(values, kind), "place": pa.array(range(len(values)))})
    return store(tmp_path / "a.parquet", table, **options)


def test_an_edit_deep_in_a_list_of_objects_leaves_the_others_bit_for_bit(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table())
    after = rewritten(path, put(0, "messages", 1, "ids", value=np.array([7, 8, 9], np.int32)))
    table = assert_only_changed(path, after, {"messages"})
    old, new = table_of(path)["messages"].combine_chunks(), table["messages"].combine_chunks()
    assert new[0].values.field("ids").to_pylist() == [None, [7, 8, 9]]
    for name in ("role", "logprobs", "at", "extra"):
        assert new[0].values.field(name).equals(old[0].values.field(name))
    assert str(new.slice(1)) == str(old.slice(1))


def test_entries_of_a_list_that_stay_are_not_built_anew(tmp_path):
    """What a row shows of a moment out of range and of null beside NaN would not give them back."""
    kind = pa.list_(pa.struct([("at", pa.timestamp("us")), ("lp", pa.list_(pa.float32()))]))
    values = [[{"at": 2**62, "lp": [None, math.nan]}, {"at": 1, "lp": None}, {"at": 2, "lp": []}]]
    path = only("m", values, kind, tmp_path)
    after = rewritten(path, lambda _, old: [{**old, "m": [{"at": "2000-01-01 00:00:00"}, old["m"][0]]}])
    old, new = (table_of(file)["m"].combine_chunks().values for file in (path, after))
    assert str(new.slice(1)) == str(old.slice(0, 1))
    assert str(new[0].as_py()["at"]) == "2000-01-01 00:00:00"
    assert new[0].as_py()["lp"] is None


def test_absent_is_null_and_null_stays_null(tmp_path):
    kind = pa.struct([("a", pa.int32()), ("b", pa.int32()), ("c", pa.int32())])
    path = only("s", [{"a": 1, "b": None, "c": 3}, None], kind, tmp_path)
    drop = rewritten(path, lambda i, old: [{**old, "s": {"c": 4}}] if i == 0 else [old])
    assert table_of(drop)["s"].to_pylist() == [{"a": None, "b": None, "c": 4}, None]
    gone = rewritten(path, lambda i, old: [{"place": old["place"]}] if i == 0 else [{**old, "s": {"b": 2}}])
    assert table_of(gone)["s"].to_pylist() == [None, {"a": None, "b": 2, "c": None}]


@pytest.mark.parametrize(
    ("old", "others", "expected"),
    [
        ([None, -0.5], [], [None, -0.25, None]),
        ([math.nan, -0.5], [], [math.nan, -0.25, math.nan]),
        ([-0.1, -0.5], [], [None, -0.25, None]),
        ([-0.1, -0.5], [[math.nan]], [math.nan, -0.25, math.nan]),
        ([-0.1, -0.5], [[None]], [None, -0.25, None]),
        ([None, -0.5], [[math.nan]], [None, -0.25, None]),
    ],
)
def test_a_missing_float_is_written_as_the_list_has_it_or_else_the_column(tmp_path, old, others, expected):
    path = only("lp", [old, *others], pa.list_(pa.float32()), tmp_path)
    new = np.array([np.nan, -0.25, np.nan])
    after = rewritten(path, put(0, "lp", value=new))
    assert repr(table_of(after)["lp"][0].as_py()) == repr(expected)


def test_a_float_that_must_not_be_null_is_nan(tmp_path):
    kind = pa.list_(pa.field("element", pa.float64(), nullable=False))
    path = only("lp", [[1.0]], kind, tmp_path)
    after = rewritten(path, put(0, "lp", value=np.array([np.nan, 2.0])))
    assert repr(table_of(after)["lp"].to_pylist()) == "[[nan, 2.0]]"


def test_numbers_take_the_width_of_their_column(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table())
    new = {
        "ids": [5, None, 6],
        "logprobs": np.array([0.1, -2.0], np.float64),
        "half": 0.1,
        "small": 7,
        "big": 2**64 - 2,
        "mask": np.array([0, 1, 1], np.int8),
        "pair": np.array([1, 2], np.int64),
    }
    after = rewritten(path, lambda i, old: [{**old, **new}] if i == 0 else [old])
    row = {
        name: column[0].as_py()
        for name, column in zip(new, table_of(after).select(list(new)).columns, strict=True)
    }
    assert row == {
        "ids": [5, None, 6],
        "logprobs": [float(np.float32(0.1)), -2.0],
        "half": np.float16(0.1),
        "small": 7,
        "big": 2**64 - 2,
        "mask": [False, True, True],
        "pair": [1.0, 2.0],
    }
    assert_only_changed(path, after, set(new))


def test_keys_of_a_map_can_change_come_and_go(tmp_path):
    path = only("m", [[("a", 1), ("b", None), ("a", 2)], [("z", 0)]], pa.map_(pa.string(), pa.int32()), tmp_path)
    after = rewritten(path, lambda i, old: [{**old, "m": {"a": 9, "c": 3}}] if i == 0 else [old])
    assert table_of(after)["m"].to_pylist() == [[("a", 1), ("a", 9), ("c", 3)], [("z", 0)]]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("small",), -1, "uint8"),
        (("small",), 256, "uint8"),
        (("small",), 1.5, "uint8"),
        (("small",), True, "uint8"),
        (("place",), None, "must not be null"),
        (("text",), 5, "string"),
        (("text",), {"a": 1}, "string"),
        (("ids",), np.array([1.5]), "truncated"),
        (("large_ids",), np.array([2**40]), "large_ids"),
        (("ids",), {"a": 1}, "a list was expected, not an object"),
        (("pair",), [1.0, 2.0, 3.0], "has 2 entries, not 3"),
        (("single",), 1e300, "single"),
        (("mask",), np.array([0, 2]), "2 is neither true nor false"),
        (("nothing",), 1, "nothing"),
        (("moment",), "soon", "soon"),
        (("messages", 1, "role"), None, "must not be null"),
        (("messages", 1, "token_ids"), [1], "no field 'token_ids'"),
        (("messages", 1), "hello", "an object was expected"),
        (("messages", 1, "extra", "a"), 1000, "messages"),
        (("unheard_of",), 1, "column 'unheard_of'"),
    ],
)
def test_a_value_that_the_column_cannot_hold_is_an_error_with_its_place(tmp_path, path, value, says):
    source = store(tmp_path / "a.parquet", rich_table())
    with pytest.raises(StorageError, match=says) as raised:
        rewritten(source, put(0, *path, value=value))
    assert str(source) in str(raised.value)
    assert "row 0" in str(raised.value)
    assert repr(path[0]) in str(raised.value)


def test_forks_and_left_out_rows_change_the_size_of_their_row_group_only(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=4)

    def change(index: int, row: Row) -> list[Row]:
        if index == 1:
            return [{**row, "place": 100}, row, {**row, "text": "fork"}]
        return [] if index == 2 or 4 <= index < 8 else [row]

    after = rewritten(path, change, added=())
    table = table_of(after)
    assert table["place"].to_pylist() == [0, 100, 1, 1, 3, 8, 9, 10, 11]
    assert table["text"].to_pylist() == ["a", None, None, "fork", "", "a", None, "ü", ""]
    assert [sizes for sizes, _ in form_of(after)[-1]] == [5, 4]
    source = pa.concat_tables([table_of(path).slice(i, 1) for i in (0, 1, 1, 1, 3, 8, 9, 10, 11)])
    for name in set(source.column_names) - {"place", "text", "word"}:
        assert same_values(table[name], source[name]), name
    assert table["word"].to_pylist() == source["word"].to_pylist()


@pytest.mark.parametrize("rows", [(0,), (5,), (11,), (0, 3, 6, 11), tuple(range(12)), (11, 10)])
def test_row_groups_keep_their_bounds_wherever_the_edits_are(tmp_path, rows):
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=5)
    after = rewritten(path, lambda i, row: [{**row, "place": -i - 1}] if i in rows else [row], added=())
    table = assert_only_changed(path, after, {"place"})
    assert table["place"].to_pylist() == [-i - 1 if i in rows else i for i in range(12)]
    assert form_of(after) == form_of(path)
    again = rewritten(path, lambda i, row: [{**row, "place": -i - 1}] if i in rows else [row], added=())
    assert pq.ParquetFile(again).metadata.num_row_groups == 3


def test_the_same_changes_give_the_same_bytes(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table(3), rows_per_group=5)
    change = put(7, "word", value="new")
    assert rewritten(path, change).read_bytes() == rewritten(path, change).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "none"},
        {"compression": {"text": "gzip", "ids.list.element": "lz4", "place": "brotli"}},
        {"use_dictionary": False},
        {"use_dictionary": ["text", "messages.list.element.role"]},
        {"use_dictionary": False, "column_encoding": {"place": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": False, "use_byte_stream_split": ["single"]},
        {"write_statistics": False},
        {"write_statistics": ["place"]},
        {"write_page_index": True},
        {"store_schema": False},
        {"use_compliant_nested_type": False},
        {"version": "1.0"},
        {"version": "2.4"},
        {"data_page_version": "2.0"},
        {"data_page_version": "2.0", "write_page_checksum": True, "compression": "zstd"},
        {"use_deprecated_int96_timestamps": True},
        {"store_decimal_as_integer": True},
        {"write_time_adjusted_to_utc": True},
        {"sorting_columns": [pq.SortingColumn(0, descending=True), pq.SortingColumn(3)]},
    ],
    ids=str,
)
def test_what_the_footer_tells_of_the_writing_is_kept(tmp_path, options):
    table = rich_table(2).drop_columns(["far"])
    if "version" in options:  # before 2.6 there were no nanoseconds
        table = table.drop_columns(["moment", "times", "messages"])
    path = store(tmp_path / "a.parquet", table, rows_per_group=4, **options)
    after = rewritten(path, put(6, "place", value=1), added=())
    assert_only_changed(path, after, {"place"})
    assert form_of(after) == form_of(path)
    pages = [[header_of(file, i) for i in range(2)] for file in (path, after)]
    assert pages[0] == pages[1]


def header_of(path: Path, group: int) -> bytes:
    """The kind of the first data page, and the field that follows its two sizes."""
    chunk = pq.ParquetFile(path).metadata.row_group(group).column(0)
    data = path.read_bytes()[chunk.data_page_offset :][:40]
    at = 3
    for _ in range(2):
        while data[at] & 0x80:
            at += 1
        at += 2
    return data[:2] + data[at - 1 : at]


def test_an_added_column_is_text_that_is_null_where_no_row_has_it(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table(2), rows_per_group=4, compression="zstd")
    note = {"repaired": {"splice": [np.int64(1)]}, "ü": None}
    after = rewritten(path, lambda i, row: [{**row, "tito_audit": note}] if i == 5 else [row])
    table = assert_only_changed(path, after, set())
    assert table.schema.names == [*rich_table().schema.names, "tito_audit"]
    assert table.schema.field("tito_audit") == pa.field("tito_audit", pa.string())
    assert table["tito_audit"].to_pylist() == [None] * 5 + ['{"repaired":{"splice":[1]},"ü":null}'] + [None] * 2
    assert {row[2] for row in form_of(after)[3][0]} == {"ZSTD"}

    again = rewritten(after.rename(path), lambda i, row: [{**row, "tito_audit": {"n": 2}}] if i == 0 else [row])
    assert table_of(again)["tito_audit"].to_pylist()[:6] == [
        '{"n":2}',
        *[None] * 4,
        '{"repaired":{"splice":[1]},"ü":null}',
    ]
    assert table_of(again).schema.equals(table.schema, check_metadata=True)


def test_an_added_column_that_the_file_has_as_objects_is_edited_as_objects(tmp_path):
    path = only("tito_audit", [{"n": 1}, None], pa.struct([("n", pa.int8())]), tmp_path)
    after = rewritten(path, lambda i, row: [{**row, "tito_audit": {"n": i + 2}}])
    assert table_of(after)["tito_audit"].to_pylist() == [{"n": 2}, {"n": 3}]


def test_files_without_rows_or_row_groups_stay_their_bytes(tmp_path):
    empty = store(tmp_path / "a.parquet", rich_table().slice(0, 0))
    assert rewritten(empty, lambda _, row: [row]).read_bytes() == empty.read_bytes()
    with pq.ParquetWriter(tmp_path / "b.parquet", rich_table().schema):
        pass
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups == 0
    bare = tmp_path / "b.parquet"
    assert rewritten(bare, lambda _, row: [row]).read_bytes() == bare.read_bytes()


def test_row_groups_without_rows_are_kept_and_all_rows_may_be_left_out(tmp_path):
    table = rich_table()
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 2), table.slice(0, 0), table.slice(2)):
            writer.write_table(part)
    path = tmp_path / "a.parquet"
    sizes = [rows for rows, _ in form_of(path)[-1]]
    assert sizes == [2, 0, 2]
    after = rewritten(path, put(3, "place", value=0))
    assert [rows for rows, _ in form_of(after)[-1]] == sizes
    none = rewritten(path, lambda *_: [], added=())
    assert table_of(none).num_rows == 0
    assert pq.ParquetFile(none).schema_arrow.equals(table_of(path).schema, check_metadata=True)


def test_rows_that_cannot_be_read_go_through_untouched(tmp_path):
    data = pa.array([b"fine", b"\xff\xfe", b"end"]).view(pa.string())
    path = store(tmp_path / "a.parquet", pa.table({"t": data, "n": [1, 2, 3]}))
    after = rewritten(path, put(2, "n", value=7), added=())
    assert table_of(after)["t"].cast(pa.binary()).to_pylist() == [b"fine", b"\xff\xfe", b"end"]
    assert table_of(after)["n"].to_pylist() == [1, 2, 7]


def test_extension_types_are_edited_by_what_they_store(tmp_path):
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.float32).reshape(2, 2, 2))
    table = pa.table({"grid": tensors, "name": pa.array(['{"a":1}', None], pa.json_())})
    path = store(tmp_path / "a.parquet", table)
    after = rewritten(path, put(0, "grid", value=np.array([9, 8, 7, 6], np.float32)))
    assert table_of(after)["grid"].combine_chunks().storage.to_pylist() == [[9, 8, 7, 6], [4, 5, 6, 7]]
    after = rewritten(path, put(1, "name", value="[]"), added=())
    assert table_of(after)["name"].combine_chunks().storage.to_pylist() == ['{"a":1}', "[]"]
    assert table_of(after).schema.equals(table.schema, check_metadata=True)


def test_words_of_a_dictionary_inside_a_list_of_objects_can_change(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int8())]))
    path = only("m", [[{"role": "a", "n": 1}, {"role": "b", "n": None}], None], kind, tmp_path)
    after = rewritten(path, put(0, "m", 1, "role", value="c"))
    assert table_of(after)["m"].type == table_of(path)["m"].type
    assert table_of(after)["m"].to_pylist() == [[{"role": "a", "n": 1}, {"role": "c", "n": None}], None]


def test_old_times_that_nanoseconds_cannot_hold_are_never_written_as_others(tmp_path):
    year_9999 = 253_402_300_799_000_000
    for kind, values in (
        (pa.timestamp("us"), [year_9999]),
        (pa.list_(pa.timestamp("us")), [[1, None, year_9999]]),
    ):
        path = only("t", values, kind, tmp_path, use_deprecated_int96_timestamps=True)
        with pytest.raises(StorageError, match="outside the years"):
            rewritten(path, put(0, "place", value=7))


def test_a_repair_that_breaks_the_order_which_the_footer_claims_is_an_error(tmp_path):
    table = pa.table({"n": [1, 2, 2, 5], "m": [0, 0, 0, 0]})
    path = store(tmp_path / "a.parquet", table, sorting_columns=[pq.SortingColumn(0)])
    fine = rewritten(path, put(1, "n", value=1), added=())
    assert form_of(fine)[-1] == form_of(path)[-1]
    assert rewritten(path, put(1, "m", value=7)).exists()
    with pytest.raises(StorageError, match="sorted by n"):
        rewritten(path, put(0, "n", value=3))


def test_a_row_group_that_cannot_be_read_is_an_error_that_leaves_no_trace(tmp_path):
    path = store(
        tmp_path / "a.parquet", pa.table({"a": list(range(2000))}), rows_per_group=1000, use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))
    with pytest.raises(StorageError, match="row group 1"):
        rewritten(path, put(3, "a", value=1))


def test_an_output_given_up_halfway_touches_its_file_no_more(tmp_path):
    path = store(tmp_path / "a.parquet", rich_table(2), rows_per_group=2)
    out = io.BytesIO()
    output, rows = ParquetOutput(path, out, ()), list(open_log(path))
    output.replace(rows[0], [])
    output.keep(rows[5])
    out.close()
    del output
    gc.collect()


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        parts = {kind.field(i).name: values_of(kind.field(i).type) for i in range(kind.num_fields)}
        return st.none() | st.fixed_dictionaries(parts)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.none() | st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_floating(kind):
        return st.none() | st.floats(width=32, allow_nan=False)
    return st.none() | (st.text(max_size=3) if pa.types.is_string(kind) else st.integers(-100, 100))


LEAVES = st.sampled_from([pa.int8(), pa.float32(), pa.string()])
KINDS = st.recursive(
    LEAVES,
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{i}", k) for i, k in enumerate(kinds)])
        )
    ),
    max_leaves=5,
)


@st.composite
def swaps(draw: st.DrawFn) -> tuple[pa.DataType, list[Any], list[Any]]:
    """A type, values of it, and as many other values."""
    kind = draw(KINDS)
    pairs = draw(st.lists(st.tuples(values_of(kind), values_of(kind)), min_size=1, max_size=5))
    return kind, [old for old, _ in pairs], [new for _, new in pairs]


@settings(
    max_examples=examples(15, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(swaps(), st.integers(1, 3))
def test_any_value_can_take_the_place_of_any_other_of_its_type(tmp_path, swap, rows_per_group):
    """A file made to say what another says is that other, read back."""
    kind, old, new = swap
    source = only("v", old, kind, tmp_path, rows_per_group=rows_per_group)
    shown = pa.table({"v": pa.array(new, kind)})
    goal = [raw.value["v"] for raw in open_log(store(tmp_path / "goal.parquet", shown))]
    after = rewritten(source, lambda i, row: [{**row, "v": merged(row["v"], goal[i])}], added=())
    assert table_of(after)["v"].to_pylist() == table_of(tmp_path / "goal.parquet")["v"].to_pylist()


def merged(old: Any, new: Any) -> Any:
    """The new value sharing with the old one what is equal in both."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: merged(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [merged(a, b) for a, b in zip(old, new, strict=True)]
    return new
