"""Prompts compared only where they differ from the prompts before them.

A conversation of T calls holds O(T²) tokens of prompts, of which O(T) are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.stretches import Stretch, equal_around, stretches
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.prefix import common_prefix, same_ids
from tito_audit.tokens.prefix_cache import KnownText, KnownTexts

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
        for known in self._known:
            common = common_prefix(ids, known.ids)
            if common == len(ids) == len(known):
                return known
            if common > shared:
                best, shared = known, common
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
                self._known = [known for known in self._known if known is not best]
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
        known, shared = self._known.find(text)
        characters, first = known.up_to(shared) if known is not None else (0, 0)
        if known is not None and not same_ids(known.ids[:first], recorded[:first]):
            known, shared, characters, first = None, 0, 0, 0
        if self._reference.text(recorded[first:]) != text[characters:]:
            return False
        self._known.keep(text, recorded, known, shared)
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


def compare_text(
    text: str, recorded: Ids, before: Comparison | None, reference: Reference, pieces: PiecesCache
) -> tuple[Sequence[Stretch], Comparison | None]:
    """Where recorded ids differ from those of a text, after the part compared `before`, and the new comparison.

    Ids with equal bytes are paired by where their tokens end, so nothing before a shared control token affects
    what follows it. If bytes differ, or nothing is shared, the whole text is compared.
    """
    shared = before.shared(text, recorded, reference) if before is not None else 0
    if before is not None and shared:
        found = _compare_rest(text, recorded, before, shared, reference)
        if found is not None:
            return found
    encoded = reference.encode_as(text, recorded)
    if same_ids(encoded, recorded):
        return [], comparison_of_equal(text, recorded, reference)
    held, canonical = pieces.of(recorded), pieces.of(encoded)
    found_all = stretches(held, canonical, align(held, canonical))
    if held.data != canonical.data:
        return found_all, None
    cuts = reference.tokenizer.cuts
    mine, theirs = KnownText(cuts, text, recorded), KnownText(cuts, text, encoded)
    mine.read()
    theirs.read()
    alike = _cut_alike(held, canonical, np.array(mine.tokens, np.int64), np.array(theirs.tokens, np.int64))
    return found_all, Comparison(theirs, mine) if alike else None


def comparison_of_equal(text: str, ids: Ids, reference: Reference) -> Comparison:
    """The comparison for a text whose ids are the recorded ids."""
    known = KnownText(reference.tokenizer.cuts, text, ids)
    return Comparison(known, known)


def _compare_rest(
    text: str, recorded: Ids, before: Comparison, shared: int, reference: Reference
) -> tuple[Sequence[Stretch], Comparison] | None:
    """The same from the last shared control token on; None if bytes or cuts differ there."""
    characters, first = before.canonical.up_to(shared)
    mine = before.recorded.up_to(shared)[1] - 1
    first -= 1
    characters -= len(reference.vocabulary.token_bytes(int(before.canonical.ids[first])).decode())
    rest = recorded[mine:]
    encoded = reference.encode_as(text[characters:], rest)
    found: list[Stretch] = []
    cuts = reference.tokenizer.cuts
    whole = KnownText(
        cuts, text, np.concatenate([before.canonical.ids[:first], encoded]), before.canonical, shared
    )
    if same_ids(encoded, rest):
        if before.canonical is before.recorded:
            return found, Comparison(whole, whole)
        return found, Comparison(whole, KnownText(cuts, text, recorded, before.recorded, shared))
    held, canonical = reference.pieces(rest), reference.pieces(encoded)
    if held.data != canonical.data:
        return None
    known = KnownText(cuts, text, recorded, before.recorded, shared)
    new = np.array(known.tokens[shared:], np.int64) - mine, np.array(whole.tokens[shared:], np.int64) - first
    if not _cut_alike(held, canonical, *new):
        return None
    for one in stretches(held, canonical, align(held, canonical)):
        start, end = one.start + mine, one.end + mine
        c_start, c_end = one.canonical_start + first, one.canonical_end + first
        equal = equal_around(recorded, (start, end), whole.ids, (c_start, c_end))
        found.append(replace(one, start=start, end=end, canonical_start=c_start, canonical_end=c_end, equal=equal))
    return found, Comparison(whole, known)


def _cut_alike(held: Pieces, canonical: Pieces, mine: Offsets, theirs: Offsets) -> bool:
    """Whether the cuts of two sequences, given as token counts, are at the same bytes."""
    return len(mine) == len(theirs) and same_ids(held.end[mine - 1], canonical.end[theirs - 1])
