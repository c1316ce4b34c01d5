"""Training rows out of plain columns: one flat list of ids, or prompt and response ids with a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.format import Row
from tito_audit.formats._calls import CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import (
    Raw,
    first_filled,
    first_list,
    flat_logprobs,
    ids_or_none,
    is_list,
    other_columns,
)
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.build import training_row
from tito_audit.record.column import ColumnRole
from tito_audit.record.rollout import TrainingRow

__all__ = ["FLAT_IDS", "flat_row", "split_row"]

FLAT_IDS = ("token_ids", "tokens", "input_ids")
_MASKS = (
    "loss_mask",
    "loss_masks",
    "mask",
    "masks",
    "assistant_mask",
    "assistant_masks",
    "response_mask",
    "completion_mask",
    "env_mask",
    "action_mask",
    "labels",
)
_RESPONSE_MASKS = ("env_mask", "response_mask", "completion_mask", "action_mask", *_MASKS)
_ROW_LOGPROBS = (
    "logprobs",
    "log_probs",
    "rollout_log_probs",
    "rollout_logprobs",
    "inference_logprobs",
    "sampled_logprobs",
    "response_logprobs",
    "completion_logprobs",
    "generation_log_probs",
    "generation_logprobs",
    "old_log_probs",
)


def flat_row(row: Row, *, has_calls: bool) -> TrainingRow | None:
    """The training row of a flat list of ids; None when the list is empty.

    A row that also has calls keeps the columns named after completions for them, where they do not fit
    the row: `has_calls` says so.
    """
    name = first_filled(row, FLAT_IDS)
    row = _without_padding(row, name)
    ids = ids_or_none(row.get(name or ""), name or "")
    if ids is None:
        return None
    names = tuple(n for n in _ROW_LOGPROBS if not has_calls or n not in CALL_LOGPROBS[:6])
    logprobs, mask = first_filled(row, names), first_filled(row, _MASKS)
    prompt_length, stated = _prompt_length(row, len(ids))
    trained = training_row(
        ids,
        mask=None if mask is None else (mask, row[mask]),
        logprobs=flat_logprobs(row, logprobs),
        other=other_columns(row, _taken(mask, logprobs)),
        prompt_length=prompt_length,
        # slime and miles, which are the ones to write this length: no mask means all of the response.
        absent_mask_trains_response=stated and mask is None,
    )
    return _with_sentinel(trained)


def split_row(row: Row) -> TrainingRow | None:
    """The training row of prompt and response ids whose mask has untrained tokens in the response.

    None when there is no such mask: then the response is what one call sampled. A mask that fits neither
    the response nor the whole makes a row too, since a rule has to see it.
    """
    prompt_name, response_name = first_filled(row, PROMPT_IDS), first_filled(row, COMPLETION_IDS)
    mask = first_list(row, _RESPONSE_MASKS)
    if response_name is None or mask is None or not len(row[mask]):
        return None
    prompt = ids_or_none(row.get(prompt_name or ""), prompt_name or "")
    response = ids_or_none(row[response_name], response_name)
    if response is None:
        return None
    prompt = empty_ids() if prompt is None else prompt
    if _trains_all_of_response(row[mask], prompt, response):
        return None
    logprobs = first_filled(row, CALL_LOGPROBS)
    trained = training_row(
        np.concatenate([prompt, response]),
        mask=(mask, row[mask]),
        logprobs=flat_logprobs(row, logprobs),
        other=other_columns(row, _taken(mask, logprobs)),
        prompt_length=len(prompt),
    )
    return _with_sentinel(trained)


def _with_sentinel(row: TrainingRow) -> TrainingRow:
    """The row with what it writes where no logprob exists: the one value that all untrained tokens share.

    Most trainers write 0.0 there, Atropos 1.0, others null; no name tells which of them wrote this row.
    """
    if row.logprobs is None or row.loss_mask is None:
        return row
    outside = np.unique(row.logprobs[~row.loss_mask & ~np.isnan(row.logprobs)])
    # A lone untrained token may have a real logprob, which is below zero and above any floor.
    if len(outside) != 1 or -100 < outside[0] < 0:
        return row
    sentinel = float(outside[0])
    columns = tuple(
        replace(column, sentinel=sentinel) if column.role is ColumnRole.LOGPROBS else column
        for column in row.columns
    )
    return replace(row, sentinel=sentinel, columns=columns)


def _trains_all_of_response(mask: Raw, prompt: Ids, response: Ids) -> bool:
    """True for a mask that says no more than that everything sampled is trained."""
    entries = list(mask)
    if len(entries) == len(prompt) + len(response) != len(response):
        if any(entries[: len(prompt)]):
            return False
        entries = entries[len(prompt) :]
    return len(entries) == len(response) and all(entry == 1 for entry in entries)


def _taken(mask: str | None, logprobs: str | None) -> set[str]:
    """The columns that are not among the others, ids under every name included."""
    return {mask or "", logprobs or "", *FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, "attention_mask"}


def _prompt_length(row: Row, full: int) -> tuple[int | None, bool]:
    """Tokens before the first sampled one, and whether the row told it as the length of the response."""
    response = row.get("response_length")
    if type(response) is int and 0 <= response <= full:
        return full - response, True
    for name in ("prompt_length", "prompt_len"):
        length = row.get(name)
        if type(length) is int and 0 <= length <= full:
            return length, False
    prompt = first_filled(row, PROMPT_IDS)
    if prompt is not None and 0 < len(row[prompt]) <= full and _starts_with(row, row[prompt]):
        return len(row[prompt]), False
    return None, False


def _starts_with(row: Row, prompt: Sequence[Any]) -> bool:
    name = first_filled(row, FLAT_IDS)
    return name is not None and list(row[name][: len(prompt)]) == list(prompt)


def _without_padding(row: Row, name: str | None) -> Row:
    """The row with every column as long as the ids cut to what the attention mask leaves visible."""
    mask = row.get("attention_mask")
    if name is None or not is_list(mask) or len(mask) != len(row[name]):  # type: ignore[arg-type]
        return row
    seen = np.flatnonzero(np.asarray(mask) == 1)
    if not len(seen) or len(seen) == len(row[name]):
        return row
    start, end = int(seen[0]), int(seen[-1]) + 1
    cut: Mapping[str, Any] = {
        column: value[start:end] if is_list(value) and len(value) == len(row[name]) else value
        for column, value in row.items()
    }
    # Lengths that count the padding on the left say nothing about what is left.
    return {k: v for k, v in cut.items() if k not in ("prompt_length", "prompt_len")} if start else cut
