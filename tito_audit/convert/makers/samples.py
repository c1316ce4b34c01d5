"""Atropos groups, slime samples and samples of a token-in, token-out stack, made from other logs.

Conventions as in the formats themselves: NousResearch/atropos `atroposlib/envs/base.py` (`ScoredDataGroup`),
THUDM/slime `slime/utils/types.py` (`Sample`), arb8020/research `rollouts/rollouts/training/types.py` (`Sample`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tito_audit.convert.maker import Holds, Maker, MakerInput
from tito_audit.convert.makers.shared import (
    REWARDS,
    messages_as_logged,
    other_lists,
    reward_slots,
    row_of,
    scores_as,
    weights_as,
)
from tito_audit.errors import RecordError
from tito_audit.format import Row

_NO_LOGPROB = 1.0
"""What Atropos writes where nothing was sampled."""
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
_AT_TOP = ("prompt", "response", "label", "group_index", "index", "reward", "status", "weight_versions")
"""Facts that slime has fields for; all others go into `metadata`."""


def _atropos_group(samples: Sequence[MakerInput]) -> Row:
    rows = [row_of(sample) for sample in samples]
    new_row: dict[str, Any] = {
        "tokens": [row.token_ids.tolist() for row in rows],
        # The token's id where it is trained, else -100.
        "masks": [np.where(np.array(weights_as(row, int), bool), row.token_ids, -100).tolist() for row in rows],
        "scores": [_reward(sample.facts) for sample in samples],
    }
    scores = [scores_as(row, _NO_LOGPROB) for row in rows]
    if any(column is not None for column in scores):
        new_row["inference_logprobs"] = scores
    if any(sample.rollout.messages for sample in samples):
        new_row["messages"] = [messages_as_logged(sample.rollout.messages) for sample in samples]
    columns = [dict(other_lists(row)) for row in rows]
    for name in dict.fromkeys(name for own in columns for name in own):
        new_row.setdefault(name, [own.get(name) for own in columns])
    return new_row


def _reward(facts: Mapping[str, Any]) -> Any:
    reward = facts.get("scores")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RecordError(
            f"the log has no number as its reward (looked for {', '.join(REWARDS)}), and a scored group "
            "needs one for each sample; put it into the log under one of these names"
        )
    return reward


def _slime(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    row = row_of(sample)
    weights = weights_as(row, int)
    start = row.prompt_length
    if start is None:
        if 1 not in weights:
            raise RecordError("nothing in it is trained, so where the response begins is unknown")
        start = weights.index(1)
    if 1 in weights[:start]:
        raise RecordError("tokens of its prompt are trained, but the mask of a sample covers only the response")
    facts = dict(sample.facts)
    reasons = facts.get("finish_reasons")
    last = reasons[-1] if isinstance(reasons, list) and reasons else None
    reason = facts.get("finish_reason", last)
    new_row: dict[str, Any] = {name: facts.pop(name) for name in _AT_TOP if name in facts}
    new_row["tokens"] = row.token_ids.tolist()
    new_row["response_length"] = len(weights) - start
    new_row["loss_mask"] = weights[start:]
    if (scores := scores_as(row, 0.0)) is not None:
        if any(scores[:start]):
            raise RecordError("tokens of its prompt have logprobs, but those of a sample cover only the response")
        new_row["rollout_log_probs"] = scores[start:]
    for name, values in other_lists(row):
        outside = all(value is None for value in values[:start])
        new_row.setdefault(name, values[start:] if outside else values)
    if reason is not None:
        new_row.setdefault(
            "status", _STATUS.get(str(reason), str(reason))
        )  # the original reason stays in metadata
    # The facts that a sample has no field for, and the conversation as slime's own agents store it.
    before = facts.pop("metadata", None)
    metadata = {**before, **facts} if isinstance(before, Mapping) else facts
    if sample.rollout.messages:
        metadata["messages"] = messages_as_logged(sample.rollout.messages)
    if sample.rollout.tools:
        metadata["tools"] = list(sample.rollout.tools)
    new_row["metadata"] = metadata
    return new_row


def _tito_sample(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    row = row_of(sample)
    facts = dict(sample.facts)
    new_row: dict[str, Any] = {name: facts.pop(name) for name in ("prompt", "response") if name in facts}
    new_row["tokens"] = row.token_ids.tolist()
    new_row["loss_mask"] = weights_as(row, float)
    new_row["rollout_log_probs"] = scores_as(row, 0.0)
    for name in ("group_index", "index", "reward", "status"):
        new_row[name] = facts.pop(name, None)
    if sample.rollout.messages:
        new_row["messages"] = messages_as_logged(sample.rollout.messages)
    if sample.rollout.tools:
        new_row["tools"] = list(sample.rollout.tools)
    for name, values in other_lists(row):
        new_row.setdefault(name, values)
    before = facts.pop("metadata", None)
    new_row["metadata"] = {**before, **facts} if isinstance(before, Mapping) else facts
    return new_row


_GROUPS = {"group_id": "group_index", "group": "group_index"}
_SAMPLE = frozenset(("tokens", "loss_mask", "rollout_log_probs", "messages", "tools", "response_length"))

ATROPOS_GROUP = Maker(
    name="atropos_group",
    format="atropos_group",
    title="Atropos groups (ScoredDataGroup), of adjacent rows that share a group",
    holds=Holds.ROWS,
    make=_atropos_group,
    own=frozenset(("tokens", "masks", "inference_logprobs", "messages")),
    slots=reward_slots("scores"),
    takes_facts=False,
    grouped=True,
)
SLIME = Maker(
    name="slime",
    format="slime",
    title="slime samples as JSON",
    holds=Holds.ROWS,
    make=_slime,
    own=_SAMPLE,
    slots={**reward_slots("reward"), **_GROUPS},
    wants=("reward",),
)
TITO_SAMPLE = Maker(
    name="tito_sample",
    format="tito_sample",
    title="Samples of a token-in, token-out stack",
    holds=Holds.ROWS,
    make=_tito_sample,
    own=_SAMPLE,
    slots={**reward_slots("reward"), **_GROUPS},
    wants=("reward",),
    tables=True,
)
