"""What all makers share: values of a rollout as plain rows write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.convert.maker import Sample
from tito_audit.convert.rows_and_calls import column_over, known_logprobs, loss_weights
from tito_audit.errors import RecordError
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.rollout import TrainingRow

REWARDS = ("reward", "rewards", "score", "scores", "episode_reward", "final_reward")
"""What frameworks call the reward of a rollout; the first that is stated counts."""


def reward_slots(name: str) -> dict[str, str]:
    """The names of a reward to the one that a format has."""
    return dict.fromkeys(REWARDS, name)


def row_of(sample: Sample) -> TrainingRow:
    """The training row of a sample that has one."""
    row = sample.rollout.training_row
    if row is None:
        raise RecordError("it holds no training row")
    return row


def plain_list(values: NDArray[Any]) -> list[Any]:
    """A column as JSON writes it: null where nothing is known, whole numbers where all known are whole."""
    entries: list[Any] = values.tolist()
    if values.dtype.kind in "iub":
        return entries
    return [None if value is None or value != value else value for value in entries]


def messages_as_logged(messages: tuple[Message, ...]) -> list[Mapping[str, Any]]:
    """Messages as a chat template is given them."""
    return [message.wire for message in messages]


def weights_as(row: TrainingRow, kind: type[int] | type[float]) -> list[Any]:
    """The loss mask `[T]` as zeros and ones of a kind; other weights as they are where it is float.

    RecordError when the row has no mask, or one that whole numbers cannot say.
    """
    weights = loss_weights(row)
    if weights is None:
        raise RecordError("it has no loss mask that fits its tokens, and none is made up")
    if kind is float:
        return list(weights.tolist())
    if not ((weights == 0) | (weights == 1)).all():
        raise RecordError("its loss mask holds weights, and the format knows trained or not")
    return list(weights.astype(np.int64).tolist())


def scores_as(row: TrainingRow, sentinel: float | None) -> list[Any] | None:
    """The logprobs `[T]`, `sentinel` at untrained tokens without one; None when the row has none.

    Where a trained token has none it stays null: a number there would be read as its logprob.
    """
    values = known_logprobs(row) if sentinel is not None else row.logprobs
    if values is None:
        return None
    if sentinel is not None and row.loss_mask is not None:
        values = np.where(np.isnan(values) & ~row.loss_mask, sentinel, values)
    return plain_list(values)


def other_lists(row: TrainingRow) -> Iterator[tuple[str, list[Any]]]:
    """Every other per-token column over all tokens, by its name in the log; those without a place are left out."""
    for column in row.columns:
        if column.role is ColumnRole.OTHER and len(column.values):
            whole = column_over(row, column)
            if whole is not None:
                yield column.name, plain_list(whole)
