"""NeMo-RL training dump: one sample per line, every value but `idx` wrapped in a list of one.

NVIDIA-NeMo/RL `nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`). The newer data plane names the same
columns `input_ids`, `token_mask` and `sample_mask`; both are read, wrapped or not. The distillation and
validation dumps of the same shape hold text only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_model, with_finish_reasons
from tito_audit.formats._columns import first_present_name, int_if_whole, move_policy
from tito_audit.formats._extras import read_extras
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row, with_values
from tito_audit.record.arrays import as_ids
from tito_audit.record.build import build_training_row
from tito_audit.record.column import MovePolicy
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import Padding, Place, Rollout, TrainingRow
from tito_audit.record.stated import Unread

_IDS = ("token_ids", "input_ids")
_MASK = ("token_loss_mask", "token_mask")
_SAMPLE_MASK = ("sample_loss_mask", "sample_mask")
_LOGPROBS = "generation_logprobs"
_POLICIES = {
    "prev_logprobs": MovePolicy.STALE,
    "reference_policy_logprobs": MovePolicy.STALE,
    "routed_experts": MovePolicy.DROP,
}


def matches(row: Row) -> bool:
    if any(name in row for name in _MASK) and any(name in row for name in _IDS):
        return any(name in row for name in (*_SAMPLE_MASK, "input_lengths"))
    # In a dump of text only `idx` is not wrapped.
    return (
        type(row.get("idx")) is int
        and "content" in row
        and ("input_lengths" in row or "rewards" in row)
        and all(_is_wrapped(value) for key, value in row.items() if key != "idx")
    )


def read(row: Row, place: Place) -> Rollout:
    values = _unwrap_row(row)
    # The validation dump has messages with roles; other dumps have texts, which become a stated fact.
    messages: tuple[Message, ...] = ()
    texts = values.get("content")
    if isinstance(texts, list | tuple) and texts:
        roles = all(isinstance(entry, Mapping) and "role" in entry for entry in texts)
        messages, texts = (as_messages(texts, "content"), None) if roles else ((), tuple(texts))
    stated = stated_model(values).with_facts(
        content=texts, sample_loss_mask=values.get(first_present_name(values, _SAMPLE_MASK) or "")
    )
    if texts is not None:
        stated = stated.not_read(Unread.MESSAGES, "the texts of the log name no roles")
    name = first_present_name(values, _IDS)
    if name is None:
        return Rollout(place, FORMAT.name, messages, stated=stated.without_ids())
    padded = as_ids(values[name], name)
    stated_length = values.get("input_lengths")
    if isinstance(stated_length, np.generic):
        stated_length = stated_length.item()
    length = len(padded) if stated_length is None else int_if_whole(stated_length)
    if type(length) is not int:
        raise RecordError(f"input_lengths is {stated_length!r}, not a number of tokens")
    if not 0 <= length <= len(padded):
        raise RecordError(f"input_lengths says {stated_length} tokens, but the row holds {len(padded)}")
    mask = first_present_name(values, _MASK)
    # A column of another width than the ids is not cut, which could make it fit by chance.
    cut = {
        key: value[:length] if len(value) == len(padded) else value
        for key, value in values.items()
        if isinstance(value, list | np.ndarray)
    }
    for key in (mask, _LOGPROBS):
        if key is not None and values.get(key) is not None and key not in cut:
            raise RecordError(f"column {key!r} is not a list of one entry per token")
    used = (name, mask, _LOGPROBS, "content")
    other = {key: (value, _POLICIES.get(key, move_policy(key))) for key, value in cut.items() if key not in used}
    trained = build_training_row(
        padded[:length],
        mask=None if mask is None else (mask, cut[mask]),
        logprobs=None if values.get(_LOGPROBS) is None else (_LOGPROBS, cut[_LOGPROBS]),
        other=other,
        sentinel=0.0,
        whole=True,
    )
    trained = replace(trained, padding=Padding(right=len(padded) - length), extras=read_extras(cut, values))
    return Rollout(place, FORMAT.name, messages, training_row=with_finish_reasons(trained, values), stated=stated)


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The row with its repaired columns, each in a list of one if it was before."""
    values = _unwrap_row(row)
    if new.padding.left:
        raise RecordError("input_lengths counts from the first token, so the row can be padded only on the right")
    if new.padding.right and values.get("input_lengths") is None:
        raise RecordError("the row has no input_lengths: nothing would tell padding from tokens")
    name = first_present_name(values, _IDS) or ""
    updated = updated_row(values, old, new, name, can_pad=True)
    changed = {key: updated[key] for key in values if updated[key] is not values[key]}
    for key, value in changed.items():
        if row[key] is not values[key]:
            changed[key] = np.array([value], row[key].dtype) if isinstance(row[key], np.ndarray) else [value]
    return with_values(row, changed)


def _unwrap_row(row: Row) -> dict[str, Any]:
    """The row with values taken out of their lists of one; rows of the data plane have none."""
    ids = row.get(first_present_name(row, _IDS) or "")
    if ids is not None and not (_is_wrapped(ids) and isinstance(ids[0], list | np.ndarray)):
        return dict(row)
    return {key: value[0] if _is_wrapped(value) else value for key, value in row.items()}


def _is_wrapped(value: object) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == 1


FORMAT = Format(
    name="nemo_rl",
    title="NeMo-RL training dumps",
    signature=Signature("{token_ids} + {token_loss_mask} + {sample_loss_mask}, each value a list of one"),
    precedence=90,
    matches=matches,
    **training_rows(read, write).functions,
    shows="The training row with its mask and logprobs. There are no roles, tools or model, so tokens can be "
    "checked and templates cannot; distillation and validation dumps hold no ids.",
)
