"""Which calls of a log are one conversation, by what they saw and sampled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE, gaps, paired_runs
from tito_audit.chains.links import AT_ONCE, components
from tito_audit.join.history._columns import Array, CallColumns, Calls, ExactLinks, Holders, JoinedBy
from tito_audit.join.history._trace import (
    CallTraits,
    Decode,
    Has,
    Hashes,
    Reread,
    Trace,
    Tracer,
    as_bytes,
    digest,
    salt,
    text_and_calls,
    without_reasoning,
)
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import starts_with

__all__ = [
    "CallTraits",
    "Decode",
    "HistoryIndex",
    "Holders",
    "JoinedBy",
    "JoinedConversations",
    "Reread",
    "Trace",
    "Tracer",
    "digest",
]


@dataclass(frozen=True, slots=True)
class JoinedConversations:
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


# How much an answer resembles what a later prompt holds in its place


PROVEN = 0.8
"""From this likeness on, they are the same answer."""
SAME, SAME_WITHOUT_REASONING, SAME_IN_OTHER_SPELLING = 3.0, 2.0, 1.0
_UNPROVEN = 0.5
"""The highest likeness of two answers that say different things in similar words."""
_LEAST_BYTES, _LEAST_IDS = 16, 8
_MOST_WORDS, _MOST_IDS, _FREQUENT_FROM = 1000, 1500, 200
_WORD = re.compile(r"\w+|[^\w\s]")


def likeness_of_texts(answer: bytes, there: bytes, *, open_end: bool = False) -> float:
    """How much two texts resemble each other: 1 to 3 if they say the same, else below 1.

    With `open_end`, `there` may go on after the answer.
    """
    if not answer.strip() or not there.strip():
        return 0.0
    if answer == there or (open_end and len(answer) >= _LEAST_BYTES and there.startswith(answer)):
        return SAME
    spelled, spelled_there = (text.decode("utf-8", "replace") for text in (answer, there))
    shown, shown_there = without_reasoning(spelled).strip(), without_reasoning(spelled_there).strip()
    if shown and _same(shown, shown_there, open_end=open_end):
        return SAME_WITHOUT_REASONING
    (text, calls), (text_there, calls_there) = text_and_calls(spelled), text_and_calls(spelled_there)
    if calls != calls_there[: len(calls)] or (len(calls) != len(calls_there) and not open_end):
        return 0.0
    text, text_there = "".join(text.split()), "".join(text_there.split())
    if _same(text, text_there, open_end=open_end) and (text or calls):
        return SAME_IN_OTHER_SPELLING
    return 0.0 if open_end else _likeness_of_words(shown, shown_there)


def _same(text: str, there: str, *, open_end: bool) -> bool:
    return text == there or (open_end and len(text) >= _LEAST_BYTES and there.startswith(text))


def _likeness_of_words(text: str, there: str) -> float:
    """The share of words that two texts have in common, in order; below proof if numbers differ."""
    words, others = _WORD.findall(text), _WORD.findall(there)
    if not words or not others or max(len(words), len(others)) > _MOST_WORDS:
        return 0.0
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    same = [word for start, _, size in matcher.get_matching_blocks() for word in words[start : start + size]]
    equal = sum(map(len, same))
    likeness = equal / max(sum(map(len, words)), sum(map(len, others)))
    numbers, other_numbers = (
        Counter(word for word in spelled if any(map(str.isdigit, word))) for spelled in (words, others)
    )
    return likeness if numbers == other_numbers and equal >= _LEAST_BYTES else min(likeness, _UNPROVEN)


def likeness_of_ids(answer: Ids, there: Ids, *, open_end: bool = False) -> float:
    """The same for token ids whose text is unknown.

    One id instead of another is different text; several instead of one may be the same text.
    """
    if not len(answer) or not len(there):
        return 0.0
    if open_end:
        return SAME if len(answer) >= _LEAST_IDS and starts_with(there, answer) else 0.0
    if np.array_equal(answer, there):
        return SAME
    if len(there) < len(answer) and np.array_equal(answer[-len(there) :], there):
        return SAME_WITHOUT_REASONING
    runs = list(paired_runs(answer, there, longest=_MOST_IDS, frequent_from=_FREQUENT_FROM))
    equal = sum(run.size for run in runs)
    swapped = any(
        gap.end - gap.start == gap.other_end - gap.other == 1 for gap in gaps(runs, len(answer), len(there))
    )
    likeness = min(equal / len(there), 0.99)
    return likeness if equal >= _LEAST_IDS and not swapped else min(likeness, _UNPROVEN)


_AT_ONCE = 512
_RIVALS = 64
"""With how many calls at each length."""
_LONGEST = 1 << 13
"""How many ids of an answer are compared where no end token shows where it ends."""

Values = NDArray[Any]


@dataclass(slots=True)
class _Level:
    """What a prompt holds after a prefix that is other calls' prompt, or its body."""

    at: int
    rivals: Calls
    there: Values
    open_end: bool
    likeness: list[tuple[int, float]] = field(default_factory=list)


class PrefixSearch:
    """Rereads calls that exactly continue no call, to find prefixes that others saw or were sent."""

    def __init__(self, columns: CallColumns, links: ExactLinks, decode: Decode | None) -> None:
        self._columns, self._links, self._decode = columns, links, decode
        self._body, self._prompt = columns.array("body"), columns.array("prompt")
        self._with_body = Holders(self._body)
        has_prompt = columns.array("has") & (Has.IDS | Has.TEXT) != 0
        self._with_prompt = Holders(np.where(has_prompt, self._prompt, np.uint64(0)))
        self._looked_for = _Filter(3 * len(columns))
        for prefixes in (columns.array("seen"), self._body):
            for start in range(0, len(columns), AT_ONCE):
                self._looked_for.add(columns.hashes(prefixes[start : start + AT_ONCE]))
        for start in range(0, len(self._with_prompt.values), AT_ONCE):
            self._looked_for.add(self._with_prompt.values[start : start + AT_ONCE])
        self.contested: list[tuple[int, Sequence[int]]] = []
        """Calls that provably continue each of several calls, with these."""
        self.undecided: list[int] = []
        """Calls whose prompt holds something like another call's answer, neither the same nor clearly
        different."""
        self.starts_like_own_key = np.zeros(len(columns), np.bool_)
        """`[N]` Whether the prompt of a call starts with the prompt of another call with its key."""

    def link(self, wanted: NDArray[np.bool_], reread: Reread) -> None:
        """Link the wanted calls that provably continue exactly one call; record those that are contested."""
        calls = np.flatnonzero(wanted)
        _, first, group = np.unique(self._prompt[calls], return_index=True, return_inverse=True)
        order, ends = np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))
        by_first = np.argsort(first)
        for start in range(0, len(by_first), _AT_ONCE):
            places = by_first[start : start + _AT_ONCE]
            groups = [order[ends[place - 1] if place else 0 : ends[place]] for place in places]
            members = {int(calls[group[0]]): calls[group] for group in groups}
            levels = [(members[k], self._levels(members[k], call)) for k, call in reread([*members])]
            # Read the calls that others may continue, and compare their answers with what is there.
            wanted_by: dict[int, list[_Level]] = {}
            for level in chain.from_iterable(of_call for _, of_call in levels):
                for rival in level.rivals.tolist():
                    wanted_by.setdefault(rival, []).append(level)
            for number, call in reread(sorted(wanted_by)) if wanted_by else ():
                for level in wanted_by[number]:
                    level.likeness.append((number, self._likeness(call, level)))
            for alike, of_call in levels:
                if of_call:
                    self._decide(alike, of_call)

    def _decide(self, calls: Calls, levels: Sequence[_Level]) -> None:
        """Link calls with one prompt to the only call that they provably continue."""
        links, near = self._links, np.concatenate([level.rivals for level in levels])
        by_level = (sorted(each for each in level.likeness if each[1] >= PROVEN) for level in levels)
        # Only the answers after the longest prefix.
        proven = next(filter(None, by_level), [])
        doubtful = any(0.6 <= likeness < PROVEN for level in levels for _, likeness in level.likeness)
        for call in calls.tolist():
            key = int(links.key[call])
            self.starts_like_own_key[call] = key and (links.key[near] == key).any()
            # The calls whose answers are most like what is held, among those with the same key if there are any.
            own = [each for each in proven if key and links.key[each[0]] == key] or proven
            most = max((likeness for _, likeness in own), default=0.0)
            rivals = [rival for rival, likeness in own if likeness > most - 0.05]
            if len(rivals) == 1:
                links.parent[call], links.by[call] = rivals[0], links.sequence[call]
            elif rivals:
                self.contested.append((call, rivals))
            elif doubtful:
                self.undecided.append(call)

    def _levels(self, calls: Calls, call: CallTraits) -> list[_Level]:
        """What the prompt of these calls holds where others' answers would be, after the longest prefix first.

        If the prompt starts with everything that another call saw, they are linked to that call.
        """
        values: Any
        if call.prompt is not None:
            values, salted = call.prompt, salt("ids", call.context)
        else:
            values, salted = as_bytes(call.prompt_text or ""), salt("text", call.context)
        tracer = self._columns.tracer
        hash_at = tracer.rolling.prefixes(values, salted)
        at = 1 + self._looked_for.may_hold(hash_at[1:])[::-1]
        prefixes = self._columns.trie.find_all(hash_at[at])
        seen = prefixes[self._links.is_end[prefixes]]
        if len(seen):
            for each in calls.tolist():
                self._links.choose(each, seen.tolist())
            return []
        levels: list[_Level] = []
        shared = (at < len(values)) & ((prefixes != 0) | (self._with_prompt.counts(hash_at[at])[0] > 0))
        for position, prefix in zip(at[shared].tolist(), prefixes[shared].tolist(), strict=True):
            # Calls whose prompt has this hash, with or without a generation prompt; the nearest if they are many.
            first = int(calls[0])
            body = self._with_body.of(prefix) if prefix and prefix != self._body[first] else np.empty(0, np.int64)
            shorter = body[self._links.length[body] < self._links.length[first]]
            rivals = np.union1d(self._with_prompt.of(int(hash_at[position])), shorter)
            near = max(int(np.searchsorted(rivals, first)) - _RIVALS // 2, 0)
            rivals = rivals[near : near + _RIVALS]
            if len(rivals):
                there = values[position : position + _LONGEST]
                ends = tracer.ends.after(there) if call.prompt is not None else there[:0]
                there = there[: int(ends[0])] if len(ends) else there
                levels.append(_Level(position, rivals, there.copy(), not len(ends)))
            if len(levels) == 4:
                break
        return levels

    def _likeness(self, call: CallTraits, level: _Level) -> float:
        if call.prompt is None:
            after_prefix = as_bytes(call.prompt_text or "")[level.at :], as_bytes(call.completion_text or "")
            text = b"".join(part.tobytes() for part in after_prefix)
            return likeness_of_texts(text, level.there.tobytes(), open_end=level.open_end)
        completion = call.completion if call.completion is not None else call.prompt[:0]
        own = np.concatenate((call.prompt[level.at :], completion))
        answer, there = self._columns.tracer.ends.without(own), self._columns.tracer.ends.without(level.there)
        likeness = self._likeness_of_ids(answer, there, level.open_end)
        if call.ended and len(answer) == len(own) and likeness < PROVEN:  # an unknown end token
            likeness = max(likeness, self._likeness_of_ids(answer[:-1], there, level.open_end))
        return likeness

    def _likeness_of_ids(self, answer: Values, there: Values, open_end: bool) -> float:
        if self._decode is None:
            return likeness_of_ids(answer, there, open_end=open_end)
        return likeness_of_texts(self._decode(answer), self._decode(there), open_end=open_end)


class _Filter:
    """A set of hashes, one bit each: rules out most hashes that were not added."""

    def __init__(self, count: int) -> None:
        self._bits = max(count.bit_length() + 4, 10)
        self._table = np.zeros(1 << (self._bits - 3), np.uint8)

    def add(self, hashes: Hashes) -> None:
        """Add hashes."""
        np.bitwise_or.at(self._table, *self._slots(hashes))

    def _slots(self, hashes: Hashes) -> tuple[Array, Array]:
        slots = hashes >> np.uint64(64 - self._bits)
        return slots >> np.uint64(3), np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))

    def may_hold(self, hashes: Hashes) -> Calls:
        """Which of these hashes were added, or look like one that was; ascending positions."""
        byte, bit = self._slots(hashes)
        return np.flatnonzero(self._table[byte] & bit)


def decide(
    contested: Sequence[tuple[int, Sequence[int]]], links: ExactLinks, conversation: Calls
) -> Iterator[int]:
    """Link calls to one of the several that they provably continue, if these are one conversation; yields the
    rest."""
    joined_to: dict[int, int] = {}

    def now(call: int) -> int:
        """A number that all calls of a conversation share by now."""
        at = int(conversation[call])
        while at in joined_to:
            at = joined_to[at]
        return at

    for call, rivals in sorted(contested, key=lambda each: (links.length[each[0]], each[0])):
        if len(set(map(now, rivals))) > 1:
            yield call
            continue
        links.parent[call], links.by[call] = rivals[0], links.sequence[call]
        first, second = sorted((now(call), now(rivals[0])))
        if first != second:
            joined_to[second] = first


class HistoryIndex(CallColumns):
    """Finds which calls continue which. Calls may come in any order."""

    def learn(self, calls: Iterable[CallTraits]) -> None:
        """Learn from some calls which ids end a turn; other such ids are found by rereading rows."""
        for call in calls:
            self.tracer.learn(call)

    def settle(self, reread: Reread, decode: Decode | None) -> JoinedConversations:
        """The conversations of all calls that were added; no more may be added.

        `reread` reads calls again where hashes are not enough; `decode` gives the bytes of token ids, None without
        a tokenizer.
        """
        count = len(self)
        if not count:
            return JoinedConversations(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64), False)
        links = ExactLinks(self)
        links.link()
        starts_like_own_key, undecided = np.zeros(count, np.bool_), list[int]()
        believed = are_believed(links, self.array("prompt"), starts_like_own_key)
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
            del search  # It holds more than what it found.
            undecided += decide(contested, links, components(count, links.parent))
            believed = believed or are_believed(links, self.array("prompt"), starts_like_own_key)
        joined = [links.parent]
        if believed:
            across = (links.key > 0) & (links.parent >= 0) & (links.key[links.parent] != links.key)
            links.parent[across], links.by[across] = -1, JoinedBy.NOTHING
            first = np.full(int(links.key.max(initial=0)) + 1, count, np.int64)  # the first call with each key
            np.minimum.at(first, links.key, np.arange(count))
            first[0] = -1
            joined.append(first[links.key])
        of = components(count, *joined)
        # A key joins what continues no call and is not the first such call of its conversation.
        starts = np.flatnonzero(links.parent < 0)
        _, first = np.unique(of[starts], return_index=True)
        later = links.parent < 0
        later[starts[first]] = False
        links.by[later] = JoinedBy.KEY
        unsure = np.unique(np.concatenate((links.between_conversations(of), np.array(undecided, np.int64))))
        if believed:
            key = links.key[unsure]
            unsure = unsure[(key == 0) | (np.bincount(links.key)[key] == 1)]
        return JoinedConversations(of, links.by, unsure, believed)


# Whether stated keys name conversations or something else that calls share


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
    # A conversation may have calls without a predecessor: sub-agents, and histories that were cut.
    if np.median(np.bincount(key[starts], minlength=len(size))[several]) > 64:
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
