"""Rows that match a format but hold something else than they should are findings with a place, never a crash."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import command
from tests.world import CLEAN
from tito_audit.errors import RecordError, describe_error
from tito_audit.formats.tinker import FORMAT as TINKER
from tito_audit.inspect.roles import _differs
from tito_audit.record.column import MaskEncoding, detect_mask_encoding
from tito_audit.record.nesting import MAX_DEPTH, TooDeep, is_too_deep, load_json, load_python_json
from tito_audit.record.rollout import Place
from tito_audit.storage import open_log
from tito_audit.storage.row import dump_row, is_json, parse_row
from tito_audit.storage.table_rows import plain_decimal, plain_values, take_rows

HERE = Place("log.jsonl", 0)


def nested(levels: int, kind: str = "[]") -> str:
    return "[" * levels + "]" * levels if kind == "[]" else '{"a":' * levels + "1" + "}" * levels


# A format that matched


def test_what_a_format_does_not_expect_is_a_reason_that_names_the_place_in_the_code() -> None:
    def read(row: Any, place: Place) -> Any:
        return row["loss_fn_inputs"]["missing"]

    row = {"model_input": {"chunks": []}, "loss_fn_inputs": {"target_tokens": []}}
    with pytest.raises(
        RecordError, match=r"cannot be read as tinker: a part of it is missing .*KeyError 'missing'"
    ):
        replace(TINKER, read=read).read(row, HERE)
    with pytest.raises(RecordError, match=r"not a row of tinker, which was asked for: it has no 'loss_fn_inputs'"):
        replace(TINKER, read=read).read({}, HERE)
    assert not replace(TINKER, matches=lambda row: row["nothing"]).matches(row)


def test_a_formats_own_reason_and_a_lack_of_memory_pass_the_guard() -> None:
    def failing(error: Exception, *_: object) -> Any:
        raise error

    for error in (RecordError("its own words"), MemoryError()):
        with pytest.raises(type(error)) as raised:
            replace(TINKER, update=partial(failing, error)).update({}, ())
        assert raised.value is error


def test_an_unexpected_error_is_told_with_the_place_of_our_code() -> None:
    with pytest.raises(ValueError, match="Expecting value") as raised:
        load_python_json("x")
    assert describe_error(raised.value).endswith(" in record/nesting.py (load_python_json)")
    assert describe_error(RecursionError()) == "its values are nested too deeply"


# Nesting


@pytest.mark.parametrize("kind", ["[]", "{}"])
@pytest.mark.parametrize("levels", [1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 900, 1023, 1024, 1025, 100_000])
def test_one_limit_of_nesting_holds_for_every_text(levels: int, kind: str) -> None:
    text = nested(levels, kind)
    if levels <= MAX_DEPTH:
        value = load_json(text)
        assert load_json(text.encode()) == value == load_python_json(text)
        assert not is_too_deep(value)
        assert orjson.dumps(value).decode() == text
        return
    for parse in (load_json, load_python_json):
        with pytest.raises(ValueError, match=r"too deeply|[Rr]ecursion|depth limit"):
            parse(text)
    raw = parse_row(0, b'{"a":%b}' % text.encode())
    assert raw.value is None
    assert f"more than {MAX_DEPTH} levels" in str(raw.error)


@pytest.mark.parametrize("text", ["],[", "]],[[", "1,2", "[]]", "[[]", "", "[],[]", '"["]'])
def test_text_that_closes_the_lists_around_it_is_not_json(text: str) -> None:
    padded = text + " " * 40_000
    with pytest.raises(orjson.JSONDecodeError):
        load_json(padded)
    with pytest.raises(orjson.JSONDecodeError):
        load_json("[]," * 300 + text)


def test_nesting_is_measured_and_not_counted() -> None:
    flat = [{"a": [index]} for index in range(2000)]
    assert load_json(orjson.dumps(flat)) == flat
    with pytest.raises(TooDeep):
        load_json(orjson.dumps(flat)[:-1] + b"," + nested(MAX_DEPTH).encode() + b"]")


def test_a_deeply_nested_row_is_a_finding_of_every_command_that_reads_it(tmp_path: Path) -> None:
    deep = json.dumps(CLEAN)[:-1] + f', "extra": {nested(MAX_DEPTH + 1)}}}\n'
    fits = json.dumps(CLEAN)[:-1] + f', "extra": {nested(MAX_DEPTH - 1)}}}\n'
    log = tmp_path / "log.jsonl"
    log.write_text(fits + deep + fits, encoding="utf-8")
    code, out, err = command.run("scan", log, "--report", "json")
    report = json.loads(out)
    assert (code, err, report["summary"]["rollouts"]) == (1, "", 2)
    assert [finding["row"] for finding in report["findings"] if finding["code"] == "REC001"] == [1]
    for words in (
        ("show", log, "--row", 1),
        ("show", log, "--row", 0),
        ("inspect", log),
        ("convert", log, "--to", "rows", "-o", tmp_path / "rows.jsonl", "--lossy"),
        ("repair", log, "-o", tmp_path / "out.jsonl"),
    ):
        code, out, err = command.run(*words)
        assert code in (0, 1, 2)
        assert out + err
    assert (tmp_path / "out.jsonl").read_bytes() == log.read_bytes()


# Tables


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (pa.array([[1], None, [2, 3], []], pa.list_view(pa.int64())), [[1], None, [2, 3], []]),
        (pa.array([[["a"]], None], pa.large_list_view(pa.list_(pa.string_view()))), [[["a"]], None]),
        (pa.array([[("k", [1])], None], pa.map_(pa.string(), pa.list_(pa.int64()))), [{"k": [1]}, None]),
        (pa.array([[(b"\xff", 1)]], pa.map_(pa.binary(), pa.int64())), [{"\\xff": 1}]),
        (pa.array([[([1], 2)]], pa.map_(pa.list_(pa.int64()), pa.int64())), [[[[1], 2]]]),
        (pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)), [1.5, None]),
        (pa.array([Decimal(7)], pa.decimal256(60, 0)), [7]),
        (pa.array([1, 1, 2]).dictionary_encode(), [1, 1, 2]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), ["a", "a", "b"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_arrow_type_is_read_as_plain_values(array: Any, values: list[Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list | np.ndarray) else value

    assert plain(list(plain_values(array))) == values
    assert plain(list(plain_values(array.slice(1)))) == values[1:]


def test_a_decimal_that_no_number_holds_is_text() -> None:
    assert plain_decimal(Decimal("12345678901234567890.125")) == "12345678901234567890.125"
    assert plain_decimal(Decimal("0.1")) == 0.1
    assert repr(plain_decimal(Decimal("NaN"))) == "nan"


def test_rows_of_a_type_that_arrow_cannot_take_are_sampled() -> None:
    batch = pa.record_batch({"s": pa.array(["a", None, "c"], pa.string_view())})
    assert take_rows(batch, np.array([0, 2])).to_pylist() == [{"s": "a"}, {"s": "c"}]
    assert take_rows(batch, np.array([], np.int64)).num_rows == 0


def test_a_value_that_python_cannot_hold_is_a_finding_of_its_row(tmp_path: Path) -> None:
    moments = pa.array([[1], None], pa.list_view(pa.timestamp("s", "Mars/Base")))
    union = pa.UnionArray.from_sparse(
        pa.array([0, 0], pa.int8()), [pa.array([1, 2], pa.timestamp("s", "Mars/Base"))]
    )
    log = tmp_path / "log.arrow"
    table = pa.table({**{name: [value] * 2 for name, value in CLEAN.items()}, "at": moments, "when": union})
    with pa.ipc.new_file(log, table.schema) as out:
        out.write_table(table)
    code, out_text, err = command.run("scan", log, "--report", "json")
    messages = [finding["message"] for finding in json.loads(out_text)["findings"] if finding["code"] == "REC001"]
    assert (code, err, len(messages)) == (1, "", 2)
    assert all("column 'when' holds a value of type sparse_union" in message for message in messages)


# Values that JSON has no place for


def test_a_row_of_any_values_is_written_as_json() -> None:
    row = {
        "bytes": b"\xff\x00",
        "decimal": Decimal("1.5"),
        "inf": float("inf"),
        "nan": float("nan"),
        "array": np.array([1, 2])[::-1],
        "mixed": [1, np.array([1.0, 2.0]), "x"],
        "set": {1},
        "\ud800": 2**70,
    }
    for case in (row, {"bytes": b"\xff\x00"}, {"mixed": row["mixed"]}):
        back = json.loads(dump_row(case))
        assert back.keys() == case.keys()
        assert back.get("bytes", "/wA=") == "/wA="
        assert back.get("mixed", [1, [1.0, 2.0], "x"]) == [1, [1.0, 2.0], "x"]


def test_a_table_with_bytes_and_decimals_is_converted(tmp_path: Path) -> None:
    columns = {name: [value] * 2 for name, value in CLEAN.items()}
    columns |= {"reward": [Decimal("0.5")] * 2, "blob": [b"\xff", None], "spans": [[[1.0, 2.0]], [[1.0], [2.0]]]}
    log, out = tmp_path / "log.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table(columns), log)
    code, _, err = command.run("convert", log, "--to", "tito_sample", "-o", out, "--lossy")
    assert (code, err) == (0, "")
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


# Numbers


@pytest.mark.filterwarnings("error")
def test_masks_of_half_precision_are_judged_without_overflow() -> None:
    assert detect_mask_encoding(np.array([-100, 5, 7], np.float16)) is MaskEncoding.LABELS
    assert detect_mask_encoding(np.array([0, 0.5], np.float16)) is MaskEncoding.FLOAT


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mask", [[None, None, None, None], [None, 0.0, 3.0, 5.0]])
def test_a_mask_of_nulls_is_described_without_a_warning(tmp_path: Path, mask: list[Any]) -> None:
    log = command.written(tmp_path / "log.jsonl", [{**CLEAN, "loss_mask": mask}])
    _, out, err = command.run("scan", log, "--report", "json")
    assert err == ""
    findings = [finding for finding in json.loads(out)["findings"] if finding["code"] == "REC002"]
    assert [("are all null" in finding["message"], "some null" in finding["message"]) for finding in findings] == [
        (mask[1] is None, mask[1] is not None)
    ]


def test_values_with_arrays_in_them_are_compared() -> None:
    value = {"a": [np.array([1, 2]), "x"], "b": 1}
    assert not _differs(value, copy.deepcopy(value))
    assert _differs(value, {**value, "a": [np.array([1, 3]), "x"]})
    assert _differs(value, {"a": value["a"]})
    assert _differs([1], [1, 2])


DEEP = b"[" * 2000 + b"]" * 2000


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (DEEP, True),
        (b' {"a": "]}", "b": ' + DEEP + b', "c": "\\"]"} \r\n', True),
        (b"[" + DEEP + b",", False),
        (b"[" + DEEP + b', "]]', False),
        (DEEP + b"]", False),
    ],
)
def test_a_value_that_is_nested_too_deeply_is_one_if_its_first_bracket_closes_at_its_end(
    text: bytes, is_one: bool
) -> None:
    assert is_json(text) is is_one


def test_an_array_whose_first_row_is_nested_too_deeply_is_an_array(tmp_path: Path) -> None:
    # The first line alone was taken for a row: then no row could be read.
    log = tmp_path / "log.json"
    log.write_bytes(b"[" + DEEP + b',\n{"token_ids": [1, 2, 3]}]\n')
    rows = list(open_log(log))
    assert [row.index for row in rows] == [0, 1]
    assert "nested too deeply" in str(rows[0].error)
    assert rows[1].value == {"token_ids": [1, 2, 3]}
