"""Numbers of a flat JSON array, parsed into a numpy array without creating a Python object for each.

Doubtful cases are left to the JSON parser: None means that nothing was decided.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_COMMA, _MINUS, _SPACE, _ZERO = b",- 0"
_WORD = 8
"""Characters in a word, and the maximum digits of an integer parsed as one."""
_RUNS = (4096, 512, 64, 8)
"""How many repetitions of a number are compared at once; shorter runs are parsed one by one."""

_AT_ONCE = 1 << 19
"""How many bytes of a longer array are parsed at once: parsing briefly takes many times their size in memory."""

_LONGEST_UNIT = 32
"""Maximum characters of a number whose repetitions are looked for."""

# Eight digits in a word, the first of them in its lowest byte.
_ZEROS = np.uint64(0x3030303030303030)
_PAST_NINE = np.uint64(0x7676767676767676)
_HIGH = 0x8080808080808080
_JOINED = (
    (np.uint64(10 << 8 | 1), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(100 << 16 | 1), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(10_000 << 32 | 1), np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
)
"""Steps that combine neighbouring numbers into one: factor, right shift, mask."""


def numbers_of(data: bytes, start: int, stop: int) -> NDArray[Any] | None:
    """The numbers in `data[start:stop]`, the inside of a JSON array, as `[N]`.

    int64 if all are integers, float64 if all have a fraction or an exponent, bool if all are `true` or `false`:
    bit for bit what parsing gives. None for everything else, including invalid JSON.
    """
    if stop - start < 2 * _AT_ONCE:
        return _numbers(data, start, stop)
    parts: list[NDArray[Any]] = []
    comma = start
    while comma >= 0:
        comma = data.find(b",", start + _AT_ONCE, stop) if stop - start >= 2 * _AT_ONCE else -1
        part = _numbers(data, start, stop if comma < 0 else comma)
        if part is None or (parts and part.dtype != parts[0].dtype):
            return None
        parts.append(part)
        start = comma + (2 if data[comma + 1] == _SPACE else 1)
    return np.concatenate(parts)


def _numbers(data: bytes, start: int, stop: int) -> NDArray[Any] | None:
    """The same, parsed at once."""
    comma = data.find(b",", start, stop)
    if comma <= start or start < _WORD:
        return None
    gap = 2 if data[comma + 1] == _SPACE else 1
    if comma == start + 1:
        digits = _digits(data, start, stop, gap)
        if digits is not None:
            return digits
    if data[start] in b"tf":
        return _booleans(data[start:stop], gap)
    if data.find(b".", start, stop) < 0:
        return _integers(data, start, stop, gap)
    return _floats(data, start, stop, data[start : comma + gap], data[comma : comma + gap])


def _digits(data: bytes, start: int, stop: int, gap: int) -> NDArray[np.int64] | None:
    """Integers of one digit each, as most masks are."""
    if (stop - start + gap) % (1 + gap):
        return None
    text = np.frombuffer(data, np.uint8, stop - start, start)
    digits = text[:: 1 + gap] - np.uint8(_ZERO)
    if int(digits.max()) > 9 or not (text[1 :: 1 + gap] == _COMMA).all():
        return None
    if gap == 2 and not (text[2::3] == _SPACE).all():
        return None
    return digits.astype(np.int64)


def _booleans(text: bytes, gap: int) -> NDArray[np.bool_] | None:
    short = text.replace(b"true", b"1").replace(b"false", b"0")
    found = _digits(short, 0, len(short), gap)
    if found is None:
        return None
    trues = int(np.count_nonzero(found))
    # If the text already had digits, it is shorter than it would be with words alone.
    words = len(short) + 3 * trues + 4 * (len(found) - trues)
    return found.astype(np.bool_) if len(text) == words else None


def _integers(data: bytes, start: int, stop: int, gap: int) -> NDArray[np.int64] | None:
    """Integers of at most eight digits."""
    # Padded to whole words plus one, which is shifted in if a number begins inside a word.
    padded = data[start:stop] + bytes(2 * _WORD - (stop - start) % _WORD)
    text = np.frombuffer(padded, np.uint8, stop - start)
    commas = np.flatnonzero(text == _COMMA)
    if gap == 2 and not (text.take(commas + 1, mode="clip") == _SPACE).all():
        return None
    starts = np.zeros(len(commas) + 1, np.int64)
    np.add(commas, gap, out=starts[1:])
    lengths = np.empty_like(starts)
    np.subtract(commas, starts[:-1], out=lengths[:-1])
    lengths[-1] = len(text) - starts[-1]
    negative = None
    if b"-" in padded:
        negative = text.take(starts, mode="clip") == _MINUS
        starts += negative
        lengths -= negative
    if int(lengths.min()) < 1 or int(lengths.max()) > _WORD:
        return None
    words = _words(np.frombuffer(padded, "<u8"), starts)
    words ^= _ZEROS
    zero_first = words.astype(np.uint8) == 0
    if zero_first.any() and int(lengths[zero_first].max()) > 1:
        return None
    # Move the digits to the end of the word, zeros before them, and drop what followed them.
    words <<= (np.subtract(_WORD, lengths) << 3).view(np.uint64)
    other = words + _PAST_NINE
    other |= words
    if int(np.bitwise_or.reduce(other)) & _HIGH:
        return None
    for factor, shift, kept in _JOINED:
        words *= factor
        words >>= shift
        words &= kept
    values = words.view(np.int64)
    if negative is not None:
        if not values[negative].all():
            return None
        np.negative(values, out=values, where=negative)
    return values


def _words(text: NDArray[np.uint64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The eight characters at each of `starts`."""
    index = starts >> 3
    inside = ((starts & 7) << 3).view(np.uint64)
    words = text.take(index)
    words >>= inside
    index += 1
    following = text.take(index)
    # A shift has to be smaller than the width of the word.
    following <<= np.uint64(1)
    following <<= np.uint64(63) - inside
    words |= following
    return words


def _floats(data: bytes, start: int, stop: int, unit: bytes, comma: bytes) -> NDArray[np.float64] | None:
    """Numbers with a fraction or an exponent; `unit` is the first one with the comma and space after it.

    The JSON parser reads them, except runs of the first number or of 0.0, which fill places where no token was
    sampled.
    """
    if len(unit) > _LONGEST_UNIT or not data.startswith(unit * _RUNS[-1], start, stop):
        unit = b"0.0" + comma
    found, between = _without_runs(data, start, stop, unit, comma)
    values = _parsed(b"".join(found))
    if values is None or not found[-1]:
        return None
    if not between:
        return values
    value = _parsed(unit[: -len(comma)])
    counts = [_count(piece, b",") for piece in found[:-1]]
    if value is None:
        return None
    out = np.full(len(values) + sum(between), value[0])
    at = read = 0
    for count, size in zip(counts, between, strict=True):
        out[at : at + count] = values[read : read + count]
        at, read = at + count + size, read + count
    out[at:] = values[read:]
    return out


def _without_runs(data: bytes, start: int, stop: int, unit: bytes, comma: bytes) -> tuple[list[bytes], list[int]]:
    """The text around runs of `unit` (one piece more than runs), and the count of numbers in each run.

    Every piece but the last ends with a comma or is empty.
    """
    runs = [unit * count for count in _RUNS]
    pieces: list[bytes] = []
    sizes: list[int] = []
    at = search = start
    while (found := data.find(runs[-1], search, stop)) >= 0:
        if found > at and data[found - len(comma) : found] != comma:
            # The end of a longer number that ends like the unit: go on with the next.
            search = found + len(unit)
            continue
        end = found
        for run in runs:
            while data.startswith(run, end, stop):
                end += len(run)
        pieces.append(data[at:found])
        sizes.append((end - found) // len(unit))
        at = search = end
    pieces.append(data[at:stop])
    return pieces, sizes


def _parsed(text: bytes) -> NDArray[np.float64] | None:
    """The numbers in a comma-separated text; None unless all are floats."""
    try:
        found = orjson.loads(b"[%b]" % text)
    except orjson.JSONDecodeError:
        return None
    # As many points as numbers means that each is a float.
    if (b'"' in text or _count(text, b".") != len(found)) and set(map(type, found)) != {float}:
        return None
    return np.fromiter(found, np.float64, len(found))


def _count(text: bytes, byte: bytes) -> int:
    """How often a byte occurs; fast if it occurs often."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == byte[0]))
