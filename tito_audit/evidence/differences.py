"""Where two aligned sequences differ, what each difference did to training, and in which completion it lies."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tito_audit.align.alignment import Pair, align, align_pair
from tito_audit.align.blocks import Block, BlockKind, Blocks
from tito_audit.align.pieces import CONTEXT_BYTES, Pieces
from tito_audit.align.runs import equal_runs, gaps
from tito_audit.evidence.model import CONTEXT_TOKENS, Against, Difference, TextSide
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity, Where
from tito_audit.record.prefix import common_ends, common_prefix, same_ids
from tito_audit.tokens.segments import KnownText
from tito_audit.tokens.vocab import Vocabulary

_BROKEN = "\ufffd"
_EMPTY_REASONING = re.compile(rb"<think>\s*</think>\s*")
_WINDOW = 4 * CONTEXT_BYTES
"""About how many bytes the text around one difference takes."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One block that is not SAME, with both sides' tokens and text."""

    kind: BlockKind
    start: int
    end: int
    """Half-open in the recorded pieces."""
    canonical_start: int
    canonical_end: int
    recorded: TextSide
    canonical: TextSide
    equal: tuple[int, int]
    """How many tokens right before and right after it are the same in both, at most `CONTEXT_TOKENS`."""

    @property
    def key(self) -> tuple[int, int, bytes]:
        """The same for one difference found twice in a recorded sequence."""
        return self.start, self.end, self.canonical.ids.tobytes()


def stretches(
    recorded: Pieces,
    canonical: Pieces,
    blocks: Blocks | Sequence[Block],
    within: tuple[Ids, int, Ids, int] | None = None,
) -> list[Stretch]:
    """The tokens that differ in every block that is not SAME, in order; their places are those `within` longer
    sequences, of which each side begins at a token, if these are given."""
    differing = blocks.differing_blocks() if isinstance(blocks, Blocks) else blocks
    few = len(differing) * _WINDOW < len(recorded.data)
    ids, first, others, c_first = within or (recorded.ids, 0, canonical.ids, 0)
    return [
        Stretch(
            kind,
            start + first,
            end + first,
            c_start + c_first,
            c_end + c_first,
            _side(recorded, start, end, few),
            _side(canonical, c_start, c_end, few),
            equal_around(ids, (start + first, end + first), others, (c_start + c_first, c_end + c_first)),
        )
        for block in differing
        for kind, start, end, c_start, c_end in narrowed(block, recorded, canonical)
    ]


def starting_before(every: Sequence[Stretch], tokens: int) -> Sequence[Stretch]:
    """Those that begin before this recorded token."""
    return [stretch for stretch in every if stretch.start < tokens]


def equal_around(
    recorded: Ids, stretch: tuple[int, int], canonical: Ids, other: tuple[int, int]
) -> tuple[int, int]:
    """How many tokens right before and right after two ranges are the same in both sequences."""
    (start, end), (c_start, c_end) = stretch, other
    before = after = 0
    for size in range(1, min(CONTEXT_TOKENS, start, c_start) + 1):
        if recorded[start - size] != canonical[c_start - size]:
            break
        before = size
    for at in range(min(CONTEXT_TOKENS, len(recorded) - end, len(canonical) - c_end)):
        if recorded[end + at] != canonical[c_end + at]:
            break
        after = at + 1
    return before, after


def _side(pieces: Pieces, start: int, end: int, few: bool) -> TextSide:
    """One side of a difference. Of few differences each keeps its own text; many share the whole sequence."""
    if not few:
        return TextSide(pieces, start, end)
    near, low = pieces.with_context(start, end)
    return TextSide(near, start - low, end - low)


# A block whose bytes differ, narrowed to the tokens that differ.


def narrowed(block: Block, recorded: Pieces, canonical: Pieces) -> list[Block]:
    """The parts of a block that differ; one part where all of it does.

    Tokens that both sides begin or end with are cut off. If all that differs is control tokens that the canonical
    side drops, broken characters that it writes as U+FFFD, text that it normalises, or empty reasoning that it
    adds, each of these is a part.
    """
    kind, start, end, c_start, c_end = block
    if kind is not BlockKind.DRIFT:
        return [block]
    a, b = recorded.ids[start:end], canonical.ids[c_start:c_end]
    head, tail = common_ends(a, b)
    whole = _part(start + head, end - tail, c_start + head, c_end - tail)
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    if not len(a) or not len(b) or max(len(a), len(b)) > 2000:
        return [whole]
    parts = [
        _part(whole[1] + i, whole[1] + i_end, whole[3] + j, whole[3] + j_end)
        for i, i_end, j, j_end in gaps(equal_runs(a, b), len(a), len(b))
    ]
    separate = len(parts) > 1 and all(_is_clear(part, recorded, canonical) for part in parts)
    return parts if separate else [whole]


def _is_clear(part: Block, recorded: Pieces, canonical: Pieces) -> bool:
    """Whether a part shows by itself what happened: dropped control tokens, text as decoding or normalising leaves
    it, or empty reasoning that was added."""
    kind, start, end, c_start, c_end = part
    if kind is BlockKind.EXTRA:
        return bool(recorded.control[start:end].all())
    data, written = recorded.bytes_of(start, end), canonical.bytes_of(c_start, c_end)
    if kind is BlockKind.MISSING:
        return _EMPTY_REASONING.fullmatch(written) is not None
    text = _text(data)
    return (_BROKEN in text and text == _text(written)) or normalised(data, written) is not None


def normalised(data: bytes, written: bytes) -> str | None:
    """The Unicode normalisation that makes one text the other; None if none does."""
    try:
        text, other = data.decode(), written.decode()
    except UnicodeDecodeError:
        return None
    if text == other:
        return None
    return next((form for form in ("NFC", "NFKC") if unicodedata.normalize(form, text) == other), None)


def _text(data: bytes) -> str:
    """Bytes as text, each run of broken characters as one: decoders differ in how many they produce."""
    return re.sub(f"{_BROKEN}+", _BROKEN, data.decode("utf-8", "replace"))


def _part(start: int, end: int, c_start: int, c_end: int) -> Block:
    kind = BlockKind.DRIFT if start < end and c_start < c_end else BlockKind.EXTRA
    return (BlockKind.MISSING if start == end else kind), start, end, c_start, c_end


@dataclass(frozen=True, slots=True)
class Region:
    """A completion inside a longer recorded sequence."""

    turn: int
    start: int
    end: int
    message_index: int | None = None
    """The message that it wrote, when known."""


def difference(
    stretch: Stretch,
    against: Against,
    severity: Severity,
    effect: str,
    turn: int | None = None,
    regions: Sequence[Region] = (),
    later_turn: int | None = None,
) -> Difference:
    """A stretch as a difference, placed in the completion that it touches, else in the prompt of `turn`, or in the
    training row if there is none.

    A stretch that begins before a completion and ends inside it counts as the completion's, from token 0 on.
    """
    region = region_of(stretch, regions)
    start, end, where = stretch.start, stretch.end, Where.ROW if turn is None else Where.PROMPT
    if region is not None:
        start, end = max(start - region.start, 0), min(end, region.end) - region.start
        where, turn = Where.COMPLETION, region.turn
    return Difference(
        against,
        stretch.kind,
        where,
        turn,
        start,
        end,
        stretch.recorded,
        stretch.canonical,
        severity,
        effect,
        sampled=region is not None,
        message_index=None if region is None else region.message_index,
        later_turn=later_turn,
        equal=stretch.equal,
    )


def region_of(stretch: Stretch, regions: Sequence[Region]) -> Region | None:
    """The first of these completions, in order, that a stretch touches; an empty one belongs to one that starts or
    continues there."""
    at = bisect_right(regions, stretch.start, key=attrgetter("end"))
    if at == len(regions):
        return None
    region = regions[at]
    touches = region.start < stretch.end or region.start <= stretch.start == stretch.end
    return region if touches else None


# Each difference once: what a later prompt and the training row both show is one difference.


def each_once(differences: Iterable[Difference]) -> list[Difference]:
    """The differences without those that are at the place of an earlier one and show the same tokens instead.

    The earlier one takes over their effect.
    """
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        old = first.setdefault(_key(difference), difference)
        if difference.effect != old.effect:
            effect = f"{old.effect}; {difference.effect}"
            first[_key(difference)] = replace(old, effect=effect, severity=max(old.severity, difference.severity))
    return list(first.values())


def first_of_each(differences: Iterable[Difference]) -> list[Difference]:
    """The same, where the earlier one stays as it is."""
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        first.setdefault(_key(difference), difference)
    return list(first.values())


def _key(difference: Difference) -> tuple[object, ...]:
    place = difference.where, difference.turn, difference.start, difference.end
    return *place, difference.canonical.ids.tobytes()


# Prompts compared only where they differ from the prompts before them. A conversation of T calls holds O(T²)
# tokens of prompts, of which O(T) are new.


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
        cuts, ids, tokens = self.canonical.count_shared_cuts(text), self.canonical.ids, self.canonical.id_ends
        while cuts and ids[tokens[cuts - 1] - 1] not in vocabulary.special_ids:
            cuts -= 1
        if not cuts:
            return _NOTHING
        characters, after = self.canonical.size_up_to(cuts)
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
    whole = KnownText(reference.tokenizer.control_tokens, text, canonical, base, shared.cuts)
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
    known_pairs: Sequence[Pair] = ()
    if before is not None:  # the pairs in what both sides begin with differ as they did
        size, other_size = common_prefix(recorded, before.recorded), common_prefix(whole.ids, before.canonical.ids)
        known_pairs = [pair for pair in before.pairs if pair[1] < size and pair[3] < other_size]
    both, pairs = (reference.pieces(recorded), reference.pieces(whole.ids)), list[Pair]()
    blocks = align(*both, open_end=open_end, compare_from=after, known_pairs=known_pairs, pairs=pairs)
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
        blocks = align_pair(own, theirs)
        differing += stretches(own, theirs, blocks, (recorded, low, canonical, c_low))
    earlier = before if before is not None and shared.cuts else Comparison(whole, recorded)
    every = [*(pair for pair in earlier.pairs if pair[1] <= shared.first), *pairs]
    old = [text for text in earlier.texts or () if text[0] <= shared.first]
    if old or texts:
        if reference.has_bytes_of(canonical, whole.text):
            data, rest = whole.text.encode(), whole.text[shared.characters :].encode()
        else:
            data, rest = vocabulary.bytes_of(canonical), vocabulary.bytes_of(canonical[shared.other :])
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
