"""Shared by makers: values of a rollout as rows hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.convert.maker import MakerInput
from tito_audit.convert.rows_and_calls import column_over, known_logprobs, loss_weights
from tito_audit.errors import RecordError
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.rollout import TrainingRow, Turn

REWARDS = ("reward", "rewards", "score", "scores", "episode_reward", "final_reward")
"""What frameworks call a rollout's reward; the first name that is present counts."""


def reward_slots(name: str) -> dict[str, str]:
    """Every name of a reward, mapped to a format's own."""
    return dict.fromkeys(REWARDS, name)


def row_of(sample: MakerInput) -> TrainingRow:
    """The training row of a sample; RecordError without one."""
    row = sample.rollout.training_row
    if row is None:
        raise RecordError("it holds no training row")
    return row


def plain_list(values: NDArray[Any]) -> list[Any]:
    """A column as a JSON list, null where an entry is unknown."""
    entries: list[Any] = values.tolist()
    if values.dtype.kind in "iub":
        return entries
    return [None if isinstance(value, float) and value != value else value for value in entries]


def messages_as_logged(messages: tuple[Message, ...]) -> list[Mapping[str, Any]]:
    """Messages as they were logged."""
    return [message.wire for message in messages]


def weights_as(row: TrainingRow, kind: type[int] | type[float]) -> list[Any]:
    """The loss mask `[T]` as ints or floats; weights other than 0 and 1 only as floats.

    RecordError when the row has no mask, or `kind` is int and it holds other weights.
    """
    weights = loss_weights(row)
    if weights is None:
        raise RecordError("it has no loss mask that fits its tokens, and none is made up")
    if kind is float:
        return list(weights.tolist())
    if not ((weights == 0) | (weights == 1)).all():
        raise RecordError("its loss mask holds weights, but the format only has trained or not")
    return list(weights.astype(np.int64).tolist())


def scores_as(row: TrainingRow, sentinel: float | None) -> list[Any] | None:
    """The logprobs `[T]`, `sentinel` at untrained tokens without one; None when the row has none.

    A trained token without one stays null: a number there would be read as its logprob.
    """
    values = known_logprobs(row) if sentinel is not None else row.logprobs
    if values is None:
        return None
    if sentinel is not None and row.loss_mask is not None:
        values = np.where(np.isnan(values) & ~row.loss_mask, sentinel, values)
    return plain_list(values)


def other_lists_of_call(turn: Turn) -> Iterator[tuple[str, list[Any]]]:
    """Every other per-token column of a call, by its name in the log; those that do not fit are left out."""
    for column in turn.columns:
        if column.role is ColumnRole.OTHER and column.alignment is not None:
            yield column.name, plain_list(column.values)


def other_lists(row: TrainingRow) -> Iterator[tuple[str, list[Any]]]:
    """Every other per-token column over all tokens, by its name in the log; those that do not fit are left out."""
    for column in row.columns:
        if column.role is ColumnRole.OTHER and len(column.values):
            whole = column_over(row, column)
            if whole is not None:
                yield column.name, plain_list(whole)
