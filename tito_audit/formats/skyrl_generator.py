"""SkyRL generator output: a batch as parallel lists, with one prompt, response and mask per sample.

NovaSky-AI/SkyRL `skyrl/train/generators/base.py` (`GeneratorOutput`, `TrajectoryID`), saved as one object per
batch. With step-wise training each call of a conversation is a sample. One sample per row is read as `generic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tito_audit.format import Format, Row
from tito_audit.formats._kit import batch, is_batch, sample_rollout, updated_sample
from tito_audit.record.rollout import Place, Rollout
from tito_audit.signature import keys, one_way

_IDS = "response_ids"


def _sample(row: Row, place: Place) -> Rollout:
    rollout = sample_rollout(row, place, FORMAT.name, (_IDS, "prompt_token_ids"))
    reason, owner = row.get("stop_reasons"), row.get("trajectory_ids")
    turns = rollout.turns
    if isinstance(reason, str):
        turns = tuple(replace(turn, finish_reason=reason) for turn in turns)
    group = owner.get("instance_id") if isinstance(owner, Mapping) else None
    stated = rollout.stated if group is None else replace(rollout.stated, group=str(group))
    return replace(rollout, turns=turns, stated=stated)


FORMAT = Format(
    name="skyrl_generator",
    title="SkyRL generator output",
    signature=one_way(
        "prompt_token_ids",
        keys("response_ids", before=" and ", after=", each one list per sample"),
        keys("loss_masks", before=", with "),
    ),
    precedence=222,
    matches=lambda row: is_batch(row, _IDS) and is_batch(row, "prompt_token_ids"),
    **batch(_sample, updated_sample, _IDS).functions,
    shows="Each sample's training row with its mask and logprobs, or its one call where all of the response is "
    "trained. No messages, tools or model; an end token added by hand has logprob 0.",
)
