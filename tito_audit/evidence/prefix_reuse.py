"""Prompts compared only where they differ from the prompts before them.

A conversation of T calls holds O(T²) tokens of prompts, of which O(T) are new.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tito_audit.align.drift import Pair, align, differing_tokens
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.stretches import Stretch, stretches
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.prefix import common_prefix, same_ids
from tito_audit.tokens.prefix_cache import KnownText, KnownTexts
from tito_audit.tokens.vocab import Vocabulary

_KEPT = 4
"""How many sequences' pieces are kept: two chains, both sides."""
_WORTH = 64
"""The fewest shared tokens for which pieces are reused."""
_REPLACED = "\ufffd"
"""The text of broken characters, whatever their bytes."""


class PiecesCache:
    """The pieces of sequences with a common start, computed once for what they share."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: list[Pieces] = []

    def of(self, ids: Ids) -> Pieces:
        """What `Reference.pieces` returns."""
        best, shared = None, 0
        for text in self._known:
            common = common_prefix(ids, text.ids)
            if common == len(ids) == len(text):
                return text
            if common > shared:
                best, shared = text, common
        if best is None or shared < _WORTH:
            pieces = self._reference.pieces(ids)
        else:
            # The pieces of `ids`: the first `shared` of known pieces, then `rest`.
            rest = self._reference.pieces(ids[shared:])
            size = int(best.end[shared - 1])
            pieces = Pieces(
                ids,
                np.concatenate([best.end[:shared], rest.end + size]),
                best.data[:size] + rest.data,
                np.concatenate([best.control[:shared], rest.control]),
            )
            if shared == len(best):
                self._known = [text for text in self._known if text is not best]
        self._known.append(pieces)
        del self._known[:-_KEPT]
        return pieces


class SpelledTexts:
    """Texts that recorded ids are known to spell, to confirm what the fast renderer writes."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known = KnownTexts(reference.tokenizer.cuts)

    def keep(self, text: str, recorded: Ids) -> None:
        """Remember that these ids spell this text."""
        self._known.keep(text, recorded)

    def confirms(self, text: str, recorded: Ids) -> bool:
        """Whether the ids spell exactly this text, in any tokens."""
        if _REPLACED in text:
            return False
        nearest, shared = self._known.find(text)
        characters, first = nearest.up_to(shared) if nearest is not None else (0, 0)
        if nearest is not None and not same_ids(nearest.ids[:first], recorded[:first]):
            nearest, shared, characters, first = None, 0, 0, 0
        rest, own = text[characters:], recorded[first:]
        if self._reference.tokenizer.has_more_bytes(own, rest) or self._reference.text(own) != rest:
            return False
        self._known.keep(text, recorded, nearest, shared)
        return True


class Comparison:
    """A text with its ids and recorded ids that spell the same text; both have the same control tokens."""

    def __init__(self, canonical: KnownText, recorded: KnownText) -> None:
        self.canonical = canonical
        self.recorded = recorded

    def shared(self, text: str, recorded: Ids, reference: Reference) -> int:
        """How many cuts from the start another text and its ids share with these; the last is at a control
        token."""
        shared = self.canonical.shared(text)
        ids, tokens = self.canonical.ids, self.canonical.tokens
        while shared and ids[tokens[shared - 1] - 1] not in reference.vocabulary.special_ids:
            shared -= 1
        first = self.recorded.up_to(shared)[1] if shared else 0
        return shared if same_ids(self.recorded.ids[:first], recorded[:first]) else 0


@dataclass(frozen=True, slots=True)
class PairedPieces:
    """Recorded ids with those of a text of other bytes, and the pieces of both that were paired."""

    recorded: Ids
    canonical: Ids
    pairs: Sequence[Pair]

    def shared_pairs(self, recorded: Ids, canonical: Ids) -> frozenset[Pair]:
        """The pairs that lie in what other ids of both sides begin with, so that they differ as they do here."""
        size, other_size = common_prefix(recorded, self.recorded), common_prefix(canonical, self.canonical)
        return frozenset([pair for pair in self.pairs if pair[1] < size and pair[3] < other_size])


def compare_text(
    text: str, recorded: Ids, before: Comparison | PairedPieces | None, reference: Reference, pieces: PiecesCache
) -> tuple[Sequence[Stretch], Comparison | PairedPieces | None]:
    """Where recorded ids differ from those of a text, after the part compared `before`, and the new comparison.

    Ids with equal bytes are paired by where their tokens end, so nothing before a shared control token affects
    what follows it. If bytes differ, or nothing is shared, the whole text is compared: pieces that were paired
    before are paired again, and not looked into.
    """
    if isinstance(before, Comparison) and not reference.tokenizer.has_more_bytes(recorded, text):
        shared = before.shared(text, recorded, reference)
        rest = _compare_rest(text, recorded, before, shared, reference) if shared else None
        if rest is not None:
            return rest
    encoded = reference.encode_as(text, recorded)
    if same_ids(encoded, recorded):
        return [], comparison_of_equal(text, recorded, reference)
    looked_into = before.shared_pairs(recorded, encoded) if isinstance(before, PairedPieces) else ()
    changed = changed_text(text, recorded, encoded, reference, looked_into=looked_into)
    if changed is None:
        both = pieces.of(recorded), pieces.of(encoded)
        pairs: list[Pair] = []
        differing = stretches(*both, align(*both, looked_into=looked_into, pairs=pairs))
        changed = ChangedTexts(differing, pairs, both[0].data == both[1].data)
    if not changed.same_bytes:
        return changed.stretches, PairedPieces(recorded, encoded, changed.pairs)
    cuts = reference.tokenizer.cuts
    own, theirs = KnownText(cuts, text, recorded), KnownText(cuts, text, encoded)
    own.read()
    theirs.read()
    tokens = np.array(own.tokens, np.int64), np.array(theirs.tokens, np.int64)
    alike = _cut_alike(pieces.of(recorded), pieces.of(encoded), *tokens)
    return changed.stretches, Comparison(theirs, own) if alike else None


class ChangedTexts(NamedTuple):
    """Where recorded ids differ from those of a text."""

    stretches: list[Stretch]
    pairs: Sequence[Pair]
    """Pieces of both sides that were paired, of which some may differ."""
    same_bytes: bool


def changed_text(
    text: str,
    recorded: Ids,
    canonical: Ids,
    reference: Reference,
    *,
    looked_into: Collection[Pair] = (),
    open_end: bool = False,
    after: int = 0,
) -> ChangedTexts | None:
    """What `stretches` and `align` find, by a look only at texts between control tokens that differ.

    None unless both sides have the same control tokens in the same order, text between the same ones, and no text
    that differs elsewhere on the other side: `align` then pairs each with the one at its place.
    """
    vocabulary = reference.vocabulary
    first = reference.tail_start(recorded[: common_prefix(recorded, canonical)])
    pairs = _paired_texts(recorded, canonical, first, vocabulary, open_end=open_end)
    if pairs is None:
        return None
    differing: list[Stretch] = []
    sides: tuple[bytes, bytes] | None = None
    for pair in pairs:
        start, end, other, other_end = pair
        data, written = vocabulary.data(recorded[start:end]), vocabulary.data(canonical[other:other_end])
        if data != written:
            if sides is None:
                whole = text.encode() if reference.has_bytes_of(canonical, text) else vocabulary.data(canonical)
                begun = whole[: len(whole) - vocabulary.byte_count(canonical[first:])]
                sides = begun + vocabulary.data(recorded[first:]), whole
            if data in sides[1] or written in sides[0]:
                return None
        if end < after or pair in looked_into:
            continue
        low, c_low = max(start - 1, 0), max(other - 1, 0)
        # The control tokens around the text are part of what surrounds a difference.
        own = reference.pieces(recorded[low : end + 1].copy())
        theirs = reference.pieces(canonical[c_low : other_end + 1].copy())
        if any(pieces.end[0] == 0 or (pieces.end[1:] == pieces.end[:-1]).any() for pieces in (own, theirs)):
            return None  # tokens without bytes are joined to the one before them
        blocks = differing_tokens(own, theirs)
        differing += stretches(own, theirs, blocks, (recorded, low, canonical, c_low))
    return ChangedTexts(differing, pairs, sides is None)


def _paired_texts(
    recorded: Ids, canonical: Ids, first: int, vocabulary: Vocabulary, *, open_end: bool
) -> list[Pair] | None:
    """The texts between control tokens that differ, from the token `first` on; None if they cannot be paired."""
    own, theirs = recorded[first:], canonical[first:]
    at, others = (vocabulary.control(ids).nonzero()[0] for ids in (own, theirs))
    longer = len(others) - len(at)
    if longer < 0 or (longer and not open_end) or not same_ids(own[at], theirs[others[: len(at)]]):
        return None
    data, other_data = own.tobytes(), theirs.tobytes()
    pairs: list[Pair] = []
    ends, other_ends = [*at.tolist(), len(own)], [*others.tolist(), len(theirs)]
    start = other = 0
    for end, other_end in zip(ends, other_ends, strict=False):
        if data[4 * start : 4 * end] != other_data[4 * other : 4 * other_end]:
            if start < end and other < other_end and not (open_end and end == len(own)):
                pairs.append((start + first, end + first, other + first, other_end + first))
            elif not (open_end and start == len(own)):
                return None
        start, other = end + 1, other_end + 1
    return pairs


def comparison_of_equal(text: str, ids: Ids, reference: Reference) -> Comparison:
    """The comparison for a text whose ids are the recorded ids."""
    own = KnownText(reference.tokenizer.cuts, text, ids)
    return Comparison(own, own)


def _compare_rest(
    text: str, recorded: Ids, before: Comparison, shared: int, reference: Reference
) -> tuple[Sequence[Stretch], Comparison] | None:
    """The same from the last shared control token on; None if bytes or cuts differ there."""
    characters, first = before.canonical.up_to(shared)
    last = before.recorded.up_to(shared)[1] - 1
    first -= 1
    characters -= len(reference.vocabulary.token_bytes(int(before.canonical.ids[first])).decode())
    rest = recorded[last:]
    encoded = reference.encode_as(text[characters:], rest)
    cuts = reference.tokenizer.cuts
    whole = KnownText(
        cuts, text, np.concatenate([before.canonical.ids[:first], encoded]), before.canonical, shared
    )
    if same_ids(encoded, rest):
        if before.canonical is before.recorded:
            return [], Comparison(whole, whole)
        return [], Comparison(whole, KnownText(cuts, text, recorded, before.recorded, shared))
    rest_pieces, canonical = reference.pieces(rest), reference.pieces(encoded)
    if rest_pieces.data != canonical.data:
        return None
    own = KnownText(cuts, text, recorded, before.recorded, shared)
    new = np.array(own.tokens[shared:], np.int64) - last, np.array(whole.tokens[shared:], np.int64) - first
    if not _cut_alike(rest_pieces, canonical, *new):
        return None
    blocks = align(rest_pieces, canonical)
    return stretches(rest_pieces, canonical, blocks, (recorded, last, whole.ids, first)), Comparison(whole, own)


def _cut_alike(recorded: Pieces, canonical: Pieces, own: Offsets, theirs: Offsets) -> bool:
    """Whether the cuts of two sequences, given as token counts, are at the same bytes."""
    return len(own) == len(theirs) and same_ids(recorded.end[own - 1], canonical.end[theirs - 1])
