"""Why the turns of a training row ended, wherever its row says so, and through a conversion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tito_audit import convert_rollouts
from tito_audit.formats import pick_format
from tito_audit.record.rollout import Place, Rollout

IDS = [11, 12, 13, 14]
FLAT = {"token_ids": IDS, "loss_mask": [0, 0, 1, 1]}
SLIME = {"tokens": IDS, "response_length": 2, "loss_mask": [1, 1]}
STACK = {
    "tokens": IDS,
    "loss_mask": [0.0, 0.0, 1.0, 1.0],
    "rollout_log_probs": [0.0, 0.0, -0.1, -0.2],
    "response": "",
}
NODE = {"full_text": "", "tokens": IDS, "masked_tokens": [-100, -100, 13, 14], "logprobs": [1.0, 1.0, -0.1, -0.2]}
SKYRL = {"prompt_token_ids": [[11]], "response_ids": [[12, 13, 14]], "loss_masks": [[1, 0, 1]]}


def read(row: Mapping[str, Any]) -> list[Rollout]:
    return list(pick_format(row).read(row, Place("log.jsonl", 0)))


@pytest.mark.parametrize(
    ("row", "reasons"),
    [
        ({**FLAT, "finish_reason": "length"}, ("length",)),
        ({**FLAT, "finish_reason": {"type": "length", "length": 2}}, ("length",)),
        ({**FLAT, "stop_reason": "max_tokens"}, ("length",)),
        ({**FLAT, "finish_reason": "EOS"}, ("stop",)),
        ({**FLAT, "finish_reason": "content_filter"}, ("content_filter",)),
        ({**FLAT, "finish_reasons": ["tool_calls", None, "stop"]}, ("tool_calls", None, "stop")),
        ({**FLAT, "finish_reasons": [None, None]}, ()),
        ({**FLAT, "is_truncated": True}, ("length",)),
        ({**FLAT, "is_truncated": False, "status": "success"}, ()),
        ({**FLAT, "metadata": {"finish_reason": "stop"}}, ("stop",)),
        (FLAT, ()),
        ({**SLIME, "status": "truncated"}, ("length",)),
        ({**SLIME, "status": "completed"}, ("stop",)),
        ({**SLIME, "status": "aborted"}, ("abort",)),
        ({**SLIME, "status": "pending"}, ()),
        (
            {**SLIME, "status": "completed", "metadata": {"finish_reasons": ["tool_calls", "stop"]}},
            ("tool_calls", "stop"),
        ),
        ({**STACK, "status": "truncated"}, ("length",)),
        ({**NODE, "metadata": {"finish_reason": "length"}}, ("length",)),
        ({**SKYRL, "stop_reasons": ["length"]}, ("length",)),
        ({"export_sequence_idx": 0, **FLAT, "finish_reason": "stop"}, ("stop",)),
    ],
)
def test_a_row_says_why_its_last_turns_ended(row: dict[str, Any], reasons: tuple[str | None, ...]) -> None:
    (rollout,) = read(row)
    assert rollout.training_row is not None
    assert rollout.training_row.finish_reasons == reasons


def test_a_packed_row_and_a_group_say_it_of_each_sample() -> None:
    packed = {
        "token_ids": IDS * 2,
        "loss_mask": [0, 0, 1, 1] * 2,
        "seq_lens": [4, 4],
        "finish_reasons": ["stop", "length"],
    }
    group = {"tokens": [IDS] * 2, "masks": [[-100, -100, 13, 14]] * 2, "scores": [0.0, 1.0]}
    for row in (packed, {**group, "finish_reasons": ["stop", "length"]}):
        rows = [rollout.training_row for rollout in read(row)]
        assert [row.finish_reasons for row in rows if row is not None] == [("stop",), ("length",)]


CALLS = {
    "reward": 1.0,
    "calls": [
        {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-0.1, None], "finish_reason": "tool_calls"},
        {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5], "logprobs": [-0.3], "finish_reason": "length"},
    ],
}


@pytest.mark.parametrize("to", ["rows", "slime", "nemo_rl", "nemo_rl_message_log", "tito_sample"])
def test_rows_made_of_calls_say_why_each_call_ended(to: str, tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_text(json.dumps(CALLS))
    convert_rollouts(log, to, out, lossy=True)
    (rollout,) = read(json.loads(out.read_text()))
    assert rollout.training_row is not None
    assert rollout.training_row.finish_reasons == ("tool_calls", "length")
    assert rollout.training_row.logprobs is not None
    assert rollout.training_row.loss_mask is not None
    trained = rollout.training_row.logprobs[rollout.training_row.loss_mask].tolist()
    assert trained[0] == -0.1
    assert trained[1] != trained[1]
    assert trained[2] == -0.3


@pytest.mark.parametrize("to", ["slime", "nemo_rl", "tito_sample", "nemo_gym"])
def test_a_reward_that_the_log_does_not_state_is_named_and_not_made_up(to: str, tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    name = "rewards" if to == "nemo_rl" else "reward"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    call = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-0.5]}
    bare = {"messages": talk, "calls": [call]}
    for more, missing in (({}, {name: 1}), ({"score": 0.5}, {}), ({"score": None}, {name: 1})):
        log.write_text(json.dumps({**bare, **more}))
        assert convert_rollouts(log, to, out, lossy=True, overwrite=True).carried.missing == missing
        converted = json.loads(out.read_text())
        assert converted.get(name) == (None if missing else [0.5] if to == "nemo_rl" else 0.5)


def test_a_conversion_lists_what_the_log_lacks(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({**FLAT, "prompt_length": 2}))
    _, shown, _ = run("convert", log, "--to", "slime", "--dry-run")
    assert "Not in the log, so left out or null, with the number of rollouts\n  reward  1\n" in shown
    _, shown, _ = run("convert", log, "--to", "atropos_group", "--dry-run")
    assert "put it into the log under one of these names" in shown
