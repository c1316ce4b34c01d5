"""Rows to rollouts: what holds for every format. What each format reads is in `tests/data/formats`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run, written
from tests.format_cases import CASES, Case, view
from tests.forms import plain
from tests.tiers import examples, one_in, some
from tests.world import FORMATS, ROOT
from tito_audit import scan_rollouts
from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format
from tito_audit.formats import all_formats, format_named, map_columns, pick_format
from tito_audit.record.edits import ABSENT, Edit, apply_edits
from tito_audit.record.edits import Path as Keys
from tito_audit.record.repaired import unrepaired
from tito_audit.record.rollout import Place, Rollout
from tito_audit.storage import find_logs, open_log

SHARED = ROOT.parent / "shared"
PLACE = Place("log.jsonl", 0)
MADE_HERE = ("atropos_group", "atropos_item", "atropos_node", "generic", "marin", "text_only")
MADE_HERE += ("tito_call", "tito_sample")
ROWS_ALONE = ("atropos_item", "slime", "tinker", "tito_sample")
"""Formats of training rows, in which an empty row says that its ids are missing."""
USER = {"role": "user", "content": "2+2?"}


def fixture_file(name: str) -> Path:
    return next(path for path in sorted(FORMATS.glob(f"{name}.*")) if path.suffix != ".py")


def fixture_rows(name: str) -> list[dict[str, Any]]:
    rows = list(open_log(fixture_file(name)))
    assert rows
    assert all(row.error is None for row in rows)
    return [dict(row.value or {}) for row in rows]


def read(row: dict[str, Any]) -> Rollout:
    """The one rollout of a row, in the format that it is told to be of."""
    (rollout,) = pick_format(row).read(row, PLACE)
    check(rollout)
    return rollout


def check(rollout: Rollout) -> None:
    """What holds for every rollout, whatever it was read from."""
    for turn in rollout.turns:
        for ids in (turn.prompt_ids, turn.completion_ids):
            assert ids is None or (ids.dtype == np.int32 and ids.ndim == 1)
        if turn.completion_logprobs is not None:
            assert turn.completion_logprobs.shape == turn.completion_ids.shape
            assert turn.completion_logprobs.dtype == np.float64
        for column in turn.columns:
            if column.alignment is not None and turn.completion_ids is not None:
                assert len(column.values) == len(turn.completion_ids), column.name
        if turn.message_index is not None:
            assert rollout.messages[turn.message_index].role == "assistant"
    indices = [turn.message_index for turn in rollout.turns if turn.message_index is not None]
    assert indices == sorted(set(indices))
    row = rollout.training_row
    if row is not None:
        assert row.token_ids.dtype == np.int32
        assert row.loss_mask is None or (row.loss_mask.dtype == np.bool_)
        for column_of_row in (row.loss_mask, row.logprobs):
            assert column_of_row is None or column_of_row.shape == row.token_ids.shape
        assert row.prompt_length is None or 0 <= row.prompt_length <= len(row.token_ids)


# Every format


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_each_format_matches_its_own_fixture_first_and_reads_it(form: Format):
    for row in fixture_rows(form.name):
        assert pick_format(row) is form, row.get("id")
        rollouts = form.read(row, PLACE)
        assert rollouts
        for item, rollout in enumerate(rollouts):
            check(rollout)
            assert rollout.format == form.name
            assert rollout.place == Place("log.jsonl", 0, item)


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_row_reads_the_same_from_parquet_as_from_json(form: Format, tmp_path: Path):
    for row in fixture_rows(form.name):
        path = tmp_path / "row.parquet"
        try:
            pq.write_table(pa.Table.from_pylist([row]), path)
        except pa.ArrowException:
            continue  # lists of mixed types and empty objects have no Parquet type
        (raw,) = open_log(path)
        assert raw.value is not None
        assert pick_format(raw.value) is form, row.get("id")
        rollouts = form.read(raw.value, PLACE)
        for left, right in zip(form.read(row, PLACE), rollouts, strict=True):
            check(right)
            # A table adds null for the keys that some messages have.
            texts = [{"messages": [message.text for message in read.messages]} for read in (left, right)]
            assert view(left) | texts[0] == view(right) | texts[1]
        (new,) = form.update(raw.value, [unrepaired(rollout) for rollout in rollouts])
        assert new is raw.value


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_format_says_what_it_is(form: Format):
    assert form.title
    assert form.signature
    assert form.shows
    assert format_named(form.name) is form


HOSTILE: tuple[Any, ...] = (
    None, [], {}, "text", 7, -1, True, 2**80, float("nan"), [0], [None], [None, 1], [[]], [[1], [2]], [{}], ["a"],
    1.5, [1.5], [True], [2**70], [float("nan")], np.array([1, 2]), np.array([1.5]), {"a": 1}, {"a": [1]}, ABSENT,
)  # fmt: skip


def paths_in(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Where the parts of a value are, however deep; of a list, the first two."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        parts = enumerate(value[:2])
    for key, inner in parts:
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_value_of_another_kind_anywhere_is_read_or_refused_in_words(form: Format):
    reasons: list[str] = []
    for row in fixture_rows(form.name)[::3]:
        text = row.get("trajectory_json")
        whole = row if text is None else json.loads(text)
        shallow = ((path, value) for path, value in product(((key,) for key in row), HOSTILE))
        deep = islice(product(paths_in(whole), HOSTILE), 0, None, examples(211, 5))
        for path, value in [*one_in(9, shallow), *deep]:
            if value is ABSENT and isinstance(path[-1], int):
                continue
            if text is None or path[0] not in whole:
                broken = apply_edits(row, [Edit(path, value)])
            else:
                broken = {**row, "trajectory_json": json.dumps(plain(apply_edits(whole, [Edit(path, value)])))}
            for own in (form, None):
                try:
                    reader = own or pick_format(broken)
                    rollouts = reader.read(broken, PLACE)
                    reader.sources(broken, rollouts)
                    new = reader.update(broken, [unrepaired(rollout) for rollout in rollouts])
                except RecordError as error:
                    reasons.append(str(error))
                    continue
                assert all(updated is broken for updated in new)
                for rollout in rollouts:
                    check(rollout)
    assert all(reasons)
    assert not any("\n" in reason for reason in reasons)


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.lists(st.integers(), max_size=3)))
def test_a_row_of_no_known_format_is_refused_with_its_columns_named(row):
    with pytest.raises(RecordError) as raised:
        pick_format(row)
    assert "empty" in str(raised.value) if not row else "--map" in str(raised.value)


TEXTS = [case for case in CASES if case.path.stem == "text_only"]


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_a_log_of_text_holds_nothing_to_audit_and_says_once_what_to_save(case: Case, tmp_path: Path):
    notice = read(case.row()).stated.notice
    run = scan_rollouts(written(tmp_path / "log.jsonl", [case.row()] * 3))
    assert [result.findings for result in run] == [()] * 3
    assert run.summary.without_ids == run.summary.rollouts == 3
    assert run.summary.rows_unreadable == 0
    assert not notice or run.summary.notices.count(notice) == 1


def test_an_unknown_format_name_is_answered_with_close_ones():
    with pytest.raises(SetupError, match="did you mean atropos_group"):
        format_named("atropos_groups")


@pytest.mark.parametrize("script", sorted(path.stem for path in FORMATS.glob("make*.py")))
def test_the_fixtures_are_what_their_scripts_write(script: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FORMATS))
    maker = importlib.import_module(script)
    if not hasattr(maker, "lines"):
        pytest.skip("its log comes out of a gateway")
    for name, text in maker.lines().items():
        assert fixture_file(Path(name).stem).read_text(encoding="utf-8") == text
    if script == "make":
        assert tuple(sorted(maker.lines())) == MADE_HERE


def test_the_tables_are_what_their_scripts_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(FORMATS))
    art, slime = importlib.import_module("make_art"), importlib.import_module("make_slime")
    tinker = importlib.import_module("make_atif")
    for name, table in (
        ("art_parquet", art.table(art.Toy())),
        ("miles_columns", slime.table(slime.column_rows(slime.Toy()))),
        ("tinker_tokendb", tinker.tokendb(tinker.Toy())),
    ):
        stored = pq.read_table(fixture_file(name))
        assert stored.equals(table)
        assert stored.schema.metadata == table.schema.metadata
    pq.write_table(art.first_version(art.Toy()), tmp_path / "v1.parquet")
    for raw in open_log(tmp_path / "v1.parquet"):
        rollout = read(dict(raw.value or {}))
        assert (rollout.format, rollout.stated.ids_wanted) == ("art_parquet", False)
        assert rollout.messages


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_row_without_ids_is_never_called_clean(form: Format):
    for row in fixture_rows(form.name):
        if "no-ids" in json.dumps(plain(list(row.values())[:3])):
            last = form.read(row, PLACE)[-1]
            assert all(turn.completion_ids is None for turn in last.turns)
            assert last.training_row is None
            assert last.stated.ids_wanted is False or last.turns or form.name in ROWS_ALONE


# --map


def test_mapped_columns_are_read_under_our_names():
    row = {"toks": [1, 20, 30], "extra": {"m": [0, 0, 1]}, "a.b": [0.0, 0.0, -0.5]}
    mapped = map_columns(row, {"token_ids": "toks", "loss_mask": "extra.m", "logprobs": "a.b"})
    row = view(read(dict(mapped)))["row"]
    assert (row["ids"], row["mask"], row["logprobs"][2]) == ([1, 20, 30], "001", -0.5)
    assert "toks" not in mapped


@pytest.mark.parametrize(
    ("mapping", "error", "says"),
    [
        ({"token_ids": "tokens"}, RecordError, r"no column 'tokens'.*extra, toks"),
        ({"loss_mask": "extra.mask"}, RecordError, r"'extra' has: m"),
        ({"ids": "toks"}, SetupError, "no such column"),
    ],
)
def test_a_mapping_that_leads_nowhere_names_what_there_is(mapping, error, says):
    with pytest.raises(error, match=says):
        map_columns({"toks": [1], "extra": {"m": [0]}}, mapping)


@pytest.mark.shared
def test_the_shared_rollouts_are_calls_that_each_wrote_their_message():
    folder = SHARED / "rollouts"
    if not folder.is_dir():
        pytest.skip("the shared rollouts are not beside this checkout")
    for path in find_logs([str(folder)]):
        for raw in open_log(path):
            rollout = read(dict(raw.value or {}))
            assert rollout.format == "generic"
            assert len(rollout.turns) == sum(message.role == "assistant" for message in rollout.messages)
            assert all(turn.message_index is not None for turn in rollout.turns)
            assert all(turn.completion_logprobs is not None for turn in rollout.turns)


def test_tools_and_arguments_out_of_a_table_are_plain_values(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1, 2]}}}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": [1, 2]}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [called]}]
    path = tmp_path / "log.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"messages": messages, "tools": [tool], "prompt_ids": [1], "completion_ids": [2]}]),
        path,
    )
    (raw,) = open_log(path)
    rollout = read(dict(raw.value or {}))
    assert rollout.tools == (tool,)
    assert rollout.messages[1].tool_calls[0].arguments == {"n": [1, 2]}
    assert rollout.messages[1].wire["tool_calls"] == [called]


def test_a_trajectory_nested_without_end_is_refused_in_words():
    row = {"format_version": 2, "group_index": 1, "group_json": "{}", "trajectory_json": "[" * 100_000}
    with pytest.raises(RecordError, match="trajectory_json is not valid JSON"):
        read(row)


@pytest.mark.parametrize("name", some([form.name for form in all_formats()], 5))
def test_rows_of_another_format_than_the_named_one_are_findings(name: str) -> None:
    code, out, err = run("scan", FORMATS, "--format", name, "--fail-on", "never", "-f", "concise")
    assert (code, err) == (0, ""), err
    assert "Traceback" not in out
