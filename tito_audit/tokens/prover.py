"""Proof without encoding: whether recorded ids are what encoding their own text gives.

    ids       The| quick| br own| fox|.        | safe cuts between tokens
    segments  The| quick|       | fox|.        one token: proven by a mark of its id
                          br own               two: looked up among those that the reference wrote before

What stands between two safe cuts is encoded as it is alone (`safe_cuts.py`). So ids are canonical if every
segment is. A segment is proven once by the reference, `tokenizers`, and remembered token by token: nothing
here is likely, all of it is equal. Three things have to hold, and where one does not, the text is encoded:

1. No ordinary tokens spell a control token: the tokenizer would take that out first.
2. Every id stands for some bytes.
3. A cut lies between two characters that are both whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.tokens._segment_table import LARGEST, KeySet, pack
from tito_audit.tokens._token_edges import BEGINS, ENDS, INSIDE, edges_of, spelling_marks
from tito_audit.tokens.split_points import SafeCuts, find_safe_cuts
from tito_audit.tokens.vocab import Prefix, Vocabulary

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Prover", "Refuted", "find_prover"]

Encode = Callable[[Sequence[str]], list[Ids]]
Refuted = tuple[int, int, Ids]
"""Tokens `start:end` that are not canonical, and those that are."""

_UNSEEN, _PROVEN, _REFUTED = 0, 1, 2
_MOST_TOKENS = 1 << 20
"""How many tokens of longer segments are remembered."""
_MOST_WINDOWS = 64
"""From so many places on, at which a control token could begin, the whole text is searched instead."""


class Prover:
    """Proves ids of one tokenizer. It learns with every segment it sees; what it says depends on none of that."""

    def __init__(self, vocabulary: Vocabulary, cuts: SafeCuts, added: dict[int, str], encode: Encode) -> None:
        """`added` are all added tokens with their contents. Raises ValueError if nothing could be proven."""
        self.vocabulary = vocabulary
        self.encode = encode
        data, lengths = vocabulary.entries.data, vocabulary.entries.lengths.astype(np.int64)
        contents = sorted(
            {content.encode("utf-8") for content in added.values()}, key=lambda one: (-len(one), one)
        )
        own = np.array(sorted(added), np.int64)
        if not _plain(vocabulary, cuts, added, contents):
            raise ValueError("its control tokens or ids are not of the plain kind")
        edges = edges_of(data, lengths, own, cuts)
        if edges is None:
            raise ValueError("its tokens are of too many kinds")
        self._edges = edges
        self._marks = (
            spelling_marks(data, lengths, own, contents) if contents else np.zeros(len(lengths), np.uint8)
        )
        self._spelled = re.compile(b"|".join(map(re.escape, contents))) if contents else None
        self._longest = max(map(len, contents), default=0)
        self._is_added = np.zeros(len(lengths), np.bool_)
        self._is_added[own] = True
        self._empty = lengths == 0
        self._alone = np.full(len(lengths), _UNSEEN, np.uint8)
        """`[V]` what is known of each token as the only one of a segment."""
        self._doubtful = np.ones(len(lengths), np.bool_)
        self._short = KeySet()
        self._long: set[bytes] = set()
        self._long_tokens = 0
        self._canonical: dict[bytes, Ids] = {}
        """What the reference makes of refuted segments."""
        self._canonical_tokens = 0

    def canonical(self, ids: Ids) -> bool:
        """True if ids `[N]` int32 are what encoding their text gives."""
        return self.encoded(ids) is ids

    def encoded(self, ids: Ids) -> Ids:
        """What encoding the text of these ids gives, `[N]` int32: `ids` itself if it is the same."""
        found = self.refuted(ids)
        if found is None:
            (encoded,) = self.encode([self.vocabulary.text(ids)])
            return ids if np.array_equal(encoded, ids) else encoded
        if not found:
            return ids
        parts, at = [], 0
        for start, end, own in found:
            parts += [ids[at:start], own]
            at = end
        joined: Ids = np.concatenate([*parts, ids[at:]])
        joined.flags.writeable = False
        return joined

    def refuted(self, ids: Ids) -> list[Refuted] | None:
        """The segments that are not canonical, in order; [] if ids are, None if only encoding them can tell."""
        if not len(ids):
            return []
        if self._canonical_tokens > _MOST_TOKENS:
            self._forget_refuted()
        slots = ids.astype(np.int64)
        if int(slots.min()) < 0 or int(slots.max()) >= self.vocabulary.size or self._empty.take(slots).any():
            return None
        if self._spells_control_token(ids, slots):
            return None
        cut = self._cuts(slots)
        before, after = cut[:-1], cut[1:]
        found = self._refuted_alone(ids, slots, before & after)
        starts = np.flatnonzero(before > after)
        lengths = np.flatnonzero(after > before) + 1 - starts
        short = lengths <= 3
        found += self._refuted_short(ids, starts[short], lengths[short])
        long = np.flatnonzero(~short)
        found += self._refuted_long(ids, starts[long].tolist(), (starts + lengths)[long].tolist())
        return sorted(found, key=lambda one: one[0])

    def _cuts(self, slots: Offsets) -> Mask:
        """`[N + 1]` True where there is a safe cut before a token, and at both ends."""
        kinds = self._edges.left.take(slots[:-1])
        kinds += self._edges.right.take(slots[1:])
        cut: Mask = np.ones(len(slots) + 1, np.bool_)
        cut[1:-1] = np.frombuffer(kinds.tobytes().translate(self._edges.safe), np.bool_)
        return cut

    def _refuted_alone(self, ids: Ids, slots: Offsets, alone: Mask) -> list[Refuted]:
        """Of the segments that are one token."""
        doubtful = self._doubtful.take(slots)
        doubtful &= alone
        places = np.flatnonzero(doubtful)
        if not len(places):
            return []
        tokens = np.unique(ids[places])
        unseen = tokens[self._alone[tokens] == _UNSEEN]
        proven = self._prove([unseen[i : i + 1] for i in range(len(unseen))])
        self._alone[unseen] = np.where(proven, _PROVEN, _REFUTED)
        self._doubtful[unseen] = ~proven
        refuted = places[self._alone[ids[places]] == _REFUTED].tolist()
        return [(at, at + 1, self._canonical_of(ids[at : at + 1])) for at in refuted]

    def _refuted_short(self, ids: Ids, starts: Offsets, lengths: Offsets) -> list[Refuted]:
        """Of the segments of two and three tokens."""
        keys = pack(ids, starts, lengths)
        places = np.flatnonzero(~self._short.holds(keys))
        if not len(places):
            return []
        distinct, first = np.unique(keys[places], return_index=True)
        segments = [ids[starts[at] : starts[at] + lengths[at]] for at in places[first].tolist()]
        unseen = np.array([one.tobytes() not in self._canonical for one in segments])
        proven = np.zeros(len(segments), np.bool_)
        proven[unseen] = self._prove([one for one, new in zip(segments, unseen.tolist(), strict=True) if new])
        self._short.add(distinct[proven])
        bad = places[np.isin(keys[places], distinct[~proven])] if not proven.all() else places[:0]
        spans = zip(starts[bad].tolist(), (starts + lengths)[bad].tolist(), strict=True)
        return [(start, end, self._canonical_of(ids[start:end])) for start, end in spans]

    def _refuted_long(self, ids: Ids, starts: Sequence[int], ends: Sequence[int]) -> list[Refuted]:
        """Of the longer segments, about one in a hundred tokens of prose."""
        data = ids.tobytes()
        keys = [data[4 * start : 4 * end] for start, end in zip(starts, ends, strict=True)]
        unseen = [key for key in dict.fromkeys(keys) if key not in self._long and key not in self._canonical]
        if unseen:
            proven = self._prove([np.frombuffer(key, np.int32) for key in unseen])
            self._remember([key for key, good in zip(unseen, proven.tolist(), strict=True) if good])
        return [
            (start, end, self._canonical_of(ids[start:end]))
            for start, end, key in zip(starts, ends, keys, strict=True)
            if key in self._canonical
        ]

    def _prove(self, segments: Sequence[Ids]) -> Mask:
        """`[N]` True for the segments that the reference writes so; what it writes else is kept."""
        if not segments:
            return np.zeros(0, np.bool_)
        joined: Ids = np.concatenate(segments)
        data = joined.tobytes()
        ends = np.cumsum([len(segment) for segment in segments])
        edges = [0, *(4 * ends).tolist()]
        keys = [data[start:end] for start, end in pairwise(edges)]
        proven = np.ones(len(segments), np.bool_)
        for number, (key, ids) in enumerate(zip(keys, self.encode(self._texts(joined, ends)), strict=True)):
            if ids.tobytes() != key:
                proven[number] = False
                self._canonical[key] = ids
                self._canonical_tokens += len(key) // 4 + len(ids)
        return proven

    def _texts(self, joined: Ids, ends: Offsets) -> list[str]:
        """What each of the segments that end there spells, read all at once."""
        data = self.vocabulary.data(joined)
        edges = [0, *np.cumsum(self.vocabulary.byte_lengths(joined))[ends - 1].tolist()]
        return [data[start:end].decode("utf-8", "replace") for start, end in pairwise(edges)]

    def _canonical_of(self, segment: Ids) -> Ids:
        return self._canonical[segment.tobytes()]

    def _remember(self, proven: Sequence[bytes]) -> None:
        if self._long_tokens > _MOST_TOKENS:
            self._long, self._long_tokens = set(), 0
        self._long.update(proven)
        self._long_tokens += sum(map(len, proven)) // 4

    def _forget_refuted(self) -> None:
        self._canonical, self._canonical_tokens = {}, 0
        self._alone[self._alone == _REFUTED] = _UNSEEN

    def _spells_control_token(self, ids: Ids, slots: Offsets) -> bool:
        """Whether ordinary tokens spell a control token somewhere."""
        if self._spelled is None:
            return False
        marks = self._marks.take(slots)
        begun = marks & INSIDE
        begun[:-1] |= ((marks[:-1] & ENDS) >> 1) & ((marks[1:] & BEGINS) >> 2)
        places = np.flatnonzero(begun)
        if not len(places):
            return False
        if len(places) > _MOST_WINDOWS:
            # As many as were recorded, or more: control tokens share no bytes with each other.
            found = sum(1 for _ in self._spelled.finditer(self.vocabulary.data(ids)))
            return found > int(self._is_added.take(slots).sum())
        widths = self.vocabulary.byte_lengths(ids[places]).tolist()
        for at, width in zip(places.tolist(), widths, strict=True):
            found_at = self._spelled.search(self.vocabulary.data(ids[at : at + 1 + self._longest]))
            if found_at is not None and found_at.start() < width:
                return True
        return False


def _plain(vocabulary: Vocabulary, cuts: SafeCuts, added: dict[int, str], contents: Sequence[bytes]) -> bool:
    """Whether control tokens are told by two bytes and apart from each other, and ids fit the tables."""
    return (
        cuts.apart
        and vocabulary.prefix is Prefix.NEVER
        and not len(vocabulary.entries.far_ids)
        and vocabulary.size <= LARGEST
        and all(len(content) > 1 and "\ufffd".encode() not in content for content in contents)
        and all(vocabulary.token_bytes(token_id) == content.encode("utf-8") for token_id, content in added.items())
    )


def find_prover(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, encode: Encode) -> Prover | None:
    """A prover for a tokenizer; None where no cuts are known to be safe. `encode` is the reference's."""
    cuts = find_safe_cuts(backend)
    if cuts is None:
        return None
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    try:
        return Prover(vocabulary, cuts, added, encode)
    except ValueError:
        return None
