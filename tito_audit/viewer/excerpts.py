"""Chooses the tokens of a long rollout that are shown."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MARGIN = 20
"""Tokens shown on each side of a finding or a swap."""
_WHOLE = 512
"""Ranges up to this length are shown whole, if there is room."""
_GAP = 12
"""Shorter gaps are shown: a note about them would take as much room."""
_FILL = (32, 128, 512, 2048, 8192)
"""How many tokens of the start of each sequence are shown, round by round, while there is room."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A range of a sequence that a finding or a swap is about."""

    sequence: int
    start: int
    end: int
    severity: int


@dataclass(slots=True)
class Excerpt:
    """What is shown of one sequence: half-open ranges, in order, not touching."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, start: int, end: int, room: int) -> int:
        """Add a range, up to `room` new tokens of it from its start; returns how many are new."""
        used = 0
        at = max(start, 0)
        while at < end and used < room:
            inside = bisect_right(self.starts, at) - 1
            if inside >= 0 and self.ends[inside] > at:
                at = self.ends[inside]
                continue
            following = self.starts[inside + 1] if inside + 1 < len(self.starts) else end
            until = min(end, following, at + room - used)
            self._insert(at, until)
            used += until - at
            at = until
        return used

    def touches(self, start: int, end: int) -> bool:
        """Whether a range, or an empty range between two tokens, is in what is shown or at its edge."""
        at = bisect_left(self.ends, start if start == end else start + 1)
        return at < len(self.starts) and self.starts[at] < max(end, start + 1)

    def gaps(self) -> list[tuple[int, int]]:
        """The gaps between ranges that are too short to leave out."""
        between = zip(self.ends[:-1], self.starts[1:], strict=True)
        return [(end, start) for end, start in between if start - end < _GAP]

    def _insert(self, start: int, end: int) -> None:
        """Insert a range that overlaps no other, joined with those it touches."""
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]


def choose_excerpts(
    lengths: Sequence[int], spots: Iterable[Spot], fill: Sequence[tuple[int, int]], room: int
) -> list[Excerpt]:
    """The excerpts to show of sequences of these lengths, at most `room` tokens in total.

    First the surroundings of the start of every spot, the most severe first; then the rest of spots that are not
    very long, and the end of each; then the sequences in `fill`, (sequence, start), growing round by round.
    """
    excerpts = [Excerpt() for _ in lengths]

    def show(sequence: int, start: int, end: int) -> None:
        nonlocal room
        if room > 0:
            room -= excerpts[sequence].add(start, min(end, lengths[sequence]), room)

    ranked = sorted(spots, key=lambda spot: (-spot.severity, spot.sequence, spot.start))
    for spot in ranked:
        show(spot.sequence, spot.start - _MARGIN, spot.start + _MARGIN)
    for spot in ranked:
        if spot.end - spot.start <= _WHOLE:
            show(spot.sequence, spot.start, spot.end)
        show(spot.sequence, spot.end - _MARGIN, spot.end + _MARGIN)
    for far in _FILL:
        for sequence, start in fill:
            show(sequence, start, start + far)
    for sequence, excerpt in enumerate(excerpts):
        for start, end in excerpt.gaps():
            show(sequence, start, end)
    return excerpts
