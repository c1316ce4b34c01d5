"""The hashes of a call: they depend only on the call and the known turn ends, so any process can compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tito_audit.join.history._said import digest, exact_digest
from tito_audit.join.history._traits import CallTraits
from tito_audit.join.history._trie import MASK, Hashes, Rolling, hash_of
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.message import Message

# Which token ids end a turn, learned from completions that end themselves


_MOST = 8
_WATCHED = 16
_OFTEN = 0.05
"""The least share of an end token among the last ids."""
_INSIDE = 0.02
"""Up to this share of uses inside completions, an id may still be an end token."""


class TurnEnds:
    """Ids that end a turn: last ids of ended completions that do not occur earlier in completions."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        """The most frequent ones."""
        self._ended = 0
        self._last: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()

    def learn(self, completion: Ids, *, ended: bool) -> None:
        """Count the last id of a completion, and the known ends within it."""
        changed = False
        self._ended += ended
        for id_ in self._last:
            if (inside := int(np.count_nonzero(completion[:-1] == id_))) != 0:
                self._inside[id_] += inside
                changed = True
        if ended and len(completion):
            last = int(completion[-1])
            if last not in self._last and len(self._last) == _WATCHED:
                rarest = min(self._last, key=self._last.__getitem__)
                if self._last[rarest] == 1:
                    del self._last[rarest], self._inside[rarest]
            if last in self._last or len(self._last) < _WATCHED:
                self._last[last] += 1
                changed |= last not in self.ids
        if changed or self._ended & (self._ended - 1) == 0:
            self._choose()

    def _choose(self) -> None:
        surest = sorted(self._last.items(), key=lambda each: (-each[1], each[0]))
        often = _OFTEN * self._ended
        self.ids = tuple(
            id_
            for id_, count in surest
            if count >= often and self._inside[id_] <= _INSIDE * (count + self._inside[id_])
        )[:_MOST]

    def after(self, ids: Ids) -> Offsets:
        """The positions after each turn end in a sequence, ascending; `[E]` int64."""
        if not self.ids or not len(ids):
            return np.empty(0, np.int64)
        if len(self.ids) == 1:
            return np.flatnonzero(ids == self.ids[0]) + 1
        at = ids == self.ids[0]
        for id_ in self.ids[1:]:
            at |= ids == id_
        return np.flatnonzero(at) + 1

    def without(self, ids: Ids) -> Ids:
        """A sequence without trailing turn ends."""
        end = len(ids)
        while end and int(ids[end - 1]) in self.ids:
            end -= 1
        return ids[:end]


_FACTOR = 0x9E3779B97F4A7C15
_NO_TURNS: Hashes = np.empty(0, np.uint64)


class Has(IntFlag):
    """What a call's row holds."""

    IDS = 1
    TEXT = 2
    MESSAGES = 4
    NO_ANSWERS = 8
    """Its messages hold no answer, so it starts its conversation."""


class MessageTrace(NamedTuple):
    """The hashes of a call's messages."""

    answers: Sequence[int]
    """After each answer among them, last one first."""
    told: int
    """Of its messages and its answer; 0 if it has none."""
    exact: int
    """What distinguishes its answer from others that say the same."""
    exact_before: int
    """The same for the last answer among its messages."""


class Trace(NamedTuple):
    """The hashes of a call."""

    has: int
    length: int
    """The length of its prompt: in ids, else in bytes of text, else in messages."""
    prompt: int
    """Of its prompt, or of its messages if it has no other prompt."""
    turns: Hashes
    """`[E]` After each turn end of its prompt, the last one first."""
    seen: int
    """Of its prompt and completion; 0 if it has no completion."""
    key: int
    """Of its key and context; 0 if it has no key."""
    messages: MessageTrace | None
    """None where they are not recorded."""


@dataclass(slots=True)
class Tracer:
    """Hashes calls. Processes with the same `ends` get the same hashes."""

    ends: TurnEnds
    rolling: Rolling

    def __init__(self) -> None:
        self.ends, self.rolling = TurnEnds(), Rolling()

    def learn(self, call: CallTraits) -> None:
        """Learn from a call which ids end a turn."""
        if call.prompt is not None and call.completion is not None:
            self.ends.learn(call.completion, ended=call.ended)

    def trace(self, call: CallTraits) -> Trace:
        """The hashes of a call."""
        has, length, prompt, seen, turns, messages = Has(0), 0, 0, 0, _NO_TURNS, None
        if call.prompt is not None:
            has, length = Has.IDS, len(call.prompt)
            prompt, seen, turns = self._ids(call.prompt, call)
        elif call.request is None and call.prompt_text is not None:
            has, values = Has.TEXT, as_bytes(call.prompt_text)
            length = len(values)
            # The hashes of a prompt, and of prompt and completion.
            completion = as_bytes(call.completion_text or "")
            salted = salt("text", call.context)
            whole = self.rolling.extended(salted, 0, values)
            prompt, seen = (whole, self.rolling.extended(whole, len(values), completion) if len(completion) else 0)
        if call.request is not None:
            request, messages = _messages(call.request, call.answer, call.context)
            has |= Has.MESSAGES
            # A prompt of several turns has a history; a template may add a system prompt.
            if not messages.answers and len(turns) <= len(call.request) + 1:
                has |= Has.NO_ANSWERS
            if call.prompt is None:
                length, prompt = len(call.request), request
        key = 0 if call.key is None else hash_of(call.key) ^ salt("key", call.context)
        return Trace(int(has), length, prompt, turns, seen, key, messages)

    def _ids(self, prompt: Ids, call: CallTraits) -> tuple[int, int, Hashes]:
        """The hashes of a prompt, of prompt and completion, and of the prompt up to each turn end."""
        hash_at = self.rolling.prefixes(prompt, salt("ids", call.context))
        whole, turns = int(hash_at[-1]), hash_at[self.ends.after(prompt)[::-1]]
        if call.completion is None or not len(call.completion):
            return whole, 0, turns
        return whole, self.rolling.extended(whole, len(prompt), call.completion), turns


def salt(kind: str, context: int) -> int:
    """The hash of the empty sequence, by kind and context."""
    return (hash_of(kind.encode()) ^ (context * _FACTOR)) & MASK


def as_bytes(text: str) -> NDArray[np.uint8]:
    """Text as an array of bytes."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _messages(request: Sequence[Message], answer: Message | None, context: int) -> tuple[int, MessageTrace]:
    """The hash of a request, and those of its answers."""
    hash_, answers = salt("messages", context), []
    for message in request:
        hash_ = _then(hash_, message)
        if message.sampled:
            answers.append(hash_)
    before = next((sent for sent in reversed(request) if sent.sampled), None)
    return hash_, MessageTrace(
        answers[::-1],
        0 if answer is None else _then(hash_, answer),
        0 if answer is None else exact_digest(answer),
        0 if before is None else exact_digest(before),
    )


def _then(hash_: int, message: Message) -> int:
    """The hash of messages with this hash, followed by one more."""
    mixed = ((hash_ ^ digest(message)) * _FACTOR) & MASK
    return (mixed ^ (mixed >> 29)) * _FACTOR & MASK
