"""What of each token matters at its edges: classes of its outer characters, and ends of control tokens.

All of it is worked out for the whole vocabulary in arrays, from its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Mask, Offsets
from tito_audit.tokens.split_points import SafeCuts

__all__ = ["BEGINS", "ENDS", "INSIDE", "Edges", "edges_of", "spelling_marks"]

INSIDE, ENDS, BEGINS = 1, 2, 4
"""Marks of a token: the first two bytes of a control token lie in it; it ends with the first of them; it begins
with the second."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Edges:
    """By id, the kind of a token as the left and as the right neighbour of a cut."""

    left: Bytes  # [V] uint8
    right: Bytes  # [V] uint8
    safe: bytes
    """256 bytes: at `left + right` of two neighbours 1 where there is always a safe cut between them."""


def edges_of(data: bytes, lengths: Offsets, added: Offsets, cuts: SafeCuts) -> Edges | None:
    """The edges of every token; None if they are of too many kinds.

    `data` are the bytes of all tokens end to end. Beside an added token there is always a cut.
    """
    first, second, last = _outer_characters(np.frombuffer(data, np.uint8), lengths)
    count, unknown = cuts.unknown, cuts.unknown
    # One kind more for added tokens, on either side.
    left = _classes(cuts, last)
    pair = _classes(cuts, first) * (count + 1) + _classes(cuts, second)
    left[added], pair[added] = count + 1, (count + 1) ** 2
    table = np.zeros((count + 2, (count + 1) ** 2 + 1), np.bool_)
    table[: count + 1, :-1] = cuts.safe[:, :, : unknown + 1].reshape(count + 1, -1)
    table[count + 1], table[:, -1] = True, True
    used, pair = np.unique(pair, return_inverse=True)
    table, rows = np.unique(table[:, used], axis=0, return_inverse=True)
    table, columns = np.unique(table, axis=1, return_inverse=True)
    if table.size > 256:
        return None
    left, right = rows.ravel()[left] * table.shape[1], columns.ravel()[pair.ravel()]
    return Edges(left.astype(np.uint8), right.astype(np.uint8), table.astype(np.uint8).tobytes().ljust(256, b"\0"))


def spelling_marks(data: bytes, lengths: Offsets, added: Offsets, contents: Sequence[bytes]) -> Bytes:
    """`[V]` uint8, what each token could have to do with a control token that is spelled with others.

    A control token that ordinary tokens spell shows its first two bytes inside of one, or at the end of one
    and the beginning of the next. Contents are of two bytes at least.
    """
    values = np.frombuffer(data, np.uint8)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    full = lengths > 0
    firsts, seconds = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
    firsts[[content[0] for content in contents]] = True
    seconds[[content[1] for content in contents]] = True
    marks = np.zeros(len(lengths), np.uint8)
    marks[full] |= np.where(firsts[values[ends[full] - 1]], ENDS, 0).astype(np.uint8)
    marks[full] |= np.where(seconds[values[starts[full]]], BEGINS, 0).astype(np.uint8)
    either = b"|".join(map(re.escape, sorted({content[:2] for content in contents})))
    at = np.array([found.start(1) for found in re.finditer(b"(?=(" + either + b"))", data, re.DOTALL)], np.int64)
    token = np.searchsorted(ends, at, side="right")
    marks[token[at + 1 < ends[token]]] |= INSIDE
    marks[added] = 0
    return marks


def _classes(cuts: SafeCuts, points: Offsets) -> Offsets:
    """The class of each character; `unknown` for -1."""
    out = cuts.classes.take(points, mode="clip").astype(np.int64)
    out[points < 0] = cuts.unknown
    return out


def _outer_characters(data: Bytes, lengths: Offsets) -> tuple[Offsets, Offsets, Offsets]:
    """`[V]` each: the first, the second and the last character of every token; -1 where it is not whole."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first, width = _character(data, starts, ends)
    second, _ = _character(data, starts + width, ends)
    second[first < 0] = -1
    last = np.full(len(lengths), -1, np.int64)
    for back in range(1, 5):
        begins = ends - back
        point, width = _character(data, np.maximum(begins, starts), ends)
        whole = (begins >= starts) & (width == back) & (point >= 0)
        last[whole] = point[whole]
    return first, second, last


def _character(data: Bytes, starts: Offsets, ends: Offsets) -> tuple[Offsets, Offsets]:
    """The character that begins at each place, -1 where none does that ends in time; and its bytes, else 0."""
    padded = np.concatenate((data, np.zeros(4, np.uint8))).astype(np.int64)
    byte = [padded[np.minimum(starts + k, len(data))] for k in range(4)]
    point, width = np.full(len(starts), -1, np.int64), np.zeros(len(starts), np.int64)
    more = [(one & 0xC0) == 0x80 for one in byte]
    low = [one & 0x3F for one in byte]
    forms: tuple[tuple[Mask, Offsets, int], ...] = (
        (byte[0] < 0x80, byte[0], 0),
        ((byte[0] & 0xE0 == 0xC0) & more[1], (byte[0] & 0x1F) << 6 | low[1], 0x80),
        ((byte[0] & 0xF0 == 0xE0) & more[1] & more[2], (byte[0] & 0x0F) << 12 | low[1] << 6 | low[2], 0x800),
        (
            (byte[0] & 0xF8 == 0xF0) & more[1] & more[2] & more[3],
            (byte[0] & 0x07) << 18 | low[1] << 12 | low[2] << 6 | low[3],
            0x10000,
        ),
    )
    for size, (fits, value, least) in enumerate(forms, start=1):
        valid = fits & (starts + size <= ends) & (value >= least) & (value < 0x110000)
        valid &= (value < 0xD800) | (value >= 0xE000)
        point[valid], width[valid] = value[valid], size
    return point, width
