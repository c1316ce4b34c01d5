"""Which tokens of a rollout are shown when not all of them can be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MARGIN = 20
"""Tokens shown on both sides of what a finding or a swap is about."""
_WHOLE = 512
"""A range up to this long is shown whole, if there is room for it."""
_GAP = 12
"""Fewer tokens than this are not left out: what says so would take as much room."""
_FILL = (32, 128, 512, 2048, 8192)
"""How far the starts of sequences are shown, round by round, while there is room."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A range of a sequence that something is said of."""

    sequence: int
    start: int
    end: int
    severity: int


@dataclass(slots=True)
class Windows:
    """Half-open ranges of one sequence, in order, not touching one another."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, start: int, end: int, room: int) -> int:
        """Take a range in, from its start on, as far as `room` new tokens reach; how many new ones there are."""
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
        """Whether a range, or the place between two tokens, lies in what is shown or at its edge."""
        at = bisect_left(self.ends, start if start == end else start + 1)
        return at < len(self.starts) and self.starts[at] < max(end, start + 1)

    def gaps(self) -> list[tuple[int, int]]:
        """What lies between two ranges and is too short to be left out."""
        between = zip(self.ends[:-1], self.starts[1:], strict=True)
        return [(end, start) for end, start in between if start - end < _GAP]

    def _insert(self, start: int, end: int) -> None:
        """Join a range, which overlaps none, with those that it touches."""
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]


def chosen(
    lengths: Sequence[int], spots: Iterable[Spot], fill: Sequence[tuple[int, int]], room: int
) -> list[Windows]:
    """The ranges to show of sequences of these lengths, at most `room` tokens in all.

    First what surrounds the start of every spot, the most severe first; then the rest of each that is not very
    long, and its end; then the sequences `fill` names, from the position beside each on, a little of each first.
    """
    windows = [Windows() for _ in lengths]

    def show(sequence: int, start: int, end: int) -> None:
        nonlocal room
        if room > 0:
            room -= windows[sequence].add(start, min(end, lengths[sequence]), room)

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
    for sequence, window in enumerate(windows):
        for start, end in window.gaps():
            show(sequence, start, end)
    return windows
