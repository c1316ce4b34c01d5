"""Which calls of a log are one conversation, by what they saw and sampled."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.chains.ledger import Sparse
from tito_audit.chains.links import AT_ONCE, connected_components
from tito_audit.join.traces import (
    PROVEN,
    CallTraits,
    Decode,
    Has,
    Hashes,
    Reread,
    Trace,
    Tracer,
    empty_hash,
    likeness_of_ids,
    likeness_of_texts,
    text_array,
)

Array = NDArray[Any]
Calls = NDArray[np.int64]


class HashNumbers:
    """Numbers hashes 1, 2, 3, … in the order of their first use: an open-addressing table of 15 bytes per hash."""

    def __init__(self) -> None:
        self.hashes = array("Q", [0])
        """The hash of each number; 0 is no number."""
        self._slots = array("I", bytes(4 * 64))

    def find(self, hash_: int) -> int:
        """The number of a hash; 0 if it has none."""
        return self._slots[self._slot(hash_)]

    def add(self, hash_: int) -> int:
        """The number of a hash, added if new."""
        slot = self._slot(hash_)
        if not self._slots[slot]:
            if len(self.hashes) > 0.7 * len(self._slots):  # the table grows
                slots = np.zeros(int(1.5 * len(self._slots)), np.uint32)
                hashes = np.frombuffer(self.hashes, np.uint64)
                for start in range(1, len(hashes), AT_ONCE):
                    stop = min(start + AT_ONCE, len(hashes))
                    pending = np.arange(start, stop, dtype=np.uint32)
                    at = _first_slots(hashes[start:stop], len(slots))
                    while len(pending):
                        free = slots[at] == 0
                        slots[at[free]] = pending[free]
                        lost = slots[at] != pending
                        pending, at = pending[lost], (at[lost] + 1) % len(slots)
                del hashes  # an exported buffer would keep the array from growing
                self._slots = array("I")
                self._slots.frombytes(slots.data.cast("B"))
                slot = self._slot(hash_)
            self._slots[slot] = len(self.hashes)
            self.hashes.append(hash_)
        return self._slots[slot]

    def _slot(self, hash_: int) -> int:
        """The slot of a hash, or the free slot where it belongs."""
        hashes, slots = self.hashes, self._slots
        size = len(slots)
        at = ((hash_ >> 32) * size) >> 32
        while slots[at] and hashes[slots[at]] != hash_:
            at = at + 1 if at + 1 < size else 0
        return at

    def find_all(self, hashes: Hashes) -> NDArray[np.uint32]:
        """`[N]` the number of each hash; 0 where it has none."""
        slots, slot_hashes = np.frombuffer(self._slots, np.uint32), np.frombuffer(self.hashes, np.uint64)
        numbers = np.zeros(len(hashes), np.uint32)
        for start in range(0, len(hashes), AT_ONCE):
            pending = np.arange(start, min(start + AT_ONCE, len(hashes)))
            at = _first_slots(hashes[pending], len(slots))
            while len(pending):
                number = slots[at]
                hit = slot_hashes[number] == hashes[pending]
                numbers[pending[hit]] = number[hit]
                further = ~hit & (number != 0)
                pending, at = pending[further], (at[further] + 1) % len(slots)
        return numbers


def _first_slots(hashes: Hashes, size: int) -> NDArray[np.int64]:
    """`[N]` the slot at which the search for each hash begins, in a table of this size."""
    return (((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


class PrefixTrie(HashNumbers):
    """Prefixes of sequences, by their hashes; each with the longest shorter prefix known when it was added."""

    def __init__(self) -> None:
        super().__init__()
        self.parents = array("I", [0])
        """`parents[n] < n`"""

    def add_after(self, parent: int, hash_: int) -> int:
        """The number of a prefix, added after the prefix `parent` if new."""
        number = self.add(hash_)
        if number == len(self.parents):
            self.parents.append(parent)
        return number

    def add_path(self, longest_first: Iterable[int]) -> int:
        """The number of the longest of these prefixes of one sequence, all of which are added.

        A known prefix has all its prefixes in the trie, so only the new part of a long history is processed.
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


class JoinedBy(IntEnum):
    """What joined a call to its conversation."""

    NOTHING = 0  # alone, or the first call of its conversation
    KEY = 1  # only the stated key
    IDS = 2
    MESSAGES = 3
    TEXT = 4


@dataclass(frozen=True, slots=True)
class JoinedConversations:
    """Which calls belong together."""

    of: NDArray[np.int64]
    """`[N]` the first call of each call's conversation; the call itself if it is alone."""
    by: NDArray[np.uint8]
    """`[N]` JoinedBy"""
    unsure: NDArray[np.int64]
    """Calls that could continue several conversations, or whose parent is unclear; ascending."""
    keys_believed: bool
    """Whether keys were taken to name conversations."""


class HistoryIndex:
    """Finds which calls continue which, from some numbers kept of each. Calls may come in any order."""

    def __init__(self) -> None:
        self.trie = PrefixTrie()
        self.keys = HashNumbers()
        self.tracer = Tracer()
        self.has = array("B")
        self.length = array("I")
        """`Trace.length`."""
        self.prompt = array("Q")
        """`Trace.prompt`, a hash."""
        self.prompt_prefix = array("I")
        """Number of the prefix that ends with the last turn of its prompt; 0: none."""
        self.seen_prefix = array("I")
        """Number of the prefix that is its prompt and completion; 0: no completion."""
        self.key = array("I")
        """Number of its key in its context; 0: no key."""
        self.messages_prefix = Sparse("I")
        """Number of the prefix of messages up to the last answer; 0: none."""
        self.dialogue_prefix = Sparse("I")
        """Number of the prefix that is its messages and its answer; 0: none."""
        self.exact = Sparse("I")
        self.exact_before = Sparse("I")

    def __len__(self) -> int:
        return len(self.has)

    def add(self, call: Trace) -> int:
        """Add a call; returns its number: 0, 1, 2, … in row order."""
        number, prompt_prefix = len(self), self.trie.add_path(map(int, call.turns))
        self.has.append(call.has)
        self.length.append(call.length)
        self.prompt.append(call.prompt)
        self.prompt_prefix.append(prompt_prefix)
        self.seen_prefix.append(self.trie.add_after(prompt_prefix, call.seen) if call.seen else 0)
        self.key.append(self.keys.add(call.key) if call.key else 0)
        messages = self.trie.add_path(call.answers)
        self.messages_prefix.set(number, messages)
        self.dialogue_prefix.set(number, self.trie.add_after(messages, call.dialogue) if call.dialogue else 0)
        self.exact.set(number, call.exact)
        self.exact_before.set(number, call.exact_before)
        return number

    def array(self, name: str) -> NDArray[Any]:
        """`[N]` a column by name; no call may be added while the array is in use."""
        column = getattr(self, name)
        if not isinstance(column, Sparse):
            return np.frombuffer(column, np.dtype(column.typecode))
        values = column.values()
        missing = np.zeros(len(self) - len(values), values.dtype)
        return np.concatenate((values, missing)) if len(missing) else values

    def hashes(self, prefixes: NDArray[np.uint32]) -> Hashes:
        """`[N]` the hashes of prefixes."""
        hashes: Hashes = np.frombuffer(self.trie.hashes, np.uint64)
        return hashes[prefixes]

    def join_conversations(self, reread: Reread, decode: Decode | None) -> JoinedConversations:
        """The conversations of all calls; no more may be added.

        `reread` reads calls again where hashes are not enough; `decode` is None without a tokenizer.
        """
        count = len(self)
        if not count:
            return JoinedConversations(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64), False)
        links = ExactLinks(self)
        links.link()
        starts_like_own_key, undecided = np.zeros(count, np.bool_), list[int]()
        believed = are_keys_believed(links, self.array("prompt"), starts_like_own_key)
        has = self.array("has")
        wanted = (links.parent < 0) & (has & (Has.IDS | Has.TEXT) != 0) & (has & Has.NO_ANSWERS == 0)
        wanted &= self.array("length") > 0
        if believed:
            wanted &= links.key == 0  # Keys join the others anyway.
        if wanted.any():
            search = PrefixSearch(self, links, decode)
            search.link(wanted, reread)
            starts_like_own_key, undecided = search.starts_like_own_key, search.undecided
            contested = search.contested
            del search  # to free its tables
            undecided += link_contested(contested, links, connected_components(count, links.parent))
            believed = believed or are_keys_believed(links, self.array("prompt"), starts_like_own_key)
        joined = [links.parent]
        if believed:
            across = (links.key > 0) & (links.parent >= 0) & (links.key[links.parent] != links.key)
            links.parent[across], links.by[across] = -1, JoinedBy.NOTHING
            first = np.full(int(links.key.max(initial=0)) + 1, count, np.int64)  # the first call with each key
            np.minimum.at(first, links.key, np.arange(count))
            first[0] = -1
            joined.append(first[links.key])
        of = connected_components(count, *joined)
        # A call without a parent is joined by its key, unless it is the first such call of its conversation.
        starts = np.flatnonzero(links.parent < 0)
        _, first = np.unique(of[starts], return_index=True)
        later = links.parent < 0
        later[starts[first]] = False
        links.by[later] = JoinedBy.KEY
        unsure = np.unique(np.concatenate((links.find_unsure(of), np.array(undecided, np.int64))))
        if believed:
            key = links.key[unsure]
            unsure = unsure[(key == 0) | (np.bincount(links.key)[key] == 1)]
        return JoinedConversations(of, links.by, unsure, believed)


class CallsByValue:
    """Finds calls by their values in columns `[N]`; values of 0 are left out, and columns share no other value."""

    def __init__(self, *columns: Array) -> None:
        values = np.concatenate(columns)
        order = np.argsort(values, kind="stable")
        order = order[int(np.searchsorted(values, 0, side="right", sorter=order)) :]
        self.calls = (order % max(len(columns[0]), 1)).astype(np.uint32)
        """In the order of their values."""
        self.values = values[order]
        """The value of each of these calls, ascending."""

    def calls_with(self, value: int) -> Calls:
        """The calls with a value, ascending."""
        wanted = self.values.dtype.type(value)
        start, stop = np.searchsorted(self.values, wanted), np.searchsorted(self.values, wanted, side="right")
        return self.calls[start:stop].astype(np.int64)

    def count_and_first(self, values: Array) -> tuple[Array, Calls]:
        """`[N]` how many calls have each value, and the first of them; 0 and -1 if none has."""
        if not len(self.values):
            return np.zeros(len(values), np.int64), np.full(len(values), -1, np.int64)
        wanted = values.astype(self.values.dtype, copy=False)
        start = np.searchsorted(self.values, wanted)
        count = np.searchsorted(self.values, wanted, side="right") - start
        first = self.calls[np.minimum(start, len(self.calls) - 1)].astype(np.int64)
        return count, np.where(count > 0, first, -1)


def nearest_marked(parents: Array, marked: NDArray[np.bool_]) -> Array:
    """`[N]` each prefix if it is marked, else its longest marked prefix, or 0.

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


_COMPARED = 4096
"""Calls that saw and sampled the same that are searched for the same key or answer."""
_TRIED = 256
"""Calls among them that are tried for one without a continuation."""


class ExactLinks:
    """Finds the parent of each call, the call it continues, as far as hashes show it."""

    def __init__(self, columns: HistoryIndex) -> None:
        self.length = columns.array("length")
        self.key = columns.array("key")
        self._has, self._prompt = columns.array("has"), columns.array("prompt")
        self.joined_by = np.where(self._has & Has.TEXT, np.uint8(JoinedBy.TEXT), np.uint8(JoinedBy.IDS))
        """`[N]` what joins a call, unless its messages do."""
        self._exact, self._before = columns.array("exact"), columns.array("exact_before")
        self.seen_columns: tuple[Array, Array] = columns.array("seen_prefix"), columns.array("dialogue_prefix")
        """`[N]` what each call saw and sampled, as a prefix of ids or text and as one of messages."""
        self._saw = CallsByValue(*self.seen_columns)
        self._parents = np.frombuffer(columns.trie.parents, np.uint32)
        self.is_end = ends = np.zeros(len(self._parents), np.bool_)
        """By prefix, whether some call saw and sampled exactly this."""
        self._is_dialogue = ends.copy()
        for column, marked in zip(self.seen_columns, (ends, self._is_dialogue), strict=True):
            marked[column] = True
            marked[0] = False
        ends |= self._is_dialogue
        self._top = nearest_marked(self._parents, ends)
        self._at = self._top[columns.array("prompt_prefix")]
        whole = columns.trie.find_all(self._prompt)
        np.copyto(self._at, whole, where=ends[whole] & (self._has & (Has.IDS | Has.TEXT) != 0))
        self._heard = self._top[columns.array("messages_prefix")]
        self._keys_with_several = np.bincount(self.key) > 1
        self._keys_with_several[0] = False
        self._used: set[tuple[int, int]] = set()
        self._continued: set[int] = set()
        self._tied: dict[int, int] = {}
        self.parent: Calls = np.full(len(columns), -1, np.int64)
        self.by = np.zeros(len(columns), np.uint8)

    def link(self) -> None:
        """Find the parents of all calls."""
        for start in range(0, len(self.parent), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            ids_count, ids_first = self._saw.count_and_first(self._at[part])
            dialogue_count, dialogue_first = self._saw.count_and_first(self._heard[part])
            by_messages = (dialogue_count > 0) & ((ids_count == 0) | self._is_deeper(dialogue_first, ids_first))
            count = np.where(by_messages, dialogue_count, ids_count)
            first = np.where(by_messages, dialogue_first, ids_first)
            # Where both give a call, the other one may still have the same key.
            key = self.key[part]
            clear = (count == 1) & (~self._keys_with_several[key] | (self.key[first] == key))
            self.parent[part][clear] = first[clear]
            self.by[part][clear] = np.where(by_messages, np.uint8(JoinedBy.MESSAGES), self.joined_by[part])[clear]
            for call in (part.start + np.flatnonzero((count > 0) & ~clear)).tolist():
                self.choose(call, self._seen_prefixes(int(self._at[call])))

    def _is_deeper(self, calls: Array, others: Array) -> Array:
        """`[K]` whether a call has a longer prompt than the other; False where lengths are in different units."""
        alike = (self._has[calls] & Has.IDS) == (self._has[others] & Has.IDS)
        deeper: Array = alike & (self.length[calls] > self.length[others])
        return deeper

    def _seen_prefixes(self, prefix: int) -> Iterator[int]:
        """This prefix and its prefixes that some call saw and sampled exactly, the longest first."""
        while prefix:
            yield prefix
            prefix = int(self._top[self._parents[prefix]])

    def choose(self, call: int, seen: Iterable[int]) -> None:
        """Link a call to the best of the calls that saw these prefixes of its prompt, the longest first."""
        kinds, longest = (list(seen), list(self._seen_prefixes(int(self._heard[call])))), 0
        if self._keys_with_several[self.key[call]]:
            # First those that a call with the same key saw.
            def shares_key(prefix: int) -> bool:
                return bool((self.key[self._nearest_calls(call, prefix)] == self.key[call]).any())

            longest = self._deepest(*(filter(shares_key, kind) for kind in kinds))
        longest = longest or self._deepest(*kinds)
        if not longest:
            return
        rivals = self._rivals(call, longest)
        if len(rivals) > 1:
            self._tied[call] = longest
        self.parent[call] = self.take_turns(call, rivals)
        self.by[call] = JoinedBy.MESSAGES if self._is_dialogue[longest] else self.joined_by[call]

    def _deepest(self, by_ids: Iterable[int], by_messages: Iterable[int]) -> int:
        """The first prefix of one of the two, that whose call has the longer prompt; 0 if both are empty."""
        ids, messages = next(iter(by_ids), 0), next(iter(by_messages), 0)
        if not ids or not messages:
            return ids or messages
        callers = self._saw.calls_with(messages)[:1], self._saw.calls_with(ids)[:1]
        return messages if self._is_deeper(*callers)[0] else ids

    def _nearest_calls(self, call: int, prefix: int) -> Calls:
        """The calls that saw a prefix; of more than _COMPARED, those nearest to a call."""
        calls = self._saw.calls_with(prefix)
        start = max(int(np.searchsorted(calls, call)) - _COMPARED // 2, 0)
        return calls[start : start + _COMPARED]

    def _rivals(self, call: int, prefix: int) -> Calls:
        """The calls that saw a prefix and that neither key nor answer tells apart."""
        calls = self._nearest_calls(call, prefix)
        wanted = self.key[calls] == self.key[call]
        calls = calls[wanted] if self._keys_with_several[self.key[call]] and wanted.any() else calls
        wanted = self._exact[calls] == self._before[call]
        return calls[wanted] if len(calls) > 1 and self._before[call] and wanted.any() else calls

    def take_turns(self, call: int, rivals: Calls) -> int:
        """The nearest rival, earlier ones first, that has no continuation yet, or none with this prompt."""
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

    def find_unsure(self, conversation: Calls) -> Calls:
        """The calls that could just as well continue a call of another conversation."""
        tied = ((call, conversation[self._rivals(call, longest)]) for call, longest in self._tied.items())
        return np.array([call for call, others in tied if len(np.unique(others)) > 1], np.int64)


_AT_ONCE = 512
"""Calls reread at once."""
_RIVALS = 64
"""Calls compared for one prefix."""
_LONGEST = 1 << 13
"""Values of an answer that are compared where no end token shows its end."""

Values = NDArray[Any]


@dataclass(slots=True)
class _PromptPrefix:
    """A prefix of a prompt that is other calls' prompt, and what the prompt holds after it."""

    at: int
    """Its length."""
    rivals: Calls
    """The calls with this prompt, with or without a generation prompt."""
    there: Values
    """What the prompt has in place of their answer."""
    open_end: bool
    """Whether `there` may go on after the answer."""
    likeness: list[tuple[int, float]] = field(default_factory=list)
    """(rival, likeness of its answer to `there`)."""


class PrefixSearch:
    """Rereads calls that continue no call exactly, to find calls whose answer their prompt holds rewritten."""

    def __init__(self, columns: HistoryIndex, links: ExactLinks, decode: Decode | None) -> None:
        self._columns, self._links, self._decode = columns, links, decode
        self._body, self._prompt = columns.array("prompt_prefix"), columns.array("prompt")
        self._with_body = CallsByValue(self._body)
        has_prompt = columns.array("has") & (Has.IDS | Has.TEXT) != 0
        self._with_prompt = CallsByValue(np.where(has_prompt, self._prompt, np.uint64(0)))
        # A filter: by its first bits, whether a hash may be one of the three kinds that are looked up.
        bits = max((3 * len(columns)).bit_length() + 2, 10)
        self._shift, self._may_hold = np.uint64(64 - bits), np.zeros(1 << bits, np.bool_)
        seen = columns.array("seen_prefix")
        for hashes in (columns.hashes(seen), columns.hashes(self._body), self._with_prompt.values):
            self._may_hold[hashes >> self._shift] = True
        self.contested: list[tuple[int, Sequence[int]]] = []
        """(call, the several calls that it provably continues)."""
        self.undecided: list[int] = []
        """Calls whose prompt holds something neither equal to nor clearly different from another call's answer."""
        self.starts_like_own_key = np.zeros(len(columns), np.bool_)
        """`[N]` whether a prompt starts with that of another call with the same key."""

    def link(self, wanted: NDArray[np.bool_], reread: Reread) -> None:
        """Link the wanted calls that provably continue exactly one call, and collect the contested ones."""
        calls, links = np.flatnonzero(wanted), self._links
        _, first, group = np.unique(self._prompt[calls], return_index=True, return_inverse=True)
        order, ends = np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))
        by_first = np.argsort(first)
        for start in range(0, len(by_first), _AT_ONCE):
            places = by_first[start : start + _AT_ONCE]
            groups = [order[ends[place - 1] if place else 0 : ends[place]] for place in places]
            members = {int(calls[group[0]]): calls[group] for group in groups}
            levels = [(members[k], self._find_prefixes(members[k], call)) for k, call in reread([*members])]
            # Reread the calls that may be continued, to compare their answers with what is there.
            wanted_by: dict[int, list[_PromptPrefix]] = {}
            for level in chain.from_iterable(of_call for _, of_call in levels):
                for rival in level.rivals.tolist():
                    wanted_by.setdefault(rival, []).append(level)
            for number, call in reread(sorted(wanted_by)) if wanted_by else ():
                for level in wanted_by[number]:
                    level.likeness.append((number, self._likeness(call, level)))
            for alike, of_call in levels:
                if not of_call:
                    continue
                near = np.concatenate([level.rivals for level in of_call])
                by_level = (sorted(each for each in level.likeness if each[1] >= PROVEN) for level in of_call)
                proven = next(filter(None, by_level), [])  # the longest prefix with a proven answer counts
                doubtful = any(0.6 <= likeness < PROVEN for level in of_call for _, likeness in level.likeness)
                for number in alike.tolist():
                    key = int(links.key[number])
                    self.starts_like_own_key[number] = key and (links.key[near] == key).any()
                    # Those with the same key, if there are any; among them the most similar ones.
                    own = [each for each in proven if key and links.key[each[0]] == key] or proven
                    most = max((likeness for _, likeness in own), default=0.0)
                    rivals = [rival for rival, likeness in own if likeness > most - 0.05]
                    if len(rivals) == 1:
                        links.parent[number], links.by[number] = rivals[0], links.joined_by[number]
                    elif rivals:
                        self.contested.append((number, rivals))
                    elif doubtful:
                        self.undecided.append(number)

    def _find_prefixes(self, calls: Calls, call: CallTraits) -> list[_PromptPrefix]:
        """The prefixes of the calls' common prompt after which other calls' answers may follow, the longest first.

        If it starts with what another call saw and sampled, the calls are linked to that one instead.
        """
        values: Any
        if call.prompt is not None:
            values, salted = call.prompt, empty_hash("ids", call.context)
        else:
            values, salted = text_array(call.prompt_text or ""), empty_hash("text", call.context)
        tracer = self._columns.tracer
        hash_at = tracer.prefixes(values, salted)
        at = 1 + np.flatnonzero(self._may_hold[hash_at[1:] >> self._shift])[::-1]
        prefixes = self._columns.trie.find_all(hash_at[at])
        seen = prefixes[self._links.is_end[prefixes]]
        if len(seen):
            for each in calls.tolist():
                self._links.choose(each, seen.tolist())
            return []
        levels: list[_PromptPrefix] = []
        shared = (at < len(values)) & ((prefixes != 0) | (self._with_prompt.count_and_first(hash_at[at])[0] > 0))
        for position, prefix in zip(at[shared].tolist(), prefixes[shared].tolist(), strict=True):
            # Calls whose prompt has this hash, with or without a generation prompt; the nearest if they are many.
            first = int(calls[0])
            body = (
                self._with_body.calls_with(prefix)
                if prefix and prefix != self._body[first]
                else np.empty(0, np.int64)
            )
            shorter = body[self._links.length[body] < self._links.length[first]]
            rivals = np.union1d(self._with_prompt.calls_with(int(hash_at[position])), shorter)
            near = max(int(np.searchsorted(rivals, first)) - _RIVALS // 2, 0)
            rivals = rivals[near : near + _RIVALS]
            if len(rivals):
                there = values[position : position + _LONGEST]
                ends = tracer.after_ends(there) if call.prompt is not None else there[:0]
                there = there[: int(ends[0])] if len(ends) else there
                levels.append(_PromptPrefix(position, rivals, there.copy(), not len(ends)))
            if len(levels) == 4:
                break
        return levels

    def _likeness(self, call: CallTraits, level: _PromptPrefix) -> float:
        """How much what a call has after the prefix, its answer, resembles what the prompt has there."""
        if call.prompt is None:
            after_prefix = text_array(call.prompt_text or "")[level.at :], text_array(call.completion_text or "")
            text = b"".join(part.tobytes() for part in after_prefix)
            return likeness_of_texts(text, level.there.tobytes(), open_end=level.open_end)
        completion = call.completion if call.completion is not None else call.prompt[:0]
        own = np.concatenate((call.prompt[level.at :], completion))
        answer, there = map(self._columns.tracer.without_ends, (own, level.there))
        likeness = self._likeness_of_ids(answer, there, level.open_end)
        if call.ended and len(answer) == len(own) and likeness < PROVEN:  # an unknown end token
            likeness = max(likeness, self._likeness_of_ids(answer[:-1], there, level.open_end))
        return likeness

    def _likeness_of_ids(self, answer: Values, there: Values, open_end: bool) -> float:
        if self._decode is None:
            return likeness_of_ids(answer, there, open_end=open_end)
        return likeness_of_texts(self._decode(answer), self._decode(there), open_end=open_end)


def link_contested(
    contested: Sequence[tuple[int, Sequence[int]]], links: ExactLinks, conversation: Calls
) -> Iterator[int]:
    """Link each contested call to one of its rivals if they are one conversation; yields the other calls."""
    joined_to: dict[int, int] = {}

    def now(call: int) -> int:
        """A number that the calls of a conversation share by now."""
        at = int(conversation[call])
        while at in joined_to:
            at = joined_to[at]
        return at

    for call, rivals in sorted(contested, key=lambda each: (links.length[each[0]], each[0])):
        if len(set(map(now, rivals))) > 1:
            yield call
            continue
        links.parent[call], links.by[call] = rivals[0], links.joined_by[call]
        first, second = sorted((now(call), now(rivals[0])))
        if first != second:
            joined_to[second] = first


def are_keys_believed(links: ExactLinks, prompt: Array, starts_like_own_key: NDArray[np.bool_]) -> bool:
    """Whether keys name conversations, not something else that calls share, such as a group of samples.

    They do if at least half of the calls that could continue one with their key do, and few keys have two calls
    that start with the same prompt.
    """
    key = links.key
    if not key.any():
        return False
    size = np.bincount(key)
    size[0] = 0
    several = size > 1
    if not several.any():
        return False
    linked = (links.parent >= 0) & (key[links.parent] == key) | starts_like_own_key
    linked_of_key = np.minimum(np.bincount(key[linked], minlength=len(size)), np.maximum(size - 1, 0))
    if 2 * linked_of_key[several].sum() < (size[several] - 1).sum():
        return False
    starts = np.flatnonzero(several[key] & ~linked)
    # A conversation may have calls without a predecessor: sub-agents, and histories that were cut.
    if np.median(np.bincount(key[starts], minlength=len(size))[several]) > 64:
        return False
    # Count the keys with several starts of the same prompt. A call logged twice is no second sample, unless both
    # copies were continued.
    hashes = key[starts].astype(np.uint64)
    for column in (prompt, *links.seen_columns):
        hashes *= HASH_BASE
        hashes ^= column[starts]
    counts = np.zeros(len(key), np.bool_)
    counts[starts[np.unique(hashes, return_index=True)[1]]] = True
    counts[links.parent[links.parent >= 0]] = True
    starts = starts[counts[starts]]
    order = starts[np.lexsort((prompt[starts], key[starts]))]
    equal = (key[order][1:] == key[order][:-1]) & (prompt[order][1:] == prompt[order][:-1])
    return bool(2 * len(np.unique(key[order][1:][equal])) < np.count_nonzero(several))
