"""The answers of a session by the history that leads to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tito_audit.record.message import Message
from tito_audit.sessions.matching import call_ids, reasoning_agrees
from tito_audit.sessions.model import Fork, Node

Fit: TypeAlias = tuple[int, int]
"""How well an answer fits a history: how many messages have the tool call ids they were given, and how many the
reasoning they were given. More is better.
"""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Where the template ends an answer."""

    at: int
    """Characters up to the end of what the answer says; its end token follows."""
    digest: bytes
    """The digest of what the template writes up to there."""
    new_from: int
    """Where the new text begins after an answer that was cut: the template closes what is open."""
    ended: bool
    """Whether the template writes an end of the turn there."""


@dataclass(slots=True, eq=False)
class Held:
    """An answer, and what the session knows about it."""

    node: Node
    history: tuple[Message, ...]
    """The messages for the template: the session's own answers in full, this one last."""
    sent: tuple[Message, ...]
    """The history as the client has it, this answer last; one message per key in `keys`."""
    keys: tuple[bytes, ...]
    """The key of each message of `sent`."""
    end: TurnEnd | Fork | None = None
    """Where the template ends its turn, or why it cannot be continued; None until asked for."""
    exact: TurnEnd | None = None
    """The same in a prompt that holds the answer exactly as sampled; None until there is one."""

    def is_answer(self, at: int) -> bool:
        """Whether the message at this place of its history was sampled, as its role says."""
        return at < len(self.sent) and self.sent[at].sampled


@dataclass(slots=True, eq=False)
class _Place:
    """A beginning of a history."""

    answers: list[Held] = field(default_factory=list)
    """The answers whose message is the last one here, in the order of their commits."""
    passing: Held | None = None
    """The latest answer with a longer history that begins like this."""


@dataclass(frozen=True, slots=True)
class Match:
    """An answer that a history holds."""

    held: Held
    depth: int
    """Messages of the call up to and including it."""
    alike: int
    """Other answers, with other ids, that fit the history equally well."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a history departs from what the session holds."""

    at: int
    """The first message that differs."""
    held: Held
    """An answer from whose history it departs there."""
    reasoning: bool = False
    """Whether it is the reasoning that differs."""


class Histories:
    """All answers of a session, found by the keys of a history in time linear in its messages."""

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        self._answered: set[bytes] = set()

    def add(self, held: Held, history_keys: Sequence[bytes]) -> None:
        """Hold an answer; the keys are those of `held.sent`, the empty history first."""
        for key in history_keys[:-1]:
            self._places.setdefault(key, _Place()).passing = held
        self._places.setdefault(history_keys[-1], _Place()).answers.append(held)
        self._answered.add(held.keys[-1])

    def answered(self, keys: Sequence[bytes]) -> bool:
        """Whether one of these messages is an answer of this session, whatever came before it."""
        return not self._answered.isdisjoint(keys)

    def matches(self, messages: Sequence[Message], history_keys: Sequence[bytes]) -> Iterator[Match]:
        """The answer at each place of a history where there is one, the last place first."""
        for depth in range(self.known(history_keys), 0, -1):
            found = [held for held in self._at(history_keys[depth]) if _differing(messages, held, depth) is None]
            if found:
                yield _pick(messages, found, depth)

    def fit(self, messages: Sequence[Message], key: bytes, depth: int) -> Fit | None:
        """How well the best answer at this place of a history fits; None if none does."""
        found = [held for held in self._at(key) if _differing(messages, held, depth) is None]
        return max((_fit(messages, held, depth) for held in found), default=None)

    def known(self, history_keys: Sequence[bytes]) -> int:
        """How many messages the history shares with one that the session holds."""
        return next((n for n in range(len(history_keys) - 1, 0, -1) if history_keys[n] in self._places), 0)

    def departure(
        self, messages: Sequence[Message], history_keys: Sequence[bytes], agreed: int = 0
    ) -> Departure | None:
        """Where a history departs from the stored one that it shares the most with; None if it only continues. Its
        first `agreed` messages are those of a stored answer.
        """
        known = self.known(history_keys)
        place = self._places.get(history_keys[known])
        if place is None:
            return None
        for held in reversed([*place.answers, *([place.passing] if place.passing is not None else [])]):
            at = _differing(messages, held, known)
            if at is not None and at >= agreed:
                return Departure(at, held, reasoning=True)
        return Departure(known, place.passing) if place.passing is not None and known < len(messages) else None

    def _at(self, key: bytes) -> Sequence[Held]:
        place = self._places.get(key)
        return place.answers if place is not None else ()


def _differing(messages: Sequence[Message], held: Held, depth: int) -> int | None:
    """The first of `depth` messages whose reasoning differs from what the session holds."""
    for index, (sent, known) in enumerate(zip(messages[:depth], held.sent, strict=False)):
        if sent.reasoning and not reasoning_agrees(sent, known):
            return index
    return None


def _fit(messages: Sequence[Message], held: Held, depth: int) -> Fit:
    """How well an answer fits a history whose messages are the same."""
    pairs = list(zip(messages[:depth], held.sent, strict=False))
    ids = sum(call_ids(sent) == call_ids(known) for sent, known in pairs)
    return ids, sum((sent.reasoning or None) == (known.reasoning or None) for sent, known in pairs)


def _pick(messages: Sequence[Message], found: Sequence[Held], depth: int) -> Match:
    """The answer that the client most likely continues: the best fit, of several the latest."""
    if len(found) == 1:
        return Match(found[0], depth, 0)
    fits = [_fit(messages, held, depth) for held in found]
    told = [held for held, fit in zip(found, fits, strict=True) if fit == max(fits)]
    return Match(told[-1], depth, sum(not _same_ids(held, told[-1]) for held in told))


def _same_ids(a: Held, b: Held) -> bool:
    return a is b or (
        np.array_equal(a.node.output_ids, b.node.output_ids)
        and a.node.prompt.length == b.node.prompt.length
        and (a.node.prompt is b.node.prompt or np.array_equal(a.node.prompt.ids, b.node.prompt.ids))
    )
