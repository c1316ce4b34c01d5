"""Rollouts to rows: nothing changes that no repair changed, and every copy of what it changed does."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forms import PLACE, as_table, covered, plain, read_one, spliced, trained_row
from tests.tiers import examples
from tests.world import FORMATS
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import all_formats, format_named, map_columns, pick_format, unmap_columns
from tito_audit.record.column import ColumnRole, MaskEncoding
from tito_audit.record.edits import edits_between
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Padding, Rollout, TrainingRow
from tito_audit.storage import open_log

FLAT = (
    "atropos_group",
    "atropos_item",
    "atropos_node",
    "generic",
    "nemo_rl",
    "nemo_rl_message_log",
    "tito_sample",
)
ONE_CALL = ("marin", "tito_call")


def fixture_rows(name: str) -> list[dict[str, Any]]:
    found = [FORMATS / f"{name}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    return [dict(raw.value or {}) for raw in open_log(next(path for path in found if path.exists()))]


def updated(row: Row, *, item: int = 0, **changes: Any) -> Row:
    """The one row that is written when a rollout of it is replaced in these fields."""
    form = pick_format(row)
    mended = [unmended(rollout) for rollout in form.read(row, PLACE)]
    mended[item] = RepairedRollout(replace(mended[item].rollout, **changes), mended[item].turns_from)
    (new,) = form.update(row, mended)
    return new


def assert_holds(row: Row, wanted: TrainingRow, item: int = 0) -> None:
    """Reading the row again gives what was asked for."""
    found = trained_row(row, item)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    for name in ("loss_mask", "logprobs"):
        left, right = getattr(found, name), getattr(wanted, name)
        assert (left is None) == (right is None), name
        if left is not None:
            np.testing.assert_array_equal(left, right, name)
    assert found.padding == wanted.padding


# Nothing changed


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_row_in_which_nothing_changed_is_the_row_itself(form: Format, as_read):
    for row in map(as_read, fixture_rows(form.name)):
        before = copy.deepcopy(plain(row))
        # The rollouts come from another reading, as they do when a repair looked at one of several.
        new = form.update(row, [unmended(rollout) for rollout in form.read(row, PLACE)])
        assert len(new) == 1
        assert new[0] is row, row.get("id")
        assert repr(plain(row)) == repr(before)  # NaN is not equal to itself


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_format_that_holds_one_row_a_rollout_says_so_of_a_fork(form: Format):
    if form.name in ("generic", "miles_session", "nemo_gym"):
        return  # these hold calls, of which a row may keep some
    row = fixture_rows(form.name)[0]
    whole = [unmended(rollout) for rollout in form.read(row, PLACE)]
    with pytest.raises(RecordError, match=r"fork|cannot hold"):
        form.update(row, [*whole, whole[0]])


# One token becomes two, anywhere in any flat row


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_tokens_that_changed_are_read_again_as_they_were_meant(name: str, as_read):
    form = format_named(name)
    told = 0
    for row in map(as_read, fixture_rows(name)):
        for item, rollout in enumerate(form.read(row, PLACE)):
            trained = rollout.training_row
            if trained is None or any(column.alignment is None for column in trained.columns):
                continue
            for at in (1, len(trained.token_ids) // 2, len(trained.token_ids) - 1):
                wanted = spliced(trained, at, at + 1, [7001, 7002])
                new = updated(row, item=item, training_row=wanted)
                told += 1
                assert_holds(new, wanted, item)
                assert list(new) == list(row)
                assert type(row) is type(new)
    assert told


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_mask_and_logprobs_change_by_themselves(name: str, as_read):
    for row in map(as_read, fixture_rows(name)):
        for item, rollout in enumerate(pick_format(row).read(row, PLACE)):
            trained = rollout.training_row
            if trained is None or trained.loss_mask is None or not trained.loss_mask.any():
                continue
            if any(column.alignment is None for column in trained.columns):
                continue
            mask = trained.loss_mask.copy()
            mask[np.flatnonzero(mask)[-1]] = False
            source = np.arange(len(mask), dtype=np.int64)
            wanted = covered(
                moved_row(trained, trained.token_ids, source, loss_mask=mask, logprobs=trained.logprobs).row
            )
            if not any(column.role is ColumnRole.LOSS_MASK for column in trained.columns):
                continue
            new = updated(row, item=item, training_row=wanted)
            assert_holds(new, wanted, item)
            if trained.logprobs is None:
                continue
            logprobs = np.where(trained.loss_mask, trained.logprobs - 1, trained.logprobs)
            wanted = moved_row(
                trained, trained.token_ids, source, loss_mask=trained.loss_mask, logprobs=logprobs
            ).row
            new = updated(row, item=item, training_row=wanted)
            assert_holds(new, wanted, item)
            changed = {path[0] for edit in edits_between(row, new) if (path := edit.path)}
            assert len(changed) == (2 if "tree" in row else 1)


def test_what_did_not_change_is_shared_with_the_old_row():
    row = next(row for row in fixture_rows("atropos_group") if row["id"] == "columns-beside")
    trained = trained_row(row, 1)
    new = updated(row, item=1, training_row=spliced(trained, 3, 4, [7001, 7002]))
    for name, value in row.items():
        if name in ("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs", "token_scores"):
            assert new[name][0] is value[0]
            assert len(new[name][1]) == len(value[1]) + 1
        elif not name.startswith("distill"):
            assert new[name] is value, name
    assert new["advantages"][1][3:5] == [None, None]
    assert new["ref_logprobs"][1][2:] == [-0.4, *[None] * (len(trained.token_ids) - 2)]
    assert new["distill_token_ids"][1][:3] == row["distill_token_ids"][1][:3]
    assert new["distill_token_ids"][1][3:] == [None] * (len(trained.token_ids) - 2)
    assert new["masks"][1][3:5] == [-100, -100]


def test_every_container_of_a_node_is_written():
    row = next(row for row in fixture_rows("atropos_node") if row["id"] == "tree")
    trained = trained_row(row, 1)
    new = updated(row, item=1, training_row=spliced(trained, 2, 3, [7001, 7002]))
    keys = list(row["tree"])
    for name in ("tree", "sequences"):
        assert list(new[name]) == keys
        assert new[name][keys[0]] is row[name][keys[0]]
        assert new[name][keys[1]]["tokens"][2:4] == [7001, 7002]
        assert new[name][keys[1]]["masked_tokens"][2:4] == [-100, -100]
        assert new[name][keys[1]]["logprobs"][2:4] == [1.0, 1.0]
        assert new[name][keys[1]]["metadata"] is row[name][keys[1]]["metadata"]


def test_one_of_two_equal_nodes_changes_alone():
    row = next(row for row in fixture_rows("atropos_node") if row["id"] == "state")
    new = updated(row, item=1, training_row=spliced(trained_row(row, 1), 2, 3, [7001, 7002]))
    assert new["nodes"][0] is row["nodes"][0]
    assert new["nodes"][1]["tokens"][2:4] == [7001, 7002]


# NeMo-RL: width, wrapping, lengths


def rl_row(**changes: Any) -> dict[str, Any]:
    row = {
        "input_lengths": [4],
        "token_ids": [[1, 2, 3, 4, 9, 9]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5, 0.5, 0.5, 0.5, 0.0, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, 0.0, 0.0]],
        "prev_logprobs": [[0.0, -0.3, -0.3, -0.3, 0.0, 0.0]],
        "idx": 3,
    }
    return row | changes


def test_padding_gives_way_to_tokens_and_the_width_stays():
    row = rl_row()
    assert trained_row(row).padding == Padding(0, 2)
    new = updated(row, training_row=spliced(trained_row(row), 1, 2, [7, 8]))
    assert new == {
        "input_lengths": [5],
        "token_ids": [[1, 7, 8, 3, 4, 9]],
        "token_loss_mask": [[0, 0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5, None, None, 0.5, 0.5, 0.0]],
        "generation_logprobs": [[0.0, 0.0, 0.0, -0.1, -0.2, 0.0]],
        "prev_logprobs": [[0.0, None, None, None, None, 0.0]],
        "idx": 3,
    }
    assert all(type(entry) is int for entry in new["token_loss_mask"][0])


def test_padding_grows_where_tokens_went_and_the_width_grows_where_they_do_not_fit():
    row = rl_row()
    fewer = updated(row, training_row=spliced(trained_row(row), 0, 2, [7]))
    assert fewer["token_ids"] == [[7, 3, 4, 9, 9, 9]]
    assert fewer["advantages"] == [[None, 0.5, 0.5, 0.0, 0.0, 0.0]]
    more = updated(row, training_row=spliced(trained_row(row), 0, 1, [5, 6, 7, 8]))
    assert more["token_ids"] == [[5, 6, 7, 8, 2, 3, 4]]
    assert more["input_lengths"] == [7]
    assert {len(more[name][0]) for name in ("token_loss_mask", "advantages", "prev_logprobs")} == {7}


def test_rows_of_a_table_keep_their_types():
    row = as_table(rl_row())
    row["token_ids"] = [row["token_ids"][0].astype(np.int32)]
    row["advantages"] = [row["advantages"][0].astype(np.float32)]
    new = updated(row, training_row=spliced(trained_row(row), 1, 2, [7, 8]))
    assert isinstance(new["input_lengths"], np.ndarray)
    assert new["input_lengths"].tolist() == [5]
    assert new["token_ids"][0].dtype == np.int32
    assert new["advantages"][0].dtype == np.float32
    assert np.isnan(new["advantages"][0]).tolist() == [False, True, True, False, False, False]


def test_padding_needs_something_to_pad_with_and_something_that_tells_it():
    row = rl_row(
        **{
            name: [value[0][:4]]
            for name, value in rl_row().items()
            if isinstance(value, list) and isinstance(value[0], list)
        }
    )
    with pytest.raises(RecordError, match="with which value"):
        updated(row, training_row=replace(trained_row(row), padding=Padding(0, 2)))
    with pytest.raises(RecordError, match="right"):
        updated(rl_row(), training_row=replace(trained_row(rl_row()), padding=Padding(2, 0)))
    del row["input_lengths"]
    with pytest.raises(RecordError, match="input_lengths"):
        updated(row, training_row=replace(trained_row(row), padding=Padding(0, 2)))
    item = fixture_rows("atropos_item")[0]
    with pytest.raises(RecordError, match="no padding"):
        updated(item, training_row=replace(trained_row(item), padding=Padding(0, 2)))


def test_a_column_that_fitted_nothing_is_written_whole_with_its_padding():
    row = rl_row(generation_logprobs=[[0.0, 0.0, -0.1, -0.2, 0.0, 0.0, 0.0]])
    trained = trained_row(row)
    assert trained.logprobs is None
    source = np.arange(4, dtype=np.int64)
    moved = moved_row(
        trained, trained.token_ids, source, loss_mask=trained.loss_mask, logprobs=np.array([0.0, 0.0, -0.1, -0.2])
    )
    new = updated(row, training_row=moved.row)
    assert new == rl_row()
    assert new["token_ids"] is row["token_ids"]


# Message logs


def chat_log() -> dict[str, Any]:
    return {
        "message_log": [
            {"role": "user", "content": "a", "token_ids": [1, 2, 3], "token_loss_mask": [0, 0, 0]},
            {
                "role": "assistant",
                "content": "b",
                "token_ids": [4, 5],
                "token_loss_mask": [1, 1],
                "generation_logprobs": [-0.1, -0.2],
            },
            {"role": "user", "content": "c", "token_ids": [6], "token_loss_mask": [0]},
            {
                "role": "assistant",
                "content": "d",
                "token_ids": [7, 8],
                "token_loss_mask": [1, 1],
                "generation_logprobs": [-0.3, -0.4],
            },
        ],
        "length": 8,
    }


def test_messages_get_back_the_tokens_that_are_theirs():
    row = chat_log()
    new = updated(row, training_row=spliced(trained_row(row), 1, 2, [21, 22]))
    assert [entry["token_ids"] for entry in new["message_log"]] == [[1, 21, 22, 3], [4, 5], [6], [7, 8]]
    assert new["message_log"][0]["token_loss_mask"] == [0, 0, 0, 0]
    assert new["message_log"][1] is row["message_log"][1]
    assert "generation_logprobs" not in new["message_log"][0]
    assert new["length"] == 9


def test_an_answer_put_back_keeps_its_logprobs_and_its_neighbours_keep_their_tokens():
    row = chat_log()
    trained = trained_row(row)
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1], bool)
    logprobs = np.array([0, 0, 0, -0.5, -0.6, -0.7, 0, -0.3, -0.4])
    wanted = spliced(trained, 3, 5, [41, 42, 43], loss_mask=mask, logprobs=logprobs)
    new = updated(row, training_row=wanted)
    assert new["message_log"][1]["token_ids"] == [41, 42, 43]
    assert new["message_log"][1]["generation_logprobs"] == [-0.5, -0.6, -0.7]
    for number in (0, 2, 3):
        assert new["message_log"][number] is row["message_log"][number]
    assert_holds(new, wanted)


def test_tokens_on_a_boundary_go_where_the_mask_says_or_nowhere():
    row = chat_log()
    trained = trained_row(row)
    new = updated(row, training_row=spliced(trained, 3, 3, [31]))
    assert [entry["token_ids"] for entry in new["message_log"]][:2] == [[1, 2, 3, 31], [4, 5]]
    across = spliced(trained, 2, 4, [31], loss_mask=np.array([0, 0, 0, 1, 0, 1, 1], bool))
    assert [entry["token_ids"] for entry in updated(row, training_row=across)["message_log"]][:2] == [
        [1, 2, 31],
        [5],
    ]
    questions = {"message_log": [{"role": "user", "content": "a", "token_ids": [n, n + 1]} for n in (1, 3)]}
    with pytest.raises(RecordError, match=r"message_log\[0\] and message_log\[1\]"):
        updated(questions, training_row=spliced(trained_row(questions), 1, 3, [31]))


def test_a_message_without_a_column_gets_none():
    row = chat_log()
    trained = trained_row(row)
    mask = np.ones(8, bool)
    logprobs = np.full(8, -0.5)
    wanted = moved_row(
        trained, trained.token_ids, np.arange(8, dtype=np.int64), loss_mask=mask, logprobs=logprobs
    ).row
    with pytest.raises(RecordError, match="no generation_logprobs"):
        updated(row, training_row=wanted)
    for entry in row["message_log"]:
        del entry["token_loss_mask"]
    with pytest.raises(RecordError, match="no token_loss_mask"):
        updated(row, training_row=replace(trained_row(row), loss_mask=mask))


def test_a_wrapped_message_log_stays_wrapped():
    row = {"message_log": [chat_log()["message_log"]]}
    new = updated(row, training_row=spliced(trained_row(row), 1, 2, [21, 22]))
    assert new["message_log"][0][0]["token_ids"] == [1, 21, 22, 3]
    assert new["message_log"][0][3] is row["message_log"][0][3]


# Generic columns: copies, counts, padding


def slime() -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3, 4, 5],
        "prompt_ids": [1, 2],
        "extra": {"raw": {"completion_ids": [3, 4, 5]}, "kept": [3, 4, 5]},
        "response_length": 3,
        "total_length": 5,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, -0.3],
        "position_ids": [0, 1, 2, 3, 4],
        "attention_mask": [1, 1, 1, 1, 1],
        "labels": [-100, -100, 3, -100, 5],
        "ref_log_probs": [-0.1, -0.2, -0.3, -0.4, -0.5],
        "reward": 1.0,
    }


def test_every_copy_and_count_of_a_flat_row_is_written():
    row = slime()
    wanted = spliced(trained_row(row), 3, 4, [41, 42])
    new = updated(row, training_row=wanted)
    assert_holds(new, wanted)
    assert new == {
        "tokens": [1, 2, 3, 41, 42, 5],
        "prompt_ids": [1, 2],
        "extra": {"raw": {"completion_ids": [3, 41, 42, 5]}, "kept": [3, 4, 5]},
        "response_length": 4,
        "total_length": 6,
        "loss_mask": [1, 0, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, 0.0, -0.3],
        "position_ids": [0, 1, 2, 3, 4, 5],
        "attention_mask": [1, 1, 1, 1, 1, 1],
        "labels": [-100, -100, 3, -100, -100, 5],
        "ref_log_probs": [-0.1, -0.2, -0.3, None, None, None],
        "reward": 1.0,
    }
    assert new["prompt_ids"] is row["prompt_ids"]
    assert new["extra"]["kept"] is row["extra"]["kept"]


def test_a_prompt_that_changed_changes_where_it_is_repeated():
    row = slime()
    new = updated(row, training_row=spliced(trained_row(row), 0, 1, [11, 12]))
    assert new["tokens"] == [11, 12, 2, 3, 4, 5]
    assert new["prompt_ids"] == [11, 12, 2]
    assert (new["response_length"], new["total_length"]) == (3, 6)
    assert new["loss_mask"] is row["loss_mask"]
    assert new["ref_log_probs"] == [None] * 6


def padded_row(left: int, right: int) -> dict[str, Any]:
    def around(values: list[Any], fill: Any) -> list[Any]:
        return [fill] * left + values + [fill] * right

    return {
        "input_ids": around([1, 2, 3, 4], 9),
        "attention_mask": around([1, 1, 1, 1], 0),
        "labels": around([-100, -100, 3, 4], -100),
        "logprobs": around([0.0, 0.0, -0.1, -0.2], 0.0),
        "seqlen": 4,
    }


@pytest.mark.parametrize(("left", "right"), [(2, 0), (0, 2), (1, 1)])
def test_attention_mask_and_padding_follow_the_tokens(left: int, right: int):
    row = padded_row(left, right)
    assert trained_row(row).padding == Padding(left, right)
    wanted = spliced(trained_row(row), 1, 2, [21, 22])
    new = updated(row, training_row=wanted)
    assert_holds(new, wanted)
    assert len(new["input_ids"]) == 6
    assert sum(new["attention_mask"]) == new["seqlen"] == 5
    assert new["input_ids"].count(9) == 1
    swapped = replace(trained_row(row), padding=Padding(right, left))
    new = updated(row, training_row=swapped)
    assert new == padded_row(right, left)
    assert updated(row, training_row=replace(swapped, padding=Padding())) == padded_row(0, 0)


def test_lengths_that_count_the_padding_on_the_left_count_it_still():
    row = {**padded_row(3, 0), "prompt_length": 5}
    new = updated(row, training_row=spliced(trained_row(row), 3, 4, [41, 42]))
    assert (new["prompt_length"], len(new["input_ids"])) == (4, 7)
    assert new["input_ids"] == [9, 9, 1, 2, 3, 41, 42]


def test_padding_without_an_attention_mask_is_refused():
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}
    with pytest.raises(RecordError, match="attention_mask"):
        updated(row, training_row=replace(trained_row(row), padding=Padding(0, 1)))


def test_hidden_tokens_among_others_stop_a_change_of_length():
    row = {**padded_row(0, 2), "attention_mask": [1, 0, 1, 1, 0, 0]}
    with pytest.raises(RecordError, match="attention_mask hides"):
        updated(row, training_row=spliced(trained_row(row), 3, 4, [41, 42]))


def test_a_split_row_is_cut_where_its_response_begins():
    row = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.1, 0.0, -0.3],
        "num_prompt_tokens": 2,
        "num_completion_tokens": 3,
    }
    wanted = spliced(trained_row(row), 1, 2, [21, 22])
    new = updated(row, training_row=wanted)
    assert_holds(new, wanted)
    assert new == {**row, "prompt_ids": [1, 21, 22], "num_prompt_tokens": 3}
    new = updated(row, training_row=spliced(trained_row(row), 3, 4, [41, 42]))
    assert new["response_ids"] == [3, 41, 42, 5]
    assert new["response_mask"] == [1, 0, 0, 1]
    assert new["num_completion_tokens"] == 4
    everything = moved_row(
        trained_row(row),
        trained_row(row).token_ids,
        np.arange(5, dtype=np.int64),
        loss_mask=np.arange(5) > 1,
        logprobs=None,
    ).row
    with pytest.raises(RecordError, match="train all of the response"):
        updated(row, training_row=everything)


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


def test_logprobs_inside_objects_change_in_place_and_never_in_number():
    triples = [[None, 1, "a"], [-0.1, 2, "b"], [-0.2, 3, "c"]]
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": triples}
    trained = trained_row(row)
    same = np.arange(3, dtype=np.int64)
    wanted = moved_row(
        trained, trained.token_ids, same, loss_mask=trained.loss_mask, logprobs=np.array([np.nan, -0.1, -0.5])
    ).row
    new = updated(row, training_row=wanted)
    assert new["logprobs"] == [[None, 1, "a"], [-0.1, 2, "b"], [-0.5, 3, "c"]]
    assert new["logprobs"][1] is triples[1]
    with pytest.raises(RecordError, match="cannot be made up"):
        updated(row, training_row=spliced(trained, 1, 2, [7, 8]))


def test_logprobs_of_a_call_stay_in_the_object_that_holds_them():
    content = [{"token": text, "logprob": value} for text, value in (("a", 0.0), ("b", -0.1))]
    row = calls_row()
    row["calls"][2]["logprobs"] = {"content": content, "refusal": None}
    rollout = read_one(row)
    turn = rollout.turns[2]
    column = replace(turn.columns[0], values=np.array([np.nan, -0.1]))
    turns = (*rollout.turns[:2], replace(turn, columns=(column,), completion_logprobs=column.values))
    (new,) = pick_format(row).update(row, [unmended(replace(rollout, turns=turns))])
    assert new["calls"][2]["logprobs"] == {
        "content": [{"token": "a", "logprob": None}, content[1]],
        "refusal": None,
    }
    assert new["calls"][2]["logprobs"]["content"][1] is content[1]
    assert new["calls"][1] is row["calls"][1]


def test_numbers_keep_their_spelling():
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0, -0.1, 0], "advantages": [1.0, 2.0, 3.0]}
    new = updated(row, training_row=spliced(trained_row(row), 0, 1, [7, 8]))
    assert json.dumps(new["logprobs"]) == "[0, 0, -0.1, 0]"
    assert json.dumps(new["advantages"]) == "[null, null, 2.0, 3.0]"


def test_a_column_that_cannot_be_rebuilt_becomes_null_and_an_absent_one_stays_absent():
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "routed_experts": [[0], [1], [0]]}
    new = updated(row, training_row=spliced(trained_row(row), 0, 1, [7, 8]))
    assert new == {"token_ids": [7, 8, 2, 3], "loss_mask": [0, 0, 1, 1], "routed_experts": None}


def test_a_training_row_is_neither_added_nor_taken_away():
    row = fixture_rows("tito_sample")[0]
    with pytest.raises(RecordError, match="added"):
        updated(row, training_row=None)
    text = next(row for row in fixture_rows("generic") if row["id"] == "text-only")
    with pytest.raises(RecordError, match="added"):
        updated(text, training_row=trained_row(row))


# Calls


def calls_row(**changes: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "tool", "assistant", "user")]
    messages.append({"role": "assistant", "content": "last"})
    prompts = [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    calls = [
        {
            "prompt_ids": prompt,
            "completion_ids": [10 + number, 20 + number],
            "logprobs": [-0.1, -0.2],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 2, "total_tokens": len(prompt) + 2},
            "raw": {"prompt_token_ids": prompt, "tokens": [*prompt, 10 + number, 20 + number]},
        }
        for number, prompt in enumerate(prompts)
    ]
    return {"id": "r", "messages": messages, "calls": calls, "reward": 1.0, "num_calls": 3, **changes}


def with_prompt(rollout: Rollout, number: int, ids: list[int]) -> Rollout:
    turns = list(rollout.turns)
    turns[number] = replace(turns[number], prompt_ids=np.array(ids, np.int32))
    return replace(rollout, turns=tuple(turns))


def part(rollout: Rollout, *numbers: int) -> RepairedRollout:
    return RepairedRollout(replace(rollout, turns=tuple(rollout.turns[n] for n in numbers)), numbers)


@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_prompt_is_written_in_every_copy_that_its_call_holds(as_read):
    row = as_read(calls_row())
    rollout = with_prompt(read_one(row), 1, [1, 10, 20, 3, 4])
    (new,) = pick_format(row).update(row, [unmended(rollout)])
    assert new["calls"][0] is row["calls"][0]
    assert new["calls"][2] is row["calls"][2]
    assert plain(new["calls"][1]) == {
        "prompt_ids": [1, 10, 20, 3, 4],
        "completion_ids": [11, 21],
        "logprobs": [-0.1, -0.2],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        "raw": {"prompt_token_ids": [1, 10, 20, 3, 4], "tokens": [1, 10, 20, 3, 4, 11, 21]},
    }
    assert new["messages"] is row["messages"]
    if as_read is as_table:
        assert new["calls"][1]["prompt_ids"].dtype == row["calls"][1]["prompt_ids"].dtype


def test_a_fork_keeps_the_calls_of_each_part_and_the_messages_up_to_its_last_answer():
    row = calls_row()
    rollout = read_one(row)
    first, second = pick_format(row).update(row, [part(rollout, 0, 1), part(rollout, 2)])
    assert [call is row["calls"][i] for i, call in enumerate(first["calls"])] == [True, True]
    assert first["messages"] == row["messages"][:4]
    assert first["messages"][0] is row["messages"][0]
    assert second["calls"][0] is row["calls"][2]
    assert second["messages"] is row["messages"]
    assert (first["num_calls"], second["num_calls"], first["reward"]) == (2, 1, 1.0)
    for new, numbers in ((first, (0, 1)), (second, (2,))):
        indices = [turn.message_index for turn in read_one(new).turns]
        assert indices == [rollout.turns[n].message_index for n in numbers]


def test_a_fork_whose_answers_could_not_be_told_is_refused():
    row = calls_row()
    rollout = read_one(row)
    with pytest.raises(RecordError, match="which messages"):
        pick_format(row).update(row, [part(rollout, 0, 2), part(rollout, 1)])
    untold = calls_row(messages=calls_row()["messages"][:4])
    rollout = read_one(untold)
    assert [turn.message_index for turn in rollout.turns] == [None, None, None]
    with pytest.raises(RecordError, match="which messages"):
        pick_format(untold).update(untold, [part(rollout, 0, 1), part(rollout, 2)])
    with pytest.raises(RecordError, match="no call"):
        pick_format(row).update(row, [part(rollout)])


def test_a_fork_may_hold_a_training_row_a_part():
    row = calls_row(token_ids=[1, 10, 20, 2, 3], loss_mask=[0, 1, 1, 0, 0], advantages=[0.1, 0.2, 0.3, 0.4, 0.5])
    rollout = read_one(row)
    trained = rollout.training_row
    assert trained is not None
    one = part(replace(rollout, training_row=spliced(trained, 3, 5, [])), 0)
    other = part(replace(rollout, training_row=spliced(trained, 1, 3, [7])), 1, 2)
    first, second = pick_format(row).update(row, [one, other])
    assert (first["token_ids"], first["loss_mask"], first["advantages"]) == (
        [1, 10, 20],
        [0, 1, 1],
        [0.1, 0.2, 0.3],
    )
    assert (second["token_ids"], second["loss_mask"]) == ([1, 7, 2, 3], [0, 0, 0, 0])
    assert second["advantages"] == [0.1, None, 0.4, 0.5]
    assert second["messages"] is row["messages"]


def test_messages_in_two_columns_are_cut_in_the_right_one():
    messages = calls_row()["messages"]
    row = {**calls_row(), "prompt": messages[:1], "completion": messages[1:]}
    del row["messages"]
    rollout = read_one(row)
    first, _ = pick_format(row).update(row, [part(rollout, 0, 1), part(rollout, 2)])
    assert first["prompt"] is row["prompt"]
    assert first["completion"] == messages[1:4]


def test_strings_of_json_inside_a_table_are_rewritten_as_strings():
    plain_row = calls_row()
    row = {**plain_row, "messages": json.dumps(plain_row["messages"]), "calls": json.dumps(plain_row["calls"])}
    rollout = read_one(row)
    assert len(rollout.turns) == 3
    (same,) = pick_format(row).update(row, [unmended(rollout)])
    assert same is row
    changed = with_prompt(rollout, 1, [1, 10, 20, 3, 4])
    first, second = pick_format(row).update(row, [part(changed, 0, 1), part(changed, 2)])
    assert json.loads(first["messages"]) == plain_row["messages"][:4]
    assert json.loads(first["calls"])[1]["prompt_ids"] == [1, 10, 20, 3, 4]
    assert second["messages"] is row["messages"]
    assert json.loads(second["calls"]) == plain_row["calls"][2:]
    assert '"prompt_ids": [1, 10, 20, 3, 4]' in first["calls"]


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_a_row_gets_its_prompt_and_keeps_its_answer(name: str):
    row = fixture_rows(name)[0]
    key = {"marin": "prompt_tokens", "tito_call": "input_ids"}[name]
    rollout = with_prompt(read_one(row), 0, [5, 6])
    (new,) = pick_format(row).update(row, [unmended(rollout)])
    assert new == {**row, key: [5, 6]}
    with pytest.raises(RecordError, match="cannot be removed"):
        pick_format(row).update(row, [part(rollout)])


def test_a_call_without_a_column_for_its_prompt_says_so():
    row = {"completion_ids": [1, 2]}
    with pytest.raises(RecordError, match="no column for the ids of its prompt"):
        pick_format(row).update(row, [unmended(with_prompt(read_one(row), 0, [5]))])


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


# --map


def test_mapped_columns_go_back_under_the_names_of_the_log():
    row = {"extra": {"tok": [1, 2, 3], "other": [1]}, "m.ask": [0, 1, 1], "lp": [0.0, -0.1, -0.2], "x": 1}
    mapping = {"token_ids": "extra.tok", "loss_mask": "m.ask", "logprobs": "lp"}
    mapped = map_columns(row, mapping)
    form = format_named("generic")
    (rollout,) = form.read(mapped, PLACE)
    assert unmap_columns(row, form.update(mapped, [unmended(rollout)])[0], mapping) is row
    assert rollout.training_row is not None
    wanted = spliced(rollout.training_row, 1, 2, [7, 8])
    (new,) = form.update(mapped, [unmended(replace(rollout, training_row=wanted))])
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
    found = trained_row(new)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    for left, right in ((found.loss_mask, wanted.loss_mask), (found.logprobs, wanted.logprobs)):
        if left is not None and right is not None:
            np.testing.assert_array_equal(left, right)
    for name in row.keys() - {"scores", "kept", "reward"}:
        assert len(new[name]) == len(new["tokens" if "tokens" in new else "token_ids"])
        assert type(new[name]) is type(row[name])


@pytest.mark.parametrize("number", [10**30, -(10**25), 2**63 + 1])
def test_a_whole_number_that_no_float_holds_is_no_change(number: int):
    row = {
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -0.5, number],
        "advantages": [number] * 3,
    }
    for form in (row, {**row, "advantages": [0.5, number, None]}):
        (new,) = format_named("generic").update(form, [unmended(read_one(form))])
        assert new is form


def test_a_sample_with_another_list_of_ids_is_written_in_its_own_column():
    row = {"tokens": [1, 2, 3, 4], "response_length": 2, "loss_mask": [1, 1], "token_ids": [9, 9, 9, 9]}
    assert pick_format(row).name == "slime"
    (same,) = pick_format(row).update(row, [unmended(read_one(row))])
    assert same is row
    new = updated(row, training_row=spliced(trained_row(row), 0, 1, [7001]))
    assert new == {**row, "tokens": [7001, 2, 3, 4]}


def test_a_split_row_with_an_odd_mask_in_which_nothing_changed_is_the_row_itself():
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [1, 5]}
    (new,) = format_named("generic").update(row, [unmended(read_one(row))])
    assert new is row
