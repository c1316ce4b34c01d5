"""Align two token sequences, whether or not their bytes agree."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from operator import eq
from typing import TypeAlias

import numpy as np

from tito_audit.align.blocks import Block, BlockKind, Blocks, BlocksBuilder
from tito_audit.align.pieces import Pieces
from tito_audit.align.runs import Run, equal_runs
from tito_audit.record.arrays import Offsets
from tito_audit.record.prefix import common_byte_prefix, common_ends, same_ids

# `difflib` in bounded time

Opcode: TypeAlias = tuple[str, int, int, int, int]
Match: TypeAlias = tuple[int, int, int]
"""Where an equal run starts on either side, and its length."""

_MAX_STEPS = 10_000_000
"""How many pairs of equal units are compared: about a second. Where units repeat, as in every long chat, `difflib`
takes quadratic time or worse."""


def diff_opcodes(left: Sequence[Hashable], right: Sequence[Hashable], steps: int = _MAX_STEPS) -> Iterator[Opcode]:
    """The opcodes of `difflib`. Where these take too long, units that each side holds once are paired first.

    The usual case needs no search: the sides differ only at equal positions, and no unit that differs is on the
    other side too. Then `difflib` pairs each run between two such positions with itself, and so does this.
    """
    same = list(map(eq, left, right))
    changed = [position for position, equal in enumerate(same) if not equal]
    if not {left[at] for at in changed}.isdisjoint(right) or not {right[at] for at in changed}.isdisjoint(left):
        yield from _to_opcodes(_find_matches(left, right, steps), len(left), len(right))
        return
    edges = [-1, *changed, len(same)]
    runs = [(at + 1, at + 1, end - at - 1) for at, end in pairwise(edges) if end - at > 1]
    yield from _to_opcodes(runs, len(left), len(right))


def _to_opcodes(matches: list[Match], left: int, right: int) -> Iterator[Opcode]:
    """Opcodes for these equal runs, in order; runs that touch are joined."""
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


def _find_matches(left: Sequence[Hashable], right: Sequence[Hashable], steps: int) -> list[Match]:
    """The equal runs that `difflib` finds, or an approximation if that takes more than `steps`.

    The approximation is a patience diff: units that each side holds once are paired, as many as are in the same
    order on both sides, and `difflib` compares what lies between them.
    """
    matched, _ = _match_with_difflib(left, right, steps)
    if matched is not None:
        return matched
    matches: list[Match] = []
    once, positions = _unique_positions(left), _unique_positions(right)
    pairs = [(position, positions[unit]) for unit, position in once.items() if unit in positions]
    # The longest increasing subsequence, by patience sorting
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
        inner, steps = _match_with_difflib(left_part, right_part, steps)
        if inner is None:  # the common start and the common end
            shorter = min(len(left_part), len(right_part))
            start = next((at for at in range(shorter) if left_part[at] != right_part[at]), shorter)
            rest = shorter - start
            end = next((at for at in range(rest) if left_part[-1 - at] != right_part[-1 - at]), rest)
            inner = [(0, 0, start), (len(left_part) - end, len(right_part) - end, end)]
        matches += [(a + 1 + i, b + 1 + j, size) for i, j, size in inner]
        matches += [(next_a, next_b, 1)] if next_a < len(left) else []
    return matches


def _match_with_difflib(
    left: Sequence[Hashable], right: Sequence[Hashable], steps: int
) -> tuple[list[Match] | None, int]:
    """The matching blocks of `difflib`, or None if they take more steps; and how many steps remain."""
    counts = Counter(right)
    costs = [0, *accumulate([counts.get(unit, 0) + 1 for unit in left])]
    matcher = SequenceMatcher(None, left, right, autojunk=False) if costs[-1] <= steps else None
    blocks: list[Match] = []
    pending, remaining = [(0, len(left), 0, len(right))], steps
    while pending:
        start, end, other, other_end = pending.pop()
        remaining -= costs[end] - costs[start]
        if remaining < 0 or matcher is None:
            # Leave half for the other parts.
            return None, steps if matcher is None else steps // 2
        i, j, size = matcher.find_longest_match(start, end, other, other_end)
        if size:
            blocks.append((i, j, size))
            pending += [(start, i, other, j)] if start < i and other < j else []
            pending += [(i + size, end, j + size, other_end)] if i + size < end and j + size < other_end else []
    return blocks, remaining


def _unique_positions(units: Sequence[Hashable]) -> dict[Hashable, int]:
    """The position of each unit that occurs once, in order."""
    counts = Counter(units)
    return {unit: position for position, unit in enumerate(units) if counts[unit] == 1}


# Token sequences as blocks


def add_by_byte_ends(out: BlocksBuilder, recorded: Pieces, canonical: Pieces) -> None:
    """Add the blocks of two tokenizations of the same bytes, paired where tokens of both end at the same byte.

    [he, llo] against [hello] gives one MERGE block. A token without bytes joins the block before it, or the block
    after it at the very start.
    """
    if same_ids(recorded.ids, canonical.ids):
        out.add(BlockKind.SAME, len(recorded.ids), len(canonical.ids))
    elif not recorded.data:
        out.add(BlockKind.RESPLIT, len(recorded.ids), len(canonical.ids))
    else:
        size = len(recorded.data)
        a, b = recorded.end, canonical.end
        ends = _count_to_ends(a, b, size), _count_to_ends(b, a, size)
        out.add_between_ends(recorded.ids, canonical.ids, *ends)


def _count_to_ends(own_ends: Offsets, theirs: Offsets, size: int) -> Offsets:
    """How many tokens end at or before each byte end above 0 that both sides have, `[B]` int64, ascending.

    `own_ends` and `theirs` never decrease, and their last value is `size`.
    """
    ends = np.zeros(size + 1, np.bool_)
    ends[theirs] = True
    ends[0] = False
    shared = ends[own_ends]
    shared[:-1] &= own_ends[1:] != own_ends[:-1]  # the last of several tokens that end at one byte
    return shared.nonzero()[0] + 1


Range: TypeAlias = tuple[int, int]
Pair: TypeAlias = tuple[int, int, int, int]
"""Ranges that an alignment pairs: recorded start and end, canonical start and end."""


def align(
    recorded: Pieces,
    canonical: Pieces,
    *,
    open_end: bool = False,
    compare_from: int = 0,
    known_pairs: Collection[Pair] = (),
    pairs: list[Pair] | None = None,
) -> Blocks:
    """Partition both token sequences into blocks.

    Identical sequences are one SAME block. Equal bytes are paired where tokens end. Otherwise both are cut at
    control tokens and the ranges are paired in order; in a pair that differs, what lies between the common start
    and the common end is DRIFT, EXTRA or MISSING.

    open_end      the canonical side continues past the end of the recorded side (a later prompt against what was
                  seen before it), so drift at the end does not extend over the continuation
    compare_from  a pair that ends before this recorded token is one SAME block, whatever it holds
    known_pairs   so are these pairs, which an earlier call has compared
    pairs         receives every pair
    """
    out = BlocksBuilder()
    if same_ids(recorded.ids, canonical.ids):
        out.add(BlockKind.SAME, len(recorded), len(canonical))
        return out.build()
    if recorded.data == canonical.data:
        add_by_byte_ends(out, recorded, canonical)
        return out.build()
    if open_end and canonical.data.startswith(recorded.data):
        head = int(canonical.end.searchsorted(len(recorded.data), side="right"))
        if head and canonical.end[head - 1] == len(recorded.data):
            add_by_byte_ends(out, recorded, canonical.slice(0, head))
            out.add(BlockKind.MISSING, 0, len(canonical) - head)
            return out.build()
    left, right = recorded.split_at_control(), canonical.split_at_control()
    for tag, i1, i2, j1, j2 in diff_opcodes(recorded.range_keys(left), canonical.range_keys(right)):
        place = left[i1][0] if i2 > i1 else 0, left[i2 - 1][1] if i2 > i1 else 0
        other = right[j1][0] if j2 > j1 else 0, right[j2 - 1][1] if j2 > j1 else 0
        pair = (*place, *other)
        if pairs is not None:
            pairs.append(pair)
        if tag != "insert" and (place[1] < compare_from or pair in known_pairs):
            out.add(BlockKind.SAME, place[1] - place[0], other[1] - other[0])
            continue
        if tag == "equal":
            _add_same_bytes(out, recorded, place, canonical, other)
            continue
        a, b = recorded.slice(*place), canonical.slice(*other)
        if open_end and tag == "replace" and i2 == len(left) and j2 == len(right):
            head = min(len(a), len(b))
            if canonical.control.any():
                # Through as many control tokens as the recorded side has; up to the first if it has none
                controls, count = b.control.nonzero()[0], int(a.control.sum())
                last = max(count - 1, 0)
                head = int(controls[last]) + (count > 0) if last < len(controls) else len(b)
            _add_trimmed(out, a, b.slice(0, head))
            out.add(BlockKind.MISSING, 0, len(b) - head)
        else:
            _add_trimmed(out, a, b)
    return out.build()


def align_pair(recorded: Pieces, canonical: Pieces) -> list[Block]:
    """The differing blocks of one pair of ranges that `align` would pair."""
    head, tail = common_ends(recorded.ids, canonical.ids)
    end, other_end = len(recorded.ids) - tail, len(canonical.ids) - tail
    if (head == end) != (head == other_end):
        # Tokens that only one side has. If they began like what follows them, they could be placed elsewhere too.
        longer, last = (recorded, end) if head < end else (canonical, other_end)
        at, after = int(longer.end[head - 1]) if head else 0, int(longer.end[last - 1])
        if longer.data[at : at + 1] != longer.data[after : after + 1]:
            return [(BlockKind.EXTRA if head < end else BlockKind.MISSING, head, end, head, other_end)]
    data, written = recorded.bytes_of(head, end), canonical.bytes_of(head, other_end)
    start = other = head
    if data[:1] != written[:1]:  # One side may have other text before what both have.
        if data and written.endswith(data):
            other = _find_token(canonical, int(canonical.end[other_end - 1]) - len(data), head)
        elif written and data.endswith(written):
            start = _find_token(recorded, int(recorded.end[end - 1]) - len(written), head)
    if (data == written or start != other) and 1 in (end - start, other_end - other):
        kind = BlockKind.SPLIT if other_end - other > 1 else BlockKind.RESPLIT
        before = (BlockKind.EXTRA if start > other else BlockKind.MISSING, head, start, head, other)
        same = (BlockKind.MERGE if end - start > 1 else kind, start, end, other, other_end)
        return [same] if start == other else [before, same]
    out = BlocksBuilder()
    if data and written and data[:1] != written[:1]:  # the common start does not reach into the common end
        out.add(BlockKind.SAME, head, head)
        _add_trimmed(out, recorded.slice(head, end), canonical.slice(head, other_end))
    else:
        _add_trimmed(out, recorded, canonical)
    return out.build().differing_blocks()


def _find_token(pieces: Pieces, place: int, otherwise: int) -> int:
    """The index of the token that starts at this byte, which is not the first."""
    at = int(pieces.end.searchsorted(place))
    return at + 1 if pieces.end[at] == place else otherwise


def _add_same_bytes(out: BlocksBuilder, a: Pieces, range_: Range, b: Pieces, other: Range) -> None:
    """Add the blocks of two ranges with the same bytes; equal ids are compared without copying the bytes."""
    if same_ids(a.ids[slice(*range_)], b.ids[slice(*other)]):
        out.add(BlockKind.SAME, range_[1] - range_[0], other[1] - other[0])
    else:
        add_by_byte_ends(out, a.slice(*range_), b.slice(*other))


def _add_trimmed(out: BlocksBuilder, a: Pieces, b: Pieces) -> None:
    """Add the blocks of two ranges: common start and end paired, the gap between them cut at long equal runs."""
    if a.data == b.data:
        add_by_byte_ends(out, a, b)
        return
    i, j = _count_to_last_common_end(a.end, b.end, common_byte_prefix(a.data, b.data))
    _add_same_bytes(out, a, (0, i), b, (0, j))
    rest_a, rest_b = a.slice(i, len(a.ids)), b.slice(j, len(b.ids))
    # The same from the end: how many tokens of each side come after the first common token end
    length = common_byte_prefix(rest_a.data[::-1], rest_b.data[::-1])
    m, n = _count_to_last_common_end(_starts_from_end(rest_a), _starts_from_end(rest_b), length)
    x, y = len(rest_a.ids) - m, len(rest_b.ids) - n
    if not x or not y or max(x, y) > 1500:  # `difflib` is quadratic
        out.add(BlockKind.DRIFT, x, y)
    else:
        runs = equal_runs(rest_a.ids[:x], rest_b.ids[:y])
        i = j = 0
        for start, other, equal in [*(run for run in runs if run.size >= 12), Run(x, y, 0)]:
            # Between two equal runs, of which shorter ones pair by chance: paired if the bytes agree, else DRIFT.
            gap, other_gap = rest_a.slice(i, start), rest_b.slice(j, other)
            if gap.data == other_gap.data:
                add_by_byte_ends(out, gap, other_gap)
            else:
                out.add(BlockKind.DRIFT, len(gap), len(other_gap))
            out.add(BlockKind.SAME, equal, equal)
            i, j = start + equal, other + equal
    _add_same_bytes(out, rest_a, (x, x + m), rest_b, (y, y + n))


def _starts_from_end(pieces: Pieces) -> Offsets:
    """Byte positions of token starts, counted from the end, last token first."""
    size = len(pieces.data)
    back = np.empty(len(pieces.end), np.int64)
    back[:-1] = size - pieces.end[-2::-1]
    back[-1:] = size
    return back


def _count_to_last_common_end(a: Offsets, b: Offsets, length: int) -> tuple[int, int]:
    """How many tokens of each side end at or before the last byte end that both have within `length` bytes."""
    a, b = a[: a.searchsorted(length, side="right")], b[: b.searchsorted(length, side="right")]
    cuts = np.zeros(length + 1, np.bool_)
    cuts[a] = True
    common = cuts[b].nonzero()[0]
    if not len(common):
        return 0, 0
    last = b[common[-1]]
    return int(a.searchsorted(last, side="right")), int(b.searchsorted(last, side="right"))
