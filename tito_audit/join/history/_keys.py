"""Whether stated keys name conversations or something else that calls share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.join.history._holders import Array, Calls
from tito_audit.join.history._links import ExactLinks

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
    said = key[starts].astype(np.uint64)
    for column in (prompt, *links.said):
        said *= HASH_BASE
        said ^= column[starts]
    counts = np.zeros(len(key), np.bool_)
    counts[starts[np.unique(said, return_index=True)[1]]] = True
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
