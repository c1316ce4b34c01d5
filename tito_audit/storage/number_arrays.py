"""Rows of JSON whose long arrays of numbers become numpy arrays, without an object for each number.

Each such array is cut out of the text and replaced by a mark: a list of one string that no log can contain.
Finding the mark as such a list in the parsed rest proves that the array was a value, not part of a string. The
JSON parser reads all that is doubtful.

Tried instead, on a row of 30,000 tokens with logprobs and on one of 40 growing calls (here 0.9 and 1.1 ms):
pysimdjson 7.0.2 with `as_buffer` takes 1.5 and 11 ms, reads `[1, 2.5]` as floats and `[[1], [2]]` as `[1, 2]`,
refuses integers of more than 64 bits, and is not built for Python 3.14; orjson and `np.array` take 2.5 and 17 ms.
`np.fromstring` reads ids at half the speed, floats at a quarter, and takes what no JSON is, such as 01.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.storage.row import RawRow, is_json, may_repeat_keys, parse_row

_SHORTEST = 256
"""Arrays shorter than this many bytes stay in the text."""
_SHORTEST_INTEGERS = 4096
"""The same for integers of several digits, all ids of a row together: the JSON parser is faster up to here."""
_FIRST_BYTES = frozenset(bytes([byte]) for byte in b"-0123456789tf")
_Span: TypeAlias = tuple[int, int]
"""Start and stop of the inside of an array in the text."""
_FoundArray: TypeAlias = tuple[int, int, NDArray[Any]]
"""The same, and its numbers."""
_MARK = secrets.token_hex(16)
"""Random in each process, so that no log can contain it."""

_COMMA, _MINUS, _SPACE, _ZERO = b",- 0"
_WORD = 8
"""Characters in a word, and digits of an integer at most."""
_RUN_LENGTHS = (4096, 512, 64, 8)
"""Repetitions of a number that are compared at once; shorter runs are parsed number by number."""

_PART_BYTES = 1 << 19
"""Bytes of a long array that are parsed at once, which briefly takes many times as much memory."""


# Eight digits in a word, the first in the lowest byte.
_ZEROS = np.uint64(0x3030303030303030)
_PAST_NINE = np.uint64(0x7676767676767676)
_HIGH = 0x8080808080808080
_DIGIT_MERGES = (
    (np.uint64(10 << 8 | 1), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(100 << 16 | 1), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(10_000 << 32 | 1), np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
)
"""Steps that merge neighbouring numbers of a word: factor, right shift, mask."""


class ArrayParser:
    """Parses rows, with long lists of numbers in some columns as numpy arrays.

    `columns` maps paths to dtype kinds, "i" for ids and "ifb" for other numbers: `{"token_ids": "i"}` for a column
    of the row, `{"calls[].token_ids": "i"}` for one of objects in a list.
    """

    def __init__(self, columns: Mapping[str, str], other_kinds: str = "") -> None:
        """`other_kinds`, "ifb", are the dtype kinds of all other keys, only for `is_json`."""
        self._columns = columns
        self._other_kinds = other_kinds or None
        self._kinds = {
            path.rpartition(".")[2].encode("utf-8", "surrogatepass"): kinds for path, kinds in columns.items()
        }

    def parse_row(self, index: int, data: bytes, *, cut_off: bool = False) -> RawRow:
        """The same as `storage.row.parse_row`, with some lists as arrays `[N]` of int64, float64 or bool.

        Ids are int32 if that holds all ids of the row.
        """
        marked, pieces = self._cut_arrays(data) if len(data) >= _SHORTEST else ({}, [])
        text = b"".join(pieces)
        try:
            value = orjson.loads(text) if marked else None
            # orjson does not dump again what is nested too deeply.
            refused = not isinstance(value, dict) or may_repeat_keys(text, value)
        except (ValueError, TypeError):
            refused = True
        if refused:
            return parse_row(index, data, cut_off=cut_off)
        # Replace each mark by its array, or by a list if its path is not in `columns`.
        waiting: list[tuple[Any, str]] = [(value, "")]
        while waiting and marked:
            node, path = waiting.pop()
            if type(node) is list:
                waiting += [(child, f"{path}[]") for child in node if type(child) is dict or type(child) is list]
                continue
            for key, child in node.items():
                if type(child) is dict:
                    waiting.append((child, f"{path}.{key}" if path else key))
                elif type(child) is list and child:
                    first = child[0]
                    here = f"{path}.{key}" if path else key
                    if type(first) is dict or type(first) is list:
                        waiting.append((child, here))
                    elif type(first) is str and len(child) == 1 and first in marked:
                        array = marked.pop(first)
                        node[key] = array if here in self._columns else array.tolist()
        if marked:  # one was not in a list of its own
            return parse_row(index, data, cut_off=cut_off)
        return RawRow(index, value, has_arrays=True)

    def is_json(self, data: bytes) -> bool:
        """Whether a text is JSON, without making objects of numbers."""
        # The quotes of a mark would end a string around it, after which no JSON can go on like that.
        return is_json(b"".join(self._cut_arrays(data)[1])) or is_json(data)

    def _cut_arrays(self, data: bytes) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
        """The arrays by mark, and the rest of the text in pieces, with the marks in place of the arrays."""
        ids: dict[bytes, list[_Span]] = {}
        others: dict[bytes | int, list[_Span]] = {}
        key = data.find(b'":')
        opening = b'": [' if data[key + 2 : key + 3] == b" " else b'":['
        at = id_bytes = 0
        while (name_end := data.find(opening, at)) >= 0:
            at = name_end + len(opening)
            name = data[data.rfind(b'"', 0, name_end) + 1 : name_end]
            kinds = self._kinds.get(name, self._other_kinds)
            if kinds is None or data[at : at + 1] not in _FIRST_BYTES:
                continue
            start, at = at, data.find(b"]", at)
            if at < 0:
                break
            size = at - start
            if size < _SHORTEST:
                continue
            if kinds == "i":
                ids.setdefault(name, []).append((start, at))
                id_bytes += size
            elif data.find(b".", start, at) >= 0:
                others.setdefault(name, []).append((start, at))
            elif size >= _SHORTEST_INTEGERS or data[start + 1] == _COMMA:
                others[start] = [(start, at)]
        arrays = _parse_growing(data, ids.values()) if id_bytes >= _SHORTEST_INTEGERS else []
        for spans in others.values():
            arrays += _parse_each(data, spans)
        marked: dict[str, NDArray[Any]] = {}
        pieces: list[bytes] = []
        copied = 0
        for start, stop, numbers in sorted(arrays, key=itemgetter(0)):
            mark = f"{_MARK}{len(marked)}"
            pieces += data[copied:start], b'"%b"' % mark.encode()
            marked[mark] = numbers
            copied = stop
        pieces.append(data[copied:])
        return marked, pieces


def _parse_growing(data: bytes, columns: Iterable[Sequence[_Span]]) -> list[_FoundArray]:
    """The arrays of integers in some columns, as int32 if that holds them all; arrays of others are left out.

    One that starts like the one before in its column, as a call's prompt starts with that of the last, is parsed
    only from there on. If it starts with all of it, they share memory.
    """
    parts: list[_Span] = []
    plan: list[tuple[int, int, int, int]] = []
    for spans in columns:
        first = end = count = 0
        for start, stop in spans:
            shared, at = 0, start
            if count and stop - start >= 4 * _SHORTEST:  # a shorter one is parsed sooner than compared
                shared, at = _find_rest(data, start, stop, first, end, count)
            new = 0
            if at >= 0:
                parts.append((at, stop))
                new = 1
                if stop - at < _SHORTEST_INTEGERS:
                    new += data.count(b",", at, stop)
                else:  # numpy takes a fraction of the time
                    new += int(np.count_nonzero(np.frombuffer(data, np.uint8, stop - at, at) == _COMMA))
            plan.append((start, stop, shared, new))
            first, end, count = start, stop, shared + new
    values = _parse_together(data, parts)
    if values is None or values.dtype != np.int64:
        each = [array for start, stop, _, _ in plan for array in _parse_each(data, [(start, stop)])]
        return [array for array in each if array[2].dtype == np.int64]
    if -(1 << 31) <= np.minimum.reduce(values) <= np.maximum.reduce(values) < 1 << 31:
        values = values.astype(np.int32)
    arrays: list[_FoundArray] = []
    begin = at = 0
    for start, stop, shared, new in plan:
        numbers = values[at : at + new]
        if not shared:
            begin = at
        elif begin + shared == at:  # the one before is all that was parsed since `begin`
            numbers = values[begin : at + new]
        else:
            begin, numbers = len(values) + 1, np.concatenate((arrays[-1][2][:shared], numbers))
        arrays.append((start, stop, numbers))
        at += new
    return arrays


def _find_rest(data: bytes, start: int, stop: int, first: int, end: int, count: int) -> tuple[int, int]:
    """How many of the `count` numbers of the array before an array starts with, and where its others start.

    0 and its start if less than half of the text is the same; -1 for the place if there are no others.
    """
    same = end - first if data.startswith(data[first:end], start) else 0
    if same and start + same == stop:
        return count, -1
    if not same or data[start + same] != _COMMA:
        size = min(end - first, stop - start)
        differ = np.frombuffer(data, np.uint8, size, start) != np.frombuffer(data, np.uint8, size, first)
        same = int(differ.argmax())
        same = data.rfind(b",", start, start + (same if differ[same] else size)) - start
        if same < size // 2:
            return 0, start
        # As many as there were, but for those behind the last comma that both have, which are few.
        count -= data.count(b",", first + same, end)
    return count, start + same + (2 if data[start + same + 1] == _SPACE else 1)


def _parse_each(data: bytes, spans: Sequence[_Span]) -> list[_FoundArray]:
    """Those of some arrays that are numbers of one kind, parsed at once if all are of the same."""
    together = None if len(spans) == 1 else _parse_together(data, spans)
    arrays: list[_FoundArray] = []
    at = 0
    for start, stop in spans:
        if together is None:
            numbers = parse_numbers(data, start, stop)
        else:
            before, at = at, at + data.count(b",", start, stop) + 1
            numbers = together[before:at]
        if numbers is not None:
            arrays.append((start, stop, numbers))
    return arrays


def _parse_together(data: bytes, spans: Sequence[_Span]) -> NDArray[Any] | None:
    """The numbers in some parts of a text as one array, as if they were one: None as for `parse_numbers`."""
    if len(spans) == 1:
        return parse_numbers(data, *spans[0])
    comma = b", " if data[data.find(b",", spans[0][0]) + 1] == _SPACE else b","
    view = memoryview(data)
    text = comma.join([view[start:stop] for start, stop in spans])
    return parse_numbers(text, 0, len(text))


def parse_numbers(data: bytes, start: int, stop: int) -> NDArray[Any] | None:
    """The numbers in `data[start:stop]`, the inside of a JSON array, as `[N]`: bit for bit what a parser returns.

    int64 if all are integers, float64 if all have a fraction or an exponent, bool if all are `true` or `false`.
    None for all else, invalid JSON included.
    """
    parts: list[NDArray[Any]] = []
    comma = start
    while comma >= 0:
        comma = data.find(b",", start + _PART_BYTES, stop) if stop - start >= 2 * _PART_BYTES else -1
        end = stop if comma < 0 else comma
        first = data.find(b",", start, end)
        if first <= start:
            return None
        gap = 2 if data[first + 1] == _SPACE else 1
        part: NDArray[Any] | None
        if (
            first == start + 1
            and (end - start + gap) % (1 + gap) == 0
            and (digits := data[start : end : 1 + gap]).isdigit()
            and not data[start + 1 : end : 1 + gap].strip(b",")
            and not (gap == 2 and data[start + 2 : end : 3].strip(b" "))
        ):  # integers of one digit each, as in most masks
            part = (np.frombuffer(digits, np.uint8) - np.uint8(_ZERO)).astype(np.int64)
        elif data[start] in b"tf" or data.find(b".", start, end) >= 0:
            part = _parse_with_runs(data, start, end, data[start : first + gap], data[first : first + gap])
        elif end - start < _SHORTEST_INTEGERS:
            part = _parse_by_json(data[start:end])
        else:
            part = _parse_integers(data, start, end, gap)
        if part is None or (parts and part.dtype != parts[0].dtype):
            return None
        parts.append(part)
        start = comma + (2 if data[comma + 1] == _SPACE else 1)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _parse_integers(data: bytes, start: int, stop: int, gap: int) -> NDArray[np.int64] | None:
    """Integers of up to eight digits, each parsed as one word of 64 bits; None if there are others."""
    # Padded to whole words and one more, from which numbers that begin inside a word get their last digits.
    padded = data[start:stop] + bytes(2 * _WORD - (stop - start) % _WORD)
    text = np.frombuffer(padded, np.uint8, stop - start)
    commas = (text == _COMMA).nonzero()[0]
    if gap == 2 and not np.logical_and.reduce(text.take(commas + 1, mode="clip") == _SPACE):
        return None
    starts = np.zeros(len(commas) + 1, np.int64)
    np.add(commas, gap, out=starts[1:])
    lengths = np.empty(len(starts), np.int64)
    np.subtract(commas, starts[:-1], out=lengths[:-1])
    lengths[-1] = len(text) - starts[-1]
    negative = None
    if b"-" in padded:
        negative = text.take(starts, mode="clip") == _MINUS
        starts += negative
        lengths -= negative
    if np.minimum.reduce(lengths) < 1 or np.maximum.reduce(lengths) > _WORD:
        return None
    # The eight characters from each start on, out of the word that it is in and the next.
    words = np.frombuffer(padded, "<u8")
    index, inside = starts >> 3, ((starts & 7) << 3).view(np.uint64)
    following = words.take(index + 1)
    # In two steps, as a shift by all 64 bits is undefined.
    following <<= np.uint64(1)
    following <<= np.uint64(63) - inside
    words = words.take(index)
    words >>= inside
    words |= following
    words ^= _ZEROS
    zero_first = words.astype(np.uint8) == 0
    if np.logical_or.reduce(zero_first) and np.maximum.reduce(lengths[zero_first]) > 1:
        return None
    # Move the digits to the end of the word, which drops what followed them; zeros come before.
    words <<= (np.subtract(_WORD, lengths) << 3).view(np.uint64)
    if int(np.bitwise_or.reduce((words + _PAST_NINE) | words)) & _HIGH:
        return None
    for factor, shift, low in _DIGIT_MERGES:
        words *= factor
        words >>= shift
        words &= low
    values = words.view(np.int64)
    if negative is not None:
        if not values[negative].all():
            return None
        np.negative(values, out=values, where=negative)
    return values


def _parse_with_runs(data: bytes, start: int, stop: int, unit: bytes, comma: bytes) -> NDArray[Any] | None:
    """Floats or booleans, read by the JSON parser but for long runs of one value, as at untrained positions.

    Runs of the first value or of 0.0 are cut out and put back in afterwards. `unit` is the first value with the
    comma and space after it.
    """
    if len(unit) > 32 or not data.startswith(unit * _RUN_LENGTHS[-1], start, stop):
        unit = b"0.0" + comma
    if data.find(unit * _RUN_LENGTHS[-1], start, stop) < 0:
        return _parse_by_json(data[start:stop])
    runs = [unit * count for count in _RUN_LENGTHS]
    pieces: list[bytes] = []
    sizes: list[int] = []
    at = search = start
    while (run_start := data.find(runs[-1], search, stop)) >= 0:
        if run_start > at and data[run_start - len(comma) : run_start] != comma:
            # Not a unit but the end of a longer number: go on behind it.
            search = run_start + len(unit)
            continue
        end = run_start
        for run in runs:
            while data.startswith(run, end, stop):
                end += len(run)
        pieces.append(data[at:run_start])
        sizes.append((end - run_start) // len(unit))
        at = search = end
    pieces.append(data[at:stop])
    if not pieces[-1]:
        return None
    if not sizes:
        return _parse_by_json(pieces[0])
    with_fill = _parse_by_json(b"".join((*pieces, comma, unit[: -len(comma)])))
    if with_fill is None:
        return None
    values = with_fill[:-1]
    # All pieces but the last end with a comma, or are empty.
    out = np.empty(len(values) + sum(sizes), values.dtype)
    out.fill(with_fill[-1])
    at = first = 0
    for piece, size in zip(pieces, sizes, strict=False):
        count = piece.count(b",")
        out[at : at + count] = values[first : first + count]
        at, first = at + count + size, first + count
    out[at:] = values[first:]
    return out


def _parse_by_json(text: bytes) -> NDArray[Any] | None:
    """The values of a comma-separated text; None unless all are floats, 64-bit integers, or booleans."""
    try:
        values = orjson.loads(b"[%b]" % text)
    except orjson.JSONDecodeError:
        return None
    # With as many points as numbers, all are floats.
    if b'"' not in text and text.count(b".") == len(values):
        return np.fromiter(values, np.float64, len(values))
    if b"e" not in text:  # no booleans
        try:
            return np.fromiter(values, np.int64, len(values)) if type(sum(values)) is int else None
        except (OverflowError, TypeError):  # too large, or no numbers
            return None
    kinds = {*map(type, values)}
    return np.array(values, np.bool_ if kinds == {bool} else np.float64) if kinds in ({bool}, {float}) else None
