"""The rows of a joined conversation, call by call: what a new row keeps of them, and what it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tito_audit.convert.compare import same_messages
from tito_audit.convert.makers.shared import REWARDS
from tito_audit.convert.rows_and_calls import (
    MESSAGES_LOST,
    TEXTS_LOST,
    ConvertedPart,
    as_calls,
    as_rows,
    sampled_calls,
)
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError
from tito_audit.join import form_of_calls, lines_of
from tito_audit.record.message import Message
from tito_audit.record.rollout import Place, Rollout, Turn, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.storage import RawRow
from tito_audit.storage.inside import wrapper_keys
from tito_audit.storage.row import dump_row

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
    def of(cls, raw: RawRow, whole: Rollout, speakers: Speakers) -> CallsOfConversation:
        """The calls of a joined row, read one by one; RecordError if one cannot be read."""
        lines, form = lines_of(raw), form_of_calls(raw)
        each: list[Rollout] = []
        facts: list[Mapping[str, Any]] = []
        unread: dict[str, None] = {}
        for number, at in zip(whole.stated.lines, whole.stated.calls_at, strict=True):
            line = lines[number]
            row = line.value or {}
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
        converted = as_rows(whole)
        lost = [*self.unread, *(name for name in converted.lost if name not in (MESSAGES_LOST, TEXTS_LOST))]
        parts = []
        for part in converted.parts:
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
            lost += [*rest, *self._lost_in_row(row, part.calls)]
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
            if not same_messages(_sent_and_answer(turn, whole.messages), _messages_of(rollout)):
                lost_in_calls.append(MESSAGES_LOST)
            lost_in_calls += _lost_context(rollout, whole)
        converted = as_calls(whole, facts)
        parts = [replace(part, facts={**facts, **part.facts}, of_calls=tuple(own)) for part in converted.parts]
        return parts, [*self.unread, *converted.lost, *lost, *lost_in_calls]

    def _lost_in_row(self, row: Rollout, calls: Sequence[int]) -> Iterator[str]:
        """What a training row loses of the messages, texts and tools of the calls that it trains."""
        texts = {message.text for message in row.messages}
        for own in (self.each[k] for k in calls):
            messages = _messages_of(own)
            if not same_messages(row.messages[: len(messages)], messages):
                yield MESSAGES_LOST
            if own.turns[0].completion_text not in (None, *texts):
                yield TEXTS_LOST
            yield from _lost_context(own, row)

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


def _sent_and_answer(turn: Turn, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages sent to a call of a conversation, and its answer if that is one of `messages`."""
    index = turn.message_index
    if index is None:
        return turn.prompt_messages or ()
    return (*(messages[:index] if turn.prompt_messages is None else turn.prompt_messages), messages[index])


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
