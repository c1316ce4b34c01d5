"""Segments of the Token DB of tinker-cookbook: one row per turn of a trajectory, in Parquet.

thinking-machines-lab/tinker-cookbook `tinker_cookbook/tokendb/schema.py` (`arrow_schema`, `compute_ob_delta`),
`capture.py` (`record_groups`) and `reader.py` (`reconstruct_full_ob`), schema version 2, of pull request 804; they
are in no release up to 0.6.1. A prompt that starts with all tokens of the step before holds what follows these
(`ob_is_delta`), else it is whole. Each group that was filtered out is number 0 of its iteration, and samples
outside of rollouts have any numbers, so only rows of the source `rollout` name their trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature, Steps
from tito_audit.formats._calls import build_turn, stated_facts
from tito_audit.formats._columns import as_logged, first_text, is_list, per_token_column
from tito_audit.formats._update import sources_at, sources_of_calls, with_values
from tito_audit.formats._writer import listed_calls
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import CallSource, Sources

_PROMPT, _DELTA, _COMPLETION, _LOGPROBS = "ob_tokens", "ob_is_delta", "ac_tokens", "ac_logprobs"
_TRAJECTORY = ("run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx")
_STEP = "step_idx"


def read(row: Row, place: Place) -> Sequence[Rollout]:
    # A part of a prompt is no prompt, nor is one without its images.
    whole = not row[_DELTA] and not row.get("has_images")
    version = row.get("sampling_client_step")
    turn = build_turn(
        (_PROMPT, row[_PROMPT] if whole else None),
        (_COMPLETION, row[_COMPLETION]),
        lambda: per_token_column(row, _LOGPROBS),
        {},
        prompt_text=first_text(row, ("ob_text",)) if whole else None,
        completion_text=first_text(row, ("ac_text",)),
        finish_reason=first_text(row, ("stop_reason",)),
        weight_versions=() if version is None else (str(version),),
    )
    name = _trajectory(row)
    stated = replace(stated_facts(row), group=None if name is None else name.rpartition("/")[0])
    return (Rollout(place, FORMAT.name, turns=(turn,), stated=stated),)


def _trajectory(row: Row) -> str | None:
    """The trajectory of a step; None if its row does not name it."""
    names = [row.get(name) for name in _TRAJECTORY]
    if row.get("source") != "rollout" or any(name is None for name in names):
        return None
    return "/".join(map(str, names))


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    scored = sources_at([(_LOGPROBS,)] if is_list(row.get(_LOGPROBS)) else [])
    call = CallSource(prompts=sources_at([(_PROMPT,)]), logprobs=scored, columns={_LOGPROBS: scored})
    return sources_of_calls([[call]])


def with_whole_prompts(rows: Sequence[Row]) -> Sequence[Row]:
    """The steps with whole prompts; a step stays as it is if the one before it is missing or there are two."""
    numbers: list[Any] = [row.get(_STEP) for row in rows]
    if len(set(numbers)) < len(numbers):
        return rows
    whole = list(rows)
    seen: dict[Any, Ids] = {}
    for number, place in sorted(zip(numbers, range(len(rows)), strict=True)):
        row = rows[place]
        prompt = as_ids(row[_PROMPT], _PROMPT)
        if row[_DELTA]:
            if number - 1 not in seen:
                continue
            prompt = np.concatenate([seen[number - 1], prompt])
            whole[place] = with_values(row, {_PROMPT: as_logged(prompt, row[_PROMPT]), _DELTA: False})
        seen[number] = np.concatenate([prompt, as_ids(row[_COMPLETION], _COMPLETION)])
    return whole


def as_stored(new: Sequence[Row], old: Sequence[Row]) -> Sequence[Row]:
    """The steps as rows: one that held what its prompt adds does so again if it continues the step before."""
    stored = list(new)
    places = {row[_STEP]: place for place, row in enumerate(new)}
    for place, (row, was) in enumerate(zip(new, old, strict=True)):
        if row is was or not was[_DELTA]:
            continue
        before = new[places[row[_STEP] - 1]]
        if before[_DELTA]:
            raise RecordError("the prompt of a step before this one is unknown")
        parts = [as_ids(before[_PROMPT], _PROMPT), as_ids(before[_COMPLETION], _COMPLETION)]
        seen, prompt = np.concatenate(parts), as_ids(row[_PROMPT], _PROMPT)
        if len(prompt) >= len(seen) and np.array_equal(prompt[: len(seen)], seen):
            rest = as_logged(prompt[len(seen) :], was[_PROMPT])
            row = with_values(row, {_PROMPT: rest, _DELTA: True})
        stored[place] = was if all(row[name] is was[name] for name in was) else row
    return stored


FORMAT = Format(
    name="tinker_tokendb",
    title="tinker-cookbook Token DB segments",
    signature=Signature("{ob_tokens}, {ob_is_delta}, {ac_tokens}"),
    precedence=205,
    matches=lambda row: {_PROMPT, _DELTA, _COMPLETION} <= row.keys() and is_list(row[_COMPLETION]),
    **listed_calls(read, sources, only_numbers=True),
    row_is_call=True,
    conversation=", ".join(_TRAJECTORY),
    steps=Steps(_trajectory, with_whole_prompts, as_stored),
    shows="One call: its prompt, completion, logprobs and weight version. Rows of one trajectory are read "
    "together, and prompts that hold what they add to the step before become whole; in rows that are read alone "
    "or belong to a filtered group they have no prompt, nor have steps with images. No messages, tools or mask.",
)
