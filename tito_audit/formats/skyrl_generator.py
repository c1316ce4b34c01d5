"""SkyRL generator output: a batch as parallel lists, with one prompt, response and mask per sample.

NovaSky-AI/SkyRL `skyrl/train/generators/base.py` (`GeneratorOutput`, `TrajectoryID`), saved as one object per
batch. One sample per row is read as `generic`.

With step-wise training (`is_last_step`) each call of a conversation is a sample, and the samples of a trajectory
follow each other (`_validate_step_wise_fields`). `skyrl_gym_generator.py` puts the observation after what was
sampled, with mask and logprobs 0, and so an end token that it appends after a stop string; the Harbor generator
leaves observations to the next prompt. Steps that `merge_stepwise_output` merged are no single call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import as_logged, is_list, is_number_list, to_list
from tito_audit.formats._kit import SampleRows, Samples, is_batch, read_sample, split_batch, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import as_floats
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Sources

_IDS, _PROMPT, _MASK, _LOGPROBS = "response_ids", "prompt_token_ids", "loss_masks", "rollout_logprobs"
_LAST, _OWNER = "is_last_step", "trajectory_ids"


def read_skyrl_sample(row: Row, place: Place) -> Rollout:
    rollout = read_sample(row, place, FORMAT.name, (_IDS, _PROMPT))
    reason, owner = row.get("stop_reasons"), row.get(_OWNER)
    turns = rollout.turns
    if isinstance(reason, str):
        turns = tuple(replace(turn, finish_reason=reason) for turn in turns)
    group = owner.get("instance_id") if isinstance(owner, Mapping) else None
    stated = rollout.stated if group is None else replace(rollout.stated, group=str(group))
    return replace(rollout, turns=turns, stated=stated)


def _group_steps(samples: Sequence[Row]) -> list[list[int]]:
    """The numbers of the samples of each trajectory; without step-wise training each sample is alone."""
    trajectories: list[list[int]] = []
    before: Row = {}
    for number, sample in enumerate(samples):
        goes_on = isinstance(before.get(_LAST), bool | np.bool_) and not before[_LAST]
        if goes_on and to_list(sample.get(_OWNER)) == to_list(before.get(_OWNER)):
            trajectories[-1].append(number)
        else:
            trajectories.append([number])
        before = sample
    return trajectories


def split_steps(row: Row) -> Samples | None:
    """The samples of a batch; steps of a trajectory end with what was sampled, before the observation."""
    samples = split_batch(row, _IDS)
    if samples is None:
        return None
    ends: dict[int, int] = {}
    for number in chain.from_iterable(steps for steps in _group_steps(samples.rows) if len(steps) > 1):
        # A step that is not one call with an observation stays whole.
        step = samples.rows[number]
        mask: Any = step.get(_MASK)
        ids: Any = step.get(_IDS)
        logprobs: Any = step.get(_LOGPROBS)
        if not is_list(mask) or not is_list(ids) or len(mask) != len(ids) or not is_number_list(mask):
            continue
        trained = as_floats(mask, _MASK) != 0
        end = int(trained.sum())
        if not 0 < end < len(ids) or not trained[:end].all():
            continue
        # A logprob after the last trained token shows that this was sampled too.
        scored = is_list(logprobs) and len(logprobs) == len(ids) and is_number_list(logprobs)
        if not scored or not as_floats(logprobs, _LOGPROBS)[end:].any():
            ends[number] = end
    rows = [
        sample if number not in ends else {**sample, **_response_columns(sample, slice(ends[number]))}
        for number, sample in enumerate(samples.rows)
    ]
    return replace(samples, rows=tuple(rows), with_totals=partial(_with_observations, ends))


def _response_columns(sample: Row, part: slice) -> dict[str, Any]:
    """A slice of every column with an entry per token of the response."""
    size = len(sample[_IDS])
    return {
        name: value[part]
        for name, value in sample.items()
        if name != _PROMPT and is_list(value) and len(value) == size
    }


def _with_observations(ends: Mapping[int, int], old: Row, new: Row, samples: Sequence[Row]) -> Row:
    """The written row with the observation of each step after its changed columns."""
    columns: dict[str, list[Any]] = {}
    for number, end in ends.items():
        step = {name: value[number] for name, value in old.items() if is_list(value) and len(value) > number}
        for name, observed in _response_columns(step, slice(end, None)).items():
            value = new[name][number]
            if value is not old[name][number] and value is not None:
                whole = as_logged([*to_list(value), *to_list(observed)], step[name])
                columns.setdefault(name, list(new[name]))[number] = whole
    return with_values(new, columns)


def _samples_of_rollouts(rollouts: Sequence[Rollout], row: Row) -> list[list[int]]:
    """The numbers of the samples that make each rollout; a step that is not one call is one by itself."""
    samples = _ROWS.split(row)
    conversations: list[list[int]] = []
    for steps in [[0]] if samples is None else _group_steps(samples.rows):
        calls = [number for number in steps if rollouts[number].turns]
        conversations += [[number] for number in steps if number not in calls]
        conversations += [calls] if calls else []
    return sorted(conversations)


def read(row: Row, place: Place) -> Sequence[Rollout]:
    samples = _ROWS.read(row, place)
    rollouts = []
    for item, steps in enumerate(_samples_of_rollouts(samples, row)):
        rollout = replace(samples[steps[0]], place=replace(place, item=item))
        if len(steps) > 1:
            turns = tuple(replace(samples[number].turns[0], as_row=None) for number in steps)
            rollout = replace(rollout, turns=turns)
        rollouts.append(rollout)
    return rollouts


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    samples = _ROWS.read(row, rollouts[0].place)
    sources = _ROWS.sources(row, samples)
    return [
        Sources(
            sources[steps[0]].columns,
            tuple(call for number in steps for call in sources[number].calls),
            tuple(path for number in steps for path in sources[number].implied),
        )
        for steps in _samples_of_rollouts(samples, row)
    ]


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    """The row with each call of a trajectory in the sample of its step."""
    if not repaired:
        return ()
    samples = _ROWS.read(row, repaired[0].rollout.place)
    conversations = _samples_of_rollouts(samples, row)
    parts = []
    for part in repaired:
        steps = conversations[part.rollout.place.item]
        if len(steps) == 1:
            parts.append(replace(part, rollout=replace(part.rollout, place=samples[steps[0]].place)))
            continue
        if part.turns_from != tuple(range(len(steps))):
            raise RecordError("each step is a sample by itself, trained as it was sampled, so no fork is needed")
        for number, turn in zip(steps, part.rollout.turns, strict=True):
            parts.append(RepairedRollout(replace(samples[number], turns=(turn,)), (0,)))
    return _ROWS.update(row, parts)


_ROWS = SampleRows(read_skyrl_sample, updated_sample, split_steps)
FORMAT = Format(
    name="skyrl_generator",
    title="SkyRL generator output",
    signature=Signature("{prompt_token_ids} and {response_ids}, each one list per sample, with {loss_masks}"),
    precedence=222,
    matches=lambda row: is_batch(row, _IDS) and is_batch(row, _PROMPT),
    read=read,
    sources=sources,
    update=update,
    shows="Each sample's training row with its mask and logprobs, or its one call where all of the response is "
    "trained. With step-wise training, the calls of a trajectory are one rollout. No messages, tools or model; an "
    "end token added by hand has logprob 0.",
)
