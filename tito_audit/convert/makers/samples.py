"""Atropos groups, slime samples and samples of a token-in, token-out stack, made from other logs.

Conventions as in the formats themselves: NousResearch/atropos `atroposlib/envs/base.py` (`ScoredDataGroup`),
THUDM/slime `slime/utils/types.py` (`Sample`), arb8020/research `rollouts/rollouts/training/types.py` (`Sample`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tito_audit.convert.maker import Holds, Maker, Sample
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
from tito_audit.record.rollout import TrainingRow

_NO_LOGPROB = 1.0
"""What Atropos writes where nothing was sampled."""
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
_AT_TOP = ("prompt", "response", "label", "group_index", "index", "reward", "status", "weight_versions")
"""Facts that slime has fields for; all others go into `metadata`."""


def _atropos_group(samples: Sequence[Sample]) -> Row:
    rows = [row_of(sample) for sample in samples]
    made: dict[str, Any] = {
        "tokens": [row.token_ids.tolist() for row in rows],
        "masks": [_labels(row) for row in rows],
        "scores": [_reward(sample.facts) for sample in samples],
    }
    scores = [scores_as(row, _NO_LOGPROB) for row in rows]
    if any(column is not None for column in scores):
        made["inference_logprobs"] = scores
    if any(sample.rollout.messages for sample in samples):
        made["messages"] = [messages_as_logged(sample.rollout.messages) for sample in samples]
    columns = [dict(other_lists(row)) for row in rows]
    for name in dict.fromkeys(name for own in columns for name in own):
        made.setdefault(name, [own.get(name) for own in columns])
    return made


def _labels(row: TrainingRow) -> list[int]:
    """The mask as Atropos writes it: the token's id where it is trained, else -100."""
    trained = np.array(weights_as(row, int), np.bool_)
    labels: list[int] = np.where(trained, row.token_ids, -100).tolist()
    return labels


def _reward(facts: Mapping[str, Any]) -> Any:
    reward = facts.get("scores")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RecordError(
            f"the log has no number as its reward (looked for {', '.join(REWARDS)}), and a scored group "
            "needs one for each sample; put it into the log under one of these names"
        )
    return reward


def _slime(samples: Sequence[Sample]) -> Row:
    (sample,) = samples
    row = row_of(sample)
    weights = weights_as(row, int)
    start = row.prompt_length if row.prompt_length is not None else _first_trained(weights)
    if 1 in weights[:start]:
        raise RecordError("tokens of its prompt are trained, but the mask of a sample covers only the response")
    facts = dict(sample.facts)
    reasons = facts.get("finish_reasons")
    last = reasons[-1] if isinstance(reasons, list) and reasons else None
    reason = facts.get("finish_reason", last)
    made: dict[str, Any] = {name: facts.pop(name) for name in _AT_TOP if name in facts}
    made["tokens"] = row.token_ids.tolist()
    made["response_length"] = len(weights) - start
    made["loss_mask"] = weights[start:]
    if (scores := scores_as(row, 0.0)) is not None:
        if any(scores[:start]):
            raise RecordError("tokens of its prompt have logprobs, but those of a sample cover only the response")
        made["rollout_log_probs"] = scores[start:]
    for name, values in other_lists(row):
        outside = all(value is None for value in values[:start])
        made.setdefault(name, values[start:] if outside else values)
    if reason is not None:
        made.setdefault("status", _STATUS.get(str(reason), str(reason)))  # the original reason stays in metadata
    made["metadata"] = _metadata(sample, facts)
    return made


def _first_trained(weights: list[int]) -> int:
    if 1 not in weights:
        raise RecordError("nothing in it is trained, so where the response begins is unknown")
    return weights.index(1)


def _metadata(sample: Sample, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that a sample has no field for, and the conversation as slime's own agents store it."""
    before = facts.pop("metadata", None)
    made = {**before, **facts} if isinstance(before, Mapping) else facts
    if sample.rollout.messages:
        made["messages"] = messages_as_logged(sample.rollout.messages)
    if sample.rollout.tools:
        made["tools"] = list(sample.rollout.tools)
    return made


def _tito_sample(samples: Sequence[Sample]) -> Row:
    (sample,) = samples
    row = row_of(sample)
    facts = dict(sample.facts)
    made: dict[str, Any] = {name: facts.pop(name) for name in ("prompt", "response") if name in facts}
    made["tokens"] = row.token_ids.tolist()
    made["loss_mask"] = weights_as(row, float)
    made["rollout_log_probs"] = scores_as(row, 0.0)
    for name in ("group_index", "index", "reward", "status"):
        made[name] = facts.pop(name, None)
    if sample.rollout.messages:
        made["messages"] = messages_as_logged(sample.rollout.messages)
    if sample.rollout.tools:
        made["tools"] = list(sample.rollout.tools)
    for name, values in other_lists(row):
        made.setdefault(name, values)
    before = facts.pop("metadata", None)
    made["metadata"] = {**before, **facts} if isinstance(before, Mapping) else facts
    return made


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
