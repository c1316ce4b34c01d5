"""Alignment of two token sequences, whether their bytes agree or not."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from operator import eq
from typing import TypeAlias

import numpy as np

from tito_audit.align.blocks import Block, BlockKind, Blocks, GrowingBlocks, one_block
from tito_audit.align.pieces import Pieces
from tito_audit.align.runs import Run, equal_runs
from tito_audit.record.arrays import Offsets
from tito_audit.record.prefix import common_byte_prefix, common_ends, same_ids

# Which units of two sequences are equal, as opcodes of `difflib`, in bounded time.

Opcode: TypeAlias = tuple[str, int, int, int, int]
Match: TypeAlias = tuple[int, int, int]
"""Where an equal run starts on either side, and its length."""

_STEPS = 10_000_000
"""Pairs of equal units that are looked at: about a second. `difflib` alone takes quadratic time or worse where
units repeat, as they do in every long chat."""


def opcodes(left: Sequence[Hashable], right: Sequence[Hashable], steps: int = _STEPS) -> Iterator[Opcode]:
    """The opcodes of `difflib`; where these take too long, those between units that both sides hold once.

    Where units differ only at equal places, but for what one side goes on with, and none of those is on the other
    side as well, every equal run lies between two of these places on both sides. `difflib` then pairs each run
    with itself, and so does this.
    """
    same = list(map(eq, left, right))
    changed = [place for place, equal in enumerate(same) if not equal]
    apart = {left[place] for place in changed}.isdisjoint(right)
    if not (apart and {right[place] for place in changed}.isdisjoint(left)):
        yield from _around(_matches(left, right, steps), len(left), len(right))
        return
    edges = [-1, *changed, len(same)]
    runs = [(at + 1, at + 1, end - at - 1) for at, end in pairwise(edges) if end - at > 1]
    yield from _around(runs, len(left), len(right))


def _around(matches: list[Match], left: int, right: int) -> Iterator[Opcode]:
    """The opcodes of equal runs, those that touch made one, in order."""
    joined: list[Match] = []
    for i, j, size in sorted(matches):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (i, j):
            i, j, before = joined.pop()
            size += before
        if size:
            joined.append((i, j, size))
    i = j = 0
    for start, other, size in [*joined, (left, right, 0)]:
        if i < start or j < other:
            tag = "replace" if i < start and j < other else "delete" if i < start else "insert"
            yield tag, i, start, j, other
        i, j = start + size, other + size
        if size:
            yield "equal", start, i, other, j


def _matches(left: Sequence[Hashable], right: Sequence[Hashable], steps: int) -> list[Match]:
    matched, _ = _longest_first(left, right, steps)
    if matched is not None:
        return matched
    matches: list[Match] = []
    # Anchors: the places of units that each side holds once, as many as are in the same order on both.
    once, places = _unique(left), _unique(right)
    pairs = [(place, places[unit]) for unit, place in once.items() if unit in places]
    lasts, tops, before = list[int](), list[int](), list[int]()
    for at, (_, other) in enumerate(pairs):
        pile = bisect_left(lasts, other)
        before.append(tops[pile - 1] if pile else -1)
        lasts[pile : pile + 1] = [other]
        tops[pile : pile + 1] = [at]
    chain, at = [], tops[-1] if tops else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    anchors = [(-1, -1), *chain[::-1], (len(left), len(right))]
    for (a, b), (next_a, next_b) in pairwise(anchors):
        left_part, right_part = left[a + 1 : next_a], right[b + 1 : next_b]
        inner, steps = _longest_first(left_part, right_part, steps)
        inner = _ends(left_part, right_part) if inner is None else inner
        matches += [(a + 1 + i, b + 1 + j, size) for i, j, size in inner]
        matches += [(next_a, next_b, 1)] if next_a < len(left) else []
    return matches


def _longest_first(
    left: Sequence[Hashable], right: Sequence[Hashable], steps: int
) -> tuple[list[Match] | None, int]:
    """The matching blocks of `difflib`, None if they take more steps; and how many steps remain."""
    many = Counter(right)
    costs = [0, *accumulate([many.get(unit, 0) + 1 for unit in left])]
    matcher = SequenceMatcher(None, left, right, autojunk=False) if costs[-1] <= steps else None
    blocks: list[Match] = []
    pending, remaining = [(0, len(left), 0, len(right))], steps
    while pending:
        start, end, other, other_end = pending.pop()
        remaining -= costs[end] - costs[start]
        if remaining < 0 or matcher is None:
            # What did not suffice here is not tried again there.
            return None, steps if matcher is None else steps // 2
        i, j, size = matcher.find_longest_match(start, end, other, other_end)
        if size:
            blocks.append((i, j, size))
            pending += [(start, i, other, j)] if start < i and other < j else []
            pending += [(i + size, end, j + size, other_end)] if i + size < end and j + size < other_end else []
    return blocks, remaining


def _unique(units: Sequence[Hashable]) -> dict[Hashable, int]:
    """The place of each unit that is there once, in order."""
    many = Counter(units)
    return {unit: place for place, unit in enumerate(units) if many[unit] == 1}


def _ends(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[Match]:
    shorter = min(len(left), len(right))
    start = next((at for at in range(shorter) if left[at] != right[at]), shorter)
    rest = shorter - start
    end = next((at for at in range(rest) if left[-1 - at] != right[-1 - at]), rest)
    return [(0, 0, start), (len(left) - end, len(right) - end, end)]


# Two tokenizations of the same bytes, paired where tokens end at the same byte.


def add_cuts(out: GrowingBlocks, recorded: Pieces, canonical: Pieces) -> None:
    """Add the blocks between the byte ends that both sequences have. Both must spell the same bytes.

    [he, llo] against [hello] gives one MERGE block. A token without bytes joins the block before it, or the block
    after it at the very start.
    """
    if same_ids(recorded.ids, canonical.ids):
        out.block(BlockKind.SAME, len(recorded.ids), len(canonical.ids))
    elif not recorded.data:
        out.block(BlockKind.RESPLIT, len(recorded.ids), len(canonical.ids))
    else:
        size = len(recorded.data)
        ends = _shared(recorded.end, canonical.end, size), _shared(canonical.end, recorded.end, size)
        out.between(recorded.ids, canonical.ids, *ends)


def _shared(own_ends: Offsets, theirs: Offsets, size: int) -> Offsets:
    """How many of `own_ends` end at or before each byte end above 0 that both have; `[B]` int64, ascending.

    `own_ends` and `theirs` never decrease and end at `size`.
    """
    ends = np.zeros(size + 1, np.bool_)
    ends[theirs] = True
    ends[0] = False
    shared = ends[own_ends]
    shared[:-1] &= own_ends[1:] != own_ends[:-1]  # the last of several tokens that end at one byte
    return shared.nonzero()[0] + 1


Pair: TypeAlias = tuple[int, int, int, int]
"""Pieces of both sides that an alignment pairs: where they start and end in recorded tokens, and in canonical
ones."""


def align(
    recorded: Pieces,
    canonical: Pieces,
    *,
    open_end: bool = False,
    after: int = 0,
    looked_into: Collection[Pair] = (),
    pairs: list[Pair] | None = None,
) -> Blocks:
    """The blocks of two token sequences, a partition of both.

    A pair of pieces that ends before the recorded token `after`, or was `looked_into` before, is one block,
    whatever it holds. All pairs are added to `pairs`.

    `open_end` says that the canonical side continues past the end of the recorded side (a later prompt against
    what was seen before it), so drift at the end must not extend over the continuation.

    Identical sequences are one SAME block. Equal bytes are paired where tokens end. Otherwise both are cut at
    control tokens and the pieces paired in order; in pieces that differ, what lies between common start and common
    end is DRIFT, EXTRA or MISSING.
    """
    if same_ids(recorded.ids, canonical.ids):
        return one_block(BlockKind.SAME, len(recorded), len(canonical))
    out = GrowingBlocks()
    if recorded.data == canonical.data:
        add_cuts(out, recorded, canonical)
        return out.done()
    if open_end and canonical.data.startswith(recorded.data):
        head = int(canonical.end.searchsorted(len(recorded.data), side="right"))
        if head and canonical.end[head - 1] == len(recorded.data):
            add_cuts(out, recorded, canonical.part(0, head))
            out.block(BlockKind.MISSING, 0, len(canonical) - head)
            return out.done()
    left, right = recorded.units(), canonical.units()
    for tag, i1, i2, j1, j2 in opcodes(recorded.keys(left), canonical.keys(right)):
        place = left[i1][0] if i2 > i1 else 0, left[i2 - 1][1] if i2 > i1 else 0
        other = right[j1][0] if j2 > j1 else 0, right[j2 - 1][1] if j2 > j1 else 0
        pair = (*place, *other)
        if pairs is not None:
            pairs.append(pair)
        if tag != "insert" and (place[1] < after or pair in looked_into):
            out.block(BlockKind.SAME, place[1] - place[0], other[1] - other[0])
            continue
        if tag == "equal":
            _add_equal(out, recorded, place, canonical, other)
            continue
        a, b = recorded.part(*place), canonical.part(*other)
        if open_end and tag == "replace" and i2 == len(left) and j2 == len(right):
            head = _head(b, int(a.control.sum())) if canonical.control.any() else min(len(a), len(b))
            _add_trimmed(out, a, b.part(0, head))
            out.block(BlockKind.MISSING, 0, len(b) - head)
        else:
            _add_trimmed(out, a, b)
    return out.done()


def differing_tokens(recorded: Pieces, canonical: Pieces) -> list[Block]:
    """The blocks, but for those that are SAME, of two pieces that `align` pairs with each other."""
    head, tail = common_ends(recorded.ids, canonical.ids)
    end, other_end = len(recorded) - tail, len(canonical) - tail
    if (head == end) != (head == other_end):
        # Tokens that only one side has. They could stand elsewhere if they began like what follows them.
        longer, last = (recorded, end) if head < end else (canonical, other_end)
        at, after = int(longer.end[head - 1]) if head else 0, int(longer.end[last - 1])
        if longer.data[at : at + 1] != longer.data[after : after + 1]:
            return [(BlockKind.EXTRA if head < end else BlockKind.MISSING, head, end, head, other_end)]
    data, written = recorded.bytes_of(head, end), canonical.bytes_of(head, other_end)
    if data == written and 1 in (end - head, other_end - head):
        kind = BlockKind.SPLIT if other_end - head > 1 else BlockKind.RESPLIT
        return [(BlockKind.MERGE if end - head > 1 else kind, head, end, head, other_end)]
    out = GrowingBlocks()
    if data[:1] != written[:1]:  # so nothing that both begin with reaches into what they end with
        out.block(BlockKind.SAME, head, head)
        _add_trimmed(out, recorded.part(head, end), canonical.part(head, other_end))
    else:
        _add_trimmed(out, recorded, canonical)
    return out.done().differing()


def _head(pieces: Pieces, controls: int) -> int:
    """How many tokens there are through this many control tokens, or before the first if `controls` is 0."""
    where = pieces.control.nonzero()[0]
    if controls == 0:
        return int(where[0]) if len(where) else len(pieces)
    return int(where[controls - 1]) + 1 if len(where) >= controls else len(pieces)


def _add_equal(out: GrowingBlocks, a: Pieces, place: tuple[int, int], b: Pieces, other: tuple[int, int]) -> None:
    """Add the blocks of two ranges with equal bytes."""
    if same_ids(a.ids[slice(*place)], b.ids[slice(*other)]):
        out.block(BlockKind.SAME, place[1] - place[0], other[1] - other[0])
    else:
        add_cuts(out, a.part(*place), b.part(*other))


def _add_trimmed(out: GrowingBlocks, a: Pieces, b: Pieces) -> None:
    """Add the blocks of two pieces: common start and end paired, the rest refined."""
    if a.data == b.data:
        add_cuts(out, a, b)
        return
    i, j = _cut(a.end, b.end, common_byte_prefix(a.data, b.data))
    _add_equal(out, a, (0, i), b, (0, j))
    rest_a, rest_b = a.part(i, len(a.ids)), b.part(j, len(b.ids))
    # The same from the end: how many tokens of each side lie after the first common cut.
    length = common_byte_prefix(rest_a.data[::-1], rest_b.data[::-1])
    m, n = _cut(_from_back(rest_a), _from_back(rest_b), length)
    x, y = len(rest_a.ids) - m, len(rest_b.ids) - n
    _add_refined(out, rest_a.part(0, x), rest_b.part(0, y))
    _add_equal(out, rest_a, (x, x + m), rest_b, (y, y + n))


def _from_back(pieces: Pieces) -> Offsets:
    """Byte positions of token starts, counted from the end, last token first."""
    size = len(pieces.data)
    back = np.empty(len(pieces.end), np.int64)
    back[:-1] = size - pieces.end[-2::-1]
    back[-1:] = size
    return back


def _cut(a: Offsets, b: Offsets, length: int) -> tuple[int, int]:
    """How many tokens of each side end at or before the last common cut within `length` bytes."""
    a, b = a[: a.searchsorted(length, side="right")], b[: b.searchsorted(length, side="right")]
    cuts = np.zeros(length + 1, np.bool_)
    cuts[a] = True
    common = cuts[b].nonzero()[0]
    if not len(common):
        return 0, 0
    last = b[common[-1]]
    return int(a.searchsorted(last, side="right")), int(b.searchsorted(last, side="right"))


def _add_refined(out: GrowingBlocks, a: Pieces, b: Pieces) -> None:
    """Add the blocks of a drifted gap, split at long runs of equal tokens unless it is too long."""
    size, other_size = len(a.ids), len(b.ids)
    if not size or not other_size or max(size, other_size) > 1500:  # `difflib` is quadratic
        out.block(BlockKind.DRIFT, size, other_size)
        return
    i = j = 0
    runs = [run for run in equal_runs(a.ids, b.ids) if run.size >= 12]  # shorter ones pair by chance
    for start, other, equal in [*runs, Run(size, other_size, 0)]:
        # Between two equal runs: paired where the bytes agree, else one DRIFT block.
        gap, other_gap = a.part(i, start), b.part(j, other)
        if gap.data == other_gap.data:
            add_cuts(out, gap, other_gap)
        else:
            out.block(BlockKind.DRIFT, len(gap), len(other_gap))
        out.block(BlockKind.SAME, equal, equal)
        i, j = start + equal, other + equal
