"""Which calls of a log are one conversation, by what they saw and sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.chains.links import components
from tito_audit.join.history._columns import Array, Calls, Columns, ExactLinks, Holders, JoinedBy
from tito_audit.join.history._search import Search, decide
from tito_audit.join.history._trace import CallTraits, Decode, Has, Reread, Trace, Tracer, digest

__all__ = [
    "CallTraits",
    "Conversations",
    "Decode",
    "HistoryIndex",
    "Holders",
    "JoinedBy",
    "Reread",
    "Trace",
    "Tracer",
    "digest",
]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Which calls belong together."""

    of: NDArray[np.int64]
    """`[N]` The number of the first call of each call's conversation; its own if it is alone."""
    by: NDArray[np.uint8]
    """`[N]` JoinedBy"""
    unsure: NDArray[np.int64]
    """Calls that could continue calls of several conversations, or whose predecessor could not be decided;
    ascending."""
    keys_believed: bool
    """Whether the stated keys were taken to name conversations."""


class HistoryIndex(Columns):
    """Finds which calls continue which. Calls may come in any order."""

    def learn(self, calls: Iterable[CallTraits]) -> None:
        """Learn from some calls which ids end a turn; other such ids are found by rereading rows."""
        for call in calls:
            self.tracer.learn(call)

    def settle(self, reread: Reread, decode: Decode | None) -> Conversations:
        """The conversations of all calls that were added; no more may be added.

        `reread` reads calls again where hashes are not enough; `decode` gives the bytes of token ids, None without
        a tokenizer.
        """
        count = len(self)
        if not count:
            return Conversations(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64), False)
        links = ExactLinks(self)
        links.link()
        starts_like_own_key, undecided = np.zeros(count, np.bool_), []
        believed = are_believed(links, self.array("prompt"), starts_like_own_key)
        has = self.array("has")
        wanted = (links.parent < 0) & (has & (Has.IDS | Has.TEXT) != 0) & (has & Has.NO_ANSWERS == 0)
        wanted &= self.array("length") > 0
        if believed:
            wanted &= links.key == 0  # Keys join the others anyway.
        if wanted.any():
            search = Search(self, links, decode)
            search.link(wanted, reread)
            starts_like_own_key, undecided = search.starts_like_own_key, search.undecided
            contested = search.contested
            del search  # It holds more than what it found.
            undecided += decide(contested, links, components(count, links.parent))
            believed = believed or are_believed(links, self.array("prompt"), starts_like_own_key)
        return _conversations(links, undecided, believed)


def _conversations(links: ExactLinks, undecided: list[int], believed: bool) -> Conversations:
    joined = [links.parent]
    if believed:
        across = (links.key > 0) & (links.parent >= 0) & (links.key[links.parent] != links.key)
        links.parent[across], links.by[across] = -1, JoinedBy.NOTHING
        joined.append(first_of_key(links.key))
    of = components(len(links.parent), *joined)
    # `[N]` Whether a call continues no call and is not the first such call of its conversation.
    parent = links.parent
    starts = np.flatnonzero(parent < 0)
    _, first = np.unique(of[starts], return_index=True)
    later = parent < 0
    later[starts[first]] = False
    links.by[later] = JoinedBy.KEY
    doubtful = np.concatenate((links.between_conversations(of), np.array(undecided, np.int64)))
    unsure = np.unique(doubtful)
    if believed:
        key = links.key[unsure]
        unsure = unsure[(key == 0) | (np.bincount(links.key)[key] == 1)]
    return Conversations(of, links.by, unsure, believed)


# Whether stated keys name conversations or something else that calls share


_MOST_STARTS = 64
"""How many calls without a predecessor a conversation may have: sub-agents, and histories that were cut."""


def are_believed(links: ExactLinks, prompt: Array, starts_like_own_key: NDArray[np.bool_]) -> bool:
    """Whether keys name conversations.

    They do if at least half of the calls that could continue one with their key do, and few keys have two calls
    that start with the same prompt, as samples of a group do.
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
    if np.median(np.bincount(key[starts], minlength=len(size))[several]) > _MOST_STARTS:
        return False
    return bool(2 * _groups(links, prompt, starts) < np.count_nonzero(several))


def _groups(links: ExactLinks, prompt: Array, starts: Calls) -> int:
    """For how many keys several calls that start a conversation have the same prompt."""
    key = links.key
    # The same call logged twice is not a second sample, unless both were continued.
    hashes = key[starts].astype(np.uint64)
    for column in (prompt, *links.outcomes):
        hashes *= HASH_BASE
        hashes ^= column[starts]
    counts = np.zeros(len(key), np.bool_)
    counts[starts[np.unique(hashes, return_index=True)[1]]] = True
    counts[links.parent[links.parent >= 0]] = True
    starts = starts[counts[starts]]
    order = starts[np.lexsort((prompt[starts], key[starts]))]
    equal = (key[order][1:] == key[order][:-1]) & (prompt[order][1:] == prompt[order][:-1])
    return len(np.unique(key[order][1:][equal]))


def first_of_key(key: Array) -> Calls:
    """`[N]` The first call with each call's key; -1 if it has none."""
    first = np.full(int(key.max(initial=0)) + 1, len(key), np.int64)
    np.minimum.at(first, key, np.arange(len(key)))
    first[0] = -1
    return first[key]
