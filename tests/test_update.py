"""Rollouts to rows: nothing changes that no repair changed, and every copy of what it changed does."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forms import (
    PLACE,
    as_table,
    covered,
    ids,
    ids_of_turns,
    paths,
    plain,
    read_one,
    spliced,
    trained_row,
    with_logprobs,
    with_prompt,
    with_turns,
)
from tests.test_formats import fixture_rows
from tests.tiers import crossed, examples
from tests.world import ROOT, fixture_row
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import all_formats, format_named, map_columns, pick_format, unmap_columns
from tito_audit.record.column import ColumnRole, MaskEncoding
from tito_audit.record.edits import edits_between
from tito_audit.record.move_row import move_row
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import IdsFrom, TrainingRow, Turn

HOLDS_FORKS = ("generic", "miles_session", "nemo_gym")
"""Formats whose rows hold calls, of which a row may keep some."""
MAY_REFUSE = {
    "preference_pair": "only its labels can be changed|no column for the ids of its prompt",
    "sglang": "the server scored the old prompt",
    "verifiers_results": "prompt_mask trains tokens",
    "verifiers_v1": "no separate place|weighs the tokens|was sampled|several branches|mask trains the tokens",
    "vllm": "no separate place",
}
"""Why a fixture's row may have no place for another prompt."""
CALLS_STAY = ("atif", "harbor", "rllm_episode", "rllm_gateway")
SHAPES = {"json": lambda row: row, "table": as_table, "lists": partial(as_table, with_lists=True)}
"""A row as a log of JSON, and as a table holds it."""


def every_format(first: str) -> pytest.MarkDecorator:
    """Each format in each shape in `make deep`, else in one of them; these take turns from the first on."""
    shapes = [*SHAPES, *SHAPES][list(SHAPES).index(first) :][: len(SHAPES)]
    cases = [
        pytest.param(form, SHAPES[name], id=f"{name}-{form.name}") for form, name in crossed(all_formats(), shapes)
    ]
    return pytest.mark.parametrize(("form", "as_read"), cases)


def flat_rows(form: Format, as_read: Callable[[Row], Row]) -> Iterator[tuple[Row, int, TrainingRow]]:
    """Each row of a fixture with the training row of each rollout in it, where that may be replaced."""
    if form.name in ("verifiers_results", "verifiers_v1", "preference_pair"):
        return  # their rows are made of their calls; the ids of a pair never change
    for row in map(as_read, fixture_rows(form.name)):
        for item, rollout in enumerate(form.read(row, PLACE)):
            trained = rollout.training_row
            if trained is not None and all(column.alignment is not None for column in trained.columns):
                yield row, item, trained


def updated(row: Row, *, item: int = 0, **changes: Any) -> Row:
    """The one row that is written when a rollout of it is replaced in these fields."""
    form = pick_format(row)
    mended = [unrepaired(rollout) for rollout in form.read(row, PLACE)]
    mended[item] = RepairedRollout(replace(mended[item].rollout, **changes), mended[item].turns_from)
    (new,) = form.update(row, mended)
    return new


def assert_holds(row: Row, wanted: TrainingRow, item: int = 0) -> None:
    """Reading the row again gives what was asked for."""
    read = trained_row(row, item)
    assert read.token_ids.tolist() == wanted.token_ids.tolist()
    for name in ("loss_mask", "logprobs"):
        left, right = getattr(read, name), getattr(wanted, name)
        assert (left is None) == (right is None), name
        if left is not None:
            np.testing.assert_allclose(left, right, rtol=1e-6, err_msg=name)  # a table may hold float32
    assert read.padding == wanted.padding


# Nothing changed


@every_format("json")
def test_a_row_in_which_nothing_changed_is_the_row_itself(form: Format, as_read):
    for row in map(as_read, fixture_rows(form.name)):
        before = copy.deepcopy(plain(row))
        # The rollouts come from another reading, as they do when a repair looked at one of several.
        new = form.update(row, [unrepaired(rollout) for rollout in form.read(row, PLACE)])
        assert len(new) == 1
        assert new[0] is row, row.get("id")
        assert repr(plain(row)) == repr(before)  # NaN is not equal to itself


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_format_that_holds_one_row_a_rollout_says_so_of_a_fork(form: Format):
    row = fixture_rows(form.name)[0]
    whole = [unrepaired(rollout) for rollout in form.read(row, PLACE)]
    for part in () if form.name in HOLDS_FORKS else (whole[0], whole[-1]):
        with pytest.raises(RecordError, match=r"fork|cannot hold"):
            form.update(row, [*whole, part])


@pytest.mark.parametrize("name", CALLS_STAY)
def test_a_call_can_neither_be_left_out_nor_change_what_was_sampled(name: str):
    row, form = fixture_rows(name)[0], format_named(name)
    first, *others = [unrepaired(rollout) for rollout in form.read(row, PLACE)]
    less = RepairedRollout(replace(first.rollout, turns=first.rollout.turns[1:]), first.turns_from[1:])
    with pytest.raises(RecordError, match="can neither be left out"):
        form.update(row, [less, *others])
    turn, *later = first.rollout.turns
    assert turn.completion_ids is not None
    other = replace(turn, completion_ids=turn.completion_ids + np.int32(1))
    with pytest.raises(RecordError, match="no repair may change what was sampled"):
        updated(row, turns=(other, *later))


# What changed is read again, anywhere in any row


@every_format("table")
def test_tokens_that_changed_are_read_again_as_they_were_meant(form: Format, as_read):
    for row, item, trained in flat_rows(form, as_read):
        if row.get("name") == "k-best-logprobs":
            continue  # nobody scored the others of the k best that would stand beside a new token
        for at in (1, len(trained.token_ids) // 2, len(trained.token_ids) - 1):
            wanted = spliced(trained, at, at + 1, [7001, 7002])
            new = updated(row, item=item, training_row=wanted)
            assert_holds(new, wanted, item)
            assert list(new) == list(row)
            assert type(row) is type(new)
            for other, old in enumerate(form.read(row, PLACE)):
                if other != item and old.training_row is not None:
                    read = trained_row(new, other)
                    assert read.token_ids.tolist() == old.training_row.token_ids.tolist()


@every_format("lists")
def test_prompts_and_logprobs_that_changed_are_read_again_as_they_were_meant(form: Format, as_read):
    changes, calls = 0, 0
    for row in map(as_read, fixture_rows(form.name)):
        before = repr(plain(row))
        for item, rollout in enumerate(form.read(row, PLACE)):
            for number, turn in enumerate(rollout.turns):
                if ids(turn.prompt_ids) == ids(turn.completion_ids):
                    continue  # placeholders, of which nobody can say which is whose copy
                others: list[Turn] = []
                if turn.prompt_ids is not None:
                    others += [
                        with_prompt(turn, [*turn.prompt_ids, 7001]),
                        with_prompt(turn, [7, *turn.prompt_ids]),
                    ]
                if turn.completion_logprobs is not None:
                    others.append(with_logprobs(turn, turn.completion_logprobs - 1))
                calls += bool(others)
                for other in others:
                    turns = (*rollout.turns[:number], other, *rollout.turns[number + 1 :])
                    try:
                        new = updated(row, item=item, turns=turns)
                    except RecordError as error:
                        if not re.search(MAY_REFUSE.get(form.name, "^$"), str(error)):
                            raise
                        continue
                    read = form.read(new, PLACE)[item].turns[number]
                    np.testing.assert_array_equal(read.prompt_ids, other.prompt_ids)
                    np.testing.assert_array_equal(read.completion_ids, other.completion_ids)
                    if other.completion_logprobs is not None and len(other.completion_logprobs):
                        # A log with four digits a logprob gets no more.
                        np.testing.assert_allclose(read.completion_logprobs, other.completion_logprobs, atol=5e-5)
                    assert list(new) == list(row)
                    changes += 1
        assert repr(plain(row)) == before
    assert bool(changes) == bool(calls) or form.name == "preference_pair"  # of which only labels change


@every_format("json")
def test_a_mask_and_logprobs_change_by_themselves(form: Format, as_read):
    for row, item, trained in flat_rows(form, as_read):
        if trained.loss_mask is None or not trained.loss_mask.any():
            continue
        if not any(column.role is ColumnRole.LOSS_MASK for column in trained.columns):
            continue
        mask = trained.loss_mask.copy()
        mask[np.flatnonzero(mask)[-1]] = False
        source = np.arange(len(mask), dtype=np.int64)
        moved = move_row(trained, trained.token_ids, source, loss_mask=mask, logprobs=trained.logprobs)
        wanted = covered(moved.row)
        assert_holds(updated(row, item=item, training_row=wanted), wanted, item)
        if trained.logprobs is None:
            continue
        logprobs = np.where(trained.loss_mask, trained.logprobs - 1, trained.logprobs)
        moved = move_row(trained, trained.token_ids, source, loss_mask=trained.loss_mask, logprobs=logprobs)
        new = updated(row, item=item, training_row=moved.row)
        assert_holds(new, moved.row, item)
        changed = {path[0] for edit in edits_between(row, new) if (path := edit.path)}
        assert len(changed) == (2 if "tree" in row else 1)


# What is no case of data


def test_rows_of_a_table_keep_their_types():
    row = as_table(
        {
            "input_lengths": [4],
            "token_ids": [[1, 2, 3, 4, 9, 9]],
            "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
            "sample_loss_mask": [1.0],
            "advantages": [[0.5, 0.5, 0.5, 0.5, 0.0, 0.0]],
        }
    )
    row["token_ids"] = [row["token_ids"][0].astype(np.int32)]
    row["advantages"] = [row["advantages"][0].astype(np.float32)]
    new = updated(row, training_row=spliced(trained_row(row), 1, 2, [7, 8]))
    assert isinstance(new["input_lengths"], np.ndarray)
    assert new["input_lengths"].tolist() == [5]
    assert new["token_ids"][0].dtype == np.int32
    assert new["advantages"][0].dtype == np.float32
    assert np.isnan(new["advantages"][0]).tolist() == [False, True, True, False, False, False]


def test_a_mask_in_another_style_is_written_in_it_or_refused_by_the_type():
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.1, -0.2]}

    def styled(row: Row) -> TrainingRow:
        trained = trained_row(row)
        columns = tuple(
            replace(column, values=column.values > 0, encoding=MaskEncoding.BOOL)
            if column.role is ColumnRole.LOSS_MASK
            else column
            for column in trained.columns
        )
        return replace(trained, columns=columns)

    assert json.dumps(updated(row, training_row=styled(row))["loss_mask"]) == "[false, true, true]"
    with pytest.raises(RecordError, match="int64"):
        updated(as_table(row), training_row=styled(as_table(row)))


def test_a_row_beside_its_call_leaves_the_columns_of_the_call_alone():
    row = {
        "tokens": [1, 2, 30, 31],
        "loss_mask": [0, 0, 1, 1],
        "prompt_ids": [1, 2],
        "completion_ids": [30, 31],
        "completion_logprobs": [-0.1, -0.2],
    }
    rollout = read_one(row)
    assert rollout.turns
    new = updated(row, training_row=spliced(trained_row(row), 2, 3, [300, 301]))
    assert new["tokens"] == [1, 2, 300, 301, 31]
    assert new["completion_ids"] is row["completion_ids"]
    assert new["prompt_ids"] is row["prompt_ids"]


def test_a_row_without_a_trajectory_stays_and_takes_no_tokens():
    row = {"format_version": 2, "group_index": 0, "group_json": "{}", "trajectory_json": None, "reward": 1.0}
    rollout = read_one(row)
    assert format_named("art_parquet").update(row, [unrepaired(rollout)]) == (row,)
    turn = Turn(np.array([1], np.int32), np.array([2], np.int32))
    with pytest.raises(RecordError, match="no place"):
        updated(row, turns=(turn,))


def test_a_change_over_two_chunks_keeps_both():
    row = next(row for row in fixture_rows("tinker") if row["name"] == "three-chunks")
    sizes = [len(chunk["tokens"]) for chunk in row["model_input"]["chunks"]]
    old = trained_row(row)
    ids = old.token_ids.copy()
    ids[sizes[0] - 1 : sizes[0] + 1] = 7001
    new = updated(row, training_row=replace(old, token_ids=ids))
    assert trained_row(new).token_ids.tolist()[sizes[0] - 1 : sizes[0] + 1] == [7001, 7001]
    assert len(new["model_input"]["chunks"]) == 3


def test_what_a_row_has_no_place_for_is_refused():
    form, row = format_named("nemo_gym"), fixture_row("nemo_gym", "clean")
    rollout = read_one(row)
    first, *later = rollout.turns
    assert later
    column = replace(first.columns[0], name="extra")
    assert first.completion_logprobs is not None
    less = with_logprobs(first, first.completion_logprobs - 1)
    for wrong, reason in (
        (replace(first, prompt_ids=None), "gain or lose its prompt"),
        (replace(first, columns=(*first.columns, column)), "no column 'extra'"),
        (replace(first, completion_logprobs=first.completion_logprobs - 2, columns=less.columns), "one set"),
    ):
        with pytest.raises(RecordError, match=reason):
            updated(row, turns=(wrong, *later))
    with pytest.raises(RecordError, match="no rollout"):
        form.update(row, [])
    with pytest.raises(RecordError, match="another order"):
        form.update(row, [RepairedRollout(replace(rollout, turns=rollout.turns[:2]), (1, 0))])


@pytest.mark.parametrize("as_read", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("clean", "response.choices.0.logprobs.content.0.logprob"),
        ("responses-object", "response.output.0.content.0.logprobs.0.logprob"),
    ],
)
def test_recovered_ids_are_never_written_and_their_logprobs_are(name: str, path: str, as_read):
    row = as_read(fixture_row("openai_chat", name))
    turn, *later = read_one(row).turns
    assert turn.token_texts is not None
    logprobs = np.array([token.logprob for token in turn.token_texts])
    same = replace(
        turn,
        completion_ids=np.arange(len(turn.token_texts), dtype=np.int32),
        completion_logprobs=logprobs,
        ids_from=IdsFrom.RECOVERED,
    )
    assert updated(row, turns=(same, *later)) is row
    other = replace(same, completion_logprobs=np.array([-7.5, *logprobs[1:]]))
    assert paths(row, updated(row, turns=(other, *later))) == [path]


@pytest.mark.shared
def test_the_recorded_round_trip_is_the_same_object_and_can_be_forked():
    recorded_file = ROOT.parent / "shared" / "recorded" / "nemo-gym-round-trip.json"
    if not recorded_file.exists():
        pytest.skip("the recorded data are not beside the checkout")
    recorded = json.loads(recorded_file.read_text())
    chat = recorded["expected_output_return_token_id_information"]
    items = {"responses_create_params": {"input": chat["messages"][:2]}, "response": recorded["input"]}
    form = format_named("nemo_gym")
    for row in (chat, items):
        before = copy.deepcopy(row)
        rollout = read_one(row)
        assert form.update(row, [unrepaired(rollout)]) == (row,)
        parts = [with_turns(rollout, {}, [n]) for n in range(len(rollout.turns))]
        for number, part in enumerate(form.update(row, parts)):
            assert ids_of_turns(read_one(part)) == [ids_of_turns(rollout)[number]]
        assert row == before


# --map


def test_mapped_columns_go_back_under_the_names_of_the_log():
    row = {"extra": {"tok": [1, 2, 3], "other": [1]}, "m.ask": [0, 1, 1], "lp": [0.0, -0.1, -0.2], "x": 1}
    mapping = {"token_ids": "extra.tok", "loss_mask": "m.ask", "logprobs": "lp"}
    mapped = map_columns(row, mapping)
    form = format_named("generic")
    (rollout,) = form.read(mapped, PLACE)
    assert unmap_columns(row, form.update(mapped, [unrepaired(rollout)])[0], mapping) is row
    assert rollout.training_row is not None
    wanted = spliced(rollout.training_row, 1, 2, [7, 8])
    (new,) = form.update(mapped, [unrepaired(replace(rollout, training_row=wanted))])
    back = unmap_columns(row, new, mapping)
    assert back == {
        "extra": {"tok": [1, 7, 8, 3], "other": [1]},
        "m.ask": [0, 0, 0, 1],
        "lp": [0.0, 0.0, 0.0, -0.2],
        "x": 1,
    }
    assert list(back) == list(row)
    assert back["extra"]["other"] is row["extra"]["other"]
    with pytest.raises(RecordError, match="two columns"):
        unmap_columns(row, {**new, "prompt_ids": [4]}, {**mapping, "prompt_ids": "extra.tok"})


# Anything anywhere


@st.composite
def splices(draw: st.DrawFn) -> tuple[dict[str, Any], TrainingRow]:
    """A flat row of random columns, and it with other ids somewhere."""
    size = draw(st.integers(2, 12))
    ids = draw(st.lists(st.integers(2, 5), min_size=size, max_size=size))
    mask = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    style = draw(st.sampled_from(["atropos", "generic", "padded"]))
    logprobs = [-0.25 * (1 + i) if trained else 1.0 for i, trained in enumerate(mask)]
    row: dict[str, Any]
    if style == "atropos":
        labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
        row = {"tokens": ids, "masks": labels, "scores": 1.0, "inference_logprobs": logprobs, "kept": {"a": [1]}}
    else:
        left, right = (draw(st.integers(0, 3)), draw(st.integers(0, 3))) if style == "padded" else (0, 0)
        row = {
            "token_ids": [9] * left + ids + [9] * right,
            "attention_mask": [0] * left + [1] * size + [0] * right,
            "loss_mask": [0] * left + mask + [0] * right,
            "logprobs": [1.0] * left + logprobs + [1.0] * right,
            "kept": {"a": [1]},
        }
    if draw(st.booleans()):
        row = as_table(row)
    start = draw(st.integers(0, size))
    end = draw(st.integers(start, size))
    new = draw(st.lists(st.integers(2, 7), min_size=1 if end - start == size else 0, max_size=4))
    return row, spliced(trained_row(row), start, end, new)


@settings(max_examples=examples(50, 200), deadline=None)
@given(splices())
def test_whatever_is_put_in_is_read_again_and_nothing_else_moves(case: tuple[dict[str, Any], TrainingRow]):
    row, wanted = case
    before = copy.deepcopy(plain(row))
    new = updated(row, training_row=wanted)
    assert plain(row) == before
    assert new["kept"] is row["kept"]
    assert list(new) == list(row)
    read = trained_row(new)
    assert read.token_ids.tolist() == wanted.token_ids.tolist()
    for left, right in ((read.loss_mask, wanted.loss_mask), (read.logprobs, wanted.logprobs)):
        if left is not None and right is not None:
            np.testing.assert_array_equal(left, right)
    for name in row.keys() - {"scores", "kept", "reward"}:
        assert len(new[name]) == len(new["tokens" if "tokens" in new else "token_ids"])
        assert type(new[name]) is type(row[name])


@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(100, 999), max_size=3),
    st.sampled_from([None, [1, 1, 0, 1, 1]]),
    st.booleans(),
)
def test_any_splice_is_read_back_and_keeps_the_kinds_of_a_table(first, second, ids, mask, table):
    start, end = sorted((first, second))
    row: dict[str, Any] = {
        "tokens": [1, 20, 21, 30, 31, 60, 70, 2],
        "response_length": 5,
        "loss_mask": mask,
        "rollout_log_probs": [-0.2, -0.1, 0.0, -0.3, -0.01],
        "status": "completed",
    }
    if table:
        types = {"tokens": np.int32, "loss_mask": np.int8, "rollout_log_probs": np.float32}
        row |= {key: np.array(row[key], kind) for key, kind in types.items() if row[key] is not None}
    before = trained_row(row)
    if start <= 3 < end or len(before.token_ids) - (end - start) + len(ids) == 0:
        return  # where the prompt ends then is for a repair to say
    wanted = spliced(before, start, end, ids)
    new = updated(row, training_row=wanted)
    read = trained_row(new)
    assert (read.token_ids.tolist(), read.prompt_length) == (wanted.token_ids.tolist(), wanted.prompt_length)
    np.testing.assert_array_equal(read.loss_mask, wanted.loss_mask)
    np.testing.assert_allclose(read.logprobs, wanted.logprobs, rtol=1e-6)
    for key in ("tokens", "loss_mask", "rollout_log_probs"):
        if row[key] is not None and len(new[key]):
            assert type(new[key]) is type(row[key])
            assert getattr(new[key], "dtype", None) == getattr(row[key], "dtype", None)
