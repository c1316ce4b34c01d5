"""Files to rows: every kind of file, whole and broken, whatever it is called."""

from __future__ import annotations

import gzip
import json
import os
import threading
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tests.world import json_lines, zstd
from tito_audit.errors import StorageError
from tito_audit.storage import RawRow, find_logs, open_log
from tito_audit.storage.streams import cut_lines, cut_values, rows_of_pieces

SHARED = Path(__file__).resolve().parents[2] / "shared"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6)


def rows_of(path: Path, **options: Any) -> list[RawRow]:
    return list(open_log(path, **options))


def values_of(path: Path, **options: Any) -> list[Any]:
    rows = rows_of(path, **options)
    assert all(row.error is None for row in rows), [row.error for row in rows if row.error]
    assert [row.index for row in rows] == list(range(len(rows)))
    return [row.value for row in rows]


def chunks(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` cut into blocks of these sizes, over and over."""
    blocks, start, turn = [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        blocks.append(data[start : start + size])
        start, turn = start + size, turn + 1
    return blocks


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# JSON, any chunking


@given(ROWS, st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_lines_give_the_same_rows_however_the_bytes_are_cut(rows, sizes):
    read = list(rows_of_pieces(cut_lines(chunks(json_lines(rows), sizes), 1 << 20), 1 << 20, lines=True))
    assert [row.value for row in read] == rows


@given(ROWS, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([None, 2]))
def test_an_array_gives_the_same_rows_however_the_bytes_are_cut(rows, sizes, indent):
    data = json.dumps(rows, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    read = list(rows_of_pieces(cut_values(chunks(data, sizes), array=True, limit=1 << 20), 1 << 20))
    assert [row.value for row in read] == rows
    assert [row.index for row in read] == list(range(len(rows)))


@given(ROWS, st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_documents_one_after_the_other_are_rows(rows, sizes):
    data = b"\n".join(json.dumps(row, indent=1).encode() for row in rows)
    read = list(rows_of_pieces(cut_values(chunks(data, sizes), array=False, limit=1 << 20), 1 << 20))
    assert [row.value for row in read] == rows


@given(st.binary(max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_cutting_bytes_that_are_not_json_depends_on_no_chunking_and_loses_nothing_but_separators(data, sizes):
    whole = [piece.data for piece in cut_values([data], array=False, limit=1 << 20)]
    assert [piece.data for piece in cut_values(chunks(data, sizes), array=False, limit=1 << 20)] == whole
    assert b"".join(whole).strip() == data.strip() or not b"".join(whole).strip()


@settings(max_examples=30)
@given(ROWS)
def test_plain_gzip_and_zstd_hold_the_same_rows(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("packed")
    data = json_lines(rows)
    for name, content in (
        ("a.jsonl", data),
        ("b.jsonl.gz", gzip.compress(data)),
        ("c.jsonl.zst", zstd(data)),
    ):
        assert values_of(write(folder / name, content)) == rows


# What a file is, its content says

PAIR = [{"a": 1}, {"a": 2}]
LINES, (FIRST, SECOND) = json_lines(PAIR), [json_lines([row]) for row in PAIR]
DOCUMENT = {"steps": [{"a": [1, 2]}, {"b": '} ] \\ " {'}], "c": None}
ARRAY = [{"a": [1, {"b": "]"}]}, {"c": {}}]
MARK = b"\xef\xbb\xbf"
FILES: dict[str, tuple[str, bytes, list[Any]]] = {
    **{
        f"lines called .{name}": (f"log.{name}", LINES, PAIR)
        for name in ("parquet", "txt", "jsonl.gz", "pkl", "json")
    },
    "members of gzip one after the other": ("a.gz", gzip.compress(FIRST) + gzip.compress(SECOND), PAIR),
    "frames of zstd one after the other": ("a.zst", zstd(FIRST) + zstd(SECOND), PAIR),
    "a document on one line": ("a.json", json.dumps(DOCUMENT).encode(), [DOCUMENT]),
    "a document on one line that ends": ("a.json", json.dumps(DOCUMENT).encode() + b"\n", [DOCUMENT]),
    "a document on many lines": ("a.json", json.dumps(DOCUMENT, indent=2).encode(), [DOCUMENT]),
    "a document on many lines that end": ("a.json", json.dumps(DOCUMENT, indent=2).encode() + b"\n", [DOCUMENT]),
    "a document whose second line is an object": (
        "a.json",
        b'{"nodes": [\n{"full_text": "a"}\n]}\n',
        [{"nodes": [{"full_text": "a"}]}],
    ),
    "an array on one line": ("a.json", json.dumps(ARRAY).encode(), ARRAY),
    "an array on many lines": ("a.json", json.dumps(ARRAY, indent=2).encode(), ARRAY),
    "an empty array": ("a.json", b" [ ]\n", []),
    "a byte order mark and line ends of Windows": ("a.jsonl", MARK + b'{"a": 1}\r\n{"a": 2}\r\n', PAIR),
    "the same in gzip": ("a.gz", gzip.compress(MARK + b'{"a": 1}\r\n{"a": 2}\r\n'), PAIR),
    "a byte order mark before a document": ("a.json", MARK + b'{\n"a": 1}', PAIR[:1]),
    "nothing": ("a.jsonl", b"", []),
    "blank lines alone": ("a.jsonl", b"\n \n", []),
    "nothing in gzip": ("a.gz", gzip.compress(b""), []),
    "a byte order mark alone": ("a", MARK, []),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_read_by_what_it_holds(tmp_path, case):
    name, data, rows = FILES[case]
    assert values_of(write(tmp_path / name, data)) == rows


def test_a_table_called_jsonl_is_a_table(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "log.jsonl")
    assert values_of(tmp_path / "log.jsonl") == PAIR


def test_blank_lines_are_skipped_and_counted(tmp_path):
    rows = rows_of(write(tmp_path / "a.jsonl", b'\n{"a": 1}\n  \n\n{"a": 2}\n\n'))
    assert [(row.index, row.value) for row in rows] == [(1, {"a": 1}), (4, {"a": 2})]


def test_what_python_writes_beside_json_is_read(tmp_path):
    (row,) = rows_of(write(tmp_path / "a.jsonl", b'{"x": NaN, "y": [-Infinity], "z": "\\ud800", "n": 1e999}\n'))
    assert np.isnan(row.value["x"])
    assert row.value["y"] == [float("-inf")]
    assert row.value["z"] == "\ud800"


def test_a_log_can_be_read_twice_and_tells_how_far_it_is(tmp_path):
    log = open_log(write(tmp_path / "a.jsonl", json_lines([{"a": i} for i in range(5)])))
    assert list(log) == list(log)
    assert log.position == log.size == (tmp_path / "a.jsonl").stat().st_size


def test_a_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(json_lines([{"a": 1}, {"a": 2}]),))
    writer.start()
    assert values_of(pipe) == [{"a": 1}, {"a": 2}]
    writer.join()


# Broken rows are error rows

LONG = b'{"a": "' + b"x" * 5000 + b'"}'
BAD_LINES = [b'{"a": 1}', b'{"a": oops}', b'{"a": "\xff"}', b"[1, 2]", b'[{"a": 1}, {"a": 2}]', b"7", b'{"a": 2}']
ERRORS = ["not JSON", "UTF-8 at byte 7", "a list, not an object", "list of 2 objects", "is int"]
CUT = [{"a": 1}, "ends in the middle of a row"]
BROKEN: dict[str, tuple[bytes, list[Any]]] = {
    "bad lines among others": (b"\n".join(BAD_LINES), [PAIR[0], *ERRORS, PAIR[1]]),
    **{
        f"a first line {line!r} makes no document of it": (line + b"\n" + LINES, ["", *PAIR])
        for line in (b'{"a": 1, "b": [1, 2', b'{"a": 1}}', b'{"a": oops}', b"INFO starting up")
    },
    "lists from the first line on": (b'[{"a": 1}]\n[{"a": 2}]\n', ["list of 1 objects"] * 2),
    "a last line cut off": (FIRST + b'{"a": [1, 2', CUT),
    "an array cut off": (b'[{"a": 1}, {"a": [1, 2', CUT),
    "a last document cut off": (b'{\n"a": 1\n}\n{\n"a": ', CUT),
    "an array that was never closed": (b'[\n{"a": 1},\n{"a": 2},\n', [*PAIR, ""]),
    "a document that is not JSON": (b'{\n  "a": oops\n}\n', ["not JSON"]),
    "a first line over the limit": (LONG, ["5,009 bytes"]),
    "an entry of an array over the limit": (b"[" + LONG + b',{"a": 1}]', ["", PAIR[0]]),
}
"""What a file holds, and its rows: the value, or what the error says."""


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_an_error_row_and_the_others_are_read(tmp_path, case):
    data, expected = BROKEN[case]
    rows = rows_of(write(tmp_path / "a.jsonl", data), max_row_bytes=1000)
    assert [row.index for row in rows] == list(range(len(expected)))
    assert [row.value for row in rows] == [None if isinstance(row, str) else row for row in expected]
    for row, says in zip(rows, expected, strict=True):
        assert (row.error and says in row.error) if isinstance(says, str) else row.error is None


def test_a_line_over_the_limit_is_skipped_and_never_held(tmp_path):
    path = tmp_path / "long.jsonl"
    block = b"1," * (1 << 19)
    with path.open("wb") as out:
        out.write(b'{"a": 1}\n{"token_ids": [')
        for _ in range(200):
            out.write(block)
        out.write(b'1]}\n{"a": 2}\n')
    tracemalloc.start()
    rows = rows_of(path, max_row_bytes=4 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.value for row in rows] == [{"a": 1}, None, {"a": 2}]
    assert "over the limit of 4,194,304" in str(rows[1].error)
    assert peak < 16 << 20


def test_a_document_over_the_limit_is_refused_with_advice(tmp_path):
    data = json.dumps({"a": ["x" * 100] * 100}, indent=1).encode()
    with pytest.raises(StorageError, match="as JSONL"):
        rows_of(write(tmp_path / "a.json", data), max_row_bytes=1000)


# Damaged and foreign files


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_rows_before_damage_are_given_and_then_one_error_row(tmp_path, pack, damage):
    noise = np.random.default_rng(0).integers(0, 1 << 30, examples(40_000, 100_000)).tolist()
    packed = pack(json_lines([{"a": number} for number in noise]))
    half = len(packed) // 2
    broken = packed[:half] if damage == "cut" else packed[:half] + b"\0" * 64 + packed[half + 64 :]
    rows = rows_of(write(tmp_path / "a.jsonl", broken))
    # Deflate has no checks of its own: bytes past the damage may come out as lines of noise.
    whole = next(i for i, row in enumerate(rows) if row.value is None)
    assert whole > 1000
    assert [row.value for row in rows[:whole]] == [{"a": number} for number in noise[:whole]]
    assert rows[-1].index > rows[-2].index
    assert "cannot be read past byte" in str(rows[-1].error)


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_packed_file_of_which_nothing_can_be_read_is_a_storage_error(tmp_path, pack):
    packed = pack(json_lines([{"a": 1}]))
    with pytest.raises(StorageError, match="No row could be read"):
        rows_of(write(tmp_path / "a.jsonl", packed[:14]))


def test_damaged_parquet_is_a_storage_error_or_an_error_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(2000))}), path, row_group_size=1000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    with pytest.raises(StorageError, match="footer"):
        rows_of(write(tmp_path / "cut.parquet", bytes(data[:-20])))
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 60] = b"\xff" * 60
    rows = rows_of(write(tmp_path / "hit.parquet", bytes(data)))
    assert [row.value for row in rows[:-1]] == [{"a": i} for i in range(1000)]
    assert "row group 1" in str(rows[-1].error)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.pkl", b"\x80\x04\x95...", "runs whatever code"),
        ("a.jsonl", b"\x80\x05\x95...", "dataclasses.asdict"),
        ("old.pickle", b"(dp0\nS'a'\n.", "runs whatever code"),
        ("a.pkl.gz", gzip.compress(b"\x80\x03}q\0.", mtime=0), "runs whatever code"),
        ("a.db", b"SQLite format 3\0....", "sqlite3 -json"),
        ("a.msgpack", b"\x83\xa1a\x01", "msgpack"),
        ("a.arrow", b"ARROW1\0\0", "an Arrow file whose schema"),
        ("a.arrow", b"\xff\xff\xff\xff", "an Arrow file whose schema"),
        ("a.arrow.gz", gzip.compress(b"ARROW1\0\0", mtime=0), "a compressed Arrow file"),
        ("a.feather", b"FEA1", r"feather\.write_feather"),
        ("a.xz", b"\xfd7zXZ\0", "unxz"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "iconv"),
        ("a.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "compressed twice"),
        ("a.csv", b"prompt,completion\n1,2\n", "a CSV file"),
        ("a.txt", b"prompt,completion\n1,2\n", "neither JSON nor a table"),
        ("a.jsonl", b"\n<!DOCTYPE html>\n<html></html>", "a web page.\nPass the address of the file itself"),
        ("a.npy", b"\x93NUMPY\x01\0", "a numpy array"),
        ("a.bin", bytes(range(128, 256)), "binary data"),
    ],
)
def test_files_of_other_kinds_are_refused_with_a_way_out(tmp_path, name, data, says):
    with pytest.raises(StorageError, match=says) as raised:
        rows_of(write(tmp_path / name, data))
    assert str(tmp_path / name) in str(raised.value)


def test_torch_files_and_numpy_archives_are_refused_with_a_way_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "0.pt", "w") as archive:
        archive.writestr("0/data.pkl", b"\x80\x02}q\0.")
    with pytest.raises(StorageError, match="Torch file"):
        rows_of(tmp_path / "0.pt")
    np.savez(tmp_path / "a.npz", sequences=np.zeros(3))
    with pytest.raises(StorageError, match=r"np\.load"):
        rows_of(tmp_path / "a.npz")


def test_folders_and_missing_and_forbidden_files_are_storage_errors(tmp_path):
    with pytest.raises(StorageError, match="folder"):
        open_log(tmp_path)
    with pytest.raises(StorageError, match="No such file"):
        open_log(tmp_path / "absent.jsonl")
    path = write(tmp_path / "locked.jsonl", b"{}")
    path.chmod(0)
    if not os.access(path, os.R_OK):
        with pytest.raises(StorageError, match="Permission denied"):
            open_log(path)


@settings(max_examples=examples(60, 200), deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=80).map(gzip.compress) | st.binary(max_size=80).map(zstd))
def test_no_bytes_whatever_raise_anything_else(tmp_path_factory, data):
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", data)
    for start in (b"", b"{", b"[", b"PAR1", b'{"a": [1]}\n'):
        write(path, start + data)
        try:
            rows = rows_of(path, max_row_bytes=64)
        except StorageError:
            continue
        assert all((row.value is None) != (row.error is None) for row in rows)


# Parquet


def shown(value: Any) -> Any:
    """A value with the kind of its arrays beside their entries."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind, value.tolist()
    if isinstance(value, dict):
        return {name: shown(entry) for name, entry in value.items()}
    return [shown(entry) for entry in value] if isinstance(value, list) else value


TENSORS = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
COLUMNS: dict[str, tuple[pa.Array, Any, Any]] = {
    "ids": (pa.array([[1, 2, 3], None]), ("i", [1, 2, 3]), None),
    "mask": (pa.array([[True, False], None]), ("b", [True, False]), None),
    "logprobs": (pa.array([[-0.5, None], None]), ("f", [-0.5, np.nan]), None),
    "holes": (pa.array([[1, None], None]), [1, None], None),
    "calls": (
        pa.array([[{"ids": [1, 2], "text": "a"}, {"ids": [], "text": None}], None]),
        [{"ids": ("i", [1, 2]), "text": "a"}, {"ids": ("i", [])}],
        None,
    ),
    "nested": (pa.array([[[1], [2, 3], []], None]), [("i", [1]), ("i", [2, 3]), ("i", [])], None),
    "names": (pa.array([["x", None], None]), ["x", None], None),
    "extra": (pa.array([{"a": 1, "b": None}, None]), {"a": 1}, None),
    "name": (pa.array(["é", None]), "é", None),
    "nothing": (pa.nulls(2), None, None),
    "map": (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())), {"k": 1}, None),
    "word": (pa.array(["x", "y"]).dictionary_encode(), "x", "y"),
    "time": (
        pa.array([1, 2], pa.timestamp("ns", tz="UTC")),
        *(f"1970-01-01 00:00:00.00000000{at}Z" for at in (1, 2)),
    ),
    "day": (pa.array([-(2**30), 1], pa.date32()), "<value out of range: -1073741824>", "1970-01-02"),
    "tensor": (
        pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), TENSORS),
        ("i", [1, 2]),
        ("i", [3, 4]),
    ),
    "empty": (pa.array([[], []], pa.list_(pa.null())), [], []),
    "raw": (pa.array([b"\xff", None]), b"\xff", None),
    "struct": (pa.array([{"a": {"b": [1, 2]}}, None]), {"a": {"b": ("i", [1, 2])}}, None),
}
"""Columns of two rows, and what each row shows."""


@pytest.mark.parametrize("name", COLUMNS)
def test_lists_of_numbers_in_a_table_are_arrays_and_the_rest_is_plain(tmp_path, name):
    column, *expected = COLUMNS[name]
    pq.write_table(pa.table({name: column}), tmp_path / "a.parquet")
    assert repr([shown(row[name]) for row in values_of(tmp_path / "a.parquet")]) == repr(expected)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.large_list(pa.int64()),
        pa.list_(pa.uint16()),
        pa.list_(pa.float32()),
        pa.large_list(pa.float16()),
        pa.list_(pa.int64(), 3),
    ],
    ids=str,
)
def test_every_list_of_numbers_keeps_its_values_across_batches_and_groups(tmp_path, kind):
    lists = [[i, i + 1, i + 2] for i in range(500)]
    lists[7] = None
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array(lists, kind)}), path, row_group_size=64)
    read = values_of(path)
    assert [None if row["a"] is None else row["a"].tolist() for row in read] == lists
    assert all(isinstance(row["a"], np.ndarray) for i, row in enumerate(read) if i != 7)


def test_text_that_is_not_utf8_spoils_its_own_parquet_row_only(tmp_path):
    good, bad = pa.array([b"a", b"\xff", b"c"]).cast(pa.binary()), None
    strings = pa.StringArray.from_buffers(3, good.buffers()[1], good.buffers()[2])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"s": strings}), path)
    rows = rows_of(path)
    assert [row.value for row in rows] == [{"s": "a"}, bad, {"s": "c"}]
    assert "'s'" in str(rows[1].error)


def test_a_parquet_row_over_the_limit_is_an_error_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [[1], list(range(10_000)), [2]]}), path)
    rows = rows_of(path, max_row_bytes=10_000)
    assert [row.index for row in rows] == [0, 1, 2]
    assert [None if row.value is None else row.value["a"].tolist() for row in rows] == [[1], None, [2]]


def test_parquet_without_rows_is_a_log_without_rows(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == []


# Finding logs


def test_a_folder_gives_its_logs_sorted_and_leaves_out_what_is_no_log(tmp_path):
    wanted = ["a.jsonl", "sub/b.jsonl.gz", "sub/c.parquet", "z.json"]
    others = [".hidden.jsonl", ".cache/d.jsonl", "config.json", "tokenizer.json", "notes.txt", "e.jsonl.tmp"]
    for name in wanted + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_logs([str(tmp_path)]) == [tmp_path / name for name in wanted]
    assert find_logs([str(tmp_path / "**" / "*.gz")]) == [tmp_path / "sub" / "b.jsonl.gz"]
    assert find_logs([str(tmp_path / "notes.txt"), str(tmp_path / "*.txt")]) == [tmp_path / "notes.txt"]
    assert find_logs([str(tmp_path / "s*")]) == [tmp_path / name for name in wanted[1:3]]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path):
    (tmp_path / "step[3].jsonl").write_bytes(b"")
    assert find_logs([str(tmp_path / "step[3].jsonl")]) == [tmp_path / "step[3].jsonl"]


def test_what_cannot_be_found_says_what_to_do(tmp_path):
    (tmp_path / "rollouts.jsonl").write_bytes(b"")
    (tmp_path / "none").mkdir()
    for argument, says in (
        (tmp_path / "rolouts.jsonl", r"Did you mean .*rollouts\.jsonl"),
        (tmp_path / "absent" / "a.jsonl", "does not exist either"),
        (tmp_path / "none", r"\.jsonl\.zst"),
        (tmp_path / "*.parquet", "no file matches"),
        ("file:///logs/a.jsonl", r'scan_rollouts\("/logs/a.jsonl"\)'),
    ):
        with pytest.raises(StorageError, match=says):
            find_logs([str(argument)])


@pytest.mark.shared
def test_the_shared_rollouts_are_read_line_by_line():
    folder = SHARED / "rollouts"
    if not folder.is_dir():
        pytest.skip("the shared rollouts are not beside this checkout")
    for path in find_logs([str(folder)]):
        assert all("calls" in row for row in values_of(path))
