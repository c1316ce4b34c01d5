"""Arrays cut out of a row's text: what is read is what parsing the whole row gives."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tables import stored
from tests.tiers import examples, one_in, some
from tito_audit.errors import RecordError
from tito_audit.formats import NUMBER_COLUMNS, map_columns, number_columns, pick_format
from tito_audit.record.nesting import MAX_DEPTH
from tito_audit.record.rollout import Place
from tito_audit.run.repair import repair_rollouts
from tito_audit.run.rows import LogGroup
from tito_audit.run.scan import read_rollouts, scan_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import number_arrays, open_log
from tito_audit.storage.number_arrays import ArrayParser, parse_numbers
from tito_audit.storage.row import RawRow, is_json, parse_row

FIXTURES = Path(__file__).parent.parent / "fixtures" / "formats"
SHARED = Path(__file__).parent.parent.parent / "shared"
LOGS = sorted(FIXTURES.glob("*.jsonl"))
REAL = [
    *sorted((SHARED / "rollouts").glob("*/*.jsonl.gz")),
    *sorted((SHARED / "recorded").glob("*.json")),
]
SEPARATORS = ((",", ":"), (", ", ": "))


@pytest.fixture
def every_array_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_arrays, "_SHORTEST", 3)
    monkeypatch.setattr(number_arrays, "_SHORTEST_INTEGERS", 3)


def numbers(text: str) -> Any:
    data = b'{"some_key":[%b]}' % text.encode()
    return parse_numbers(data, 13, len(data) - 2)


def by_parsing(text: str) -> Any:
    """The array that a list of numbers of one kind makes; None for everything else."""
    try:
        values = orjson.loads(f"[{text}]")
    except orjson.JSONDecodeError:
        return None
    kinds = set(map(type, values))
    if kinds not in ({int}, {float}, {bool}):
        return None
    try:
        return np.array(values, {int: np.int64, float: np.float64, bool: np.bool_}[kinds.pop()])
    except OverflowError:
        return None


def assert_right_or_nothing(text: str) -> Any:
    array, wanted = numbers(text), by_parsing(text)
    if array is not None:
        assert wanted is not None, text[:200]
        assert (array.dtype, array.shape, array.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), text
    return array


def exactly(left: Any, right: Any, *, arrays: bool = False) -> None:
    """Equal in values and types; with `arrays` a numpy array on the left may be a list on the right."""
    if arrays and isinstance(left, np.ndarray) and isinstance(right, list):
        assert left.ndim == 1
        left = left.tolist()
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        if left.dtype == object:
            exactly(left.tolist(), right.tolist())
        else:
            assert left.tobytes() == right.tobytes()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            exactly(left[key], right[key], arrays=arrays)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for ours, other in zip(left, right, strict=True):
            exactly(ours, other, arrays=arrays)
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            exactly(getattr(left, field.name), getattr(right, field.name), arrays=arrays)
    elif isinstance(left, float):
        assert left.hex() == right.hex()
    else:
        assert left == right


def reading(row: Any, mapping: dict[str, str] | None = None) -> Any:
    """The rollouts of a row, or why there are none."""
    if row is None:
        return None
    try:
        row = map_columns(row, mapping) if mapping else row
        return list(pick_format(row).read(row, Place("log", 0)))
    except RecordError as error:
        return str(error)


def assert_same_row(data: bytes, columns: Any = NUMBER_COLUMNS, *, read: bool = True) -> RawRow:
    parsed = ArrayParser(columns).parse_row(7, data, cut_off=True)
    wanted = parse_row(7, data, cut_off=True)
    exactly(dataclasses.replace(parsed, has_arrays=False), wanted, arrays=True)
    exactly(dataclasses.replace(parsed, text=data).without_arrays.value, wanted.value)
    if read:
        exactly(reading(parsed.value), reading(wanted.value))
    return parsed


# Numbers


COMMON = {
    "ids": "151644,8948,198,2101,12,7,0,151645,99999999",
    "labels": "-100,-100,-100,5,77,-100",
    "a mask": "0,0,0,1,1,0",
    "a mask of booleans": "true,false,false,true",
    "logprobs": "0.0,0.0,-0.25,-1.1920928955078125e-07,-0.0007125309202820063,-31.5,-1e-05,-0.0",
    "logprobs with runs": ",".join(["0.0"] * 900 + ["-0.5", "-10.0"] + ["0.0"] * 8 + ["-0.1"] + ["0.0"] * 4700),
    "logprobs that start late": ",".join(["-0.5"] + ["0.0"] * 50 + ["-1.5"]),
    "a sentinel": ",".join(["1.0"] * 30 + ["-1.0"] + ["1.0"] * 30 + ["11.0"] + ["1.0"] * 30),
}


@pytest.mark.parametrize("text", COMMON.values(), ids=COMMON)
def test_numbers_as_logs_hold_them_are_read_as_parsing_gives_them(text: str):
    for written in (text, text.replace(",", ", ")):
        assert assert_right_or_nothing(written) is not None


ZEROS = {"ZEROS": ",".join(["0.0"] * 20), "SPACED": ", ".join(["0.0"] * 20)}
LONG = (
    *(",".join(["0." + "3" * 90] * 20), ",".join(["-0.333333333333333333333333333333"] * 9)),
    *("0" * 30 + ".5,1.5", "1." + "3" * 400 + ",0.5"),
)


@pytest.mark.parametrize("text", [*stored(__file__, "NUMBERS"), *LONG])
def test_what_is_no_plain_list_of_one_kind_is_never_read_otherwise_than_by_parsing(text: str):
    for name, zeros in ZEROS.items():
        text = text.replace(name, zeros)
    assert_right_or_nothing(text)
    assert_right_or_nothing(",".join([text] * 12))


@settings(max_examples=examples(100, 400))
@given(
    st.one_of(
        st.lists(st.integers(-200, 200_000), min_size=2, max_size=60),
        st.lists(st.integers(0, 9), min_size=2, max_size=60),
        st.lists(st.integers(), min_size=2, max_size=9),
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=60),
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -0.25, -1e-07]), min_size=2, max_size=300),
        st.lists(st.booleans(), min_size=2, max_size=60),
        st.lists(st.sampled_from([0, 1, 0.0, True, None, "0.0", []]), min_size=2, max_size=20),
    ),
    st.sampled_from([",", ", "]),
)
def test_random_lists_are_read_as_parsing_gives_them(values: list[Any], comma: str):
    text = json.dumps(values, separators=(comma, ":"))[1:-1]
    array = assert_right_or_nothing(text)
    kinds = set(map(type, values))
    if (
        kinds == {bool}
        or (kinds == {float} and "." in text)
        or (kinds == {int} and all(abs(value) < 10**8 for value in values))
    ):
        assert array is not None


def test_texts_with_random_faults_are_never_read_otherwise_than_by_parsing():
    rng = random.Random(5)
    refused, tried = 0, examples(600, 3000)
    for _ in range(tried):
        text = list(rng.choice(list(COMMON.values()))[: rng.choice((40, 400))].rsplit(",", 1)[0])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at] = rng.choice(["", text[at] * 2, *'0123456789.,-+eE \ttnuf[]{}"'])
        refused += assert_right_or_nothing("".join(text)) is None
    assert tried // 6 < refused < tried


# Rows


def lines(log: Path) -> Iterator[bytes]:
    for row in open_log(log):
        for separators in SEPARATORS:
            yield json.dumps(row.value, separators=separators).encode()
        yield orjson.dumps(row.value)


@pytest.mark.usefixtures("every_array_is_cut")
@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_an_example_log_reads_the_same(log: Path):
    for data in lines(log):
        assert_same_row(data)


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason="no logs beside the checkout")
@pytest.mark.usefixtures("every_array_is_cut")
def test_logs_of_real_models_read_the_same():
    for log in REAL:
        for number, data in enumerate(lines(log)):
            if number < examples(6, 60):
                assert_same_row(data)


@pytest.mark.usefixtures("every_array_is_cut")
@pytest.mark.parametrize("log", some(LOGS, 10), ids=lambda log: log.name)
def test_a_row_with_numbers_of_any_kind_in_any_column_reads_the_same(log: Path):
    """Wherever an example has a list, and under every name of a column of numbers."""
    rng = random.Random(3)
    values: list[Any] = [
        *([1, 2, 3], [0, 1, 1], [0.5, 1.5, -0.5], [True, False, True], [1.5, 2, 3], [-100, 5, 6], [2**40, 1, 2]),
        *([[1, 2, 3], [4, 5, 6]], [[0.5, 0.5], [1.5, 1.5]], [[1, 2], [3.5, 4.5]], [None, 1.5, 2.5], [2**70, 1]),
    ]
    names = sorted(name for name in NUMBER_COLUMNS if "." not in name)
    for raw in some(list(open_log(log)), 1):
        row = dict(raw.value or {})
        sizes = {len(value) for value in row.values() if isinstance(value, list)} - {0, 1}
        for name, value in one_in(4, product([*row, *rng.sample(names, 4)], values)):
            long = (value * 400)[: rng.choice([len(value), *sizes])]
            assert_same_row(json.dumps({**row, name: long}).encode())
            present = row.get(name)
            if isinstance(present, list) and present and isinstance(present[0], dict):
                inner = rng.choice([*present[0], *names])
                changed = [{**present[0], inner: long}, *present[1:]]
                assert_same_row(orjson.dumps({**row, name: changed}) if 2**70 not in value else b"{}")


BIG = ",".join(map(str, range(1000, 1900)))
FLAT = ",".join(["-0.5"] * 300)


@pytest.mark.parametrize("text", stored(__file__, "ROWS"))
def test_a_hostile_row_is_read_or_refused_as_without_cutting(text: str):
    for name, numbers in (("BIG", BIG), ("FLAT", FLAT)):
        text = text.replace(f"{name} ", numbers.replace(",", ", ")).replace(name, numbers)
    assert_same_row(text.encode("utf-8", "surrogatepass"))
    assert_same_row(text.encode("utf-8", "surrogatepass") + b"\xff")


def test_a_row_of_many_arrays_that_never_end_takes_no_longer_than_its_length():
    started = time.process_time()
    for unit in (b'"token_ids":[1,', b'{"logprobs":[1.0,', b'"token_ids": [1, 2,', b'{"loss_mask":[1,[0,1],'):
        assert_same_row(b"{" + unit * 200_000, read=False)
        assert_same_row(b"{" + unit * 200_000 + b"]", read=False)
    assert time.process_time() - started < 60


def test_a_row_is_refused_from_the_same_depth_on_as_without_cutting():
    for depth in range(MAX_DEPTH - 3, MAX_DEPTH + 3):
        for opening, closing in ((b"[", b"]"), (b'{"x":', b"}")):
            value = opening * depth + b"1" + closing * depth
            row = assert_same_row(b'{"token_ids":[%b],"deep":%b}' % (BIG.encode(), value), read=False)
            assert (row.value is None) == (depth >= MAX_DEPTH)


def test_a_row_that_writes_the_mark_is_read_as_without_cutting():
    for mark in (number_arrays._MARK, number_arrays._MARK + "0", number_arrays._MARK + "x"):
        assert_same_row(b'{"token_ids":[%b],"loss_mask":["%b"]}' % (BIG.encode(), mark.encode()[:-1]))
        assert_same_row(b'{"x":"%b","token_ids":[%b]}' % (mark.encode(), BIG.encode()))


@pytest.mark.usefixtures("every_array_is_cut")
def test_rows_with_random_faults_are_read_or_refused_as_without_cutting():
    rng = random.Random(11)
    rows = [data for log in LOGS for data in lines(log) if len(data) < 4000]
    cut, tried = 0, examples(500, 2000)
    for _ in range(tried):
        data = bytearray(rng.choice(rows))
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.choice(
                [b"", b'"', b"\\", b"[", b"]", b",", b"1", b".", b":", b" "]
            )
        row = assert_same_row(bytes(data), read=False)
        cut += row.value is not None and any(isinstance(value, np.ndarray) for value in row.value.values())
    assert cut > tried * 3 // 40


def test_long_lists_of_numbers_become_arrays_where_they_are_wanted_only():
    floats, integers = [-0.5] * 300, list(range(1000, 1900))
    row = {
        "token_ids": integers,
        "logprobs": floats,
        "loss_mask": [1] * 300,
        "calls": [{"prompt_ids": integers, "token_ids": [5] * 9}],
        "messages": [{"role": "user", "token_ids": integers}],
        "scores": floats,
        "tokens": floats,
    }
    value = ArrayParser(NUMBER_COLUMNS).parse_row(0, orjson.dumps(row)).value
    assert value is not None
    arrays = (
        value["token_ids"],
        value["logprobs"],
        value["loss_mask"],
        value["calls"][0]["prompt_ids"],
    )
    assert [array.dtype for array in arrays] == [np.int64, np.float64, np.int64, np.int64]
    lists = value["calls"][0]["token_ids"], value["messages"][0]["token_ids"], value["scores"], value["tokens"]
    assert all(type(entry) is list for entry in lists)
    exactly(value, row, arrays=True)


@st.composite
def growing(draw: st.DrawFn) -> list[list[Any]]:
    """Lists of which each begins as one before does, and goes on with ids or with something else."""
    entries = st.lists(st.integers(0, 200_000) | st.sampled_from([0, 7, 70, 700, -1, 2**40]), max_size=4)
    odd = st.sampled_from([[0.5, 1.5], [None], ["1,2"], [1e400], [-0.0], [True, False], [[1]], []])
    lists: list[list[Any]] = [[*draw(entries), 5, 6, 7]]
    for _ in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from(lists))
        shared = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        lists.append([*shared, *draw(entries), *(draw(odd) if draw(st.integers(0, 9)) == 0 else [])])
    return lists


FLOATS = st.lists(
    st.sampled_from([[-0.5, -1.25], [0.0] * 9, [-1e-07], [-0.012345678901234567], [-12.5] * 3]),
    min_size=1,
    max_size=4,
)


@pytest.mark.usefixtures("every_array_is_cut")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    growing(),
    st.lists(FLOATS, min_size=1, max_size=4),
    st.sampled_from([None, *([None] * 9), 0, True, "0.5", [0.5]]),
    st.sampled_from(SEPARATORS),
    st.booleans(),
    st.sampled_from([16, 64, 1 << 19]),
)
def test_lists_that_are_parsed_together_or_from_where_they_differ_read_the_same(
    monkeypatch: pytest.MonkeyPatch,
    lists: list[list[Any]],
    floats: list[list[list[float]]],
    odd: Any,
    separators: Any,
    mixed: bool,
    part: int,
):
    monkeypatch.setattr(number_arrays, "_PART_BYTES", part)
    calls: list[Any] = []
    for i, entries in enumerate(lists):
        logprobs = [value for values in floats[i % len(floats)] for value in values]
        calls.append({"prompt_ids": entries, "completion_ids": [9, 8, 7], "logprobs": logprobs})
    calls[-1]["logprobs"] += [] if odd is None else [odd]
    text = json.dumps({"calls": calls, "tokens": lists[-1], "token_ids": lists[-1]}, separators=separators)
    assert_same_row((text.replace(",", ", ", len(text) // 9) if mixed else text).encode(), read=False)


def test_a_prompt_that_begins_as_the_one_before_is_parsed_from_there_on(monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []

    def counted(data: bytes, start: int, stop: int) -> Any:
        parsed.append(stop - start)
        return parse_numbers(data, start, stop)

    monkeypatch.setattr(number_arrays, "parse_numbers", counted)
    first = list(range(1000, 1900))
    prompts = [first, [*first, 5, 77], [*first, 5, 77, *range(3000, 3100)], [*first, 5, 77, *range(3000, 3100)]]
    row = {"calls": [{"prompt_ids": prompt} for prompt in prompts]}
    row_read = assert_same_row(orjson.dumps(row), read=False)
    assert parsed == [len(BIG) + len(",5,77,") + 5 * 100 - 1]
    assert [call["prompt_ids"].dtype for call in (row_read.value or {})["calls"]] == [np.int32] * 4


def test_a_mapped_column_is_read_as_an_array():
    columns = number_columns({"token_ids": "mine", "logprobs": "extra.mine", "messages": "chat"})
    row = {"mine": list(range(1000, 1900)), "extra": {"mine": [-0.5] * 900}, "chat": [1] * 300}
    value = ArrayParser(columns).parse_row(0, orjson.dumps(row)).value
    assert value is not None
    mapping = {"token_ids": "mine", "logprobs": "extra.mine"}
    assert isinstance(value["mine"], np.ndarray)
    assert isinstance(value["extra"]["mine"], np.ndarray)
    assert type(value["chat"]) is list
    exactly(reading(value, mapping), reading(row, mapping))


# Scans


def test_rows_that_keep_their_text_have_their_lists_again(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(orjson.dumps({"token_ids": list(range(1000, 1900))}) + b"\n")
    (plain,), (array,), (text,) = (
        open_log(path),
        open_log(path, arrays=NUMBER_COLUMNS),
        open_log(path, arrays=NUMBER_COLUMNS, keep_text=True),
    )
    for row in (array, text):
        assert row.has_arrays
        assert isinstance((row.value or {})["token_ids"], np.ndarray)
    assert text.without_arrays.value == plain.value
    assert plain.without_arrays is plain


@pytest.mark.usefixtures("every_array_is_cut")
@pytest.mark.parametrize("log", some(LOGS, 3), ids=lambda log: log.name)
def test_a_scan_says_the_same_of_rows_read_either_way(log: Path, monkeypatch: pytest.MonkeyPatch):
    def scanned(jobs: int) -> list[Any]:
        scan = scan_rollouts(log, Settings(jobs=jobs))
        scan.chunk_bytes = 1 << 12
        return [(result.place, result.findings, result.skips, dict(result.counts)) for result in scan]

    results = scanned(1), scanned(2)
    rollouts = list(read_rollouts(log))
    monkeypatch.setattr("tito_audit.run.rows.number_columns", lambda mapping: {})
    assert results == (scanned(1),) * 2
    exactly(rollouts, list(read_rollouts(log)))


@pytest.mark.usefixtures("every_array_is_cut")
@pytest.mark.parametrize("log", some(LOGS, 3), ids=lambda log: log.name)
def test_a_repair_writes_the_same_of_rows_read_either_way(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def done(jobs: int) -> Any:
        out = tmp_path / f"out{log.suffix}"
        settings = Settings(tokenizer="fixtures/tokenizers/toy_bpe", jobs=jobs)
        repairs = repair_rollouts(log, out, settings, RepairSettings(unsafe=True, force=True))
        repairs.batch_bytes = None if jobs == 1 else 1 << 12
        outcomes = [
            (repair.place, repair.cured, repair.declined, repair.notes, repair.costs, repair.quarantined)
            for repair in repairs
        ]
        return outcomes, out.read_bytes(), repairs.changed

    outputs = done(1), done(2)
    monkeypatch.setattr(LogGroup, "can_splice", False)
    assert outputs == (done(1),) * 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["1", "-20", "333", "0.5", "-1e-7", "0.0", "true", "null"]), min_size=8, max_size=60)
    | st.lists(st.sampled_from(["1", "-20", "333"]), min_size=8, max_size=60)
    | st.lists(st.sampled_from(["0.5", "-1e-7", "0.0"]), min_size=8, max_size=60),
    st.sampled_from([",", ", "]),
    st.sampled_from(["", ",", ", ", ",,1"]),
)
def test_a_long_array_read_in_parts_is_what_it_is_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, values: list[str], comma: str, more: str
):
    text = comma.join(values) + more
    whole = numbers(text)
    monkeypatch.setattr(number_arrays, "_PART_BYTES", 16)
    parts = numbers(text)
    monkeypatch.undo()
    assert parts is None or (whole is not None and parts.dtype == whole.dtype and np.array_equal(parts, whole))


@pytest.mark.parametrize(
    "numbers_of_one_kind", [range(100, 90_000), [-0.5, -1e-7, 0.0] * 50_000, [True, False] * 90_000]
)
def test_a_long_array_is_read_in_parts(monkeypatch: pytest.MonkeyPatch, numbers_of_one_kind: Any):
    monkeypatch.setattr(number_arrays, "_PART_BYTES", 1 << 14)
    assert np.array_equal(numbers(json.dumps([*numbers_of_one_kind])[1:-1]), numbers_of_one_kind)


def test_a_long_text_is_json_if_it_is_json_with_its_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(number_arrays, "_SHORTEST", 3)
    monkeypatch.setattr(number_arrays, "_SHORTEST_INTEGERS", 3)
    whole = json.dumps({"a": [1, 22, 333], "b": ['": [1, 22, 333]', {"c": [0.5, -1.5]}], "d": [True, False]})
    texts = [whole, *(whole[:at] + whole[at + 1 :] for at in range(len(whole))), *(whole[:at] for at in range(40))]
    for text in texts:
        assert ArrayParser({}, other_kinds="ifb").is_json(text.encode()) == is_json(text.encode()), text
