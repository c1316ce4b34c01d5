"""A repair through the command keeps what no repair names, or says in one notice what it cannot keep.

The judge is `lost` of the torture room, which shares no code with the tool. `make deep` repairs many more logs.
"""

from __future__ import annotations

import base64
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import run
from tests.tiers import examples
from tests.torture import proving
from tests.torture.forms_tables import joined_parquet
from tests.torture.proof import lost
from tests.torture.proof_text import members
from tests.world import ROOT
from tito_audit.convert.rows_and_calls import _same_entries

TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
ROWS = pq.read_table(ROOT / "fixtures/formats/miles_columns.parquet").to_pylist()
"""Training rows; in one of them the mask is one token late, which a repair puts back."""


def repair(log: Path, *flags: object, out: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The repaired file, in which nothing is lost, and the report."""
    target = log.with_name(out or f"out{''.join(log.suffixes)}")
    command = ("repair", log, "-o", target, "-t", TOKENIZER, "--report", "json", "--quiet", "--jobs", 1)
    code, printed, errors = run(*command, *flags)
    assert code in (0, 1), errors
    report = json.loads(printed)
    assert report["changed"], "a repair that changes nothing shows nothing"
    assert lost(log, target, report) == []
    return target, report


def notices(report: dict[str, Any]) -> list[str]:
    return [notice for notice in report["before"]["notices"] if "another form" in notice]


def table(**more: pa.Array) -> pa.Table:
    """The rows as a table, with more columns."""
    widened = pa.Table.from_pylist(ROWS)
    for name, column in more.items():
        widened = widened.append_column(name, column)
    return widened


def text(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# What is named


def test_the_report_names_each_changed_row_and_place(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(text(ROWS))
    out, report = repair(log)
    named = {row for change in report["changed"] for start, stop in change["rows"] for row in range(start, stop)}
    before, after = (path.read_bytes().splitlines() for path in (log, out))
    assert named == {number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]}
    assert {name for change in report["changed"] for name in change["columns"]} == {"loss_mask", "tito_audit"}
    assert all(change["file"] == str(log) and change["into"] == 1 for change in report["changed"])


def test_a_resumed_repair_names_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.gz"
    data = text(ROWS)
    log.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    _, first = repair(log, "--resume")
    _, again = repair(log, "--resume")
    assert again["changed"] == first["changed"]
    assert notices(again) == notices(first) != []


def test_rows_in_quarantine_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\xef\xbb\xbf" + (ROOT / "fixtures/formats/generic.jsonl").read_bytes())
    out, report = repair(log, "--with", "drop", "--unsafe", "--quarantine", tmp_path / "moved.jsonl")
    assert {change["into"] for change in report["changed"]} == {0}
    assert out.read_bytes().startswith(b"\xef\xbb\xbf{")


def test_a_row_that_was_not_read_is_not_moved_to_the_quarantine(tmp_path: Path) -> None:
    quarantine = tmp_path / "moved.jsonl"
    options = ("-t", TOKENIZER, "--max-row-bytes", 100, "--quarantine", quarantine)
    log = tmp_path / "log.jsonl"
    log.write_bytes(text(ROWS))
    code, _, err = run("repair", log, "-o", tmp_path / "out.jsonl", *options)
    assert code == 2
    assert "row 0 cannot be carried over" in err
    assert "raise --max-row-bytes" in err
    table = tmp_path / "log.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    code, page, _ = run("repair", table, "-o", tmp_path / "out.parquet", *options)
    assert code == 1
    assert "in quarantine" not in page
    assert (tmp_path / "out.parquet").read_bytes() == table.read_bytes()
    assert not quarantine.exists() or not quarantine.read_bytes()


def test_a_value_among_nested_rows_that_is_no_row_stays(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"rows": [ROWS[0], 7, "text"]}))
    quarantine = tmp_path / "moved.jsonl"
    options = ("-t", TOKENIZER, "--rows-at", "rows", "--quarantine", quarantine)
    code, _, err = run("repair", log, "-o", tmp_path / "out.json", *options)
    assert code == 1, err
    assert json.loads((tmp_path / "out.json").read_text())["rows"][1:] == [7, "text"]


def test_a_row_in_quarantine_that_is_not_utf_8_has_its_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bad = rb'{"token_ids": "\xff' + b'\xff"}'
    log.write_bytes(text(ROWS) + bad + b"\n")
    quarantine = tmp_path / "moved.jsonl"
    run("repair", log, "-o", tmp_path / "out.jsonl", "-t", TOKENIZER, "--quarantine", quarantine)
    moved = json.loads(quarantine.read_bytes().splitlines()[-1])["tito_audit"]
    assert base64.b64decode(moved["base64"]) == bad


# Text


@pytest.mark.parametrize("odd", ["1e400", "-1e400", "NaN", '"\\ud800"', "1" * 400])
def test_a_first_line_that_only_python_reads_is_a_line(odd: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = text(ROWS).splitlines(keepends=True)
    log.write_bytes(
        b"\n" + b"".join([line[0].replace(b"{", f'{{"odd": {odd}, '.encode(), 1), b"null\n", *line[1:]])
    )
    out, report = repair(log)
    assert odd.encode() in out.read_bytes()
    assert min(start for change in report["changed"] for start, _ in change["rows"]) >= 1, "line 0 is blank"


@pytest.mark.parametrize("twice", [b'"metadata": {"a": 1, "a": 2.50}', b'"n": 1E5, "n": -0'])
def test_a_row_with_a_key_twice_is_kept_as_it_is(tmp_path: Path, twice: bytes) -> None:
    log = tmp_path / "log.jsonl"
    odd, *others = text(ROWS).splitlines(keepends=True)
    log.write_bytes(b"{" + twice + b", " + odd[1:] + b"".join(others))
    out, report = repair(log)
    assert out.read_bytes().startswith(b"{" + twice + b", " + odd[1:])
    assert min(start for change in report["changed"] for start, _ in change["rows"]) >= 1


def test_odd_numbers_of_a_repaired_row_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    more = b'{"metadata": {"a": 1, "b": 2.50}, "n": 1E5, "m": -0, "big": 123456789012345678901234567890, '
    lines = [more + line[1:] + b"\r\n" for line in text(ROWS).splitlines()]
    log.write_bytes(b"".join(lines))
    out, _ = repair(log)
    assert all(line.startswith(more) for line in out.read_bytes().splitlines())


def test_equal_numbers_of_a_list_keep_their_own_spelling(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes((ROOT / "fixtures/formats/generic.jsonl").read_bytes().replace(b"0.0, 0.0", b"0, 0.0"))
    repair(log)


def test_a_file_of_several_gzip_members_becomes_one_with_a_notice(tmp_path: Path) -> None:
    data = text(ROWS)
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(gzip.compress(data))
    assert notices(repair(log)[1]) == []
    log = tmp_path / "members.jsonl.gz"
    log.write_bytes(gzip.compress(data[:99]) + gzip.compress(data[99:]))
    out, report = repair(log, out="one.jsonl.gz")
    assert members(out.read_bytes()) == 1
    assert notices(report) == [
        f"{log}: the repaired file is stored in another form: one gzip member, not several."
    ]


def test_compression_under_a_plain_suffix_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(gzip.compress(text(ROWS), mtime=0))
    out, _ = repair(log)
    assert gzip.decompress(out.read_bytes()).startswith(b"{")


# Tables


def store(path: Path, content: pa.Table, **options: Any) -> Path:
    pq.write_table(content, path, **options)
    return path


def test_each_column_keeps_its_codec_whatever_its_list_calls_its_entries(tmp_path: Path) -> None:
    tensor = pa.fixed_shape_tensor(pa.float32(), [2])
    cells = pa.array([[1.0, 2.0]] * len(ROWS), tensor.storage_type)
    with_tensor = table(tensor=pa.ExtensionArray.from_storage(tensor, cells))
    leaves = [
        *(f"{name}.list.element" for name in ("tokens", "loss_mask", "rollout_log_probs")),
        "tensor.list.element",
    ]
    codecs = dict(zip(leaves, ("ZSTD", "NONE", "GZIP", "BROTLI"), strict=True))
    log = store(tmp_path / "log.parquet", with_tensor, compression=codecs | {"response_length": "LZ4"})
    assert notices(repair(log)[1]) == []


def test_a_column_of_several_codecs_gets_one_with_a_notice(tmp_path: Path) -> None:
    whole, log = table(), tmp_path / "log.parquet"
    joined_parquet(log, [whole.slice(0, 1), whole.slice(1)], ["NONE", "ZSTD"])
    (notice,) = notices(repair(log)[1])
    assert notice.startswith(f"{log}: the repaired file is stored in another form: codec of ")


def test_metadata_written_after_the_rows_is_kept(tmp_path: Path) -> None:
    for stores in (True, False):
        log, whole = tmp_path / f"log{stores}.parquet", table()
        with pq.ParquetWriter(log, whole.schema, store_schema=stores) as writer:
            writer.write_table(whole)
            writer.add_key_value_metadata({"after": "all"})
        out, _ = repair(log, out=f"out{stores}.parquet")
        assert pq.read_metadata(out).metadata[b"after"] == b"all"


def test_bloom_filters_and_encodings_of_booleans_are_kept(tmp_path: Path) -> None:
    flagged = table(flag=pa.array([True] * len(ROWS)))
    for number, encoding in enumerate(("PLAIN", "RLE")):
        log = store(
            tmp_path / f"log{number}.parquet",
            flagged,
            use_dictionary=False,
            column_encoding={"flag": encoding},
            data_page_version="2.0",
            bloom_filter_options={"response_length": True},
        )
        repair(log, out=f"out{number}.parquet")


# Many forms


@pytest.mark.parametrize("number", range(examples(12, 2000)))
def test_nothing_is_lost_in_odd_forms(number: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        word, losses = proving.attempt(7, number, Path(place))
    assert losses == [], word


# Conversions


def test_columns_of_lists_are_compared_after_a_conversion() -> None:
    pairs = np.empty(2, object)
    pairs[:] = [np.array([1, 0]), np.array([2, 0])]
    lists = np.empty(2, object)
    lists[:] = [[1, 0], [2, 0]]
    assert _same_entries(pairs, lists)
    assert not _same_entries(pairs, lists[:1])
    lists[1] = [2, 1]
    assert not _same_entries(pairs, lists)
