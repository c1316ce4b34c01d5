"""Segments: texts cut at control tokens, each distinct segment encoded once.

A tokenizer first takes the control tokens out of a text, then encodes what is between them piece by piece. So a
text may be cut there beforehand, at tokens whose places depend only on their literal text:

    <|im_start|>  user\\nHi  <|im_end|>  \\n  <|im_start|>  assistant\\n
      token       segment     token  segment   token        segment

A chat repeats most of its segments, from turn to turn and from rollout to rollout.

Very long segments are encoded in parts: an encoder takes 12 bytes for each byte of a text, the reference some 200.
A part ends at a safe cut (see `split_points.py`), so the ids of the parts, joined, are those of the whole. A text
without safe cuts, and every text of a tokenizer without a table of them, is encoded whole.

Of texts that begin like texts with known ids only the new part is encoded. The prompts of a conversation grow by a
turn each, and the rollouts of a group share their first prompt:

    known   <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n
    text    <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n Hello <|im_end|> …
                                                         ^ the last cut within what both begin with

Text before a cut is encoded as if nothing followed, so the ids up to the cut are those of the known text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tito_audit.errors import EncodeError
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.tokens.encoders import ReferenceEncoder, well_formed
from tito_audit.tokens.split_points import SafeCuts, apart_from
from tito_audit.tokens.vocab import Prefix, Vocabulary, part_steps

if TYPE_CHECKING:
    import tokenizers

LONG = 1 << 20
"""Texts of more characters are encoded in parts."""
PART = 1 << 18
"""Characters of a part."""

Encode: TypeAlias = Callable[[Sequence[str]], list[Ids]]


def in_parts(encode: Encode, safe_cuts: Callable[[], SafeCuts | None]) -> Encode:
    """The same ids, without the memory that long texts would take as a whole."""

    def encoded(texts: Sequence[str]) -> list[Ids]:
        if max(map(len, texts), default=0) <= LONG or (safe := safe_cuts()) is None:
            return encode(texts)
        short = iter(encode([text for text in texts if len(text) <= LONG]))
        return [next(short) if len(text) <= LONG else _joined(encode, text, safe) for text in texts]

    return encoded


def _joined(encode: Encode, text: str, safe: SafeCuts) -> Ids:
    ids: Ids = np.concatenate([encode([part])[0] for part in safe.parts(well_formed(text), PART)])
    ids.flags.writeable = False
    return ids


Stretch = tuple[int, int, bytes]
"""The ids of a segment with its neighbours: the control token before (-1: the start), the one after (-1: the
end), the ids as bytes."""

_SIDES = ("", "a", " a ", "\n", "\n\n", "e\u0301", "\u0301", "12", "中", "'s", ".", "<", "|>")
"""Texts that surround a control token in the probes."""
_MOST = 1024
"""With more control tokens than this, only those marked as special are used (gemma-3 has 6,000 unused ones)."""
_BEGINNINGS = 16 << 20
"""Characters that all beginnings of control tokens may have together; those of gemma-3 have a million."""
_PROBED = 16
"""How many control tokens are probed with all neighbours; every control token is probed once."""


class Cuts:
    """Where the texts of one tokenizer may be cut: its control tokens, by their literal text.

    Without any (`Cuts({})`) a text is one segment.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self._split = re.compile(f"({pattern_of(sorted(tokens))})").split if tokens else None
        self._contents = {token_id: content for content, token_id in tokens.items()}
        self._arrays = {content: np.array([token_id], np.int32) for content, token_id in tokens.items()}
        # One slot more on either side, to which out-of-range ids are clipped.
        self._table: Mask = np.zeros(max(tokens.values(), default=-1) + 3, np.bool_)
        self._table[[token_id + 1 for token_id in tokens.values()]] = True

    def split(self, text: str) -> list[str]:
        """Segments and control tokens alternating, a segment first and last; joined, they are the text."""
        return self._split(text) if self._split is not None else [text]

    def join(self, pieces: Sequence[str], ids_by_segment: Mapping[str, Ids]) -> Ids:
        """The ids of a split text, from the ids of its segments."""
        if len(pieces) == 1:
            return ids_by_segment[pieces[0]]
        # Between two adjacent control tokens there is no text, whatever an encoder makes of the empty one.
        arrays = self._arrays
        parts = [arrays[piece] if i & 1 else ids_by_segment[piece] for i, piece in enumerate(pieces) if piece]
        ids: Ids = np.concatenate(parts)
        ids.flags.writeable = False
        return ids

    def positions(self, ids: Ids) -> Offsets:
        """The positions `[N]` of the control tokens at which texts are cut."""
        # The highest int32 wraps around to the lowest, which is not a token either.
        return self._table.take(ids + np.int32(1), mode="clip").nonzero()[0]

    def divide(self, ids: Ids) -> list[Stretch]:
        """The ranges between control tokens, including empty ones."""
        at = self.positions(ids).tolist()
        around = [-1, *ids[at].tolist(), -1]
        data = ids.astype(np.int32, copy=False).tobytes()
        stretches, start = [], 0
        for before, after, end in zip(around, around[1:], [*at, len(ids)], strict=False):
            stretches.append((before, after, data[4 * start : 4 * end]))
            start = end + 1
        return stretches

    def tail(self, text: str, ids: Ids, size: int) -> tuple[int, int]:
        """How many characters and ids of a text end with the last control token within its first `size` ids; 0
        and 0 if there is none, or the text does not hold those after it."""
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

    def some_parts(self, text: str, ids: Ids, numbers: Iterable[int]) -> list[tuple[str, bytes]] | None:
        """The segments with these numbers, ascending, and those without ids, each with its ids as bytes.

        None if a control token is not found, or one of the segments holds one: text and ids do not have the same.
        Control tokens are looked for one by one in the order of the ids, which is faster than finding all.
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

    def parts(self, text: str, ids: Ids) -> list[tuple[str, Stretch]] | None:
        """Each segment of a text with its ids; None if text and ids do not have the same control tokens."""
        pieces, stretches = self.split(text), self.divide(ids)
        spelled = [self.tokens[piece] for piece in pieces[1::2]]
        if spelled != [after for _, after, _ in stretches[:-1]]:
            return None
        return list(zip(pieces[::2], stretches, strict=True))


class SegmentEncoder:
    """An encoder that encodes each distinct segment once, within a call and across calls."""

    def __init__(
        self,
        encode: Encode,
        cuts: Cuts,
        cached_characters: int,
        safe_cuts: Callable[[], SafeCuts | None] = lambda: None,
    ) -> None:
        """`safe_cuts` finds the cuts at which very long segments are encoded in parts."""
        self.cuts = cuts
        self.cached_characters = cached_characters
        """How many characters of text it keeps the ids of."""
        self.cache: OrderedDict[str, Ids] = OrderedDict()
        """Segments and their ids, the least recently used first."""
        self.held = 0
        """How many characters the cached segments have."""
        self._encode = encode
        self._in_parts = in_parts(encode, safe_cuts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        if len(texts) == 1:
            pieces = self.cuts.split(texts[0])
            return [self.cuts.join(pieces, self._look_up(pieces[::2]))]
        cut = {text: self.cuts.split(text) for text in dict.fromkeys(texts)}
        ids_by_segment = self._look_up([piece for pieces in cut.values() for piece in pieces[::2]])
        whole = {text: self.cuts.join(pieces, ids_by_segment) for text, pieces in cut.items()}
        return [whole[text] for text in texts]

    def encode_segments(self, segments: Sequence[str]) -> list[Ids]:
        """The ids of texts that contain no control token at which to cut."""
        ids_by_segment = self._look_up(segments)
        return [ids_by_segment[segment] for segment in segments]

    def unknown(self, text: str) -> list[str]:
        """The segments of a text that are not in the cache."""
        return [piece for piece in dict.fromkeys(self.cuts.split(text)[::2]) if piece not in self.cache]

    def encode_apart(self, segments: Sequence[str]) -> dict[str, Ids]:
        """The ids by segment, bypassing the cache, for a second thread."""
        return dict(zip(segments, self._in_parts(segments), strict=True))

    def remember(self, encoded: Mapping[str, Ids]) -> None:
        """Cache what `encode_apart` returned."""
        self._remember({segment: ids for segment, ids in encoded.items() if segment not in self.cache})

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
            encode = self._encode if max(map(len, missing)) <= LONG else self._in_parts  # a call less for each
            encoded = dict(zip(missing, encode(missing), strict=True))
            ids_by_segment |= encoded
            self._remember(encoded)
        return ids_by_segment

    def _remember(self, encoded: Mapping[str, Ids]) -> None:
        """Keep these segments and drop the least recently used ones."""
        for segment, ids in encoded.items():
            if len(segment) > self.cached_characters // 4:
                continue
            self.cache[segment] = ids
            self.held += len(segment)
        while self.held > self.cached_characters:
            segment, _ = self.cache.popitem(last=False)
            self.held -= len(segment)


def find_cuts(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Cuts:
    """The control tokens at which texts may be cut; none if this cannot be proven for the tokenizer.

    Derived from the definition of the tokenizer, then checked on probes: cut and whole texts must encode the same.
    """
    none = Cuts({})
    try:
        normal = not part_steps(backend.normalizer)
        part_steps(backend.pre_tokenizer)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return none
    if vocabulary.prefix is Prefix.FIRST_UNLESS_SPACE:
        return none
    added = backend.get_added_tokens_decoder()
    plain = {i: token for i, token in added.items() if _plain(token) and (normal or not token.normalized)}
    if len(plain) > _MOST:
        plain = {i: token for i, token in plain.items() if token.special}
    if sum(len(token.content) ** 2 for token in added.values()) > _BEGINNINGS:
        return none
    apart = apart_from({token.content for token in plain.values()}, {token.content for token in added.values()})
    cuts = Cuts({token.content: i for i, token in plain.items() if token.content in apart})
    return cuts if _holds(cuts, ReferenceEncoder(backend)) else none


def _plain(token: tokenizers.AddedToken) -> bool:
    """Whether a token is found wherever its literal text occurs, whatever is next to it.

    Its ends are symbols, so it neither completes a word nor takes spaces from neighbours that want them. Half a
    surrogate pair in a text is replaced after the text is cut, so a token that contains the replacement would be
    found too late.
    """
    ends = token.content[:1] + token.content[-1:]
    signs = bool(ends) and not any(char.isalnum() or char.isspace() or char == "_" for char in ends)
    replaced = any(char >= "\U00010000" or char == "\ufffd" for char in token.content)
    return signs and not replaced and not (token.lstrip or token.rstrip or token.single_word)


def _holds(cuts: Cuts, reference: ReferenceEncoder) -> bool:
    """Whether the reference gives cut and whole texts the same ids."""
    contents = list(cuts.tokens)
    probes = ["".join(contents)]
    for content in contents[:: max(1, len(contents) // _PROBED)]:
        probes += [before + content + after for before, after in zip(_SIDES, reversed(_SIDES), strict=True)]
    pieces = [cuts.split(probe) for probe in probes]
    segments = list(dict.fromkeys(piece for cut in pieces for piece in cut[::2]))
    try:
        ids_by_segment = dict(zip(segments, reference.encode_alone(segments), strict=True))
        whole = reference.encode_alone(probes)
    except EncodeError:
        return False
    return all(np.array_equal(cuts.join(cut, ids_by_segment), ids) for cut, ids in zip(pieces, whole, strict=True))


def pattern_of(words: list[str]) -> str:
    """A pattern for any of these sorted words, the longest where one begins another.

    Common beginnings are written once, so a place in a text is rejected as soon as no word continues there.
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word)
    optional = groups.pop("", None) is not None
    branches = []
    for group in groups.values():
        start = shared_start(group[0], group[-1])
        rest = [word[len(start) :] for word in group]
        branches.append(re.escape(start) + (pattern_of(rest) if len(rest) > 1 else ""))
    joined = branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)})"
    return joined + ("?" if optional else "")


def shared_start(first: str, last: str) -> str:
    """The common beginning of the first and last of sorted words, and so of all of them."""
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


_LONG_PROMPT = 2048
"""Texts of at least this many characters are compared with earlier ones."""
_KEPT = 4
"""How many texts are remembered: a rollout's calls may alternate between several chains, and the next rollout may
begin the same way."""


class KnownText:
    """A text with its ids `[N]`, and the cuts found in it."""

    def __init__(self, cuts: Cuts, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0) -> None:
        """The first `shared` cuts are those of `base`, with which text and ids begin."""
        self.text = text
        self.ids = ids
        self._cuts = cuts
        self._ends: list[int] = []
        """Characters up to the end of each cut token; found when a text arrives that may share some."""
        self._tokens: list[int] = []
        """The same, counted in ids."""
        self._read = False
        if base is not None and shared:
            self._ends, self._tokens = base._ends[:shared], base._tokens[:shared]

    @property
    def tokens(self) -> Sequence[int]:
        """Ids up to the end of each cut token found so far."""
        return self._tokens

    def shared(self, text: str) -> int:
        """How many cuts the common start of this text and another one holds."""
        if not self._read:
            # Finding cuts costs a third of encoding: not worth it if only a system prompt is shared.
            half = len(self.text) // 2
            near = self.text[max(half - 32, 0) : half]  # fewer characters are compared before all of them are
            if not text.startswith(near, half - len(near)) or not text.startswith(self.text[:half]):
                return 0
            self._read = True
            begin, first = self.up_to(len(self._ends))
            pieces = self._cuts.split(self.text[begin:])
            at = self._cuts.positions(self.ids[first:]) + first
            # No more if text and ids differ there: a model may write an unknown character as a control token.
            if [self._cuts.tokens[piece] for piece in pieces[1::2]] == self.ids[at].tolist():
                self._ends += list(accumulate(map(len, pieces), initial=begin))[2::2]
                self._tokens += (at + 1).tolist()
        low, high = 0, len(self._ends)
        first = high
        while low < high:
            begin, end = self._ends[low - 1] if low else 0, self._ends[first - 1]
            if text.startswith(self.text[begin:end], begin):
                low = first
            else:
                high = first - 1
            first = (low + high + 1) // 2
        return low

    def up_to(self, shared: int) -> tuple[int, int]:
        """How many characters and ids there are up to the end of the first `shared` cuts."""
        return (self._ends[shared - 1], self._tokens[shared - 1]) if shared else (0, 0)


class KnownTexts:
    """The last few texts with known ids, of several chains that grow by turns."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._known: list[KnownText] = []

    def find(self, text: str) -> tuple[KnownText | None, int, int, int]:
        """The known text that shares the most with this one, how many cuts, and how many characters and ids up to
        the end of the last; None and zeros if none shares any."""
        best, most, longest = None, 0, (0, 0)
        for text_known in reversed(self._known):
            shared = text_known.shared(text)
            if shared and (size := text_known.up_to(shared)) > longest:
                best, most, longest = text_known, shared, size
        return best, most, *longest

    def ids_of(self, text: str) -> Ids | None:
        """The ids of exactly this text; None if it is not known."""
        return next((earlier.ids for earlier in reversed(self._known) if earlier.text == text), None)

    def keep(self, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0) -> None:
        """Remember a text, replacing `base` if it continues all of it."""
        if base is not None and base in self._known and len(base.tokens) == shared:
            self._known.remove(base)
        self._known.append(KnownText(self._cuts, text, ids, base, shared))
        del self._known[:-_KEPT]


class PrefixEncoder:
    """An encoder that encodes only the new part of a long text."""

    def __init__(self, whole: SegmentEncoder, cuts: Cuts) -> None:
        self._whole = whole
        self._known = KnownTexts(cuts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        if len(texts) != 1 or len(texts[0]) < _LONG_PROMPT:
            return self._whole.encode_batch(texts)
        text = texts[0]
        same = self._known.ids_of(text)
        if same is not None:
            return [same]
        base, shared, characters, first = self._known.find(text)
        if base is not None and characters == len(text):
            return [base.ids[:first]]
        (ids,) = self._whole.encode_batch([text[characters:]])
        if base is not None:
            ids = np.concatenate([base.ids[:first], ids])
            ids.flags.writeable = False
        self._known.keep(text, ids, base, shared)
        return [ids]
