"""The record of each call, and which call it continues as far as hashes show it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.ledger import Sparse
from tito_audit.chains.links import AT_ONCE
from tito_audit.join.history._trace import Has, Hashes, Trace, Tracer

Array = NDArray[Any]
Calls = NDArray[np.int64]


class Numbers:
    """Hashes and their numbers, 1, 2, 3, …, in about 15 bytes each: a hash table with open addressing."""

    def __init__(self) -> None:
        self.hashes = array("Q", [0])
        """The hash of each number; 0 is no number."""
        self._slots = array("I", bytes(4 * 64))

    def find(self, hash_: int) -> int:
        """The number of a hash; 0 if it has none."""
        return self._slots[self._slot(hash_)]

    def add(self, hash_: int) -> int:
        """The number of a hash, added if new."""
        at = self._slot(hash_)
        if not self._slots[at]:
            if len(self.hashes) > 0.7 * len(self._slots):
                self._grow()
                at = self._slot(hash_)
            self._slots[at] = len(self.hashes)
            self.hashes.append(hash_)
        return self._slots[at]

    def _slot(self, hash_: int) -> int:
        """The slot of a hash, or the free one where it belongs."""
        hashes, slots = self.hashes, self._slots
        size = len(slots)
        at = ((hash_ >> 32) * size) >> 32
        while slots[at] and hashes[slots[at]] != hash_:
            at = at + 1 if at + 1 < size else 0
        return at

    def find_all(self, hashes: Hashes) -> NDArray[np.uint32]:
        """`[N]` The number of each hash; 0 where it has none."""
        slots, hashes_held = np.frombuffer(self._slots, np.uint32), np.frombuffer(self.hashes, np.uint64)
        numbers = np.zeros(len(hashes), np.uint32)
        for start in range(0, len(hashes), AT_ONCE):
            pending = np.arange(start, min(start + AT_ONCE, len(hashes)))
            at = _home(hashes[pending], len(slots))
            while len(pending):
                number = slots[at]
                hit = hashes_held[number] == hashes[pending]
                numbers[pending[hit]] = number[hit]
                further = ~hit & (number != 0)
                pending, at = pending[further], (at[further] + 1) % len(slots)
        return numbers

    def _grow(self) -> None:
        slots = np.zeros(int(1.5 * len(self._slots)), np.uint32)
        hashes = np.frombuffer(self.hashes, np.uint64)
        for start in range(1, len(hashes), AT_ONCE):
            stop = min(start + AT_ONCE, len(hashes))
            pending, at = np.arange(start, stop, dtype=np.uint32), _home(hashes[start:stop], len(slots))
            while len(pending):
                free = slots[at] == 0
                slots[at[free]] = pending[free]
                lost = slots[at] != pending
                pending, at = pending[lost], (at[lost] + 1) % len(slots)
        self._slots = array("I")
        self._slots.frombytes(slots.data.cast("B"))


def _home(hashes: Hashes, size: int) -> NDArray[np.int64]:
    """`[N]` The first slot searched in a table of this size."""
    return (((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


class Trie(Numbers):
    """Prefixes, each with the longest shorter prefix known when it was added."""

    def __init__(self) -> None:
        super().__init__()
        self.parents = array("I", [0])
        """`parents[n] < n`"""

    def add_after(self, parent: int, hash_: int) -> int:
        """The number of a prefix; if it is new, `parent` is the number of the prefix before it."""
        number = self.add(hash_)
        if number == len(self.parents):
            self.parents.append(parent)
        return number

    def add_path(self, longest_first: Iterable[int]) -> int:
        """The number of the longest of these prefixes of one sequence; new prefixes are added.

        All prefixes of a known prefix are known, so only the new part of a long history is processed.
        """
        new, parent = [], 0
        for hash_ in longest_first:
            parent = self.find(hash_)
            if parent:
                break
            new.append(hash_)
        for hash_ in reversed(new):
            parent = self.add_after(parent, hash_)
        return parent


class CallColumns:
    """What is kept of each call."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.keys = Numbers()
        self.tracer = Tracer()
        self.has = array("B")
        self.length = array("I")
        """The length of its prompt: in ids, else in bytes of text, else in messages."""
        self.prompt = array("Q")
        """The hash of its prompt, or of its messages if it has no other prompt."""
        self.body = array("I")
        """The prefix up to the last turn end of its prompt; 0 if there is none."""
        self.seen = array("I")
        """The prefix that is its prompt and completion; 0 if it has no completion."""
        self.key = array("I")
        """The number of its key and context; 0 if it has no key."""
        self.heard = Sparse("I")
        """The prefix up to the last answer among its messages; 0 if there is none."""
        self.dialogue = Sparse("I")
        """The prefix that is its messages and its answer; 0 if it has none."""
        self.exact = Sparse("I")
        """What distinguishes its answer from others with the same content."""
        self.exact_before = Sparse("I")
        """The same for the last answer among its messages."""

    def __len__(self) -> int:
        return len(self.has)

    def add(self, call: Trace) -> int:
        """Add a call, of which only the trace is kept; returns its number: 0, 1, 2, … in row order."""
        number, body = len(self), self.trie.add_path(map(int, call.turns))
        self.has.append(call.has)
        self.length.append(call.length)
        self.prompt.append(call.prompt)
        self.body.append(body)
        self.seen.append(self.trie.add_after(body, call.seen) if call.seen else 0)
        self.key.append(self.keys.add(call.key) if call.key else 0)
        heard = self.trie.add_path(call.answers)
        self.heard.set(number, heard)
        self.dialogue.set(number, self.trie.add_after(heard, call.dialogue) if call.dialogue else 0)
        self.exact.set(number, call.exact)
        self.exact_before.set(number, call.exact_before)
        return number

    def array(self, name: str) -> NDArray[Any]:
        """`[N]` A column; it must not grow while the array is in use."""
        column = getattr(self, name)
        if not isinstance(column, Sparse):
            return np.frombuffer(column, np.dtype(column.typecode))
        values = column.values()
        missing = np.zeros(len(self) - len(values), values.dtype)
        return np.concatenate((values, missing)) if len(missing) else values

    def hashes(self, prefixes: NDArray[np.uint32]) -> Hashes:
        """`[N]` The hashes of prefixes."""
        hashes: Hashes = np.frombuffer(self.trie.hashes, np.uint64)
        return hashes[prefixes]


class Holders:
    """Calls by their value in a column; calls with 0 are left out."""

    def __init__(self, column: Array) -> None:
        order = np.argsort(column, kind="stable")
        zeros = int(np.searchsorted(column, 0, side="right", sorter=order))
        self.calls = order[zeros:].astype(np.uint32)
        """By their value."""
        self.values = column[self.calls]
        """The value of each of them, ascending."""

    def of(self, value: int) -> Calls:
        """The calls with a value, ascending."""
        wanted = self.values.dtype.type(value)
        start, stop = np.searchsorted(self.values, wanted), np.searchsorted(self.values, wanted, side="right")
        return self.calls[start:stop].astype(np.int64)

    def counts(self, values: Array) -> tuple[Array, Calls]:
        """`[N]` How many calls have each value, and the first of them; 0 and -1 if none has."""
        if not len(self.values):
            return np.zeros(len(values), np.int64), np.full(len(values), -1, np.int64)
        wanted = values.astype(self.values.dtype, copy=False)
        start = np.searchsorted(self.values, wanted)
        count = np.searchsorted(self.values, wanted, side="right") - start
        first = self.calls[np.minimum(start, len(self.calls) - 1)].astype(np.int64)
        return count, np.where(count > 0, first, -1)


def nearest(parents: Array, marked: NDArray[np.bool_]) -> Array:
    """`[N]` For each prefix, itself if it is marked, else its longest marked prefix; 0 if there is none.

    `parents[n] < n`, and 0 is its own parent.
    """
    top = parents.copy()
    top[marked] = np.flatnonzero(marked)
    changed = True
    while changed:
        changed = False
        for start in range(0, len(top), AT_ONCE):
            part = top[start : start + AT_ONCE]
            further = np.where(marked[part], part, top[part])
            changed |= not np.array_equal(further, part)
            part[:] = further
    return top


class JoinedBy(IntEnum):
    """What joined a call to its conversation."""

    NOTHING = 0  # it is alone, or its conversation starts with it
    KEY = 1  # nothing else was found or, where keys are believed, looked for
    IDS = 2
    MESSAGES = 3
    TEXT = 4


_COMPARED = 4096
"""How many calls that saw and sampled the same are searched for those with the same key or answer."""
_TRIED = 256
"""How many of them are tried for one that has no continuation yet."""


class ExactLinks:
    """The parent of each call, as far as hashes show it."""

    def __init__(self, columns: CallColumns) -> None:
        self._columns = columns
        self.length = columns.array("length")
        self.key = columns.array("key")
        self._has, self._prompt = columns.array("has"), columns.array("prompt")
        self.sequence = np.where(self._has & Has.TEXT, np.uint8(JoinedBy.TEXT), np.uint8(JoinedBy.IDS))
        """What joins each call, unless its messages do."""
        self._exact, self._before = columns.array("exact"), columns.array("exact_before")
        seen, dialogue = columns.array("seen"), columns.array("dialogue")
        self.seen, self._dialogue = Holders(seen), Holders(dialogue)
        self.outcomes: tuple[Array, Array] = seen, dialogue
        """What each call saw and sampled: two columns that are equal where this is."""
        self._parents = np.frombuffer(columns.trie.parents, np.uint32)
        self.is_end = ends = np.zeros(len(self._parents), np.bool_)
        """For each prefix, whether it is everything that some call saw."""
        ends[seen] = ends[dialogue] = True
        ends[0] = False
        self._top = nearest(self._parents, ends)
        self._at = self._top[columns.array("body")]
        whole = columns.trie.find_all(self._prompt)
        np.copyto(self._at, whole, where=ends[whole] & (self._has & (Has.IDS | Has.TEXT) != 0))
        self._heard = self._top[columns.array("heard")]
        self._keys_with_several = np.bincount(self.key) > 1
        self._keys_with_several[0] = False
        self._used: set[tuple[int, int]] = set()
        self._continued: set[int] = set()
        self._tied: dict[int, tuple[int, bool]] = {}
        self.parent: Calls = np.full(len(columns), -1, np.int64)
        self.by = np.zeros(len(columns), np.uint8)

    def link(self) -> None:
        """Find the parents of all calls."""
        for start in range(0, len(self.parent), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            ids_count, ids_first = self.seen.counts(self._at[part])
            dialogue_count, dialogue_first = self._dialogue.counts(self._heard[part])
            by_messages = (dialogue_count > 0) & ((ids_count == 0) | self._is_deeper(dialogue_first, ids_first))
            count = np.where(by_messages, dialogue_count, ids_count)
            first = np.where(by_messages, dialogue_first, ids_first)
            # Where both give a call, the other one may still have the same key.
            key = self.key[part]
            clear = (count == 1) & (~self._keys_with_several[key] | (self.key[first] == key))
            self.parent[part][clear] = first[clear]
            self.by[part][clear] = np.where(by_messages, np.uint8(JoinedBy.MESSAGES), self.sequence[part])[clear]
            for call in (part.start + np.flatnonzero((count > 0) & ~clear)).tolist():
                self.choose(call, self._above(int(self._at[call])))

    def _is_deeper(self, calls: Array, others: Array) -> Array:
        """Whether a call has the longer prompt; False where they cannot be compared."""
        alike = (self._has[calls] & Has.IDS) == (self._has[others] & Has.IDS)
        deeper: Array = alike & (self.length[calls] > self.length[others])
        return deeper

    def _above(self, prefix: int) -> Iterator[int]:
        """This prefix and the shorter ones that are everything some call saw, longest first."""
        while prefix:
            yield prefix
            prefix = int(self._top[self._parents[prefix]])

    # One call

    def choose(self, call: int, seen: Iterable[int]) -> None:
        """Link a call to the best of the calls that saw these prefixes of its prompt (longest first)."""
        by_ids = [(prefix, False) for prefix in seen]
        by_messages = [(prefix, True) for prefix in self._above(int(self._heard[call]))]
        longest = None
        if self._keys_with_several[self.key[call]]:
            longest = self._deeper(self._of_key(call, by_ids), self._of_key(call, by_messages))
        longest = longest or self._deeper(by_ids[0] if by_ids else None, by_messages[0] if by_messages else None)
        if longest is None:
            return
        prefix, is_messages = longest
        rivals = self._rivals(call, prefix, is_messages)
        if len(rivals) > 1:
            self._tied[call] = longest
        self.parent[call] = self.take_turns(call, rivals)
        self.by[call] = JoinedBy.MESSAGES if is_messages else self.sequence[call]

    def _of_key(self, call: int, prefixes: Sequence[tuple[int, bool]]) -> tuple[int, bool] | None:
        """The longest prefix that a call with the same key saw."""
        for prefix, is_messages in prefixes:
            if (self.key[self._around(call, prefix, is_messages)] == self.key[call]).any():
                return prefix, is_messages
        return None

    def _deeper(
        self, by_ids: tuple[int, bool] | None, by_messages: tuple[int, bool] | None
    ) -> tuple[int, bool] | None:
        if by_ids is None or by_messages is None:
            return by_ids or by_messages
        first, first_by_ids = self._dialogue.of(by_messages[0])[:1], self.seen.of(by_ids[0])[:1]
        return by_messages if self._is_deeper(first, first_by_ids)[0] else by_ids

    def _around(self, call: int, prefix: int, is_messages: bool) -> Calls:
        """The calls that saw a prefix; only the nearest to a call if there are very many."""
        calls = (self._dialogue if is_messages else self.seen).of(prefix)
        start = max(int(np.searchsorted(calls, call)) - _COMPARED // 2, 0)
        return calls[start : start + _COMPARED]

    def _rivals(self, call: int, prefix: int, is_messages: bool) -> Calls:
        """The calls that saw a prefix and cannot be told apart."""
        calls = self._around(call, prefix, is_messages)
        if self._keys_with_several[self.key[call]]:
            calls = _those(calls, self.key[calls] == self.key[call])
        if len(calls) > 1 and self._before[call]:
            calls = _those(calls, self._exact[calls] == self._before[call])
        return calls

    def take_turns(self, call: int, rivals: Calls) -> int:
        """The nearest of the calls, earlier ones first, that has no continuation yet, or none with the same
        prompt."""
        at, prompt = int(np.searchsorted(rivals, call)), int(self._prompt[call])
        earlier, later = rivals[max(at - _TRIED, 0) : at][::-1], rivals[at : at + _TRIED]
        tried: list[int] = [*earlier.tolist(), *later.tolist()]
        free = (rival for rival in tried if rival not in self._continued)
        again = (rival for rival in tried if (rival, prompt) not in self._used)
        parent = next(chain(free, again), tried[0])
        if len(rivals) > 1:
            self._used.add((parent, prompt))
            self._continued.add(parent)
        return parent

    def between_conversations(self, conversation: Calls) -> Calls:
        """The calls that could just as well continue a call of another conversation."""
        tied = ((call, conversation[self._rivals(call, *longest)]) for call, longest in self._tied.items())
        return np.array([call for call, others in tied if len(np.unique(others)) > 1], np.int64)


def _those(calls: Calls, wanted: Array) -> Calls:
    """The wanted calls; all if none is wanted."""
    return calls[wanted] if wanted.any() else calls
