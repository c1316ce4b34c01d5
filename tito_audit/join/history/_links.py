"""Which call a call continues: its prompt or messages start with all that the other saw and sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from tito_audit.chains.links import AT_ONCE
from tito_audit.join.history._columns import Columns
from tito_audit.join.history._holders import Array, Calls, Holders, nearest
from tito_audit.join.history._trace import Has
from tito_audit.join.history._traits import JoinedBy

_COMPARED = 4096
"""How many calls that saw and sampled the same are searched for those with the same key or answer."""
_TRIED = 256
"""How many of them are tried for one that has no continuation yet."""


class ExactLinks:
    """The parent of each call, as far as hashes show it."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.length = columns.array("length")
        self.key = columns.array("key")
        self._has, self._prompt = columns.array("has"), columns.array("prompt")
        self.sequence = np.where(self._has & Has.TEXT, np.uint8(JoinedBy.TEXT), np.uint8(JoinedBy.IDS))
        """What joins each call, unless its messages do."""
        self._exact, self._before = columns.array("exact"), columns.array("exact_before")
        seen, heard_and_said = columns.array("seen"), columns.array("told")
        self.seen, self._told = Holders(seen), Holders(heard_and_said)
        self.said: tuple[Array, Array] = seen, heard_and_said
        """What each call saw and sampled: two columns that are equal where this is."""
        self._parents = np.frombuffer(columns.trie.parents, np.uint32)
        self.is_end = ends = np.zeros(len(self._parents), np.bool_)
        """For each prefix, whether it is everything that some call saw."""
        ends[seen] = ends[heard_and_said] = True
        ends[0] = False
        self._top = nearest(self._parents, ends)
        self._at = self._top[columns.array("body")]
        whole = columns.trie.numbers.find_all(self._prompt)
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
            told_count, told_first = self._told.counts(self._heard[part])
            by_messages = (told_count > 0) & ((ids_count == 0) | self._is_deeper(told_first, ids_first))
            count, first = (
                np.where(by_messages, told_count, ids_count),
                np.where(by_messages, told_first, ids_first),
            )
            # Where both give a call, the other one may still have the same key.
            key = self.key[part]
            clear = (count == 1) & (~self._keys_with_several[key] | (self.key[first] == key))
            self.parent[part][clear] = first[clear]
            self.by[part][clear] = np.where(by_messages, np.uint8(JoinedBy.MESSAGES), self.sequence[part])[clear]
            for call in (part.start + np.flatnonzero((count > 0) & ~clear)).tolist():
                self.choose(call, self._above(int(self._at[call])))

    def _is_deeper(self, one: Array, other: Array) -> Array:
        """Whether a call has the longer prompt; False where they cannot be compared."""
        alike = (self._has[one] & Has.IDS) == (self._has[other] & Has.IDS)
        deeper: Array = alike & (self.length[one] > self.length[other])
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
        one, other = self._told.of(by_messages[0])[:1], self.seen.of(by_ids[0])[:1]
        return by_messages if self._is_deeper(one, other)[0] else by_ids

    def _around(self, call: int, prefix: int, is_messages: bool) -> Calls:
        """The calls that saw a prefix; only the nearest to a call if there are very many."""
        calls = (self._told if is_messages else self.seen).of(prefix)
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
        return np.array(
            [
                call
                for call, (prefix, is_messages) in self._tied.items()
                if len(np.unique(conversation[self._rivals(call, prefix, is_messages)])) > 1
            ],
            np.int64,
        )


def _those(calls: Calls, wanted: Array) -> Calls:
    """The wanted calls; all if none is wanted."""
    return calls[wanted] if wanted.any() else calls
