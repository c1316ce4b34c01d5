"""Encodes texts cut at control tokens, each distinct segment once.

A tokenizer first finds the control tokens of a text, then encodes what is between them. So a text may be cut at
control tokens beforehand, if these are found wherever their literal text occurs:

    <|im_start|>  user\\nHi  <|im_end|>  \\n  <|im_start|>  assistant\\n
      token       segment     token  segment   token        segment

A chat repeats most of its segments from turn to turn and from rollout to rollout.

Very long segments are encoded in parts, since encoders take 12 to 200 bytes of memory for each byte of text. A
part ends at a safe cut (see `split_points.py`), so the joined ids are those of the whole. Without safe cuts a text
is encoded whole.

Of a text that begins like one with known ids only the rest is encoded. The prompts of a conversation grow by a
turn each, and the rollouts of a group share their first prompt:

    known   <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n
    text    <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n Hello <|im_end|> …
                                                         ^ the last cut within the common start

What follows a cut never changes the ids before it, so these are taken from the known text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tito_audit.errors import EncodeError
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.tokens.encoders import ReferenceEncoder, well_formed
from tito_audit.tokens.split_points import SafeCuts, without_overlaps
from tito_audit.tokens.vocab import Prefix, Vocabulary, read_steps

if TYPE_CHECKING:
    import tokenizers

MAX_WHOLE = 1 << 20
"""Texts of more characters are encoded in parts."""
PART_SIZE = 1 << 18
"""Characters of a part."""

Encode: TypeAlias = Callable[[Sequence[str]], list[Ids]]


def encode_in_parts(encode: Encode, safe_cuts: Callable[[], SafeCuts | None]) -> Encode:
    """An encoder with the same ids that encodes long texts in parts, to bound its memory."""

    def encoded(texts: Sequence[str]) -> list[Ids]:
        if max(map(len, texts), default=0) <= MAX_WHOLE or (safe := safe_cuts()) is None:
            return encode(texts)
        short = iter(encode([text for text in texts if len(text) <= MAX_WHOLE]))
        batch: list[Ids] = []
        for text in texts:
            if len(text) <= MAX_WHOLE:
                batch.append(next(short))
                continue
            parts = safe.divide(well_formed(text), PART_SIZE)
            batch.append(np.concatenate([encode([part])[0] for part in parts]))
            batch[-1].flags.writeable = False
        return batch

    return encoded


IdSegment = tuple[int, int, bytes]
"""The control token before a segment (-1: the start), the one after it (-1: the end), and its ids as bytes."""
_AFTER = itemgetter(1)

_NEIGHBOURS = ("", "a", " a ", "\n", "\n\n", "e\u0301", "\u0301", "12", "中", "'s", ".", "<", "|>")
"""Texts that are put around control tokens in the probes."""
_MAX_CONTROL_TOKENS = 1024
"""With more added tokens, only those marked special are used; gemma-3 has 6,000 unused ones."""
_MAX_BEGINNINGS = 16 << 20
"""Characters of all prefixes of added tokens together; those of gemma-3 have a million."""
_FULLY_PROBED = 16
"""How many control tokens are probed with all neighbours; each is probed at least once."""


class ControlTokens:
    """The control tokens at which texts may be cut, by their literal text; without any, a text is one segment."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self.split: Callable[[str], list[str]] = (
            re.compile(f"({any_of(sorted(tokens))})").split if tokens else lambda text: [text]
        )
        """Segments and control tokens alternating, with a segment first and last; joined, they are the text."""
        self._contents = {token_id: content for content, token_id in tokens.items()}
        self._arrays = {content: np.array([token_id], np.int32) for content, token_id in tokens.items()}
        # By id + 1, with a slot more on either side to which out-of-range ids are clipped
        self._table: Mask = np.zeros(max(tokens.values(), default=-1) + 3, np.bool_)
        self._table[[token_id + 1 for token_id in tokens.values()]] = True

    def join_ids(self, pieces: Sequence[str], ids_by_segment: Mapping[str, Ids]) -> Ids:
        """The ids of a text, from its `split` and the ids of its segments."""
        if len(pieces) == 1:
            return ids_by_segment[pieces[0]]
        # An empty segment has no ids, whatever an encoder makes of an empty text.
        arrays = self._arrays
        parts = [arrays[piece] if i & 1 else ids_by_segment[piece] for i, piece in enumerate(pieces) if piece]
        ids: Ids = np.concatenate(parts)
        ids.flags.writeable = False
        return ids

    def positions(self, ids: Ids) -> Offsets:
        """The positions of control tokens in these ids, `[N]`."""
        # The highest int32 wraps around to the lowest, which is no token either.
        return self._table.take(ids + np.int32(1), mode="clip").nonzero()[0]

    def id_segments(self, ids: Ids) -> list[IdSegment]:
        """The segments between control tokens, including empty ones."""
        at = self.positions(ids).tolist()
        around = [-1, *ids[at].tolist(), -1]
        data = ids.astype(np.int32, copy=False).tobytes()
        segments, start = [], 0
        for before, after, end in zip(around, around[1:], [*at, len(ids)], strict=False):
            segments.append((before, after, data[4 * start : 4 * end]))
            start = end + 1
        return segments

    def find_last_before(self, text: str, ids: Ids, size: int) -> tuple[int, int]:
        """How many characters and ids there are up to the last control token among the first `size` ids.

        (0, 0) if there is none, or if the text lacks a control token that follows it.
        """
        first, near = size, 64
        while first and not len(at := self.positions(ids[max(size - near, 0) : size])):
            first, near = max(size - near, 0), 4 * near
        if not first:
            return 0, 0
        first = max(size - near, 0) + int(at[-1])
        end, content = len(text), ""
        for place in reversed(self.positions(ids[first:]).tolist()):
            content = self._contents[int(ids[first + place])]
            end = text.rfind(content, 0, end)
            if end < 0:
                return 0, 0
        return end + len(content), first + 1

    def pick_segments(self, text: str, ids: Ids, numbers: Iterable[int]) -> list[tuple[str, bytes]] | None:
        """The segments with these (ascending) numbers, and all without ids, each with its ids as bytes.

        None if text and ids do not have the same control tokens: one is not found, or a segment holds one. They
        are searched one by one in the order of the ids, which is faster than finding all.
        """
        at = self.positions(ids).tolist()
        parts: list[tuple[str, bytes]] = []
        wanted = iter([*numbers, -1])
        number, begin, first = next(wanted), 0, 0
        for here, place in enumerate([*at, len(ids)]):
            content = self._contents[int(ids[place])] if place < len(ids) else ""
            end = text.find(content, begin) if content else len(text)
            if end < 0:
                return None
            if here == number or (begin < end and first == place):
                segment = text[begin:end]
                if len(self.split(segment)) > 1:
                    return None
                parts.append((segment, ids[first:place].tobytes()))
                number = next(wanted) if here == number else number
            begin, first = end + len(content), place + 1
        return parts

    def pair_segments(self, text: str, ids: Ids) -> list[tuple[str, IdSegment]] | None:
        """Each segment of a text with its ids; None if text and ids differ in control tokens."""
        pieces, stretches = self.split(text), self.id_segments(ids)
        if list(map(self.tokens.get, pieces[1::2])) != list(map(_AFTER, stretches[:-1])):
            return None
        return list(zip(pieces[::2], stretches, strict=True))


class SegmentEncoder:
    """Encodes each distinct segment once, within a call and across calls."""

    def __init__(
        self,
        encode: Encode,
        cuts: ControlTokens,
        cached_characters: int,
        safe_cuts: Callable[[], SafeCuts | None] = lambda: None,
    ) -> None:
        """`safe_cuts` finds where very long segments may be cut."""
        self.cuts = cuts
        self.cached_characters = cached_characters
        """The most characters of all cached segments."""
        self.cache: OrderedDict[str, Ids] = OrderedDict()
        """Segments and their ids, the least recently used first."""
        self.cached_length = 0
        """The characters of all cached segments."""
        self._encode = encode
        self._in_parts = encode_in_parts(encode, safe_cuts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        if not self.cuts.tokens:  # a text is one segment
            return list(map(self._look_up(texts).__getitem__, texts))
        if len(texts) == 1:
            pieces = self.cuts.split(texts[0])
            return [self.cuts.join_ids(pieces, self._look_up(pieces[::2]))]
        distinct = dict.fromkeys(texts)
        cut = dict(zip(distinct, map(self.cuts.split, distinct), strict=True))
        ids_by_segment = self._look_up([piece for pieces in cut.values() for piece in pieces[::2]])
        whole = {text: self.cuts.join_ids(pieces, ids_by_segment) for text, pieces in cut.items()}
        return [whole[text] for text in texts]

    def encode_segments(self, segments: Sequence[str]) -> list[Ids]:
        """The ids of texts that contain no control token."""
        ids_by_segment = self._look_up(segments)
        return [ids_by_segment[segment] for segment in segments]

    def uncached_segments(self, text: str) -> list[str]:
        """The segments of a text that are not in the cache."""
        return [piece for piece in dict.fromkeys(self.cuts.split(text)[::2]) if piece not in self.cache]

    def encode_uncached(self, segments: Sequence[str]) -> dict[str, Ids]:
        """The ids by segment without touching the cache, for a second thread."""
        return dict(zip(segments, self._in_parts(segments), strict=True))

    def remember(self, encoded: Mapping[str, Ids]) -> None:
        """Cache what `encode_uncached` returned."""
        self._add_to_cache({segment: ids for segment, ids in encoded.items() if segment not in self.cache})

    def _look_up(self, segments: Iterable[str]) -> dict[str, Ids]:
        """The ids by segment, from the cache or newly encoded."""
        ids_by_segment: dict[str, Ids] = {}
        missing: list[str] = []
        cache = self.cache
        for segment in dict.fromkeys(segments):
            ids = cache.get(segment)
            if ids is None:
                missing.append(segment)
            else:
                cache.move_to_end(segment)
                ids_by_segment[segment] = ids
        if missing:
            # `_in_parts` would do for all, but takes one call more
            encode = self._encode if max(map(len, missing)) <= MAX_WHOLE else self._in_parts
            encoded = dict(zip(missing, encode(missing), strict=True))
            ids_by_segment |= encoded
            self._add_to_cache(encoded)
        return ids_by_segment

    def _add_to_cache(self, encoded: Mapping[str, Ids]) -> None:
        """Cache these segments and drop the least recently used ones."""
        for segment, ids in encoded.items():
            if len(segment) > self.cached_characters // 4:
                continue
            self.cache[segment] = ids
            self.cached_length += len(segment)
        while self.cached_length > self.cached_characters:
            segment, _ = self.cache.popitem(last=False)
            self.cached_length -= len(segment)


def find_control_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> ControlTokens:
    """The control tokens at which texts may be cut; none if this cannot be shown for the tokenizer.

    They are derived from its definition, then checked on probes: cut and whole texts must encode alike.
    """
    none = ControlTokens({})
    try:
        normal = not read_steps(backend.normalizer)
        read_steps(backend.pre_tokenizer)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return none
    if vocabulary.prefix is Prefix.FIRST_UNLESS_SPACE:
        return none
    added = backend.get_added_tokens_decoder()
    usable = {i: token for i, token in added.items() if normal or not token.normalized}
    usable = {i: token for i, token in usable.items() if _is_found_everywhere(token)}
    if len(usable) > _MAX_CONTROL_TOKENS:
        usable = {i: token for i, token in usable.items() if token.special}
    if sum(len(token.content) ** 2 for token in added.values()) > _MAX_BEGINNINGS:
        return none
    contents = {token.content for token in added.values()}
    apart = without_overlaps({token.content for token in usable.values()}, contents)
    controls = ControlTokens({token.content: i for i, token in usable.items() if token.content in apart})
    reference = ReferenceEncoder(backend)
    literals = list(controls.tokens)
    probes = ["".join(literals)]
    for content in literals[:: max(1, len(literals) // _FULLY_PROBED)]:
        around = zip(_NEIGHBOURS, reversed(_NEIGHBOURS), strict=True)
        probes += [before + content + after for before, after in around]
    pieces = [controls.split(probe) for probe in probes]
    segments = list(dict.fromkeys(piece for cut in pieces for piece in cut[::2]))
    try:
        ids_by_segment = dict(zip(segments, reference.encode_single_threaded(segments), strict=True))
        whole = reference.encode_single_threaded(probes)
    except EncodeError:
        return none
    joined = [controls.join_ids(cut, ids_by_segment) for cut in pieces]
    return controls if all(map(np.array_equal, joined, whole)) else none


def _is_found_everywhere(token: tokenizers.AddedToken) -> bool:
    """Whether a token is found wherever its literal text occurs, whatever is next to it.

    Its ends must be symbols, so that it neither continues a word nor takes spaces from its neighbours. A lone
    surrogate in a text is replaced only after the text is cut, so a token with the replacement would be missed.
    """
    ends = token.content[:1] + token.content[-1:]
    signs = bool(ends) and not any(char.isalnum() or char.isspace() or char == "_" for char in ends)
    replaced = any(char >= "\U00010000" or char == "\ufffd" for char in token.content)
    return signs and not replaced and not (token.lstrip or token.rstrip or token.single_word)


def any_of(words: list[str]) -> str:
    """A pattern for any of these sorted words, preferring longer ones.

    Common prefixes are written once, so a position is rejected as soon as no word continues there.
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word)
    optional = groups.pop("", None) is not None
    branches = []
    for group in groups.values():
        start = common_beginning(group[0], group[-1])
        rest = [word[len(start) :] for word in group]
        branches.append(re.escape(start) + (any_of(rest) if len(rest) > 1 else ""))
    joined = branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)})"
    return joined + ("?" if optional else "")


def common_beginning(first: str, last: str) -> str:
    """The common prefix of the first and the last of sorted words, and so of all of them."""
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


_MIN_LENGTH = 2048
"""Only texts of at least this many characters are compared with earlier ones."""
_MAX_KNOWN = 4
"""How many texts are remembered: the calls of a rollout may alternate between chains, and the next rollout may
begin the same way."""


class KnownText:
    """A text with its ids `[N]`; its cuts, which are the ends of its control tokens, are found when needed."""

    def __init__(
        self, cuts: ControlTokens, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0
    ) -> None:
        """Text and ids begin like those of `base`, with which they share the first `shared` cuts."""
        self.text = text
        self.ids = ids
        self._control_tokens = cuts
        self.text_ends: list[int] = []
        """The number of characters before each cut found so far."""
        self.id_ends: list[int] = []
        """The number of ids before each cut found so far."""
        self._cuts_found = False
        if base is not None and shared:
            self.text_ends, self.id_ends = base.text_ends[:shared], base.id_ends[:shared]

    def count_shared_cuts(self, text: str) -> int:
        """How many cuts the common start with another text holds."""
        if not self._cuts_found:
            # Finding cuts costs a third of encoding: not worth it if only a system prompt is shared.
            half = len(self.text) // 2
            near = self.text[max(half - 32, 0) : half]  # a quick test before half of the text is compared
            if not text.startswith(near, half - len(near)) or not text.startswith(self.text[:half]):
                return 0
            self._cuts_found = True
            begin, first = (self.text_ends or [0])[-1], (self.id_ends or [0])[-1]
            pieces = self._control_tokens.split(self.text[begin:])
            at = self._control_tokens.positions(self.ids[first:]) + first
            # Not if text and ids differ in control tokens: a model may write an unknown character as one.
            if list(map(self._control_tokens.tokens.get, pieces[1::2])) == self.ids[at].tolist():
                self.text_ends += list(accumulate(map(len, pieces), initial=begin))[2::2]
                self.id_ends += (at + 1).tolist()
        low, high = 0, len(self.text_ends)
        first = high
        while low < high:
            begin, end = self.text_ends[low - 1] if low else 0, self.text_ends[first - 1]
            if text.startswith(self.text[begin:end], begin):
                low = first
            else:
                high = first - 1
            first = (low + high + 1) // 2
        return low


class KnownTexts:
    """The last few texts with known ids, possibly of several chains that grow in turns."""

    def __init__(self, cuts: ControlTokens) -> None:
        self._control_tokens = cuts
        self._known: list[KnownText] = []

    def find_longest(self, text: str) -> tuple[KnownText | None, int, int, int]:
        """The known text that shares the most with this one; how many cuts, characters and ids they share.

        None and zeros if no known text shares a cut.
        """
        best, most, longest = None, 0, (0, 0)
        for text_known in reversed(self._known):
            # To share a later cut, they must share more characters.
            if best is not None and not text.startswith(text_known.text[: longest[0] + 1]):
                continue
            shared = text_known.count_shared_cuts(text)
            if shared and text_known.text_ends[shared - 1] > longest[0]:
                longest = text_known.text_ends[shared - 1], text_known.id_ends[shared - 1]
                best, most = text_known, shared
        return best, most, *longest

    def ids_of(self, text: str) -> Ids | None:
        """The ids of exactly this text; None if unknown."""
        return next((earlier.ids for earlier in reversed(self._known) if earlier.text == text), None)

    def remember(self, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0) -> None:
        """Remember a text; it replaces `base` if it continues all of it."""
        if base is not None and base in self._known and len(base.id_ends) == shared:
            self._known.remove(base)
        self._known.append(KnownText(self._control_tokens, text, ids, base, shared))
        del self._known[:-_MAX_KNOWN]


class PrefixEncoder:
    """Encodes only the new part of a long text."""

    def __init__(self, whole: SegmentEncoder, cuts: ControlTokens) -> None:
        self._whole = whole
        self._known = KnownTexts(cuts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        if len(texts) != 1 or len(texts[0]) < _MIN_LENGTH:
            return self._whole.encode_batch(texts)
        text = texts[0]
        same = self._known.ids_of(text)
        if same is not None:
            return [same]
        base, shared, characters, first = self._known.find_longest(text)
        if base is not None and characters == len(text):
            return [base.ids[:first]]
        (ids,) = self._whole.encode_batch([text[characters:]])
        if base is not None:
            ids = np.concatenate([base.ids[:first], ids])
            ids.flags.writeable = False
        self._known.remember(text, ids, base, shared)
        return [ids]
