"""Finds where two sequences differ, and places each difference in the completion it lies in."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, itemgetter
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
"""About how many bytes of text a difference keeps when it keeps its own."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that differ between two sequences, with both sides' text."""

    kind: BlockKind
    start: int
    end: int
    """Half-open, in the recorded sequence."""
    canonical_start: int
    canonical_end: int
    recorded: TextSide
    canonical: TextSide
    equal: tuple[int, int]
    """How many tokens right before and right after are the same in both, at most `CONTEXT_TOKENS`."""

    @property
    def key(self) -> tuple[int, int, bytes]:
        """Equal for stretches that replace the same recorded tokens with the same others."""
        return self.start, self.end, self.canonical.ids.tobytes()


def stretches(
    recorded: Pieces,
    canonical: Pieces,
    blocks: Blocks | Sequence[Block],
    within: tuple[Ids, int, Ids, int] | None = None,
) -> list[Stretch]:
    """The stretches of every block that is not SAME, in order.

    `within`, if given, is (recorded ids, first, canonical ids, first): longer sequences of which each side begins
    at token `first`. Places then count from their start.
    """
    differing = blocks.differing_blocks() if isinstance(blocks, Blocks) else blocks
    keep_own = len(differing) * _WINDOW < len(recorded.data)
    ids, first, others, c_first = within or (recorded.ids, 0, canonical.ids, 0)
    return [
        Stretch(
            kind,
            start + first,
            end + first,
            c_start + c_first,
            c_end + c_first,
            _near_side(recorded, start, end) if keep_own else TextSide(recorded, start, end),
            _near_side(canonical, c_start, c_end) if keep_own else TextSide(canonical, c_start, c_end),
            equal_around(ids, (start + first, end + first), others, (c_start + c_first, c_end + c_first)),
        )
        for block in differing
        for kind, start, end, c_start, c_end in narrow_block(block, recorded, canonical)
    ]


def starting_before(every: Sequence[Stretch], tokens: int) -> Sequence[Stretch]:
    """The stretches that begin before this recorded token."""
    return [stretch for stretch in every if stretch.start < tokens]


def equal_around(
    recorded: Ids, stretch: tuple[int, int], canonical: Ids, other: tuple[int, int]
) -> tuple[int, int]:
    """How many tokens right before and right after two ranges are the same, at most `CONTEXT_TOKENS` each."""
    (start, end), (c_start, c_end) = stretch, other
    before = after = 0
    room = min(CONTEXT_TOKENS, start, c_start)
    while before < room and recorded[start - before - 1] == canonical[c_start - before - 1]:
        before += 1
    room = min(CONTEXT_TOKENS, len(recorded) - end, len(canonical) - c_end)
    while after < room and recorded[end + after] == canonical[c_end + after]:
        after += 1
    return before, after


def _near_side(pieces: Pieces, start: int, end: int) -> TextSide:
    """One side of a stretch with only the text around it, not the whole sequence, which all could share."""
    near, low = pieces.with_context(start, end)
    return TextSide(near, start - low, end - low)


# A block whose bytes differ, narrowed to the tokens that differ.


def narrow_block(block: Block, recorded: Pieces, canonical: Pieces) -> list[Block]:
    """The parts of a block that differ, without the tokens that both sides begin or end with.

    Several parts only if each explains itself; otherwise one, from the first to the last token that differs.
    """
    kind, start, end, c_start, c_end = block
    if kind is not BlockKind.DRIFT:
        return [block]
    a, b = recorded.ids[start:end], canonical.ids[c_start:c_end]
    head, tail = common_ends(a, b)
    whole = _block_of(start + head, end - tail, c_start + head, c_end - tail)
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    if not len(a) or not len(b) or max(len(a), len(b)) > 2000:
        return [whole]
    parts = [
        _block_of(whole[1] + i, whole[1] + i_end, whole[3] + j, whole[3] + j_end)
        for i, i_end, j, j_end in gaps(equal_runs(a, b), len(a), len(b))
    ]
    separate = len(parts) > 1 and all(_explains_itself(part, recorded, canonical) for part in parts)
    return parts if separate else [whole]


def _explains_itself(part: Block, recorded: Pieces, canonical: Pieces) -> bool:
    """Whether a part shows by itself what happened: the canonical side dropped control tokens, wrote broken
    characters as U+FFFD, normalised the text, or added empty reasoning."""
    kind, start, end, c_start, c_end = part
    if kind is BlockKind.EXTRA:
        return bool(recorded.control[start:end].all())
    data, written = recorded.bytes_of(start, end), canonical.bytes_of(c_start, c_end)
    if kind is BlockKind.MISSING:
        return _EMPTY_REASONING.fullmatch(written) is not None
    text = _decode_loosely(data)
    return (_BROKEN in text and text == _decode_loosely(written)) or find_normal_form(data, written) is not None


def find_normal_form(data: bytes, written: bytes) -> str | None:
    """The Unicode form, NFC or NFKC, that turns `data` into `written`; None if they are equal or neither does."""
    try:
        text, other = data.decode(), written.decode()
    except UnicodeDecodeError:
        return None
    if text == other:
        return None
    return next((form for form in ("NFC", "NFKC") if unicodedata.normalize(form, text) == other), None)


def _decode_loosely(data: bytes) -> str:
    """Bytes as text, each run of broken characters as one U+FFFD: decoders differ in how many they write."""
    return re.sub(f"{_BROKEN}+", _BROKEN, data.decode("utf-8", "replace"))


def _block_of(start: int, end: int, c_start: int, c_end: int) -> Block:
    kind = BlockKind.MISSING if start == end else BlockKind.EXTRA if c_start == c_end else BlockKind.DRIFT
    return kind, start, end, c_start, c_end


@dataclass(frozen=True, slots=True)
class CompletionSpan:
    """A completion inside a longer recorded sequence."""

    turn: int
    start: int
    end: int
    message_index: int | None = None
    """The message that it wrote, if known."""


def difference(
    stretch: Stretch,
    against: Against,
    severity: Severity,
    effect: str,
    turn: int | None = None,
    completions: Sequence[CompletionSpan] = (),
    later_turn: int | None = None,
) -> Difference:
    """A stretch as a difference in the completion that it touches, else in the prompt of `turn`, or in the row if
    that is None.

    A stretch that begins before a completion and ends inside it counts as the completion's, from token 0 on.
    """
    completion = completion_at(stretch, completions)
    start, end, where = stretch.start, stretch.end, Where.ROW if turn is None else Where.PROMPT
    if completion is not None:
        start, end = max(start - completion.start, 0), min(end, completion.end) - completion.start
        where, turn = Where.COMPLETION, completion.turn
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
        sampled=completion is not None,
        message_index=None if completion is None else completion.message_index,
        later_turn=later_turn,
        equal=stretch.equal,
    )


def completion_at(stretch: Stretch, completions: Sequence[CompletionSpan]) -> CompletionSpan | None:
    """The first of these completions, in order, that a stretch touches; None if it touches none.

    An empty stretch touches a completion that starts or goes on there.
    """
    at = bisect_right(completions, stretch.start, key=attrgetter("end"))
    if at == len(completions):
        return None
    completion = completions[at]
    touches = completion.start < stretch.end or completion.start <= stretch.start == stretch.end
    return completion if touches else None


def merge_duplicates(differences: Iterable[Difference]) -> list[Difference]:
    """One difference for those that replace the same tokens with the same others, with the effects of all.

    A later prompt and the training row may show the same difference.
    """
    merged: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        first = merged.setdefault(difference.key, difference)
        if difference.effect != first.effect:
            effect, severity = f"{first.effect}; {difference.effect}", max(first.severity, difference.severity)
            merged[difference.key] = replace(first, effect=effect, severity=severity)
    return list(merged.values())


# Prompts are compared only where they differ from the prompts before them: a conversation of T calls holds O(T²)
# tokens of prompts, of which O(T) are new.


class SharedStart(NamedTuple):
    """The common start of two texts and of the recorded ids compared with them, up to a control token."""

    cuts: int
    """How many cuts of the text; the last one is that control token. 0: nothing is shared."""
    recorded_at: int
    """The index of the control token in the recorded ids."""
    canonical_at: int
    """Its index in the ids of the text."""
    characters: int
    """Where it begins in the text."""


NOTHING_SHARED = SharedStart(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A text with its ids and the recorded ids compared with them, for comparing a longer prompt only where it is
    new."""

    canonical: KnownText
    recorded: Ids
    pairs: Sequence[Pair] = ()
    """The ranges of both that were paired; some may differ."""
    texts: Sequence[tuple[int, bytes, bytes]] | None = ()
    """(end, recorded bytes, canonical bytes) of each pair whose bytes differ. None if `align` paired more than the
    texts between control tokens that both sides have: nothing is then known about what follows."""

    def shared_start(self, text: str, recorded: Ids, vocabulary: Vocabulary) -> SharedStart:
        """The start that another text and its recorded ids share with these."""
        if self.texts is None:
            return NOTHING_SHARED
        ids = self.canonical.ids
        cuts, tokens = self.canonical.count_shared_cuts(text), self.canonical.id_ends
        while cuts and ids[tokens[cuts - 1] - 1] not in vocabulary.special_ids:
            cuts -= 1
        if not cuts:
            return NOTHING_SHARED
        characters, after = self.canonical.text_ends[cuts - 1], tokens[cuts - 1]
        longer = 0  # tokens more on the recorded side
        for start, end, at, last in self.pairs:
            longer += end - start - last + at if last < after else 0
        if not same_ids(self.recorded[: after + longer], recorded[: after + longer]):
            return NOTHING_SHARED
        characters -= len(vocabulary.piece(int(ids[after - 1])))
        return SharedStart(cuts, after + longer - 1, after - 1, characters)


def compare_text(
    text: str,
    recorded: Ids,
    previous: Comparison | None,
    reference: Reference,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[Sequence[Stretch], Comparison]:
    """Where recorded ids differ from today's ids of a text, after what `previous` compared; and the comparison.

    Texts between control tokens that both sides have are compared alone, so nothing before a shared control token
    affects what follows it. If more than that differs, the whole text is aligned, and ranges that were paired
    before are paired again without a look inside. For `open_end` and `after` see `align`.
    """
    shared = NOTHING_SHARED if previous is None else previous.shared_start(text, recorded, reference.vocabulary)
    ids = reference.encode_as(text[shared.characters :], recorded[shared.recorded_at :], goes_on=open_end)
    base = previous.canonical if previous is not None and shared.cuts else None
    if base is not None:
        ids = np.concatenate([base.ids[: shared.canonical_at], ids])
    canonical = KnownText(reference.tokenizer.control_tokens, text, ids, base, shared.cuts)
    return compare_ids(canonical, recorded, reference, previous, shared, open_end=open_end, after=after)


def compare_ids(
    canonical: KnownText,
    recorded: Ids,
    reference: Reference,
    previous: Comparison | None = None,
    shared: SharedStart = NOTHING_SHARED,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[Sequence[Stretch], Comparison]:
    """What `compare_text` returns, for a text whose ids are known."""
    changed = compare_between_controls(
        canonical, recorded, reference, previous, shared, open_end=open_end, after=after
    )
    if changed is not None:
        return changed
    known_pairs: Sequence[Pair] = ()
    if previous is not None:  # in the common start, pairs differ as they did before
        size = common_prefix(recorded, previous.recorded)
        other_size = common_prefix(canonical.ids, previous.canonical.ids)
        known_pairs = [pair for pair in previous.pairs if pair[1] < size and pair[3] < other_size]
    both, pairs = (reference.pieces(recorded), reference.pieces(canonical.ids)), list[Pair]()
    blocks = align(*both, open_end=open_end, compare_from=after, known_pairs=known_pairs, pairs=pairs)
    return stretches(*both, blocks), Comparison(canonical, recorded, pairs, None)


def compare_between_controls(
    canonical: KnownText,
    recorded: Ids,
    reference: Reference,
    previous: Comparison | None = None,
    shared: SharedStart = NOTHING_SHARED,
    *,
    open_end: bool = False,
    after: int = 0,
) -> tuple[list[Stretch], Comparison] | None:
    """What `align` would find, from a look only at the texts between control tokens that differ.

    None unless both sides have the same control tokens in the same order, with text between the same ones, and no
    text that differs occurs elsewhere on the other side: only then does `align` pair texts at the same place.
    """
    vocabulary, canonical_ids = reference.vocabulary, canonical.ids
    pairs = _pair_texts(recorded, canonical_ids, shared, vocabulary, open_end=open_end)
    if pairs is None:
        return None
    differing: list[Stretch] = []
    texts: list[tuple[int, bytes, bytes]] = []
    both: list[Ids] = []
    for start, end, other, other_end in pairs:
        # A difference keeps the control tokens around the text as its context.
        both += recorded[max(start - 1, 0) : end + 1], canonical_ids[max(other - 1, 0) : other_end + 1]
    spelled = iter(reference.pieces_of_each(both) if both else ())
    for (start, end, other, other_end), own, theirs in zip(pairs, spelled, spelled, strict=True):
        low, c_low = max(start - 1, 0), max(other - 1, 0)
        if own.data != theirs.data:
            written = theirs.bytes_of(other - c_low, other_end - c_low)
            texts.append((end, own.bytes_of(start - low, end - low), written))
        if end < after:
            continue
        if own.has_empty() or theirs.has_empty():
            return None  # `align` joins tokens without bytes to the one before them
        blocks = align_pair(own, theirs)
        differing += stretches(own, theirs, blocks, (recorded, low, canonical_ids, c_low))
    every, old = pairs, list[tuple[int, bytes, bytes]]()
    if previous is not None and shared.cuts:
        at = bisect_right(previous.pairs, shared.recorded_at, key=itemgetter(1))
        every = [*previous.pairs[:at], *pairs]
        texts_before = previous.texts or ()
        old = [*texts_before[: bisect_right(texts_before, shared.recorded_at, key=itemgetter(0))]]
    if old or texts:
        if reference.has_bytes_of(canonical_ids, canonical.text):
            data, rest = canonical.text.encode(), canonical.text[shared.characters :].encode()
        else:
            data, rest = (
                vocabulary.bytes_of(canonical_ids),
                vocabulary.bytes_of(canonical_ids[shared.canonical_at :]),
            )
        spelled_now = list(map(itemgetter(2), [*old, *texts]))
        for checked, part, others in ((texts, data, spelled_now), (old, rest, spelled_now[len(old) :])):
            for _, differs, written in checked:
                if differs in part or part.count(written) > sum(map(bytes.count, others, repeat(written))):
                    return None
    return differing, Comparison(canonical, recorded, every, [*old, *texts])


def _pair_texts(
    recorded: Ids, canonical: Ids, shared: SharedStart, vocabulary: Vocabulary, *, open_end: bool
) -> list[Pair] | None:
    """The texts between control tokens that differ, after the shared start; None if they cannot be paired."""
    first, c_first = shared.recorded_at, shared.canonical_at
    own, theirs = recorded[first:], canonical[c_first:]
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
                pairs.append((start + first, end + first, other + c_first, other_end + c_first))
            elif not (open_end and start == len(own)):
                return None
        start, other = end + 1, other_end + 1
    return pairs
