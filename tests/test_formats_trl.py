"""Buffers of TRL's trainers: padded batches with the sampler's logprobs, read and written in their width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.forms import as_table, plain, spliced
from tito_audit.errors import RecordError
from tito_audit.formats import pick_format
from tito_audit.record.column import MovePolicy
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Place, Rollout

PLACE = Place("log.jsonl", 0)
PAD = 9
BUFFER: dict[str, Any] = {
    "prompt_ids": [[PAD, 11, 12], [13, 14, 15]],
    "prompt_mask": [[0, 1, 1], [1, 1, 1]],
    "completion_ids": [[21, 22, 2, PAD, PAD], [23, 61, 62, 24, PAD]],
    "completion_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
    "tool_mask": [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]],
    "sampling_per_token_logps": [[-0.1, -0.2, -0.3, 0.0, 0.0], [-0.4, 0.0, 0.0, -0.5, 0.0]],
    "old_per_token_logps": [[-0.1, -0.2, -0.4, 0.0, 0.0], [-0.4, -7.0, -7.0, -0.5, 0.0]],
    "ref_per_token_logps": [[-0.1, -0.2, -0.4, 0.0, 0.0], [-0.4, -7.0, -7.0, -0.5, 0.0]],
    "advantages": [0.5, -0.5],
    "num_items_in_batch": 7,
}


def read(row: Mapping[str, Any]) -> tuple[Rollout, ...]:
    assert pick_format(row).name == "trl_rollout"
    return tuple(pick_format(row).read(row, PLACE))


def sample(number: int) -> dict[str, Any]:
    return {name: value[number] if isinstance(value, list) else value for name, value in BUFFER.items()}


@pytest.mark.parametrize("row", [BUFFER, as_table(BUFFER)], ids=["json", "table"])
def test_a_buffer_is_its_samples_without_padding(row: dict[str, Any]) -> None:
    first, second = read(row)
    (turn,) = first.turns
    assert turn.prompt_ids is not None
    assert turn.completion_ids is not None
    assert turn.completion_logprobs is not None
    assert (turn.prompt_ids.tolist(), turn.completion_ids.tolist()) == ([11, 12], [21, 22, 2])
    assert turn.completion_logprobs.tolist() == [-0.1, -0.2, -0.3]
    stale = {column.name for column in turn.columns if column.policy is MovePolicy.STALE}
    assert stale == {"old_per_token_logps", "ref_per_token_logps"}
    trained = second.training_row
    assert trained is not None
    assert trained.token_ids.tolist() == [13, 14, 15, 23, 61, 62, 24]
    assert trained.loss_mask is not None
    assert np.flatnonzero(trained.loss_mask).tolist() == [3, 6]
    assert trained.logprobs is not None
    assert trained.logprobs[trained.loss_mask].tolist() == [-0.4, -0.5]


@pytest.mark.parametrize("row", [BUFFER, as_table(BUFFER), sample(0), sample(1)], ids=["json", "table", "0", "1"])
def test_a_buffer_in_which_nothing_changed_is_the_row_itself(row: dict[str, Any]) -> None:
    (new,) = pick_format(row).update(row, [unmended(rollout) for rollout in read(row)])
    assert new is row


def test_a_completion_that_the_trainer_left_out_trains_nothing() -> None:
    row = {**sample(0), "completion_mask": [0] * 5}
    (rollout,) = read(row)
    assert rollout.training_row is not None
    assert rollout.training_row.loss_mask is not None
    assert not rollout.training_row.loss_mask.any()


def test_a_prompt_that_changes_keeps_to_its_width_or_is_refused() -> None:
    rollouts = read(BUFFER)
    old = rollouts[1].training_row
    assert old is not None

    def written(ids: list[int]) -> dict[str, Any]:
        mended = [unmended(one) for one in rollouts]
        mended[1] = RepairedRollout(replace(rollouts[1], training_row=spliced(old, 1, 2, ids)), ())
        (new,) = pick_format(BUFFER).update(BUFFER, mended)
        return dict(new)

    new = written([77])
    assert new["prompt_ids"] == [[PAD, 11, 12], [13, 77, 15]]
    assert plain(new["prompt_mask"]) == BUFFER["prompt_mask"]
    with pytest.raises(RecordError, match="only 3 tokens wide"):
        written([77, 78])


def test_a_mask_of_another_width_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="prompt_mask has 2 entries for 3 of prompt_ids"):
        read({**sample(0), "prompt_mask": [0, 1]})
