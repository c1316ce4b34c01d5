"""Rows to rollouts: what holds for every format, then Atropos, Marin, provider and generic rows."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tests.tiers import one_in, some
from tito_audit import scan_rollouts
from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format
from tito_audit.formats import all_formats, format_named, map_columns, pick_format
from tito_audit.record.column import Alignment, MaskEncoding, MovePolicy
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.stated import Stated
from tito_audit.storage import find_logs, open_log

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "formats"
SHARED = Path(__file__).resolve().parents[2] / "shared"
PLACE = Place("log.jsonl", 0)
MADE_HERE = (
    "atropos_group",
    "atropos_item",
    "atropos_node",
    "generic",
    "marin",
    "text_only",
    "tito_call",
    "tito_sample",
)
ROLES = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4"}


def fixture_file(name: str) -> Path:
    found = [FIXTURES / f"{name}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    return next(path for path in found if path.exists())


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


def row_of(row: dict[str, Any]) -> TrainingRow:
    trained = read(row).training_row
    assert trained is not None
    return trained


def turn_of(row: dict[str, Any]) -> Turn:
    (turn,) = read(row).turns
    return turn


def check(rollout: Rollout) -> None:
    """What holds for every rollout, whatever it was read from."""
    for turn in rollout.turns:
        for ids in (turn.prompt_ids, turn.completion_ids):
            assert ids is None or (ids.dtype == np.int32 and ids.ndim == 1)
        if turn.completion_logprobs is not None:
            assert turn.completion_ids is not None
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


def same(left: Rollout, right: Rollout) -> None:
    """Two readings of one row agree in everything that rules look at."""
    assert left.place == right.place
    assert len(left.turns) == len(right.turns)
    for a, b in zip(left.turns, right.turns, strict=True):
        for name in ("prompt_ids", "completion_ids", "completion_logprobs"):
            assert_same_array(getattr(a, name), getattr(b, name))
        assert (a.message_index, a.finish_reason, a.completion_text) == (
            b.message_index,
            b.finish_reason,
            b.completion_text,
        )
    assert (left.training_row is None) == (right.training_row is None)
    if left.training_row is not None and right.training_row is not None:
        for name in ("token_ids", "loss_mask", "logprobs"):
            assert_same_array(getattr(left.training_row, name), getattr(right.training_row, name))
    assert [message.text for message in left.messages] == [message.text for message in right.messages]


def assert_same_array(left: Any, right: Any) -> None:
    assert (left is None) == (right is None)
    if left is not None:
        np.testing.assert_array_equal(left, right)


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
        for left, right in zip(form.read(row, PLACE), form.read(raw.value, PLACE), strict=True):
            check(right)
            same(left, right)


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_format_says_what_it_is(form: Format):
    assert form.title
    assert form.signature
    assert form.shows
    assert format_named(form.name) is form


def broken_versions(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row with each of its columns missing, null, empty, of another type or of other contents."""
    for name in row:
        yield {key: value for key, value in row.items() if key != name}
        for value in (None, [], [0], "text", 7, {}, [None], [[1], [2]], [{}], ["a"], [1.5], np.array([1, 2])):
            yield {**row, name: value}


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_a_row_with_a_broken_column_is_read_or_refused_in_words(form: Format):
    for row in fixture_rows(form.name):
        for broken in one_in(3, broken_versions(row)):
            with contextlib.suppress(RecordError):
                for rollout in pick_format(broken).read(broken, PLACE):
                    check(rollout)


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.lists(st.integers(), max_size=3)))
def test_a_row_of_no_known_format_is_refused_with_its_columns_named(row):
    with pytest.raises(RecordError) as raised:
        pick_format(row)
    assert "empty" in str(raised.value) if not row else "--map" in str(raised.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 3}, "verl.*response_mask"),
        ({"step": 3, "prompt": "a", "completion": "b", "r": 1.0, "advantage": 0.7}, "TRL.*env_mask"),
        ({"input_prompt": "a", "output_response": "b", "score": 1.0}, "SkyRL.*response_ids"),
        ({"task_id": 7, "head_version": -1, "completion": "b", "prompt": "a"}, "AReaL.*output_tokens"),
    ],
)
def test_text_logs_hold_nothing_to_audit_and_say_what_to_save(row, says, tmp_path: Path):
    rollout = read(row)
    assert rollout.stated.ids_wanted is False
    assert re.fullmatch(f"No token ids.*{says}.*", rollout.stated.notice)
    log = tmp_path / "log.jsonl"
    log.write_text((json.dumps(row) + "\n") * 3)
    run = scan_rollouts([str(log)])
    assert [result.findings for result in run] == [()] * 3
    assert run.summary.without_ids == run.summary.rollouts == 3
    assert run.summary.notices.count(rollout.stated.notice) == 1


TEXTS = [
    {"prompt": "2+2?", "completion": "4"},
    {"prompt": "2+2?", "response": "4", "scores": [0.5, 0.25]},
    {"question": "2+2?", "answer": "4"},
    {"prompt": [ROLES[0]], "completion": [ROLES[1]]},
    {"prompt": [ROLES[0]], "completion": "4"},
    {"prompts": ["2+2?", "3+3?"], "completions": ["4", "6"], "rewards": [1.0, 0.0]},
    {"messages": list(ROLES), "scores": [0.5, 0.25]},
    {"messages": list(ROLES), "token_ids": []},
    {"messages": list(ROLES), "token_ids": None, "loss_mask": None},
]


@pytest.mark.parametrize("row", TEXTS)
def test_rows_of_text_alone_are_nothing_to_audit(row, tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row) + "\n")
    run = scan_rollouts([str(log)])
    assert [result.findings for result in run] == [()]
    assert (run.summary.without_ids, run.summary.rows_unreadable) == (1, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "completion": "4", "toks": [5, 6, 7]},
        {"prompt": "2+2?", "completion": "4", "extra": {"toks": [5, 6, 7]}},
        {"messages": list(ROLES), "toks": [5, 6, 7]},
        {"text": "4"},
        {"prompt": "2+2?"},
    ],
)
def test_a_row_of_unknown_shape_beside_text_is_refused(row):
    with pytest.raises(RecordError, match="no known format"):
        pick_format(row)


@pytest.mark.parametrize("name", ["text", "completion", "response", "output"])
def test_a_row_of_text_alone_is_read_as_one_without_ids(name):
    row = {"prompt": "2+2?", name: "4", "reward": 1.0}
    (rollout,) = pick_format(row).read(row, PLACE)
    assert rollout.stated.ids_wanted is False
    assert not rollout.turns
    assert rollout.training_row is None


def test_an_unknown_format_name_is_answered_with_close_ones():
    with pytest.raises(SetupError, match="did you mean atropos_group"):
        format_named("atropos_groups")


def test_files_may_mix_formats(tmp_path: Path):
    rows = [fixture_rows(name)[0] for name in MADE_HERE]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tuple(pick_format(raw.value or {}).name for raw in open_log(path)) == MADE_HERE


@pytest.mark.parametrize("name", MADE_HERE)
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FIXTURES))
    made = importlib.import_module("make").lines()
    assert tuple(sorted(made)) == MADE_HERE
    assert (FIXTURES / f"{name}.jsonl").read_text() == made[name]


# Atropos


def group(**columns: Any) -> dict[str, Any]:
    row = {
        "tokens": [[1, 20, 30, 31], [1, 20, 32]],
        "masks": [[-100, -100, 30, 31], [-100, -100, 32]],
        "scores": [1.0, -1.0],
    }
    return {**row, **columns}


def group_rows(**columns: Any) -> list[TrainingRow]:
    rows = [rollout.training_row for rollout in format_named("atropos_group").read(group(**columns), PLACE)]
    return [row for row in rows if row is not None]


def test_a_group_is_one_rollout_a_sample():
    rollouts = format_named("atropos_group").read(
        group(inference_logprobs=[[1.0, 1.0, -0.2, -0.3], [1.0, 1.0, -0.4]], messages=[list(ROLES)] * 2),
        PLACE,
    )
    assert [rollout.place.item for rollout in rollouts] == [0, 1]
    first = rollouts[0].training_row
    assert first is not None
    assert first.loss_mask is not None
    assert first.logprobs is not None
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.logprobs.tolist() == [1.0, 1.0, -0.2, -0.3]
    assert first.sentinel == 1.0
    assert [message.role for message in rollouts[1].messages] == ["user", "assistant"]


def test_group_masks_may_be_labels_or_binary_or_a_placeholder():
    assert [row.columns[0].encoding for row in group_rows()] == [MaskEncoding.LABELS] * 2
    binary = group_rows(masks=[[0, 0, 1, 1], [0, 0, 1]])
    assert [row.columns[0].encoding for row in binary] == [MaskEncoding.BINARY] * 2
    for placeholder in ([[1]], [[1], [1]], None):
        assert [row.loss_mask for row in group_rows(masks=placeholder)] == [None, None]


def test_group_columns_of_environments_move_and_those_of_other_models_go_stale():
    four, three = [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3]
    (first, _) = group_rows(
        advantages=[four, three],
        ref_logprobs=[four, three],
        distill_token_ids=[[[1, 2]] * 4, [[1, 2]] * 3],
        my_weights=[four, three],
        scores_per_step=[[1.0], [2.0]],
        chosen_tokens=[[1, 2, 3, 4], [1, 2, 3]],
        overrides=[{"set_advantage_to_zero": True}, {}],
    )
    assert {column.name: column.policy for column in first.columns[1:]} == {
        "advantages": MovePolicy.MOVE,
        "ref_logprobs": MovePolicy.STALE,
        "distill_token_ids": MovePolicy.STALE,
        "my_weights": MovePolicy.MOVE,
    }


def test_group_messages_that_are_not_the_conversation_count_as_absent():
    invented = [{"role": "user", "content": "<|im_start|>user…"}]
    for messages in (["2+2?", "4"], [["2+2?"], ["4"]], [invented, invented], [list(ROLES)], None):
        assert all(not rollout.messages for rollout in pick_format(group()).read(group(messages=messages), PLACE))


def test_group_lists_that_do_not_pair_with_the_samples_are_refused():
    for name in ("masks", "inference_logprobs"):
        with pytest.raises(RecordError, match=f"'{name}' holds 3 lists for 2 samples"):
            group_rows(**{name: [[0], [0], [0]]})
    with pytest.raises(RecordError, match="empty"):
        pick_format(group(tokens=[])).read(group(tokens=[]), PLACE)
    with pytest.raises(RecordError, match=r"tokens\[1\].*a string at position 0"):
        group_rows(tokens=[[1], ["a"]])


NODE = {
    "full_text": "user: 2+2?",
    "tokens": [1, 20, 30, 2],
    "masked_tokens": [-100, -100, 30, 2],
    "logprobs": [1.0, 1.0, -0.2, -0.5],
    "metadata": {"finish_reason": "stop"},
}


@pytest.mark.parametrize(
    "state",
    [NODE, {"nodes": [NODE]}, {"sequences": {"a": NODE}, "tree": {"a": NODE}}],
    ids=["node", "list", "tree"],
)
def test_a_sequence_node_is_read_alone_from_a_list_and_from_a_tree(state):
    rollout = read(state)
    assert rollout.format == "atropos_node"
    assert rollout.stated.facts["finish_reason"] == "stop"
    assert rollout.training_row is not None
    assert rollout.training_row.loss_mask is not None
    assert rollout.training_row.loss_mask.tolist() == [False, False, True, True]


def test_every_node_of_a_state_is_an_item_and_placeholder_ids_are_told():
    dummy = {**NODE, "metadata": {"dummy_tokens": True}}
    rollouts = pick_format({"nodes": [NODE, dummy]}).read({"nodes": [NODE, dummy]}, PLACE)
    assert [rollout.place.item for rollout in rollouts] == [0, 1]
    assert [rollout.stated.dummy_tokens for rollout in rollouts] == [False, True]
    with pytest.raises(RecordError, match=r"nodes\[1\]: column 'tokens'"):
        format_named("atropos_node").read({"nodes": [NODE, {**NODE, "tokens": "x"}]}, PLACE)


# One call


def test_a_marin_rollout_is_one_call_with_its_rewards():
    turn = turn_of(
        {
            "prompt_tokens": [1, 20],
            "response_tokens": [30, 2],
            "response_logprobs": [-0.2, -0.5],
            "token_rewards": [1.0, 1.0],
            "is_truncated": True,
            "metadata": {"weight_step": 3},
        }
    )
    assert turn.completion_logprobs is not None
    assert turn.completion_logprobs.tolist() == [-0.2, -0.5]
    assert (turn.finish_reason, turn.weight_versions) == ("length", ("3",))
    assert [(column.name, column.policy) for column in turn.columns][1:] == [("token_rewards", MovePolicy.MOVE)]


def test_a_provider_call_keeps_what_it_was_sent():
    call = {"input_ids": [1, 20], "output_ids": [30, 2], "logprobs": [-0.2, -0.5], "finish_reason": "stop"}
    assert turn_of(call).finish_reason == "stop"
    sent = turn_of({**call, "messages": [ROLES[0]]})
    assert sent.message_index is None
    assert sent.prompt_messages is not None
    assert [message.text for message in sent.prompt_messages] == ["2+2?"]
    assert turn_of({**call, "messages": list(ROLES)}).message_index == 1


def test_a_provider_sample_is_told_from_a_slime_sample_by_its_length_column():
    sample = {
        "tokens": [1, 20, 30, 2],
        "loss_mask": [0.0, 0.0, 0.5, 1.0],
        "rollout_log_probs": [-0.2, -0.5],
        "response": "4",
    }
    rollout = read(sample)
    assert rollout.format == "tito_sample"
    assert rollout.training_row is not None
    assert rollout.training_row.columns[0].encoding is MaskEncoding.FLOAT
    assert rollout.training_row.columns[1].alignment is Alignment.SAMPLED
    slime = read({**sample, "loss_mask": [1, 1], "response_length": 2})
    assert slime.format == "slime"
    assert slime.training_row is not None
    assert slime.training_row.prompt_length == 2
    assert slime.training_row.columns[0].alignment is Alignment.RESPONSE


# Generic: flat rows


@pytest.mark.parametrize("ids", ["token_ids", "tokens", "input_ids"])
@pytest.mark.parametrize("mask", ["loss_mask", "mask", "assistant_mask", "masks", "response_mask"])
def test_flat_rows_are_read_under_every_name(ids, mask):
    row = row_of({ids: [1, 20, 30, 2], mask: [0, 0, 1, 1], "old_log_probs": [0.0, 0.0, -0.2, -0.5]})
    assert row.loss_mask is not None
    assert row.logprobs is not None
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert row.logprobs.tolist() == [0.0, 0.0, -0.2, -0.5]
    assert row.sentinel == 0.0


def test_labels_are_a_mask():
    row = row_of({"input_ids": [1, 20, 30, 2], "labels": [-100, -100, 30, 2]})
    assert row.columns[0].encoding is MaskEncoding.LABELS


@pytest.mark.parametrize(
    ("logprobs", "alignment"),
    [
        ([0.0, 0.0, -0.2, -0.5], Alignment.FULL),
        ([-0.2, -0.5], Alignment.SAMPLED),
        ([0.0, -0.2, -0.5], Alignment.SHIFTED),
        ([0.0] * 5, None),
        ([0.0] * 9, None),
    ],
)
def test_logprobs_are_placed_by_their_length(logprobs, alignment):
    row = row_of({"token_ids": [1, 20, 30, 2], "loss_mask": [0, 0, 1, 1], "logprobs": logprobs})
    assert row.columns[1].alignment is alignment
    assert (row.logprobs is None) == (alignment is None)


def test_what_stands_where_nothing_was_sampled_is_seen_from_the_row():
    base = {"token_ids": [1, 20, 30, 2], "loss_mask": [0, 0, 1, 1]}
    for outside, sentinel in ((0.0, 0.0), (1.0, 1.0), (-9999.0, -9999.0), (None, None), (-0.3, None)):
        row = row_of({**base, "logprobs": [outside, outside, -0.2, -0.5]})
        assert row.sentinel == sentinel
        assert row.columns[1].sentinel == sentinel


def test_unknown_lists_as_long_as_the_tokens_move_with_them():
    row = row_of(
        {
            "token_ids": [1, 20, 30, 2],
            "loss_mask": [0, 0, 1, 1],
            "my_column": [1, 2, 3, 4],
            "short": [1],
            "words": ["a", "b", "c", "d"],
            "trainer_logprobs": [-0.1] * 4,
            "entropy": [0.1] * 4,
            "routed_experts": [[1], [2], [3], [4]],
            "position_ids": [0, 1, 2, 3],
            "attention_mask": [1, 1, 1, 1],
        }
    )
    assert {column.name: column.policy for column in row.columns[1:]} == {
        "my_column": MovePolicy.MOVE,
        "trainer_logprobs": MovePolicy.STALE,
        "entropy": MovePolicy.STALE,
        "routed_experts": MovePolicy.DROP,
        "position_ids": MovePolicy.COPY,
    }


def test_padding_is_taken_off_both_ends_of_every_column():
    row = row_of(
        {
            "input_ids": [0, 0, 1, 20, 30, 2, 0],
            "attention_mask": [0, 0, 1, 1, 1, 1, 0],
            "loss_mask": [0, 0, 0, 0, 1, 1, 0],
            "logprobs": [0.0, 0.0, 0.0, 0.0, -0.2, -0.5, 0.0],
            "prompt_length": 4,
        }
    )
    assert row.token_ids.tolist() == [1, 20, 30, 2]
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert row.prompt_length is None


def test_a_slime_sample_without_mask_trains_the_whole_response():
    row = row_of({"tokens": [1, 20, 30, 2], "response_length": 2, "loss_mask": None, "rollout_log_probs": None})
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("ids", [None, []])
def test_a_flat_row_without_ids_is_read_with_its_messages(ids):
    rollout = read({"token_ids": ids, "loss_mask": ids, "messages": list(ROLES)})
    assert rollout.training_row is None
    assert len(rollout.messages) == 2


# Generic: prompt and completion


@pytest.mark.parametrize("prompt", ["prompt_ids", "prompt_token_ids", "input_tokens"])
@pytest.mark.parametrize(
    "completion", ["completion_ids", "response_ids", "completion_token_ids", "generation_token_ids"]
)
def test_a_split_row_is_one_call_under_every_name(prompt, completion):
    turn = turn_of({prompt: [1, 20], completion: [30, 2], "logprobs": [-0.2, -0.5], "messages": list(ROLES)})
    assert turn.prompt_ids is not None
    assert turn.prompt_ids.tolist() == [1, 20]
    assert turn.completion_logprobs is not None
    assert turn.message_index == 1


def test_a_response_with_tokens_of_tools_is_a_training_row():
    split = {"prompt_ids": [1, 20], "response_ids": [30, 60, 2], "response_logprobs": [-0.2, 0.0, -0.5]}
    for mask in ([1, 0, 1], [0, 0, 1, 0, 1]):
        row = row_of({**split, "response_mask": mask})
        assert row.prompt_length == 2
        assert row.loss_mask is not None
        assert row.loss_mask.tolist() == [False, False, True, False, True]
        assert row.logprobs is not None
    assert read({**split, "response_mask": [1, 1, 1]}).training_row is None
    assert row_of({**split, "response_mask": [1, 1]}).columns[0].alignment is None


def test_messages_that_end_with_a_question_are_what_the_call_was_sent():
    turn = turn_of({"prompt_ids": [1], "completion_ids": [2], "messages": [*ROLES, ROLES[0]]})
    assert turn.message_index is None
    assert turn.prompt_messages is not None
    assert len(turn.prompt_messages) == 3


def test_prompt_and_completion_may_be_lists_of_messages():
    rollout = read({"prompt_ids": [1], "completion_ids": [2], "prompt": [ROLES[0]], "completion": [ROLES[1]]})
    assert [message.role for message in rollout.messages] == ["user", "assistant"]
    assert rollout.turns[0].message_index == 1


@pytest.mark.parametrize("value", ["absent", None, []])
def test_the_ways_to_say_no_ids_keep_the_text(value):
    row = {"messages": list(ROLES), "text": "It is 4", "completion_ids": None}
    if value != "absent":
        row.update(prompt_ids=value, completion_ids=value, logprobs=value)
    turn = turn_of(row)
    assert (turn.prompt_ids, turn.completion_ids, turn.completion_logprobs) == (None, None, None)
    assert turn.completion_text == "It is 4"
    emptied = turn_of({**row, "prompt_ids": [1], "completion_ids": []})
    assert emptied.completion_ids is not None
    assert len(emptied.completion_ids) == 0


def test_messages_alone_say_that_no_ids_are_wanted_unless_other_lists_may_be_ids():
    assert read({"messages": list(ROLES), "reward": 1.0}).stated.ids_wanted is False
    with pytest.raises(RecordError, match="toks"):
        pick_format({"messages": list(ROLES), "toks": [1, 2, 3]})
    with pytest.raises(RecordError, match="rounds"):
        pick_format({"messages": list(ROLES), "rounds": [{"toks": [1, 2, 3]}]})


# Generic: calls


def call(prompt: list[int], completion: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": completion, **more}


@pytest.mark.parametrize("name", ["calls", "turns", "steps", "trajectory"])
def test_calls_belong_to_the_answers_in_order(name):
    messages = [*ROLES, *ROLES]
    entries = [
        call([1], [2], generation_log_probs=[-0.1], text="It is 4", finish_reason="stop"),
        call([1, 2, 3], [4, 5], generation_log_probs=[-0.2], finish_reason={"type": "length"}),
    ]
    rollout = read({name: entries, "messages": messages, "tools": '[{"type": "function"}]', "id": "x"})
    first, second = rollout.turns
    assert (first.message_index, second.message_index) == (1, 3)
    assert (first.completion_text, first.finish_reason, second.finish_reason) == ("It is 4", "stop", "length")
    assert second.completion_logprobs is None
    assert second.columns[0].alignment is None
    assert rollout.tools == ({"type": "function"},)
    assert rollout.stated == Stated(facts={"id": "x"})


def test_answers_that_nobody_sampled_come_first_and_missing_answers_are_not_guessed():
    more = read({"calls": [call([1], [2])], "messages": [*ROLES, *ROLES]})
    assert [turn.message_index for turn in more.turns] == [3]
    fewer = read({"calls": [call([1], [2])] * 3, "messages": [*ROLES, *ROLES]})
    assert [turn.message_index for turn in fewer.turns] == [None, None, None]


def test_what_a_call_was_sent_leaves_out_the_answer_that_some_logs_append():
    for sent in ([ROLES[0]], list(ROLES)):
        rollout = read({"steps": [call([1], [2], messages=sent, text="It is 4")]})
        messages = rollout.turns[0].prompt_messages
        assert messages is not None
        assert [message.role for message in messages] == ["user"]


def test_logprobs_of_servers_are_read_out_of_their_objects():
    content = {"content": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}]}
    triples = [[-0.1, 2, None], [-0.2, 3, None]]
    table = [np.array([-0.1, 2.0]), np.array([-0.2, 3.0])]
    for logprobs in (content, triples, table, {"token_logprobs": [-0.1, -0.2]}):
        (turn,) = read({"calls": [call([1], [2, 3], logprobs=logprobs)]}).turns
        assert turn.completion_logprobs is not None
        assert turn.completion_logprobs.tolist() == [-0.1, -0.2]


def test_a_row_may_hold_calls_and_a_training_row():
    rollout = read(
        {
            "calls": [call([1, 20], [30, 2])],
            "token_ids": [1, 20, 30, 2],
            "loss_mask": [0, 0, 1, 1],
            "logprobs": None,
        }
    )
    assert len(rollout.turns) == 1
    assert rollout.training_row is not None


def test_a_bad_call_is_named():
    with pytest.raises(RecordError, match=r"calls\[1\]: column 'generation_token_ids' holds a string"):
        read({"calls": [call([1], [2]), call([1], ["a"])]})
    with pytest.raises(RecordError, match=r"calls\[1\] is not a call"):
        read({"calls": [call([1], [2]), 7]})


# --map


def test_mapped_columns_are_read_under_our_names():
    row = {"toks": [1, 20, 30], "extra": {"m": [0, 0, 1]}, "a.b": [0.0, 0.0, -0.5]}
    mapped = map_columns(row, {"token_ids": "toks", "loss_mask": "extra.m", "logprobs": "a.b"})
    trained = row_of(dict(mapped))
    assert trained.loss_mask is not None
    assert trained.loss_mask.tolist() == [False, False, True]
    assert trained.logprobs is not None
    assert "toks" not in mapped


def test_a_mapping_that_leads_nowhere_names_what_there_is():
    row = {"toks": [1], "extra": {"m": [0]}}
    with pytest.raises(RecordError, match=r"no column 'tokens'.*extra, toks"):
        map_columns(row, {"token_ids": "tokens"})
    with pytest.raises(RecordError, match=r"'extra' has: m"):
        map_columns(row, {"loss_mask": "extra.mask"})
    with pytest.raises(SetupError, match="no such column"):
        map_columns(row, {"ids": "toks"})


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


def test_null_columns_that_a_table_adds_beside_a_training_row_are_no_call() -> None:
    row = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "prompt_ids": None, "completion_ids": None}
    (rollout,) = format_named("generic").read(row, Place("log", 0))
    assert rollout.turns == ()
    assert rollout.training_row is not None


QUESTION = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("generic", {"token_ids": [1, 20, 30, 2], "loss_mask": [0, 0, 1, 1]}),
        ("generic", {"prompt_ids": [1, 20], "response_ids": [30, 60, 2], "response_mask": [1, 0, 1]}),
        ("tito_sample", {"tokens": [1, 2], "loss_mask": [0.0, 1.0], "rollout_log_probs": None, "response": "4"}),
        (
            "tinker",
            {
                "model_input": {"chunks": [{"tokens": [1, 20]}]},
                "loss_fn_inputs": {"target_tokens": [20, 2], "mask": [0.0, 1.0]},
            },
        ),
    ],
)
def test_what_was_asked_is_read_beside_a_training_row(form, row):
    asked = read({**row, "messages": [QUESTION]})
    assert asked.format == form
    assert asked.training_row is not None
    assert [message.text for message in asked.messages] == ["2+2?"]
    assert len(read({**row, "messages": list(ROLES)}).messages) == 2


def test_the_prompt_column_of_a_training_row_is_what_was_asked():
    split = {"prompt_ids": [1, 20], "response_ids": [30, 60, 2], "response_mask": [1, 0, 1]}
    assert read({**split, "prompt": [QUESTION], "completion": "4"}).messages[-1].text == "2+2?"
    assert len(read({**split, "prompt": [QUESTION], "completion": [ROLES[1]]}).messages) == 2


def test_a_mask_with_a_number_that_is_no_id_is_no_mask_of_labels():
    for wrong in (float("inf"), 1e30, 2**31):
        for ids in ([1, 20, 30, 2], [1, 20, 30, 2, 5]):
            row = row_of({"input_ids": ids, "labels": [-100, wrong, 30, 2]})
            assert row.columns[0].encoding is None


@pytest.mark.parametrize("mask", [["1", "1", "1", "0"], [[1], [1], [1], [0]], [1, 1, [1], 0]])
def test_an_attention_mask_that_holds_no_numbers_is_refused_by_name(mask):
    with pytest.raises(RecordError, match="'attention_mask' holds a"):
        read({"input_ids": [1, 20, 30, 0], "attention_mask": mask})


def test_a_mask_over_the_response_alone_is_no_sample_of_a_token_in_token_out_stack():
    sample = {"tokens": [1, 20, 30, 2], "rollout_log_probs": [-0.2, -0.5], "response": "4", "status": "completed"}
    assert pick_format({**sample, "loss_mask": [0.0, 0.0, 1.0, 1.0]}).name == "tito_sample"
    for short in ([1, 1], None):
        assert pick_format({**sample, "loss_mask": short}).name == "generic"


def test_a_group_whose_tokens_are_null_is_an_empty_group():
    row = group(tokens=None, messages=[list(ROLES)] * 2)
    with pytest.raises(RecordError, match="the group is empty"):
        pick_format(row).read(row, PLACE)


def test_tools_and_arguments_out_of_a_table_are_plain_values(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1, 2]}}}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": [1, 2]}}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [called]}]
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


@pytest.mark.parametrize("name", some([form.name for form in all_formats()], 9))
def test_rows_of_another_format_than_the_named_one_are_findings(name: str) -> None:
    code, out, err = run("scan", FIXTURES, "--format", name, "--fail-on", "never", "-f", "concise")
    assert (code, err) == (0, ""), err
    assert "Traceback" not in out
