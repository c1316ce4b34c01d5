"""Differences from blocks: both sides with the text around them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from tito_audit.align.blocks import BlockKind, Blocks
from tito_audit.align.pieces import AROUND, Pieces
from tito_audit.align.prefix import common_prefix
from tito_audit.evidence.model import CONTEXT_TOKENS, Against, Difference, TextSide
from tito_audit.evidence.narrowed import narrowed
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Turn

_WINDOW = 4 * AROUND
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


@dataclass(frozen=True, slots=True)
class Region:
    """A completion inside a longer recorded sequence."""

    turn: int
    start: int
    end: int


def stretches(recorded: Pieces, canonical: Pieces, blocks: Blocks) -> list[Stretch]:
    """The tokens that differ in every block that is not SAME, in order."""
    differing = blocks.differing()
    few = len(differing) * _WINDOW < len(recorded.data)
    return [
        Stretch(
            kind,
            start,
            end,
            c_start,
            c_end,
            _side(recorded, start, end, few),
            _side(canonical, c_start, c_end, few),
            equal_around(recorded.ids, (start, end), canonical.ids, (c_start, c_end)),
        )
        for block in differing
        for kind, start, end, c_start, c_end in narrowed(block, recorded, canonical)
    ]


def difference(
    stretch: Stretch,
    against: Against,
    severity: Severity,
    effect: str,
    *,
    regions: tuple[Region, ...],
    turn: int | None,
    where: Where = Where.PROMPT,
    turns: Sequence[Turn] = (),
    later_turn: int | None = None,
) -> Difference:
    """A stretch as a difference, placed in the completion that it touches, else in `where` of `turn`.

    A stretch that begins before a completion and ends inside it counts as the completion's, from token 0 on.
    """
    region = region_of(stretch, regions)
    start, end = stretch.start, stretch.end
    index = None
    if region is not None:
        start, end = max(start - region.start, 0), min(end, region.end) - region.start
        where, turn = Where.COMPLETION, region.turn
        index = turns[region.turn].message_index if turns else None
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
        message_index=index,
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


def equal_around(
    recorded: Ids, stretch: tuple[int, int], canonical: Ids, other: tuple[int, int]
) -> tuple[int, int]:
    """How many tokens right before and right after two ranges are the same in both sequences."""
    before = (
        ids[max(at - CONTEXT_TOKENS, 0) : at][::-1] for ids, (at, _) in ((recorded, stretch), (canonical, other))
    )
    after = (ids[end : end + CONTEXT_TOKENS] for ids, (_, end) in ((recorded, stretch), (canonical, other)))
    return common_prefix(*before), common_prefix(*after)


def _side(pieces: Pieces, start: int, end: int, few: bool) -> TextSide:
    """One side of a difference. Of few differences each keeps its own text; many share the whole sequence."""
    if not few:
        return TextSide(pieces, start, end)
    near, low = pieces.near(start, end)
    return TextSide(near, start - low, end - low)
