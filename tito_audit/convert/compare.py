"""What a conversion keeps: whether a rollout read back holds what it held, and what joined rows say together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.convert.makers import REWARDS
from tito_audit.convert.rows_and_calls import (
    MESSAGES_LOST,
    TEXTS_LOST,
    ConvertedPart,
    as_calls,
    as_rows,
    column_over,
    known_logprobs,
    loss_weights,
    sampled_calls,
)
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError
from tito_audit.join import CallsOfRollout
from tito_audit.record.arrays import Logprobs
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.rollout import Place, Rollout, TrainingRow, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.storage.inside import wrapper_keys
from tito_audit.storage.row import dump_row


def difference(before: Rollout, after: Rollout) -> str | None:
    """How tokens, mask or logprobs differ after a conversion; None when they are the same."""
    if before.training_row is not None:
        if after.training_row is None:
            return "no training row"
        if not np.array_equal(before.training_row.token_ids, after.training_row.token_ids):
            return "other token ids"
        if not _same_arrays(loss_weights(before.training_row), loss_weights(after.training_row)):
            return "another loss mask"
        return None if _same_logprobs(before.training_row, after.training_row) else "other logprobs"
    if len(before.turns) != len(after.turns):
        return f"{len(after.turns)} calls instead of {len(before.turns)}"
    for number, (old, new) in enumerate(zip(before.turns, after.turns, strict=True)):
        if not _same_arrays(old.prompt_ids, new.prompt_ids):
            return f"other prompt ids in call {number}"
        if not _same_arrays(old.completion_ids, new.completion_ids):
            return f"other completion ids in call {number}"
        blank = np.full(0 if old.completion_ids is None else len(old.completion_ids), np.nan)
        values = [blank if turn.completion_logprobs is None else turn.completion_logprobs for turn in (old, new)]
        if not _equal(*values).all():
            return f"other logprobs in call {number}"
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
        messages = before.messages
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


def _same_arrays(old: NDArray[Any] | None, new: NDArray[Any] | None) -> bool:
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


_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class CallsOfConversation:
    """The calls of a conversation as their own rows hold them, in the order of its turns."""

    each: Sequence[Rollout]
    """The rollout of each row alone."""
    facts: Sequence[Mapping[str, Any]]
    """What else each row says."""
    unread: tuple[str, ...]
    """Paths of values that were read only in part, in any of the rows."""

    @classmethod
    def of(cls, joined: CallsOfRollout, whole: Rollout, speakers: Speakers) -> CallsOfConversation:
        """The calls of a joined row, read one by one; RecordError if one cannot be read."""
        lines, rows, form = joined.raws, joined.whole, joined.format
        each: list[Rollout] = []
        facts: list[Mapping[str, Any]] = []
        unread: dict[str, None] = {}
        for number, at in zip(whole.stated.lines, whole.stated.calls_at, strict=True):
            line, row = lines[number], rows[number]
            rollouts = form.read(row, Place(*at))
            about = row_facts(row, rollouts, form.sources(row, rollouts))
            unread |= dict.fromkeys((*about.unread, *wrapper_keys(line)))
            facts += about.facts
            each += (with_speakers(rollout, speakers) for rollout in rollouts)
        return cls(each, facts, tuple(unread))

    def with_ids(
        self, whole: Rollout, refuse: Callable[[Place, str], None]
    ) -> tuple[CallsOfConversation, Rollout]:
        """The same without the calls that lack ids; each of those is refused with its place."""
        numbers: list[int] = []
        for k, own in enumerate(self.each):
            try:
                sampled_calls(own)
                numbers.append(k)
            except RecordError as error:
                refuse(own.place, str(error))
        rest = replace(whole, turns=tuple(whole.turns[k] for k in numbers))
        return replace(self, each=[self.each[k] for k in numbers], facts=[self.facts[k] for k in numbers]), rest

    def as_rows(self, whole: Rollout) -> tuple[list[ConvertedPart], list[str]]:
        """A training row for each unbroken run of calls, and the names of what is lost; RecordError as in
        `as_rows`.

        Each has the messages, tools and model of its last call, and what all the calls say that it trains.
        """
        row_parts, lost_in_rows = as_rows(whole)
        lost = [*self.unread, *(name for name in lost_in_rows if name not in (MESSAGES_LOST, TEXTS_LOST))]
        parts = []
        for part in row_parts:
            last = self.each[part.calls[-1]]
            row = replace(
                part.rollout,
                messages=_messages_of(last),
                tools=last.tools,
                template_kwargs=last.template_kwargs,
                stated=replace(part.rollout.stated, model=last.stated.model),
            )
            facts, rest = self.shared(part.calls)
            parts.append(replace(part, rollout=row, facts={**facts, **part.facts}))
            lost += rest
            texts = {message.text for message in row.messages}
            for own in (self.each[k] for k in part.calls):
                messages = _messages_of(own)
                if not same_messages(row.messages[: len(messages)], messages):
                    lost.append(MESSAGES_LOST)
                if own.turns[0].completion_text not in (None, *texts):
                    lost.append(TEXTS_LOST)
                lost += _lost_context(own, row)
        return parts, lost

    def as_calls(self, whole: Rollout, reserved: Set[str] | None) -> tuple[list[ConvertedPart], list[str]]:
        """A row that lists all calls, and the names of what is lost; RecordError as in `as_calls`.

        Its calls have a place for what only some of the rows say, except under names that are `reserved`; None: no
        place.
        """
        facts, lost = self.shared(range(len(self.each)))
        own: list[dict[str, Any]] = []
        if reserved is not None:
            facts = {
                name: value
                for name, value in facts.items()
                if all(name in about and _same(about[name], value) for about in self.facts)
            }
            left = [{name: value for name, value in about.items() if name not in facts} for about in self.facts]
            own = [{name: value for name, value in about.items() if name not in reserved} for about in left]
            lost = [name for about in left for name in about if name in reserved]
        lost_in_calls: list[str] = []
        for rollout, turn in zip(self.each, whole.turns, strict=True):
            # The messages that were sent, and the answer if it is one of those of the whole.
            messages, index = turn.prompt_messages, turn.message_index
            if index is not None:
                messages = (*(whole.messages[:index] if messages is None else messages), whole.messages[index])
            if not same_messages(messages or (), _messages_of(rollout)):
                lost_in_calls.append(MESSAGES_LOST)
            lost_in_calls += _lost_context(rollout, whole)
        call_parts, lost_as_calls = as_calls(whole, facts)
        parts = [replace(part, facts={**facts, **part.facts}, of_calls=tuple(own)) for part in call_parts]
        return parts, [*self.unread, *lost_as_calls, *lost, *lost_in_calls]

    def shared(self, calls: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
        """What the rows of these calls all say, and the names of what only some say or say differently.

        A reward that only the last of them has is the reward of all.
        """
        about = [self.facts[k] for k in calls]
        common: dict[str, Any] = {}
        lost: list[str] = []
        for name in dict.fromkeys(name for each in about for name in each):
            values = [each.get(name, _MISSING) for each in about]
            if name in REWARDS and all(value is _MISSING for value in values[:-1]):
                values = values[-1:]
            value = _common(values, name, lost)
            if value is not _MISSING:
                common[name] = value
        return common, lost


def _messages_of(rollout: Rollout) -> tuple[Message, ...]:
    """The messages of the only call of a rollout, with its answer."""
    (turn,) = rollout.turns
    return rollout.messages or turn.prompt_messages or ()


def _lost_context(own: Rollout, whole: Rollout) -> Iterator[str]:
    """What a new row says once for all of its calls but this call says differently."""
    if own.tools != whole.tools:
        yield "tools"
    if own.template_kwargs != whole.template_kwargs:
        yield "template arguments"
    if own.stated.model != whole.stated.model:
        yield "model"


def _common(values: Sequence[Any], path: str, lost: list[str]) -> Any:
    """What all values have in common, `_MISSING` if nothing; adds the paths of the rest to `lost`."""
    first = values[0]
    if all(value is not _MISSING and _same(value, first) for value in values):
        return first
    if not all(isinstance(value, Mapping) for value in values):
        lost.append(path)
        return _MISSING
    common = {}
    for name in dict.fromkeys(name for value in values for name in value):
        value = _common([value.get(name, _MISSING) for value in values], f"{path}.{name}", lost)
        if value is not _MISSING:
            common[name] = value
    return common or _MISSING


def _same(value: Any, other: Any) -> bool:
    """Whether two values are written the same way: 1, 1.0 and true all differ."""
    return value is other or dump_row({"": value}) == dump_row({"": other})
