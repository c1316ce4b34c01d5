"""slime, miles and the token capture written again: every column, copy and count, and nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forms import read_one, row_of
from tests.world import FORMATS, fixture_row
from tito_audit import Settings, read_rollouts, repair_rollouts, scan_rollouts, write_rollouts
from tito_audit.errors import RecordError
from tito_audit.formats import pick_format
from tito_audit.record.edits import edits_between
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.settings.model import RepairSettings

pytestmark = pytest.mark.usefixtures("loaded_once")

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TOY = str(FIXTURES / "tokenizers" / "toy_bpe")


def spliced(row: TrainingRow, start: int, end: int, ids: list[int], mask: Any = None) -> TrainingRow:
    """The row with tokens in place of others, which nobody sampled, so that they are not trained."""
    new = np.concatenate([row.token_ids[:start], ids, row.token_ids[end:]]).astype(np.int32)
    old = np.arange(len(row.token_ids))
    source = np.concatenate([old[:start], np.full(len(ids), -1), old[end:]])
    if mask is None and row.loss_mask is not None:
        mask = np.where(source >= 0, row.loss_mask[source], False)
    logprobs = None if row.logprobs is None else np.where(source >= 0, row.logprobs[source], np.nan)
    return moved_row(row, new, source, loss_mask=mask, logprobs=logprobs).row


def updated(row: Any, wanted: TrainingRow) -> Any:
    """The row with this training row, read again to see that it says so."""
    rollout = read_one(row)
    (new,) = pick_format(row).update(row, [RepairedRollout(replace(rollout, training_row=wanted), ())])
    said = read_one(new).training_row
    assert said is not None
    assert said.token_ids.tolist() == wanted.token_ids.tolist()
    assert said.prompt_length == wanted.prompt_length
    for left, right in ((said.loss_mask, wanted.loss_mask), (said.logprobs, wanted.logprobs)):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            # What was never recorded is written as the sentinel.
            np.testing.assert_allclose(np.nan_to_num(left), np.nan_to_num(right), rtol=1e-6)
    return new


def sample(**columns: Any) -> dict[str, Any]:
    row = {
        "tokens": [1, 20, 21, 30, 31, 60, 70, 2],
        "response_length": 5,
        "loss_mask": [1, 1, 0, 1, 1],
        "rollout_log_probs": [-0.2, -0.1, 0.0, -0.3, -0.01],
        "status": "completed",
        "metadata": {"note": [1, 2]},
    }
    return {**row, **columns}


# Samples


@pytest.mark.parametrize("path", sorted(FORMATS.glob("slime.*")) + sorted(FORMATS.glob("miles_*.jsonl")), ids=str)
def test_rows_as_they_were_read_are_the_same_objects(path: Path):
    for row in map(json.loads, path.read_text().splitlines()):
        (same,) = pick_format(row).update(row, [unmended(read_one(row))])
        assert same is row


def test_another_token_moves_every_column_and_every_count():
    row = sample(
        teacher_log_probs=[-1.0] * 5, per_token=[5, 6, 7, 8, 9], total_length=8, effective_response_length=4
    )
    new = updated(row, spliced(row_of(row), 4, 5, [41, 42]))
    assert new == {
        **row,
        "tokens": [1, 20, 21, 30, 41, 42, 60, 70, 2],
        "response_length": 6,
        "total_length": 9,
        "effective_response_length": 3,
        "loss_mask": [1, 0, 0, 0, 1, 1],
        "rollout_log_probs": [-0.2, 0.0, 0.0, 0.0, -0.3, -0.01],
        "teacher_log_probs": [-1.0, None, None, None, None, None],
        "per_token": [5, None, None, 7, 8, 9],
    }
    assert list(new) == list(row)
    assert new["metadata"] is row["metadata"]


def test_a_longer_prompt_leaves_the_response_alone():
    row = sample()
    new = updated(row, spliced(row_of(row), 1, 2, [22, 23]))
    assert new["tokens"] == [1, 22, 23, 21, 30, 31, 60, 70, 2]
    assert new["response_length"] == 5
    assert new["loss_mask"] is row["loss_mask"]


def test_null_stays_null_while_the_whole_response_is_trained():
    row = sample(loss_mask=None)
    before = row_of(row)
    longer = updated(row, spliced(before, 1, 2, [22, 23]))
    assert longer["loss_mask"] is None
    trained = np.array([False] * 3 + [True] * 5)
    assert updated(row, spliced(before, 4, 5, [41], mask=trained))["loss_mask"] is None
    cut = updated(row, spliced(before, 4, 5, [41]))
    assert cut["loss_mask"] == [1, 0, 1, 1, 1]


def test_a_mask_that_null_cannot_say_needs_its_column():
    row = sample(loss_mask=None)
    before = row_of(row)
    outside = replace(before, loss_mask=np.array([True] * 8))
    with pytest.raises(RecordError, match="cannot train a token before it"):
        updated(row, outside)
    del row["loss_mask"]
    with pytest.raises(RecordError, match="without a column 'loss_mask'"):
        updated(row, replace(before, loss_mask=np.array([False] * 8)))


def test_routing_and_kept_tokens_are_null_once_a_token_changed_and_not_before():
    row = fixture_row("slime", "columns-beside")
    row["rollout_indexer_topk"] = "AAECAw=="
    before = row_of(row)
    names = {
        name for name in row if name.startswith(("rollout_top_p", "rollout_routed", "rollout_indexer", "mopd"))
    }
    assert len(names) == 5
    mask = before.loss_mask.copy() if before.loss_mask is not None else None
    assert mask is not None
    mask[-1] = False
    untrained = updated(row, spliced(before, 0, 0, [], mask=mask))
    assert {key for key in row if untrained[key] is not row[key]} == {"loss_mask"}
    at = len(before.token_ids) - 2
    new = updated(row, spliced(before, at, at + 1, [7, 8]))
    assert {name for name in names if new[name] is not None} == set()
    assert new["rollout_topk_token_ids"][-1] == row["rollout_topk_token_ids"][-1]
    assert new["rollout_topk_token_ids"][-3:-1] == [None, None]
    assert new["teacher_log_probs"][-3:] == [None] * 3


def test_a_sample_without_a_training_row_gets_none():
    row = fixture_row("slime", "no-ids-null")
    wanted = replace(read_one(row), training_row=row_of(sample()))
    with pytest.raises(RecordError, match="neither be added"):
        pick_format(row).update(row, [RepairedRollout(wanted, ())])


def test_a_sample_holds_no_fork():
    row = sample()
    with pytest.raises(RecordError, match="fork"):
        pick_format(row).update(row, [unmended(read_one(row))] * 2)


@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(100, 999), max_size=3),
    st.sampled_from([None, [1, 1, 0, 1, 1]]),
    st.booleans(),
)
def test_any_splice_is_read_back_and_keeps_the_kinds_of_a_table(one, other, ids, mask, table):
    start, end = sorted((one, other))
    row = sample(loss_mask=mask)
    if table:
        types = {"tokens": np.int32, "loss_mask": np.int8, "rollout_log_probs": np.float32}
        row |= {key: np.array(row[key], kind) for key, kind in types.items() if row[key] is not None}
    before = row_of(row)
    if start <= 3 < end or len(before.token_ids) - (end - start) + len(ids) == 0:
        return  # where the prompt ends then is for a repair to say
    new = updated(row, spliced(before, start, end, ids))
    for key in ("tokens", "loss_mask", "rollout_log_probs"):
        if row[key] is not None and len(new[key]):
            assert type(new[key]) is type(row[key])
            assert getattr(new[key], "dtype", None) == getattr(row[key], "dtype", None)


# miles columns


def test_a_repair_keeps_the_types_and_row_groups_of_the_columns(tmp_path: Path):
    source, out = FORMATS / "miles_columns.parquet", tmp_path / "new.parquet"
    terms = RepairSettings(strategies=("realign",), provenance=False)
    outcomes = list(repair_rollouts(source, out, Settings(tokenizer=TOY), terms))
    assert [outcome.place.row for outcome in outcomes if outcome.cured] == [3]
    before, after = pq.read_table(source), pq.read_table(out)
    assert after.schema.equals(before.schema)
    assert pq.ParquetFile(out).num_row_groups == pq.ParquetFile(source).num_row_groups
    masks = after["loss_mask"].to_pylist()
    assert masks[3] == masks[0]
    assert [row for row in range(5) if not after.slice(row, 1).equals(before.slice(row, 1))] == [3]


def test_columns_are_written_in_their_types_with_a_mask_in_the_place_of_null(tmp_path: Path):
    source, out = FORMATS / "miles_columns.parquet", tmp_path / "new.parquet"
    rollouts = list(read_rollouts(source))
    changed = [replace(one, training_row=longer(one.training_row)) for one in rollouts[:3]]
    assert write_rollouts(source, [*changed, *rollouts[3:]], out) == 3
    before, after = pq.read_table(source), pq.read_table(out)
    assert after.schema.equals(before.schema)
    assert after.slice(3).equals(before.slice(3))
    assert pq.ParquetFile(out).num_row_groups == pq.ParquetFile(source).num_row_groups
    for old, new in zip(before.to_pylist()[:3], after.to_pylist()[:3], strict=True):
        assert new["total_length"] == old["total_length"] + 1 == len(new["tokens"])
        assert new["response_length"] == old["response_length"] + 1 == len(new["loss_mask"])
        assert new["loss_mask"][-2:] == [0, 0]
        assert new["rollout_log_probs"][-2:] == [0.0, 0.0]


def longer(row: TrainingRow | None) -> TrainingRow:
    assert row is not None
    end = len(row.token_ids)
    return spliced(row, end - 1, end, [7, 8])


def test_the_messages_of_a_trajectory_take_no_tokens():
    line = json.loads((FORMATS / "miles_trajectory.jsonl").read_text().splitlines()[0])
    wanted = replace(read_one(line), training_row=row_of(sample()))
    with pytest.raises(RecordError, match="dashboard_columns"):
        pick_format(line).update(line, [RepairedRollout(wanted, ())])
    assert pick_format(line).update(line, []) == ()


# Sessions


def with_prompt(rollout: Rollout, number: int, ids: list[int]) -> RepairedRollout:
    turns = list(rollout.turns)
    turns[number] = replace(turns[number], prompt_ids=np.array(ids, np.int32))
    return RepairedRollout(replace(rollout, turns=tuple(turns)), tuple(range(len(turns))))


def test_a_changed_prompt_is_written_in_every_copy_of_a_session():
    row = fixture_row("miles_session", "clean")
    kept = copy.deepcopy(row)
    row["records"][2]["response"]["usage"] = {"prompt_tokens": 0, "completion_tokens": 0}
    usage = row["records"][2]["response"]["usage"]
    old = row["records"][2]["request"]["input_ids"]
    usage.update(prompt_tokens=len(old), completion_tokens=5)
    (new,) = pick_format(row).update(row, [with_prompt(read_one(row), 2, [7, 8, *old])])
    record, meta = new["records"][2], new["records"][2]["response"]["choices"][0]["meta_info"]
    assert record["request"]["input_ids"] == [7, 8, *old]
    assert meta["prompt_tokens"] == record["response"]["usage"]["prompt_tokens"] == len(old) + 2
    assert meta["routed_experts"] is None
    assert meta["indexer_topk"] is None
    assert new["metadata"]["accumulated_token_ids"] == [7, 8, *kept["metadata"]["accumulated_token_ids"]]
    assert new["metadata"]["tito_session_mismatch"] is None
    assert new["metadata"]["max_trim_tokens"] == 1
    assert all(a is b for a, b in zip(new["records"][:2], row["records"][:2], strict=True))
    assert {edit.path[0] for edit in edits_between(row, new)} == {"records", "metadata"}


def test_a_trimmed_sequence_stays_as_much_shorter():
    row = fixture_row("miles_session", "clean-trimmed-at-the-end")
    old = row["records"][2]["request"]["input_ids"]
    running = row["metadata"]["accumulated_token_ids"]
    (new,) = pick_format(row).update(row, [with_prompt(read_one(row), 2, [7, *old])])
    assert new["metadata"]["accumulated_token_ids"] == [7, *running]


def test_a_sequence_that_is_no_copy_is_left_alone():
    row = fixture_row("miles_session", "running-ids-out-of-step")
    old = row["records"][2]["request"]["input_ids"]
    (new,) = pick_format(row).update(row, [with_prompt(read_one(row), 2, [7, *old])])
    assert new["metadata"] is row["metadata"]


def test_the_parts_of_a_fork_are_sessions_with_their_calls():
    row = fixture_row("miles_session", "clean-with-an-error-behind")
    rollout = read_one(row)
    parts = [
        RepairedRollout(replace(rollout, turns=rollout.turns[:2]), (0, 1)),
        RepairedRollout(replace(rollout, turns=rollout.turns[2:]), (2,)),
    ]
    first, second = pick_format(row).update(row, parts)
    assert [record["status_code"] for record in first["records"]] == [200, 200, 400]
    assert [record["status_code"] for record in second["records"]] == [200, 400]
    assert second["metadata"] is row["metadata"]
    seen = rollout.turns[1].seen_ids
    assert seen is not None
    assert first["metadata"]["accumulated_token_ids"] == seen.tolist()
    assert len(read_one(first).messages) == 5
    with pytest.raises(RecordError, match="no call would be left"):
        pick_format(row).update(row, [RepairedRollout(replace(rollout, turns=()), ())])


def test_a_repair_of_sessions_leaves_fewer_findings_and_no_new_ones(tmp_path: Path):
    out, settings = tmp_path / "new.jsonl", Settings(tokenizer=TOY)
    outcomes = list(repair_rollouts(FORMATS / "miles_session.jsonl", out, settings, RepairSettings()))
    assert any("SEQ301" in codes for outcome in outcomes for codes in outcome.cured.values())
    codes = {finding.code for result in scan_rollouts(out, settings) for finding in result.findings}
    assert codes <= {"TOK101", "REC006", "REC008"}


# Token capture


def digest(ids: list[int]) -> str:
    return hashlib.sha256(b"nemo-gym-tokens" + struct.pack(f">BQ{len(ids)}Q", 1, len(ids), *ids)).hexdigest()


def test_a_changed_prompt_of_a_capture_has_its_length_and_its_digest():
    row = {**fixture_row("nemo_gym_tokens", "clean"), "routed_experts": [[[0]]], "unknown": {"x": 1}}
    wanted = [7, *row["prompt_token_ids"]]
    (new,) = pick_format(row).update(row, [with_prompt(read_one(row), 0, wanted)])
    seen = wanted + row["generation_token_ids"]
    assert new == {
        **row,
        "prompt_token_ids": wanted,
        "cum_len": len(seen),
        "digest": digest(seen),
        "routed_experts": None,
    }
    assert list(new) == list(row)
    assert read_one(new).turns[0].finish_reason is None


def test_a_digest_of_something_else_refuses_the_line():
    row = {**fixture_row("nemo_gym_tokens", "clean"), "digest": "0" * 64}
    with pytest.raises(RecordError, match="digest does not match these tokens"):
        pick_format(row).update(row, [with_prompt(read_one(row), 0, [7])])
    (same,) = pick_format(row).update(row, [unmended(read_one(row))])
    assert same is row


def test_a_line_is_one_call_and_stays_one():
    row = fixture_row("nemo_gym_tokens", "clean")
    rollout = read_one(row)
    with pytest.raises(RecordError, match="cannot be removed"):
        pick_format(row).update(row, [RepairedRollout(replace(rollout, turns=()), ())])
    with pytest.raises(RecordError, match="fork"):
        pick_format(row).update(row, [unmended(rollout)] * 2)
