"""Arrow IPC written again: what no change touches survives, in format, batches and compression."""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.command import run
from tests.test_parquet_output import Row, put, rewritten, rich_table, same_values
from tests.tiers import examples
from tito_audit.errors import SetupError, StorageError
from tito_audit.record.edits import Edit, apply_edits
from tito_audit.storage import open_log, open_output
from tito_audit.storage.arrow import ArrowFile, ArrowOutput, open_arrow

NEW = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}


def store(path: Path, table: pa.Table, new: str = "stream", rows: int | None = None, **options: Any) -> Path:
    with NEW[new](path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def batches_of(path: Path) -> list[tuple[pa.RecordBatch, Any]]:
    with open_arrow(path) as file:
        return [(batch, metadata) for batch, metadata, _ in file.batches()]


def lengths_of(file: ArrowFile) -> list[int]:
    return [batch.num_rows for batch, *_ in file.batches()]


def table_of(path: Path) -> pa.Table:
    return pa.Table.from_batches([batch for batch, _ in batches_of(path)])


def values_of(path: Path) -> list[Row | None]:
    return [raw.value for raw in open_log(path)]


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_rich_table_survives_a_change_of_one_value_in_the_form_it_had(tmp_path, new, compression):
    table = rich_table(3)
    path = store(tmp_path / "log.arrow", table, new, 5, compression=compression)
    before = path.read_bytes()
    out = rewritten(path, put(6, "ids", value=np.array([9, 8])), added=())
    assert path.read_bytes() == before
    with open_arrow(path) as old, open_arrow(out) as again:
        assert (again.has_footer, lengths_of(again)) == (old.has_footer, lengths_of(old))
        was, now = old.options(), again.options()
        assert (now.compression, now.metadata_version) == (was.compression, was.metadata_version)
        assert again.schema.equals(old.schema, check_metadata=True)
        assert now.compression == compression
    assert out.read_bytes()[:4] == before[:4]
    after = table_of(out)
    assert after["ids"][6].as_py() == [9, 8]
    for name in table.column_names:
        if name == "ids":
            continue
        assert same_values(after[name], table[name]) or after[name].to_pylist() == table[name].to_pylist(), name
    assert [v for i, v in enumerate(after["ids"].to_pylist()) if i != 6] == [
        v for i, v in enumerate(table["ids"].to_pylist()) if i != 6
    ]


@pytest.mark.parametrize("new", NEW)
def test_an_arrow_file_in_which_nothing_changes_stays_its_bytes(tmp_path, new):
    path = store(tmp_path / "log.arrow", rich_table(), new, 2, compression="zstd")
    assert rewritten(path, lambda _, row: [dict(row)]).read_bytes() == path.read_bytes()
    empty = store(tmp_path / "empty.arrow", rich_table().slice(0, 0), new)
    assert rewritten(empty, lambda _, row: [row]).read_bytes() == empty.read_bytes()


@pytest.mark.parametrize("new", NEW)
def test_record_batches_keep_their_bounds_where_rows_do_not_fork(tmp_path, new):
    table = pa.table({"n": list(range(10)), "ids": [[i] * i for i in range(10)]})
    path = store(tmp_path / "log.arrow", table, new, 3)
    doubled = lambda index, row: [row, {**row, "n": 100}] if index == 4 else [] if index == 9 else [row]  # noqa: E731
    with open_arrow(rewritten(path, put(7, "n", value=70))) as file:
        assert lengths_of(file) == [3, 3, 3, 1]
    out = rewritten(path, doubled)
    with open_arrow(out) as file:
        assert lengths_of(file) == [3, 4, 3]
    assert [row["n"] for row in values_of(out)] == [0, 1, 2, 3, 4, 100, 5, 6, 7, 8]
    nothing = rewritten(path, lambda _, row: [])
    assert values_of(nothing) == []


def test_what_belongs_to_record_batches_and_to_the_footer_is_kept(tmp_path):
    table = pa.table({"n": [1, 2, 3]}).replace_schema_metadata({"huggingface": "{}"})
    stream, file = tmp_path / "stream.arrow", tmp_path / "file.arrow"
    with pa.ipc.new_stream(stream, table.schema) as writer:
        for number, batch in enumerate(table.to_batches(max_chunksize=1)):
            writer.write_batch(batch, {"batch": str(number)})
    out = rewritten(stream, put(1, "n", value=5))
    assert [metadata for _, metadata in batches_of(out)] == [{b"batch": b"%d" % i} for i in range(3)]
    with open_arrow(out) as again:
        assert again.schema.metadata == {b"huggingface": b"{}"}
    if "metadata" not in (pa.ipc.new_file.__doc__ or ""):
        pytest.skip("this pyarrow writes no metadata into footers")
    with pa.ipc.new_file(file, table.schema, metadata={"by": "us"}) as writer:
        writer.write_table(table)
    with open_arrow(rewritten(file, put(1, "n", value=5))) as again:
        assert again.metadata == {b"by": b"us"}


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("nested", [False, True])
def test_new_words_of_a_dictionary_are_written_in_either_format(tmp_path, new, nested):
    words = pa.array(["a", "b", "a", None, "b", "a"]).dictionary_encode()
    column = pa.StructArray.from_arrays([words], ["word"]) if nested else words
    path = store(tmp_path / "log.arrow", pa.table({"w": column, "n": [0] * 6}), new, 2)
    path_in = ("w", "word") if nested else ("w",)

    def change(index: int, row: Row) -> Sequence[Row]:
        return [apply_edits(row, [Edit(path_in, f"new {index}")])] if index in (1, 4) else [row]

    out = rewritten(path, change)
    with open_arrow(out) as file:
        assert file.schema.field("w").type == column.type
    values = [row["w"].get("word") if nested else row["w"] for row in values_of(out)]
    assert values == ["a", "new 1", "a", None, "new 4", "a"]


@pytest.mark.parametrize("new", NEW)
def test_an_added_column_is_null_where_no_row_has_it(tmp_path, new):
    path = store(tmp_path / "log.arrow", pa.table({"n": [1, 2, 3]}), new, 1)
    out = rewritten(path, lambda index, row: [{**row, "tito_audit": {"version": "1"}}] if index == 2 else [row])
    assert table_of(out)["tito_audit"].to_pylist() == [None, None, '{"version":"1"}']


def test_a_value_that_an_arrow_column_cannot_hold_is_an_error_that_leaves_no_file(tmp_path):
    path = store(tmp_path / "log.arrow", pa.table({"n": pa.array([1, 2], pa.int8())}))
    with pytest.raises(StorageError, match=r"row 1, column 'n'.*\n.*an Arrow file"):
        rewritten(path, put(1, "n", value=1000))
    with pytest.raises(StorageError, match="columns of an Arrow file"):
        rewritten(path, put(1, "m", value=1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.arrow"]


@pytest.mark.parametrize("new", NEW)
def test_a_stream_that_breaks_is_not_written_again(tmp_path, new):
    path = store(tmp_path / "log.arrow", pa.table({"n": list(range(1000))}), new, 100)
    path.write_bytes(path.read_bytes()[:-3000])
    rows = list(open_log(path))
    assert rows[-1].lost
    assert "record batch" in (rows[-1].error or "") or "footer" in (rows[-1].error or "")
    with pytest.raises(StorageError, match="so its file was not written"):
        rewritten(path, put(1, "n", value=7))
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.arrow"]


@pytest.mark.parametrize("new", NEW)
def test_an_arrow_output_given_up_halfway_touches_its_file_no_more(tmp_path, new):
    path = store(tmp_path / "log.arrow", pa.table({"n": list(range(9))}), new, 3)
    out = io.BytesIO()
    output = ArrowOutput(path, out, ())
    for raw in open_log(path):
        output.replace(raw, [{"n": 1}])
    size = len(out.getvalue())
    del output
    gc.collect()
    assert not out.closed
    assert len(out.getvalue()) == size


def test_the_name_of_the_output_must_fit_the_format(tmp_path):
    stream = store(tmp_path / "s.arrow", pa.table({"n": [1]}))
    file = store(tmp_path / "f.arrow", pa.table({"n": [1]}), "file")
    for log, name, says in (
        (stream, "o.feather", r"an Arrow stream and stays an Arrow stream.*name it \.arrow or \.arrows"),
        (stream, "o.parquet", "but this suffix is of another kind"),
        (file, "o.arrows", r"name it \.arrow or \.feather"),
        (file, "o.jsonl", "but this suffix is of another kind"),
    ):
        with pytest.raises(SetupError, match=says), open_output(open_log(log), tmp_path / name, overwrite=False):
            pass


def test_the_form_is_read_off_the_first_record_batch(tmp_path):
    for compression in (None, "lz4", "zstd"):
        for version in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
            table = pa.table({"n": [1.5, math.nan] * 50})
            path = store(tmp_path / "a", table, compression=compression, metadata_version=version)
            with ArrowFile(path) as file:
                options = file.options()
            assert (options.compression, options.metadata_version) == (compression, version)


@pytest.mark.parametrize("new", NEW)
def test_a_row_holds_its_part_of_a_record_batch_and_not_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    monkeypatch.setattr("tito_audit.storage.table_rows.BATCH_BYTES", 1 << 16)
    table = pa.table({"ids": pa.array([np.arange(10_000)] * 100)})
    path = store(tmp_path / "a.arrow", table, new)
    before = pa.total_allocated_bytes()
    row = next(iter(open_log(path)))
    gc.collect()
    assert row.value["ids"].tolist() == list(range(10_000))
    assert pa.total_allocated_bytes() - before < table.nbytes / 10


POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts for one test; it outlives what is in it."""


@pytest.mark.parametrize("new", NEW)
def test_a_repair_holds_two_record_batches_one_to_read_and_one_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    monkeypatch.setattr("tito_audit.storage.table_rows.BATCH_BYTES", 1 << 20)
    size = examples(400, 800)
    table = pa.table({"ids": pa.array([np.arange(10_000)] * size), "text": ["a"] * size})
    path = store(tmp_path / "a.arrow", table, new, rows=size // 4)
    each = table.nbytes / 4
    usual = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        start = POOL.bytes_allocated()
        rewritten(path, lambda index, row: [{**row, "text": "b"}])
        gc.collect()
    finally:
        pa.set_memory_pool(usual)
    assert POOL.max_memory() - start < 2.7 * each


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_batches_that_pyarrow_would_misread_are_refused(tmp_path: Path, new: str, codec: str) -> None:
    table = pa.table({"token_ids": [[5, 6, 7]], "reward": [1.0]})
    old = {"metadata_version": pa.ipc.MetadataVersion.V4}
    path = store(tmp_path / "log.arrow", table, new, compression=codec, **old)
    code, _, error = run("scan", path, "--no-config")
    assert code == 2
    assert f"{path}: compressed record batches of metadata version 4" in error
    for options in (old, {"compression": codec}):
        store(path, table, new, **options)
        with open_arrow(path) as file:
            assert [batch.to_pylist() for batch, *_ in file.batches()] == [table.to_pylist()]
