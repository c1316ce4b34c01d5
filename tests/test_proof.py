"""The proof that a repair lost nothing finds every kind of loss planted here, and nothing where none is."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.torture.forms_tables import joined_parquet
from tests.torture.proof import lost

BOM = b"\xef\xbb\xbf"
NAMED = [{"columns": ["ids", "calls[].mask", "tito_audit"], "into": 1, "rows": [[1, 2]]}]
"""Row 1 is repaired."""


def report_of(log: Path, written: Path, changed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    moved = sum(stop - start for change in changed for start, stop in change["rows"] if change["into"] == 0)
    rows = sum(stop - start for change in changed for start, stop in change["rows"])
    return {
        "before": {"notices": []},
        "after": {"notices": []},
        "notes": [],
        "rows": {"repaired": rows - moved, "quarantined": moved},
        "files": [{"log": str(log), "written": str(written)}],
        "changed": [{"file": str(log), **change} for change in changed],
    }


def losses(folder: Path, before: bytes, after: bytes, changed: Any = NAMED, suffix: str = ".jsonl") -> list[str]:
    log, written = folder / f"log{suffix}", folder / f"out{suffix}"
    log.write_bytes(before)
    written.write_bytes(after)
    return lost(log, written, report_of(log, written, changed))


# Text


def test_a_mask_may_be_spelled_otherwise_only_where_the_report_names_its_style(tmp_path: Path) -> None:
    log, written = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_bytes(b'{"loss_mask": [0, 1], "weights": [0, 1]}\n')
    written.write_bytes(b'{"loss_mask": [0.0, 1.0], "weights": [0.0, 1.0]}\n')
    report = report_of(log, written, [{"columns": ["loss_mask", "weights"], "into": 1, "rows": [[0, 1]]}])
    assert len(lost(log, written, report)) == 4
    report["notes"] = [{"text": "loss_mask is written as float, not binary"}]
    assert lost(log, written, report) == [f"row 0: weights: {n} is written as {n}.0" for n in (0, 1)]


LINES = (
    b'{"id": "a", "ids": [1, 2], "n": 1.0}\n'
    b'{"id": "b\\u00e9\\/", "ids": [1, 2, 1e5], "x": 1, "x": 2, "calls": [{"mask": [0, 1], "lp": [-0.10]}]}\n'
    b"\n"
    b'{"id": "c", "ids": []}\n'
)
CHANGED = LINES.replace(b"[1, 2, 1e5]", b"[1, 3, 1e5]").replace(b"-0.10]}]}", b'-0.10]}], "tito_audit": {"v": 1}}')

LOSSES_OF_TEXT = {
    "another row": (b'"n": 1.0', b'"n": 2.0'),
    "the spelling of a number in another row": (b'"n": 1.0', b'"n": 1'),
    "a key that is not named": (b'"id": "b', b'"id": "d'),
    "a key is gone": (b'"x": 1, "x": 2, ', b""),
    "the first of repeated keys is gone": (b'"x": 1, "x": 2', b'"x": 2'),
    "the first of repeated keys changed": (b'"x": 1, "x": 2', b'"x": 3, "x": 2'),
    "the order of keys": (b'"id": "b\\u00e9\\/", "ids": [1, 3, 1e5]', b'"ids": [1, 3, 1e5], "id": "b\\u00e9\\/"'),
    "an escape": (b"\\u00e9", "é".encode()),
    "an escaped slash": (b"\\/", b"/"),
    "the spelling of an entry": (b"1e5", b"100000"),
    "a float rounded": (b"1, 3, 1e5", b"1, 3, 100000.00000001"),
    "a neighbour inside an object": (b"-0.10", b"-0.20"),
    "a space": (b'"lp": [', b'"lp":['),
    "a key more": (b'"x": 2', b'"x": 2, "y": 3'),
    "a blank line": (b"\n\n", b"\n"),
    "a row": (b'{"id": "c", "ids": []}\n', b""),
    "a row more": (b'{"id": "c", "ids": []}\n', b'{"id": "c", "ids": []}\n{}\n'),
    "the last line end": (b'"ids": []}\n', b'"ids": []}'),
    "JSON": (b"[1, 3, 1e5]", b"[1, 3, ]"),
    "JSON for others than Python": (b"[1, 3, 1e5]", b"[1, NaN, 1e5]"),
    "UTF-8": (b'"v": 1', b'"v": "\xff"'),
}


def test_a_named_change_is_no_loss(tmp_path: Path) -> None:
    assert losses(tmp_path, LINES, CHANGED) == []
    assert losses(tmp_path, BOM + LINES, BOM + CHANGED) == []
    ends = (content.replace(b"\n", b"\r\n") for content in (LINES, CHANGED))
    assert losses(tmp_path, *ends) == []
    packed = (gzip.compress(content) for content in (LINES, CHANGED))
    assert losses(tmp_path, *packed, suffix=".jsonl.gz") == []


@pytest.mark.parametrize("what", LOSSES_OF_TEXT)
def test_a_loss_in_text_is_found(what: str, tmp_path: Path) -> None:
    old, new = LOSSES_OF_TEXT[what]
    assert CHANGED.count(old) == 1
    assert losses(tmp_path, LINES, CHANGED.replace(old, new)) != []


def test_what_is_around_the_rows_is_compared(tmp_path: Path) -> None:
    assert "the byte-order mark is gone" in losses(tmp_path, BOM + LINES, CHANGED)
    assert losses(tmp_path, LINES.replace(b"\n", b"\r\n"), CHANGED) != []
    assert losses(tmp_path, LINES, CHANGED, []) != []
    members = gzip.compress(LINES[:10]) + gzip.compress(LINES[10:])
    assert losses(tmp_path, members, gzip.compress(CHANGED), suffix=".jsonl.gz") == ["gzip members: 2 became 1"]
    assert losses(tmp_path, gzip.compress(LINES), CHANGED, suffix=".gz") != []
    array = b'[ {"ids": [1]} ,\n{"ids": [2]}]\n'
    named = [{"columns": ["ids"], "into": 1, "rows": [[1, 2]]}]
    assert losses(tmp_path, array, array.replace(b"[2]", b"[3]"), named, ".json") == []
    assert losses(tmp_path, array, array.replace(b"[2]", b"[3]").replace(b" ,", b","), named, ".json") != []
    documents = b'{\n "ids": [1]\n}\n{"ids": [2]}\n'
    assert losses(tmp_path, documents, documents.replace(b"[2]", b"[3]"), named, ".json") == []
    assert (
        losses(tmp_path, documents, documents.replace(b"[2]", b"[3]").replace(b"\n}", b"}"), named, ".json") != []
    )


def test_rows_that_were_left_out_or_forked_are_followed(tmp_path: Path) -> None:
    rows = LINES.splitlines(keepends=True)
    gone = [{"columns": [], "into": 0, "rows": [[1, 2]]}]
    assert losses(tmp_path, LINES, b"".join([rows[0], *rows[2:]]), gone) == []
    assert losses(tmp_path, LINES, b"".join([rows[0], rows[2]]), gone) != []
    two = [{"columns": ["ids"], "into": 2, "rows": [[1, 2]]}]
    forked = [rows[1].replace(b"1e5", number) for number in (b"7", b"8")]
    assert losses(tmp_path, LINES, b"".join([rows[0], *forked, *rows[2:]]), two) == []
    assert losses(tmp_path, LINES, b"".join([rows[0], forked[0], *rows[2:]]), two) != []


# Tables

TABLE = pa.table(
    {
        "id": ["a", "b", "c"],
        "ids": pa.array([[1], [2], [3]], pa.list_(pa.int32())),
        "calls": [[{"mask": [1], "lp": 0.5}], [{"mask": [0], "lp": 0.5}], None],
        "at": pa.array([1, None, 2], pa.timestamp("us", "UTC")),
        "x": pa.array([0.0, float("nan"), None]),
    }
).replace_schema_metadata({"own": "1"})


def repaired(table: pa.Table, **columns: pa.Array) -> pa.Table:
    """The table with row 1 repaired, and more columns replaced."""
    ids = pa.array([[1], [7], [3]], pa.list_(pa.int32()))
    for name, column in {"ids": ids, **columns}.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table.append_column("tito_audit", pa.array([None, "{}", None]))


def stored(folder: Path, name: str, table: pa.Table, **options: Any) -> Path:
    path = folder / name
    groups = options.pop("row_group_size", 2)
    more = options.pop("more", None)
    with pq.ParquetWriter(path, table.schema, **{"compression": "zstd", **options}) as writer:
        writer.write_table(table, row_group_size=groups)
        if more:
            writer.add_key_value_metadata(more)
    return path


LOSSES_OF_TABLES: dict[str, Any] = {
    "another column": {"id": pa.array(["a", "d", "c"])},
    "another row": {"ids": pa.array([[1], [7], [4]], pa.list_(pa.int32()))},
    "a neighbour inside an object": {
        "calls": pa.array(
            [[{"mask": [1], "lp": 0.5}], [{"mask": [0], "lp": 0.6}], None], TABLE.schema.field("calls").type
        )
    },
    "a type": {"ids": pa.array([[1], [7], [3]], pa.list_(pa.int64()))},
    "a time zone": {"at": pa.array([1, None, 2], pa.timestamp("us"))},
    "null": {"x": pa.array([0.0, float("nan"), float("nan")])},
    "the sign of zero": {"x": pa.array([-0.0, float("nan"), None])},
}
LOSSES_OF_FORM: dict[str, dict[str, Any]] = {
    "codec": {"compression": {"id": "snappy", "ids.list.element": "zstd"}},
    "row groups": {"row_group_size": 3},
    "dictionary": {"use_dictionary": ["id"]},
    "statistics": {"write_statistics": False},
    "page version": {"data_page_version": "2.0"},
    "page checksums": {"write_page_checksum": True},
    "page index": {"write_page_index": True},
    "format version": {"version": "1.0"},
    "names of entries": {"use_compliant_nested_type": False},
    "the Arrow schema": {"store_schema": False},
    "sorting columns": {"sorting_columns": [pq.SortingColumn(0)]},
    "metadata": {"more": {"a": "b"}},
}


def in_table(folder: Path, before: Path, after: Path) -> list[str]:
    return lost(before, after, report_of(before, after, NAMED))


def test_a_named_change_of_a_table_is_no_loss(tmp_path: Path) -> None:
    files = stored(tmp_path, "log.parquet", TABLE), stored(tmp_path, "out.parquet", repaired(TABLE))
    assert in_table(tmp_path, *files) == []
    calls = pa.array(
        [[{"mask": [1], "lp": 0.5}], [{"mask": [1, 1], "lp": 0.5}], None], TABLE.schema.field("calls").type
    )
    assert in_table(tmp_path, files[0], stored(tmp_path, "out.parquet", repaired(TABLE, calls=calls))) == []


@pytest.mark.parametrize("what", LOSSES_OF_TABLES)
def test_a_loss_of_a_value_is_found(what: str, tmp_path: Path) -> None:
    table = repaired(TABLE, **LOSSES_OF_TABLES[what])
    files = stored(tmp_path, "log.parquet", TABLE), stored(tmp_path, "out.parquet", table)
    assert in_table(tmp_path, *files) != []
    arrow = []
    for name, content in (("log.arrow", TABLE), ("out.arrow", table)):
        with pa.ipc.new_file(tmp_path / name, content.schema) as writer:
            writer.write_table(content, max_chunksize=2)
        arrow.append(tmp_path / name)
    assert in_table(tmp_path, *arrow) != []


@pytest.mark.parametrize("what", LOSSES_OF_FORM)
def test_a_loss_of_the_form_is_found(what: str, tmp_path: Path) -> None:
    how = LOSSES_OF_FORM[what]
    files = stored(tmp_path, "log.parquet", TABLE, **how), stored(tmp_path, "out.parquet", repaired(TABLE))
    assert in_table(tmp_path, *files) != []
    same = stored(tmp_path, "same.parquet", repaired(TABLE), **how)
    assert in_table(tmp_path, files[0], same) == []


def test_the_schema_of_a_table_is_compared(tmp_path: Path) -> None:
    log, table = stored(tmp_path, "log.parquet", TABLE), repaired(TABLE)
    for other in (
        table.replace_schema_metadata({"own": "2"}),
        table.select(["ids", "id", "calls", "at", "x", "tito_audit"]),
        table.select(["id", "ids", "calls", "at", "tito_audit"]),
        table.cast(pa.schema([table.schema.field(0).with_nullable(False), *list(table.schema)[1:]])),
        table.cast(pa.schema([table.schema.field(0).with_metadata({"a": "b"}), *list(table.schema)[1:]])),
        table.set_column(5, "tito_audit", pa.array([None, "{}", "{}"])),
    ):
        assert in_table(tmp_path, log, stored(tmp_path, "out.parquet", other)) != []


def test_the_form_of_an_arrow_file_is_compared(tmp_path: Path) -> None:
    def write(name: str, table: pa.Table, size: int = 2, codec: str | None = "zstd", stream: bool = False) -> Path:
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(tmp_path / name, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(table, max_chunksize=size)
        return tmp_path / name

    log, table = write("log.arrow", TABLE), repaired(TABLE)
    assert in_table(tmp_path, log, write("out.arrow", table)) == []
    assert in_table(tmp_path, log, write("out.arrow", table, size=3)) != []
    assert in_table(tmp_path, log, write("out.arrow", table, codec="lz4")) != []
    assert in_table(tmp_path, log, write("out.arrow", table, codec=None)) != []
    assert in_table(tmp_path, log, write("out.arrow", table, stream=True)) != []


def test_codecs_are_compared_row_group_by_row_group(tmp_path: Path) -> None:
    parts = [TABLE.slice(0, 2), TABLE.slice(2)]
    joined_parquet(tmp_path / "log.parquet", parts, ["ZSTD", "NONE"])
    done = repaired(TABLE)
    joined_parquet(tmp_path / "out.parquet", [done.slice(0, 2), done.slice(2)], ["ZSTD", "NONE"])
    assert in_table(tmp_path, tmp_path / "log.parquet", tmp_path / "out.parquet") == []
    differences = in_table(tmp_path, tmp_path / "log.parquet", stored(tmp_path, "one.parquet", done))
    assert any("codec: NONE became ZSTD" in loss for loss in differences)
