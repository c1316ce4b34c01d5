"""The pieces of a text, encoded by a fast encoder, that the reference must confirm.

    text        … The| quick| brown| fox …       | safe cuts
    recorded     The   quick  br own  fox
    fast         The   quick  brown   fox
    to prove                  brown

Text between two safe cuts encodes the same on its own, so only the pieces that differ from the recorded tokens
need proof. Which tokens differ follows from the bytes at which they end, as in the alignment of equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.tokens.segments import Cuts
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    from tito_audit.tokens.split_points import SafeCuts

Piece = tuple[str, Ids]
"""A piece of a text and the ids that a fast encoder gave it."""
_AT_ONCE = 1 << 12
"""How many pieces are looked up at a time."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIXED = np.array((0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x165667B19E3779F9), np.uint64)
"""Factors for the ids at both ends of a segment, to pick segments at random but always the same ones."""


def pieces_to_prove(
    text: str, fast: Ids, recorded: Ids, vocabulary: Vocabulary, controls: Cuts, safe: SafeCuts
) -> Iterable[Piece] | None:
    """Pieces of a text that cover every fast token that is not recorded at its place.

    None if they cannot be found: the fast tokens must spell the whole text, the recorded tokens at least its
    beginning, and all tokens need bytes.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        return None
    ends, recorded_ends = _ends(fast, vocabulary), _ends(recorded, vocabulary)
    if ends is None or recorded_ends is None or ends[-1] != len(data) or recorded_ends[-1] > len(data):
        return None
    token_at = np.empty(len(data) + 1, np.int32)  # the recorded token that ends at each byte
    token_at.fill(-1)
    token_at[recorded_ends] = np.arange(len(recorded), dtype=np.int32)
    at = token_at[ends]
    same = recorded[at] == fast
    same &= at >= 0
    differing = (~same).nonzero()[0]
    whole = recorded_ends[-1] == len(data)
    if not whole and ends[ends.searchsorted(recorded_ends[-1])] != recorded_ends[-1]:
        return None
    between = controls.positions(fast)
    between = between[same[between]]
    starts, stops = np.concatenate(([0], between + 1)), np.concatenate((between, [len(fast)]))
    stretch_of = between.searchsorted(differing)
    pieces: list[_Cells] = []
    for number in sorted(set(stretch_of.tolist())):
        start, stop = int(starts[number]), int(stops[number])
        first, last = int(ends[start - 1]) if start else 0, int(ends[stop - 1])
        # The control tokens around it must be in the text too: it may only be cut there.
        low, high = max(start - 1, 0), min(stop + 1, len(fast))
        around = data[int(ends[low - 1]) if low else 0 : int(ends[high - 1])]
        stretch_recorded = slice(
            int(token_at[first]) + 1, int(token_at[last]) + 1 if last < recorded_ends[-1] else None
        )
        stretch = data[first:last]
        if vocabulary.data(fast[low:high]) != around or not stretch.startswith(
            vocabulary.data(recorded[stretch_recorded])
        ):
            return None
        tokens_asked = differing[stretch_of == number] - start
        pieces.append(_cells(stretch, fast[start:stop], ends[start:stop] - first, tokens_asked, safe))
    return chain.from_iterable(pieces)


def picked_segments(ids: Ids, controls: Cuts, one_in: int) -> Offsets:
    """Numbers `[N]` of the non-empty segments between control tokens that a sample contains.

    Picked by a segment's length and the two ids at either end, so the choice does not depend on what surrounds it.
    """
    if not len(ids):
        return np.empty(0, np.int64)
    at = controls.positions(ids)
    edges = np.empty(len(at) + 2, np.int64)
    edges[0], edges[1:-1], edges[-1] = -1, at, len(ids)
    starts, lasts = edges[:-1] + 1, edges[1:] - 1
    ends = ids.take([starts, np.minimum(starts + 1, lasts), np.maximum(lasts - 1, starts), lasts], mode="clip")
    sign = (_MIXED @ ends.astype(np.uint64) + (lasts - starts).astype(np.uint64)) * _MIX
    sign ^= sign >> np.uint64(32)
    chosen: Mask = ((sign * _MIX >> np.uint64(33)) % np.uint64(one_in) == 0) & (starts <= lasts)
    return chosen.nonzero()[0]


def _ends(ids: Ids, vocabulary: Vocabulary) -> Offsets | None:
    """The byte at which each token ends, `[N]`; None if there are no tokens, or some have no bytes."""
    lengths = vocabulary.byte_lengths(ids)
    if not len(ids) or lengths.min() < 1:
        return None
    ends: Offsets = lengths.cumsum()
    return ends


@dataclass(frozen=True, slots=True)
class _Cells:
    """Pieces of one text, each made while it is looked at: there may be as many as tokens."""

    data: bytes
    ids: Ids
    places: Offsets
    """`[N, 4]` where each starts and ends, in the bytes and in the tokens."""

    def __iter__(self) -> Iterator[Piece]:
        for at in range(0, len(self.places), _AT_ONCE):
            for first, last, start, stop in self.places[at : at + _AT_ONCE].tolist():
                yield self.data[first:last].decode("utf-8"), self.ids[start:stop]


def _cells(data: bytes, ids: Ids, ends: Offsets, tokens: Offsets, safe: SafeCuts) -> _Cells:
    """The pieces between safe cuts that contain these `tokens`; only cuts at the end of a token count."""
    text = data.decode("utf-8")
    cuts = safe.within(text)
    if len(text) != len(data):
        # The bytes at which characters start, `[characters]`.
        starts: Offsets = ((np.frombuffer(data, np.uint8) & 0xC0) != 0x80).nonzero()[0]
        cuts = starts[cuts]
    is_cut = np.zeros(len(data) + 1, np.bool_)
    is_cut[cuts] = True
    is_cut[-1] = True
    stops = is_cut[ends].nonzero()[0] + 1  # tokens up to each cut
    numbers = np.array(sorted(set(stops.searchsorted(tokens, side="right").tolist())), np.int64)
    bounds = np.concatenate(([0], stops))
    at = np.concatenate(([0], ends[stops - 1]))
    places = np.empty((len(numbers), 4), np.int64)
    places[:, 0], places[:, 1] = at[numbers], at[numbers + 1]
    places[:, 2], places[:, 3] = bounds[numbers], bounds[numbers + 1]
    return _Cells(data, ids, places)
