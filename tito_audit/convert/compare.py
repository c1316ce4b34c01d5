"""Whether a rollout that was converted and read back holds what it held before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.convert.rows_and_calls import column_over, known_logprobs, loss_weights
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout, TrainingRow, Turn


def difference(before: Rollout, after: Rollout) -> str | None:
    """How tokens, mask or logprobs differ after a conversion; None when they are the same."""
    if before.training_row is not None:
        if after.training_row is None:
            return "no training row"
        return _row_difference(before.training_row, after.training_row)
    if len(before.turns) != len(after.turns):
        return f"{len(after.turns)} calls instead of {len(before.turns)}"
    for number, (old, new) in enumerate(zip(before.turns, after.turns, strict=True)):
        what = _turn_difference(old, new)
        if what is not None:
            return f"other {what} in call {number}"
    return None


def lost_names(before: Rollout, after: Rollout) -> Iterator[str]:
    """What else differs after a conversion, by its name in the log or the record."""
    if not same_messages(before.messages, after.messages):
        yield "messages"
    if before.tools and before.tools != after.tools:
        yield "tools"
    if before.template_kwargs and before.template_kwargs != after.template_kwargs:
        yield "template arguments"
    if before.training_row is not None and after.training_row is not None:
        yield from _lost_columns(before.training_row, after.training_row)
    for old, new in zip(before.turns, after.turns, strict=False):
        yield from _lost_of_turn(old, new, before.messages)


def digest(rollouts: Sequence[Rollout]) -> int:
    """A 64-bit digest of the tokens, masks and logprobs of rollouts."""
    state = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        row = rollout.training_row
        arrays: list[NDArray[Any] | None] = []
        if row is not None:
            arrays += [row.token_ids, loss_weights(row), _plain_nan(row.logprobs)]
        for turn in rollout.turns:
            arrays += [turn.prompt_ids, turn.completion_ids, _plain_nan(turn.completion_logprobs)]
        for array in arrays:
            state.update(b"-" if array is None else b"%d:" % len(array) + np.ascontiguousarray(array).tobytes())
    return int.from_bytes(state.digest(), "little")


def _plain_nan(values: Logprobs | None) -> Logprobs | None:
    """Logprobs with one bit pattern for every unknown entry and no negative zeros."""
    return None if values is None else np.where(np.isnan(values), np.nan, values) + 0.0


def _row_difference(before: TrainingRow, after: TrainingRow) -> str | None:
    if not np.array_equal(before.token_ids, after.token_ids):
        return "other token ids"
    old, new = loss_weights(before), loss_weights(after)
    if (old is None) != (new is None) or (old is not None and new is not None and not np.array_equal(old, new)):
        return "another loss mask"
    return None if _same_logprobs(before, after) else "other logprobs"


def _same_logprobs(before: TrainingRow, after: TrainingRow) -> bool:
    """Whether logprobs are equal as recorded or, where nothing was sampled, both unknown."""
    old, new = known_logprobs(before), known_logprobs(after)
    blank = np.full(len(before.token_ids), np.nan)
    same = _equal(blank if old is None else old, blank if new is None else new)
    if before.logprobs is not None and after.logprobs is not None:
        same |= _equal(before.logprobs, after.logprobs)
    return bool(same.all())


def _equal(old: Logprobs, new: Logprobs) -> NDArray[np.bool_]:
    return np.asarray((old == new) | (np.isnan(old) & np.isnan(new)))


def _turn_difference(old: Turn, new: Turn) -> str | None:
    if not _same_ids(old.prompt_ids, new.prompt_ids):
        return "prompt ids"
    if not _same_ids(old.completion_ids, new.completion_ids):
        return "completion ids"
    blank = np.full(0 if old.completion_ids is None else len(old.completion_ids), np.nan)
    values = [blank if turn.completion_logprobs is None else turn.completion_logprobs for turn in (old, new)]
    return None if bool(_equal(*values).all()) else "logprobs"


def _same_ids(old: Ids | None, new: Ids | None) -> bool:
    if old is None or new is None:
        return old is new
    return np.array_equal(old, new)


def same_messages(before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Whether two lists of messages are equal in every key; null and a missing key are the same."""
    return len(before) == len(after) and all(
        _text(old.wire.get(key)) == _text(new.wire.get(key))
        for old, new in zip(before, after, strict=True)
        if old.wire is not new.wire
        for key in {*old.wire, *new.wire}
    )


def _text(value: Any) -> Any:
    """A value with arrays as lists at any depth, as in JSON."""
    if isinstance(value, np.ndarray):
        return _text(value.tolist()) if value.dtype.kind == "O" else value.tolist()
    if isinstance(value, Mapping):
        return {key: _text(entry) for key, entry in value.items()}
    return [_text(entry) for entry in value] if isinstance(value, list | tuple) else value


def _lost_columns(before: TrainingRow, after: TrainingRow) -> Iterator[str]:
    if (before.padding.left, before.padding.right) != (after.padding.left, after.padding.right):
        yield "padding"
    read_back = {column.name: column for column in after.columns}
    for column in before.columns:
        if column.role is not ColumnRole.OTHER:
            if column.alignment is None:
                yield column.name
            continue
        old, column_after = column_over(before, column), read_back.get(column.name)
        new = None if column_after is None else column_over(after, column_after)
        if old is None or new is None or not _same_entries(old, new):
            yield column.name


def _same_entries(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind in "iufb" and new.dtype.kind in "iufb":
        floats = old.dtype.kind == "f" and new.dtype.kind == "f"
        return bool(np.array_equal(old, new, equal_nan=floats))
    return len(old) == len(new) and _plain(old) == _plain(new)


def _plain(value: Any) -> Any:
    """A value to compare: arrays as lists, NaN as None."""
    if isinstance(value, np.ndarray | list):
        return [_plain(each) for each in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and value != value else value


def _lost_of_turn(old: Turn, new: Turn, messages: Sequence[Message]) -> Iterator[str]:
    if old.finish_reason is not None and old.finish_reason != new.finish_reason:
        yield "finish_reason"
    if old.weight_versions and old.weight_versions != new.weight_versions:
        yield "weight_versions"
    if old.completion_text not in (None, new.completion_text) and all(
        message.text != old.completion_text for message in messages
    ):
        yield "text of completions"
    if old.prompt_text not in (None, new.prompt_text):
        yield "text of prompts"
    if old.message_index is not None and new.message_index != old.message_index:
        yield "which message each call wrote"
    sent = old.prompt_messages
    if sent is not None and not same_messages(sent, new.prompt_messages or messages[: len(sent)]):
        yield "messages of single calls"
    read_back = {column.name: column for column in new.columns}
    for column in old.columns:
        again = read_back.get(column.name)
        # Logprobs that fit are compared elsewhere.
        same = column.role is not ColumnRole.OTHER or (
            again is not None and _same_entries(column.values, again.values)
        )
        if column.alignment is None or not same:
            yield column.name
