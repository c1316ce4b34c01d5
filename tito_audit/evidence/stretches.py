"""Stretches: where two aligned sequences differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tito_audit.align.blocks import Block, BlockKind, Blocks
from tito_audit.align.pieces import AROUND, Pieces
from tito_audit.evidence.model import CONTEXT_TOKENS, TextSide
from tito_audit.evidence.narrowed import narrowed
from tito_audit.record.arrays import Ids

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


def stretches(
    recorded: Pieces,
    canonical: Pieces,
    blocks: Blocks | Sequence[Block],
    within: tuple[Ids, int, Ids, int] | None = None,
) -> list[Stretch]:
    """The tokens that differ in every block that is not SAME, in order; their places are those `within` longer
    sequences, of which each side begins at a token, if these are given."""
    differing = blocks.differing() if isinstance(blocks, Blocks) else blocks
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
    near, low = pieces.near(start, end)
    return TextSide(near, start - low, end - low)
