"""One Atropos sample as a training row, as groups, items and sequence nodes hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.formats._beside import read_beside
from tito_audit.formats._columns import (
    Raw,
    ids_or_none,
    is_list,
    is_messages,
    is_number_list,
    move_policy,
    names_in,
)
from tito_audit.record.build import build_training_row
from tito_audit.record.column import MovePolicy
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import TrainingRow

TOKEN_COLUMNS = {
    "advantages": MovePolicy.MOVE,
    "token_scores": MovePolicy.MOVE,
    "token_weights": MovePolicy.MOVE,
    "ref_logprobs": MovePolicy.STALE,
    # A teacher's top k ids and their values at each position of exactly these ids: after the first changed
    # token they are meaningless, and only the teacher could compute new ones.
    "distill_token_ids": MovePolicy.STALE,
    "distill_logprobs": MovePolicy.STALE,
}
"""Per-token columns that Atropos or its environments write."""

_NOT_PER_TOKEN = names_in(
    """tokens masks scores inference_logprobs messages overrides images
    chosen_tokens chosen_masks rejected_tokens rejected_masks"""
)
"""Of these, preference pairs are sequences of their own."""


def read_sample_row(
    tokens: object,
    mask: tuple[str, Raw | None],
    logprobs: tuple[str, Raw | None],
    other: Mapping[str, tuple[Raw, MovePolicy]],
    name: str,
) -> TrainingRow | None:
    """The training row of one sample; None if it holds no ids."""
    ids = ids_or_none(tokens, name)
    if ids is None:
        return None
    for column, entries in (mask, logprobs):
        if entries is not None and not is_list(entries):
            raise RecordError(f"column {column!r} of {name} is not a list with one entry per token")
    # Environments that compute no mask write [1] on a longer sample.
    absent = mask[1] is None or (len(mask[1]) == 1 and len(ids) != 1)
    row = build_training_row(
        ids,
        mask=None if absent else (mask[0], mask[1] if mask[1] is not None else ()),
        logprobs=None if logprobs[1] is None else (logprobs[0], logprobs[1]),
        other=other,
        sentinel=1.0,  # unambiguous, as logprobs are never above zero
        whole=True,
    )
    return replace(row, extras=read_beside({column: values for column, (values, _) in other.items()}))


def sample_columns(row: Mapping[str, Any], index: int | None) -> dict[str, tuple[Raw, MovePolicy]]:
    """The other per-token columns of sample `index` of a group, or of an item if `index` is None.

    Environments add columns of their own; an unknown list of numbers moves with the tokens.
    """
    columns: dict[str, tuple[Raw, MovePolicy]] = {}
    for name, value in row.items():
        if name in _NOT_PER_TOKEN or not is_list(value):
            continue
        entries: Any = value if index is None else value[index] if index < len(value) else None
        if is_list(entries) and (name in TOKEN_COLUMNS or is_number_list(entries)):
            columns[name] = (entries, TOKEN_COLUMNS.get(name, move_policy(name)))
    return columns


def sample_messages(value: object, where: str) -> tuple[Message, ...]:
    """The conversation of one sample; () if its tokens were not rendered from it.

    `messages` may also hold plain strings, or one made-up user message around the decoded tokens. Rendered, these
    would differ from the ids everywhere, so they count as not logged.
    """
    if not is_messages(value):
        return ()
    messages = as_messages(value, where)
    return messages if any(message.speaker not in ("system", "user") for message in messages) else ()
