"""An index of calls: small hashes of each, from which conversations are found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE, gaps, paired_runs
from tito_audit.chains.links import AT_ONCE, components
from tito_audit.join.history._columns import Columns
from tito_audit.join.history._holders import Array, Calls, Holders
from tito_audit.join.history._links import ExactLinks
from tito_audit.join.history._said import said, without_reasoning
from tito_audit.join.history._trace import Has, Trace, Tracer, as_bytes, salt
from tito_audit.join.history._traits import CallTraits, Conversations, Decode, JoinedBy, Reread
from tito_audit.join.history._trie import Hashes
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import starts_with

# Continuations whose prompt holds an earlier answer in other ids, proven from the rows themselves.

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

    With `open_end`, `held` may go on after the answer.
    """
    if not answer.strip() or not there.strip():
        return 0.0
    if answer == there or (open_end and len(answer) >= _LEAST_BYTES and there.startswith(answer)):
        return SAME
    one, other = (text.decode("utf-8", "replace") for text in (answer, there))
    shown, shown_held = without_reasoning(one).strip(), without_reasoning(other).strip()
    if shown and _same(shown, shown_held, open_end=open_end):
        return SAME_WITHOUT_REASONING
    (text, calls), (text_held, calls_held) = said(one), said(other)
    if calls != calls_held[: len(calls)] or (len(calls) != len(calls_held) and not open_end):
        return 0.0
    text, text_held = "".join(text.split()), "".join(text_held.split())
    if _same(text, text_held, open_end=open_end) and (text or calls):
        return SAME_IN_OTHER_SPELLING
    return 0.0 if open_end else _likeness_of_words(shown, shown_held)


def _same(one: str, other: str, *, open_end: bool) -> bool:
    return one == other or (open_end and len(one) >= _LEAST_BYTES and other.startswith(one))


def _likeness_of_words(one: str, other: str) -> float:
    """The share of words that two texts have in common, in order; below proof if numbers differ."""
    words, others = _WORD.findall(one), _WORD.findall(other)
    if not words or not others or max(len(words), len(others)) > _MOST_WORDS:
        return 0.0
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    same = [word for start, _, size in matcher.get_matching_blocks() for word in words[start : start + size]]
    equal, largest = sum(map(len, same)), max(sum(map(len, words)), sum(map(len, others)))
    likeness = equal / largest
    numbers = Counter(filter(_has_digit, words)) == Counter(filter(_has_digit, others))
    return likeness if numbers and equal >= _LEAST_BYTES else min(likeness, _UNPROVEN)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


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
_LEVELS = 4
"""At how many prompt lengths a call is compared with earlier calls."""
_RIVALS = 64
"""With how many calls at each length."""
_LONGEST = 1 << 13
"""How many ids of an answer are compared where no end token shows where it ends."""
_CLEARLY = 0.05
_PERHAPS = 0.6

Values = NDArray[Any]


@dataclass(slots=True)
class _Level:
    """What a prompt holds after a prefix that is other calls' prompt, or its body."""

    at: int
    rivals: Calls
    held: Values
    open_end: bool
    likeness: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seeker:
    """Calls with one prompt that continue no call exactly."""

    calls: Calls
    levels: Sequence[_Level]

    def proven(self) -> list[tuple[int, float]]:
        """The calls whose answers the prompt provably holds, with the likeness; only those of the longest
        prefix."""
        by_level = (sorted(each for each in level.likeness if each[1] >= PROVEN) for level in self.levels)
        return next(filter(None, by_level), [])

    @property
    def undecided(self) -> bool:
        """Whether an answer resembles what is held without being the same or clearly different."""
        return any(_PERHAPS <= likeness < PROVEN for level in self.levels for _, likeness in level.likeness)


@dataclass(frozen=True, slots=True)
class Contested:
    """A call that provably continues each of several calls."""

    call: int
    rivals: Sequence[int]


class Search:
    """Rereads calls that exactly continue no call, to find prefixes that others saw or were sent."""

    def __init__(self, columns: Columns, links: ExactLinks, decode: Decode | None) -> None:
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
        self.contested: list[Contested] = []
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
            groups = [
                order[ends[place - 1] if place else 0 : ends[place]]
                for place in by_first[start : start + _AT_ONCE]
            ]
            members = {int(calls[group[0]]): calls[group] for group in groups}
            found = [self._seeker(members[number], call) for number, call in reread(list(members))]
            seekers = [seeker for seeker in found if seeker is not None]
            self._compare(seekers, reread)
            for seeker in seekers:
                self._decide(seeker)

    def _decide(self, seeker: Seeker) -> None:
        """Link the calls of a seeker to the only call that they provably continue."""
        proven, links = seeker.proven(), self._links
        for call in seeker.calls.tolist():
            near = np.concatenate([level.rivals for level in seeker.levels])
            self.starts_like_own_key[call] = links.key[call] and (links.key[near] == links.key[call]).any()
            # The calls whose answers are most like what is held, among those with the same key if there are any.
            key = int(links.key[call])
            own = [each for each in proven if key and links.key[each[0]] == key] or proven
            most = max((likeness for _, likeness in own), default=0.0)
            rivals = [call for call, likeness in own if likeness > most - _CLEARLY]
            if len(rivals) == 1:
                links.parent[call], links.by[call] = rivals[0], links.sequence[call]
            elif rivals:
                self.contested.append(Contested(call, rivals))
            elif seeker.undecided:
                self.undecided.append(call)

    def _seeker(self, calls: Calls, call: CallTraits) -> Seeker | None:
        """Calls with one prompt, and what it holds where others' answers would be; None if nothing was found.

        If the prompt starts with everything that another call saw, they are linked to that call.
        """
        values, salted = _prompt_of(call)
        hash_at = self._columns.tracer.rolling.prefixes(values, salted)
        at = 1 + self._looked_for.may_hold(hash_at[1:])[::-1]
        prefixes = self._columns.trie.numbers.find_all(hash_at[at])
        seen = prefixes[self._links.is_end[prefixes]]
        if len(seen):
            for each in calls.tolist():
                self._links.choose(each, seen.tolist())
            return None
        levels: list[_Level] = []
        at_known = (at < len(values)) & ((prefixes != 0) | self._with_prompt.have(hash_at[at]))
        for position, prefix in zip(at[at_known].tolist(), prefixes[at_known].tolist(), strict=True):
            rivals = self._rivals(int(calls[0]), int(hash_at[position]), prefix)
            if len(rivals):
                levels.append(self._level(values, position, rivals, call.prompt is not None))
            if len(levels) == _LEVELS:
                break
        return Seeker(calls, levels) if levels else None

    def _rivals(self, call: int, hash_: int, prefix: int) -> Calls:
        """Calls whose prompt has this hash, with or without a generation prompt."""
        with_body = self._with_body.of(prefix) if prefix and prefix != self._body[call] else np.empty(0, np.int64)
        shorter = with_body[self._links.length[with_body] < self._links.length[call]]
        rivals = np.union1d(self._with_prompt.of(hash_), shorter)
        near = max(int(np.searchsorted(rivals, call)) - _RIVALS // 2, 0)
        return rivals[near : near + _RIVALS]

    def _level(self, values: Values, at: int, rivals: Calls, is_ids: bool) -> _Level:
        ends = self._columns.tracer.ends.after(values[at : at + _LONGEST]) if is_ids else values[:0]
        values_there = values[at : at + (int(ends[0]) if len(ends) else _LONGEST)]
        return _Level(at, rivals, values_there.copy(), not len(ends))

    # Proof

    def _compare(self, seekers: Sequence[Seeker], reread: Reread) -> None:
        """Read the calls that the seekers may continue, and compare their answers with what is held."""
        wanted: dict[int, list[_Level]] = {}
        for seeker in seekers:
            for level in seeker.levels:
                for rival in level.rivals.tolist():
                    wanted.setdefault(rival, []).append(level)
        if not wanted:
            return
        for number, call in reread(sorted(wanted)):
            for level in wanted[number]:
                level.likeness.append((number, self._likeness(call, level)))

    def _likeness(self, call: CallTraits, level: _Level) -> float:
        if call.prompt is None:
            after_prefix = as_bytes(call.prompt_text or "")[level.at :], as_bytes(call.completion_text or "")
            text = b"".join(part.tobytes() for part in after_prefix)
            return likeness_of_texts(text, level.held.tobytes(), open_end=level.open_end)
        completion = call.completion if call.completion is not None else call.prompt[:0]
        own = np.concatenate((call.prompt[level.at :], completion))
        answer, there = self._columns.tracer.ends.without(own), self._columns.tracer.ends.without(level.held)
        likeness = self._likeness_of_ids(answer, there, level.open_end)
        if call.ended and len(answer) == len(own) and likeness < PROVEN:  # an unknown end token
            likeness = max(likeness, self._likeness_of_ids(answer[:-1], there, level.open_end))
        return likeness

    def _likeness_of_ids(self, answer: Values, there: Values, open_end: bool) -> float:
        if self._decode is None:
            return likeness_of_ids(answer, there, open_end=open_end)
        return likeness_of_texts(self._decode(answer), self._decode(there), open_end=open_end)


def _prompt_of(call: CallTraits) -> tuple[Values, int]:
    """The prompt of a call as integers, and the hash of its empty prefix."""
    if call.prompt is not None:
        return call.prompt, salt("ids", call.context)
    return as_bytes(call.prompt_text or ""), salt("text", call.context)


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


class Conversing:
    """Conversations that grow together, on top of known ones."""

    def __init__(self, conversation: Calls) -> None:
        self._of = conversation
        self._now: dict[int, int] = {}

    def __call__(self, call: int) -> int:
        """A number that all calls of a conversation share."""
        at = int(self._of[call])
        while (further := self._now.get(at, at)) != at:
            self._now[at] = self._now.get(further, further)
            at = further
        return at

    def join(self, one: int, other: int) -> None:
        """Merge the conversations of two calls."""
        first, second = sorted((self(one), self(other)))
        self._now[second] = first


def decide(contested: Sequence[Contested], links: ExactLinks, conversation: Calls) -> Iterator[int]:
    """Link calls to one of the several that they provably continue, if these are one conversation; yields the
    rest."""
    conversing = Conversing(conversation)
    for each in sorted(contested, key=lambda c: (links.length[c.call], c.call)):
        if len({conversing(rival) for rival in each.rivals}) > 1:
            yield each.call
            continue
        links.parent[each.call], links.by[each.call] = each.rivals[0], links.sequence[each.call]
        conversing.join(each.call, each.rivals[0])


class HistoryIndex:
    """Finds which calls continue which. Calls may come in any order."""

    def __init__(self) -> None:
        self._columns = Columns()

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes kept for the calls so far, however long their histories."""
        return self._columns.nbytes

    @property
    def tracer(self) -> Tracer:
        """Makes the traces for `add_trace`."""
        return self._columns.tracer

    def learn(self, calls: Iterable[CallTraits]) -> None:
        """Learn from some calls which ids end a turn; other such ids are found by rereading rows."""
        for call in calls:
            self.tracer.learn(call)

    def add(self, call: CallTraits) -> int:
        """Add a call and learn from it; returns its number: 0, 1, 2, … in row order."""
        self.learn([call])
        return self.add_trace(self.tracer.trace(call))

    def add_trace(self, call: Trace) -> int:
        """Add a call of which only the trace is known; returns its number."""
        return self._columns.add(call)

    def settle(self, reread: Reread, decode: Decode | None) -> Conversations:
        """The conversations of all calls that were added; no more may be added.

        `reread` reads calls again where hashes are not enough; `decode` gives the bytes of token ids, None without
        a tokenizer.
        """
        columns = self._columns
        if not len(columns):
            return Conversations(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64), False)
        links = ExactLinks(columns)
        links.link()
        nowhere = np.zeros(len(columns), np.bool_)
        believed = are_believed(links, columns.array("prompt"), nowhere)
        search = _searched(columns, links, reread, decode, keyed=not believed)
        contested = [] if search is None else search.contested
        undecided = [] if search is None else search.undecided
        starts = nowhere if search is None else search.starts_like_own_key
        del search  # It holds more than what it found.
        undecided += decide(contested, links, components(len(columns), links.parent))
        believed = believed or are_believed(links, columns.array("prompt"), starts)
        return _conversations(links, undecided, believed)


def _searched(
    columns: Columns, links: ExactLinks, reread: Reread, decode: Decode | None, *, keyed: bool
) -> Search | None:
    """Calls without a link by hashes, linked as far as their rows prove it; None if there are no such calls.

    `keyed` includes calls with a key: where keys are believed, these are joined anyway.
    """
    has = columns.array("has")
    wanted = (links.parent < 0) & (has & (Has.IDS | Has.TEXT) != 0) & (has & Has.NO_ANSWERS == 0)
    wanted &= columns.array("length") > 0
    if not keyed:
        wanted &= links.key == 0
    if not wanted.any():
        return None
    search = Search(columns, links, decode)
    search.link(wanted, reread)
    return search


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
    for column in (prompt, *links.said):
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
