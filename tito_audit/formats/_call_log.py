"""Reads calls logged with their requests as rollouts, and writes them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._calls import same_messages
from tito_audit.formats._responses import Exchange, choices
from tito_audit.formats._responses_read import (
    choice_call,
    choice_source,
    request_facts,
    request_fields,
    request_messages,
)
from tito_audit.formats._update import of_calls
from tito_audit.formats._writer import RowFunctions, rewritten_calls
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import NOTHING_STATED, Stated

FindSource = Callable[[], CallSource]
"""Finds where a call is in its row; called only when something has to be written."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One model call with its request."""

    turn: Turn
    """Without `message_index` and `prompt_messages`."""
    source: FindSource
    prompt: tuple[Message, ...] = ()
    """() if the log does not say what it was sent."""
    answer: Message | None = None
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    stated: Stated = NOTHING_STATED
    wants_ids: bool = True
    """False if the log has neither ids nor a column for them."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One rollout of a row, and where each of its calls is stored."""

    rollout: Rollout
    sources: tuple[FindSource, ...]


@dataclass(frozen=True, slots=True)
class PartRows:
    """The `read`, `sources` and `update` of a format whose rows hold threads of calls."""

    parts: Callable[[Row, Place], Sequence[Thread]]
    """The threads of a row; their items are not numbered yet."""

    def read(self, row: Row, place: Place) -> Sequence[Rollout]:
        """One rollout for each thread."""
        rollouts = (part.rollout for part in self.parts(row, place))
        return tuple(replace(rollout, place=replace(place, item=item)) for item, rollout in enumerate(rollouts))

    def sources(self, row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        """Where the row stores the calls of each thread."""
        return of_calls([source() for source in part.sources] for part in self.parts(row, rollouts[0].place))

    def update(self, row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        """The row with its repaired threads; RecordError for a fork."""
        items = [part.rollout.place.item for part in repaired]
        if len(set(items)) != len(items):
            raise RecordError("this format holds each conversation once and cannot hold the parts of a fork")
        stays = "this format cannot leave out a call of a conversation"
        return (rewritten_calls(row, repaired, self.read, self.sources, stays=stays),)

    @property
    def functions(self) -> RowFunctions:
        """What a format takes from here."""
        return RowFunctions(read=self.read, sources=self.sources, update=self.update)


def chat_calls(
    root: Row, request: Mapping[str, Any], response: Mapping[str, Any], request_path: Path, path: Path
) -> list[LoggedCall]:
    """One call for each choice of a chat answer or completion at `path` of the row; [] if it has none."""
    listed = response.get("choices")
    if isinstance(listed, list | tuple) and not listed:
        return []
    exchange = Exchange(request, (response,), (request_path,), (path,))
    fields, before = request_fields(request), request_messages(request)
    calls = []
    for number, choice in enumerate(choices(response)):
        at = path if choice is response else (*path, "choices", number)
        call = choice_call(request, response, choice, number)
        source = partial(choice_source, root, exchange, path, at, call.turn)
        stated = replace(request_facts(request, response), copies_disagree=call.disagreement or "")
        calls.append(
            LoggedCall(call.turn, source, before, call.message, stated=stated, wants_ids=call.wants_ids, **fields)
        )
    return calls


def threads(exchanges: Sequence[Sequence[LoggedCall]]) -> list[list[LoggedCall]]:
    """Calls grouped into possible conversations, in order; each exchange is given as a list of its choices.

    Calls with other models, tools or template arguments belong to another agent. Of several choices, the one
    that a later call was sent (else the first) continues the conversation; each other one is a thread by itself.
    """

    def context(call: LoggedCall) -> tuple[Any, ...]:
        return call.stated.model, call.stated.attempt, call.tools, call.template_kwargs

    lines: list[list[Sequence[LoggedCall]]] = []
    for exchange in exchanges:
        if not exchange:
            continue
        line = next((line for line in lines if context(line[0][0]) == context(exchange[0])), None)
        if line is None:
            lines.append(line := [])
        line.append(exchange)
    main: list[list[LoggedCall]] = []
    alternatives: list[list[LoggedCall]] = []
    for line in lines:
        main.append([])
        for number, exchange in enumerate(line):
            at = _continued(exchange, line[number + 1 :])
            main[-1].append(exchange[at])
            alternatives += [[call] for n, call in enumerate(exchange) if n != at]
    return [*main, *alternatives]


def part_of(calls: Sequence[LoggedCall], place: Place, name: str, stated: Stated) -> Thread:
    """The rollout of one thread: its messages are the last call's, and calls that fit into them have an index."""
    last = calls[-1]
    messages = last.prompt if last.answer is None or not last.prompt else (*last.prompt, last.answer)
    # Facts that only one call states and that apply to all.
    copies = next((call.stated.copies_disagree for call in calls if call.stated.copies_disagree), "")
    facts = replace(last.stated, copies_disagree=copies).overlaid(stated)
    rollout = Rollout(place, name, messages, last.tools, last.template_kwargs, stated=facts)
    if not any(call.wants_ids for call in calls):
        return Thread(replace(rollout, stated=facts.without_ids()), ())
    turns: list[Turn] = []
    limit = len(messages)
    for call in reversed(calls):
        index = len(call.prompt)
        fits = call.answer is not None and 0 < index < limit
        if fits and call.answer is not None and same_messages(messages[: index + 1], (*call.prompt, call.answer)):
            limit = index
            turns.append(replace(call.turn, message_index=index))
        else:
            turns.append(replace(call.turn, prompt_messages=call.prompt or None))
    return Thread(replace(rollout, turns=tuple(reversed(turns))), tuple(call.source for call in calls))


def _continued(exchange: Sequence[LoggedCall], after: Sequence[Sequence[LoggedCall]]) -> int:
    """The first choice whose answer a later call was sent; else the first."""
    for number, call in enumerate(exchange if len(exchange) > 1 else ()):
        if call.answer is not None and call.prompt:
            conversation = (*call.prompt, call.answer)
            if any(same_messages(later[0].prompt[: len(conversation)], conversation) for later in after):
                return number
    return 0
