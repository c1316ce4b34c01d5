"""The record of each call: columns of hashes and of numbers of prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.join.history._ends import TurnEnds
from tito_audit.join.history._said import digest, exact_digest
from tito_audit.join.history._traits import CallTraits
from tito_audit.join.history._trie import MASK, Hashes, Numbers, Rolling, Trie, hash_of
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message

_FACTOR = 0x9E3779B97F4A7C15


class Has(IntFlag):
    """What a call's row holds."""

    IDS = 1
    TEXT = 2
    MESSAGES = 4
    NO_ANSWERS = 8
    """Its messages hold no answer, so that it starts its conversation."""


class Columns:
    """What is kept of each call; a column of messages stays empty where no call has any."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.keys = Numbers()
        self.ends = TurnEnds()
        self.rolling = Rolling()
        self.has = array("B")
        self.length = array("I")
        """Of its prompt: in ids, else in bytes of text, else in messages."""
        self.prompt = array("Q")
        """The hash of its prompt; of its messages where it has no other."""
        self.body = array("I")
        """The prefix at the last turn end of its prompt; 0 where there is none."""
        self.seen = array("I")
        """The prefix that is its prompt and its completion; 0 where it has no completion."""
        self.key = array("I")
        """The number of its key and context; 0 where it has no key."""
        self.heard = array("I")
        """The prefix at the last answer among its messages; 0 where there is none."""
        self.told = array("I")
        """The prefix that is its messages and its answer; 0 where it has none."""
        self.exact = array("I")
        """What tells its answer from others that say the same."""
        self.exact_before = array("I")
        """The same of the last answer among its messages."""

    def __len__(self) -> int:
        return len(self.has)

    @property
    def nbytes(self) -> int:
        """Bytes that are held for all calls."""
        columns: list[array[int]] = [self.has, self.length, self.prompt, self.body, self.seen, self.key]
        columns += [self.heard, self.told, self.exact, self.exact_before]
        return self.trie.nbytes + self.keys.nbytes + sum(len(each) * each.itemsize for each in columns)

    def add(self, call: CallTraits) -> int:
        """Keep a call; its number."""
        has, length, prompt, body, seen, turns = Has(0), 0, 0, 0, 0, 0
        if call.prompt is not None:
            has, length = Has.IDS, len(call.prompt)
            prompt, body, seen, turns = self._ids(call.prompt, call)
        elif call.request is None and call.prompt_text is not None:
            has, values = Has.TEXT, as_bytes(call.prompt_text)
            length = len(values)
            prompt, seen = self._text(values, as_bytes(call.completion_text or ""), salt("text", call.context))
        if call.request is not None:
            request, answers = self._messages(call.request, call.answer, call.context)
            has |= Has.MESSAGES
            # A prompt of more turns has a history; a template may add a system prompt.
            if not answers and turns <= len(call.request) + 1:
                has |= Has.NO_ANSWERS
            if call.prompt is None:
                length, prompt = len(call.request), request
        elif self.told:
            self._no_messages()
        self.has.append(has)
        self.length.append(length)
        self.prompt.append(prompt)
        self.body.append(body)
        self.seen.append(seen)
        self.key.append(0 if call.key is None else self.keys.add(hash_of(call.key) ^ salt("key", call.context)))
        return len(self) - 1

    def _ids(self, prompt: Ids, call: CallTraits) -> tuple[int, int, int, int]:
        """The hash of a prompt, the prefix at its last turn end, that of all that was seen, and how many ends."""
        completion = call.completion
        if completion is not None:
            self.ends.learn(completion, ended=call.ended)
        hash_at = self.rolling.prefixes(prompt, salt("ids", call.context))
        whole, ends = int(hash_at[-1]), self.ends.after(prompt)
        body = self.trie.add_path(map(int, hash_at[ends[::-1]]))
        if completion is None or not len(completion):
            return whole, body, 0, len(ends)
        seen = self.trie.add(self.rolling.extended(whole, len(prompt), completion), body)
        return whole, body, seen, len(ends)

    def _text(self, prompt: NDArray[np.uint8], completion: NDArray[np.uint8], salted: int) -> tuple[int, int]:
        """The hash of a prompt, and the prefix that is all that was seen."""
        whole = self.rolling.extended(salted, 0, prompt)
        if not len(completion):
            return whole, 0
        return whole, self.trie.add(self.rolling.extended(whole, len(prompt), completion), 0)

    def _messages(self, request: Sequence[Message], answer: Message | None, context: int) -> tuple[int, bool]:
        """The hash of a request, and whether it holds an answer."""
        hash_, after_answers = salt("messages", context), []
        for message in request:
            hash_ = _then(hash_, message)
            if message.sampled:
                after_answers.append(hash_)
        heard = self.trie.add_path(reversed(after_answers))
        self._no_messages()
        self.heard.append(heard)
        self.told.append(0 if answer is None else self.trie.add(_then(hash_, answer), heard))
        self.exact.append(0 if answer is None else exact_digest(answer))
        before = next((one for one in reversed(request) if one.sampled), None)
        self.exact_before.append(0 if before is None else exact_digest(before))
        return hash_, before is not None

    def _no_messages(self) -> None:
        """Note that calls so far had no messages, up to the one that is added."""
        missing = bytes(4 * (len(self) - len(self.told)))
        for column in (self.heard, self.told, self.exact, self.exact_before):
            column.frombytes(missing)

    # What was kept, as arrays; the columns do not grow while one is held.

    def array(self, name: str) -> NDArray[Any]:
        """`[N]` A column; zeros where no call has messages."""
        column = getattr(self, name)
        values = np.frombuffer(column, np.dtype(column.typecode))
        missing = len(self) - len(values)
        if not len(values):
            return np.zeros(missing, values.dtype)
        return np.concatenate((values, np.zeros(missing, values.dtype))) if missing else values

    def hashes(self, prefixes: NDArray[np.uint32]) -> Hashes:
        """`[N]` The hashes of prefixes."""
        known: Hashes = np.frombuffer(self.trie.numbers.hashes, np.uint64)
        return known[prefixes]


def salt(kind: str, context: int) -> int:
    """What the hash of nothing is for sequences of a kind and a context."""
    return (hash_of(kind.encode()) ^ (context * _FACTOR)) & MASK


def as_bytes(text: str) -> NDArray[np.uint8]:
    """Text as an array of bytes."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _then(hash_: int, message: Message) -> int:
    """The hash of messages with this hash and one more."""
    mixed = ((hash_ ^ digest(message)) * _FACTOR) & MASK
    return (mixed ^ (mixed >> 29)) * _FACTOR & MASK
