"""Responses of OpenRLHF's executors: one token sequence, with the ranges that the model sampled.

OpenRLHF/OpenRLHF 0.11.2 `openrlhf/utils/agent.py` (`SingleTurnAgentExecutor`, `MultiTurnAgentExecutor`): what
`execute` returns. `rollout_log_probs` is 0.0 where nothing was sampled, and null without importance sampling;
`trainer/ppo_utils/samples_generator.py` (`_process_response_into_experience`) trains `action_ranges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_facts, with_finish_reasons
from tito_audit.formats._columns import as_logged, ids_or_none, is_list, logprob_column, other_columns, to_list
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row, with_values
from tito_audit.record.arrays import Mask
from tito_audit.record.build import build_training_row
from tito_audit.record.rollout import Place, Rollout, TrainingRow

_IDS, _RANGES, _LOGPROBS = "observation_tokens", "action_ranges", "rollout_log_probs"


def read(row: Row, place: Place) -> Rollout:
    ids = ids_or_none(row[_IDS], _IDS)
    if ids is None:
        return Rollout(place, FORMAT.name, stated=stated_facts(row).without_ids())
    trained = build_training_row(
        ids,
        mask=(_RANGES, _sampled_mask(row)),
        logprobs=logprob_column(row, _LOGPROBS),
        other=other_columns(row, (_IDS, _RANGES, _LOGPROBS)),
        sentinel=0.0,
        whole=True,
    )
    return Rollout(place, FORMAT.name, training_row=with_finish_reasons(trained, row), stated=stated_facts(row))


def _sampled_mask(row: Row) -> Mask:
    """`[T]` which tokens are in a range; RecordError if one is no range of the row's tokens."""
    mask = np.zeros(len(row[_IDS]), np.bool_)
    for start, end in _read_ranges(row[_RANGES]):
        if not 0 <= start <= end <= len(mask):
            raise RecordError(f"{_RANGES} has {start} to {end}, but the row has {len(mask)} tokens")
        mask[start:end] = True
    return mask


def _read_ranges(value: Any) -> Sequence[tuple[int, int]]:
    ranges = [to_list(pair) if is_list(pair) else pair for pair in to_list(value)]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in ranges):
        raise RecordError(f"{_RANGES} is not a list of a start and an end each")
    return [(start, end) for start, end in ranges]


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The response with its repaired row; actions without feedback between them stay apart."""
    was = _sampled_mask(row)
    flat = updated_row({**row, _RANGES: was}, old, new, _IDS)
    mask: Any = flat[_RANGES]
    if mask is None:
        raise RecordError(f"without {_RANGES} nothing would say what is trained")
    if mask is was:
        return with_values(row, {name: value for name, value in flat.items() if name != _RANGES})
    joints = (
        {start for start, _ in _read_ranges(row[_RANGES]) if start and was[start - 1]}
        if len(mask) == len(was)
        else ()
    )
    trained = [False, *(bool(value) for value in to_list(mask)), False]
    cuts = [at for at, (left, right) in enumerate(pairwise(trained)) if left != right or (left and at in joints)]
    like = row[_RANGES][0] if len(row[_RANGES]) else []
    ranges = [as_logged([start, end], like) for start, end in pairwise(cuts) if trained[start + 1]]
    return with_values(flat, {_RANGES: as_logged(ranges, row[_RANGES])})


FORMAT = Format(
    name="openrlhf",
    title="OpenRLHF executor responses",
    signature=Signature("{observation_tokens} and {action_ranges}"),
    precedence=195,
    matches=lambda row: is_list(row.get(_IDS)) and is_list(row.get(_RANGES)),
    **training_rows(read, write, "a response").functions,
    shows="The training row, with its mask from the ranges, and its logprobs. No calls, messages, tools or model; "
    "the framework writes no log itself.",
)
