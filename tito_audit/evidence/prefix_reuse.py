"""Prompts compared only where they differ from the prompts before them.

A conversation of T calls holds O(T²) tokens of prompts, of which O(T) are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tito_audit.align.drift import Pair, align, differing_tokens
from tito_audit.evidence.differences import Stretch, stretches
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import common_prefix, same_ids
from tito_audit.tokens.segments import KnownText
from tito_audit.tokens.vocab import Vocabulary


class Shared(NamedTuple):
    """What a text and its recorded ids begin with in common with those of a comparison, up to a control token."""

    cuts: int
    """How many cuts of the text; the last is that control token. 0: they share nothing."""
    first: int
    """The control token's place in the recorded ids, and so in those compared before."""
    other: int
    """Its place in the ids of the text."""
    characters: int
    """Where it begins in the text."""


_NOTHING = Shared(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A text with its ids, and recorded ids that were compared with them."""

    canonical: KnownText
    recorded: Ids
    pairs: Sequence[Pair] = ()
    """The pieces of both that were paired, of which some may differ."""
    texts: Sequence[tuple[int, bytes, bytes]] | None = ()
    """Where pairs of other bytes end, and both sides' bytes. None if more was paired than texts between control
    tokens that both sides have: nothing is then known about what follows."""

    def shared(self, text: str, recorded: Ids, vocabulary: Vocabulary) -> Shared:
        """What another text and its ids share with these."""
        if self.texts is None:
            return _NOTHING
        cuts, ids, tokens = self.canonical.shared(text), self.canonical.ids, self.canonical.tokens
        while cuts and ids[tokens[cuts - 1] - 1] not in vocabulary.special_ids:
            cuts -= 1
        if not cuts:
            return _NOTHING
        characters, after = self.canonical.up_to(cuts)
        longer = sum([end - start - last + at for start, end, at, last in self.pairs if last < after])
        if not same_ids(self.recorded[: after + longer], recorded[: after + longer]):
            return _NOTHING
        characters -= len(vocabulary.token_bytes(int(ids[after - 1])).decode())
        return Shared(cuts, after + longer - 1, after - 1, characters)


def compare_text(
    text: str,
    recorded: Ids,
    before: Comparison | None,
    reference: Reference,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[Sequence[Stretch], Comparison]:
    """Where recorded ids differ from those of a text, after the part compared `before`, and the new comparison.

    Texts between control tokens that both sides have are compared alone, so nothing before a shared control token
    affects what follows it. Where that is not all that differs, the whole text is compared: pieces that were
    paired before are paired again, and not looked into. `open_end` and `after`: see `align`.
    """
    shared = before.shared(text, recorded, reference.vocabulary) if before is not None else _NOTHING
    own = recorded[shared.first :]
    canonical = encoded = reference.encode_as(text[shared.characters :], own, goes_on=open_end)
    base = before.canonical if before is not None and shared.cuts else None
    if base is not None:
        canonical = np.concatenate([base.ids[: shared.other], encoded])
    whole = KnownText(reference.tokenizer.cuts, text, canonical, base, shared.cuts)
    return compare_ids(whole, recorded, reference, before, shared, open_end=open_end, after=after)


def compare_ids(
    whole: KnownText,
    recorded: Ids,
    reference: Reference,
    before: Comparison | None = None,
    shared: Shared = _NOTHING,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[Sequence[Stretch], Comparison]:
    """The same for a text with its ids."""
    changed = changed_text(whole, recorded, reference, before, shared, open_end=open_end, after=after)
    if changed is not None:
        return changed
    looked_into: Sequence[Pair] = ()
    if before is not None:  # the pairs in what both sides begin with differ as they did
        size, other_size = common_prefix(recorded, before.recorded), common_prefix(whole.ids, before.canonical.ids)
        looked_into = [pair for pair in before.pairs if pair[1] < size and pair[3] < other_size]
    both, pairs = (reference.pieces(recorded), reference.pieces(whole.ids)), list[Pair]()
    blocks = align(*both, open_end=open_end, after=after, looked_into=looked_into, pairs=pairs)
    return stretches(*both, blocks), Comparison(whole, recorded, pairs, None)


def changed_text(
    whole: KnownText,
    recorded: Ids,
    reference: Reference,
    before: Comparison | None = None,
    shared: Shared = _NOTHING,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[list[Stretch], Comparison] | None:
    """What `stretches` and `align` find, by a look only at texts between control tokens that differ.

    None unless both sides have the same control tokens in the same order, text between the same ones, and no text
    that differs elsewhere on the other side: `align` then pairs each with the one at its place.
    """
    vocabulary, canonical = reference.vocabulary, whole.ids
    pairs = _paired_texts(recorded, canonical, shared, vocabulary, open_end=open_end)
    if pairs is None:
        return None
    differing: list[Stretch] = []
    texts: list[tuple[int, bytes, bytes]] = []
    for start, end, other, other_end in pairs:
        # The control tokens around the text are part of what surrounds a difference.
        low, c_low = max(start - 1, 0), max(other - 1, 0)
        own = reference.pieces(recorded[low : end + 1].copy())
        theirs = reference.pieces(canonical[c_low : other_end + 1].copy())
        if own.data != theirs.data:
            written = theirs.bytes_of(other - c_low, other_end - c_low)
            texts.append((end, own.bytes_of(start - low, end - low), written))
        if end < after:
            continue
        if 0 in vocabulary.byte_lengths(own.ids) or 0 in vocabulary.byte_lengths(theirs.ids):
            return None  # tokens without bytes are joined to the one before them
        blocks = differing_tokens(own, theirs)
        differing += stretches(own, theirs, blocks, (recorded, low, canonical, c_low))
    earlier = before if before is not None and shared.cuts else Comparison(whole, recorded)
    every = [*(pair for pair in earlier.pairs if pair[1] <= shared.first), *pairs]
    old = [text for text in earlier.texts or () if text[0] <= shared.first]
    if old or texts:
        if reference.has_bytes_of(canonical, whole.text):
            data, rest = whole.text.encode(), whole.text[shared.characters :].encode()
        else:
            data, rest = vocabulary.data(canonical), vocabulary.data(canonical[shared.other :])
        for checked, part, others in ((texts, data, [*old, *texts]), (old, rest, texts)):
            for _, differs, written in checked:
                if differs in part or part.count(written) > sum([text.count(written) for _, _, text in others]):
                    return None
    return differing, Comparison(whole, recorded, every, [*old, *texts])


def _paired_texts(
    recorded: Ids, canonical: Ids, shared: Shared, vocabulary: Vocabulary, *, open_end: bool
) -> list[Pair] | None:
    """The texts between control tokens that differ, after what is shared; None if they cannot be paired."""
    own, theirs = recorded[shared.first :], canonical[shared.other :]
    data, other_data = own.tobytes(), theirs.tobytes()
    if data == other_data or (open_end and other_data.startswith(data)):
        return []
    at, others = vocabulary.control(own).nonzero()[0], vocabulary.control(theirs).nonzero()[0]
    longer = len(others) - len(at)
    if longer < 0 or (longer and not open_end) or not same_ids(own[at], theirs[others[: len(at)]]):
        return None
    pairs: list[Pair] = []
    ends, other_ends = [*at.tolist(), len(own)], [*others.tolist(), len(theirs)]
    start = other = 0
    for end, other_end in zip(ends, other_ends, strict=False):
        if data[4 * start : 4 * end] != other_data[4 * other : 4 * other_end]:
            if start < end and other < other_end and not (open_end and end == len(own)):
                pairs.append((start, end, other, other_end))
            elif not (open_end and start == len(own)):
                return None
        start, other = end + 1, other_end + 1
    first, other = shared.first, shared.other
    return [(a + first, b + first, c + other, d + other) for a, b, c, d in pairs]
