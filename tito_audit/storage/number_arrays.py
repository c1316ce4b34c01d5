"""Rows of JSON whose long arrays of numbers are cut out of the text before it is parsed.

Each array is replaced by a mark: a list of one string that no log can contain. Then the rest is parsed; finding
the mark as such a list proves that the array was a value there, and not part of a string.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.nesting import parsed_json
from tito_audit.storage.number_text import numbers_of
from tito_audit.storage.repeated_keys import may_repeat_keys
from tito_audit.storage.row import RawRow, parse_row, parses

_SHORTEST = 256
"""Arrays shorter than this many bytes stay in the text."""
_SHORTEST_INTEGERS = 2048
"""The same for integers of several digits, where the parser is faster on short arrays."""
_FIRST = frozenset(bytes([byte]) for byte in b"-0123456789tf")
_COMMA, _SPACE = b", "
_Read: TypeAlias = tuple[int, int, NDArray[Any]]
"""Where an array starts and stops in the text, and its numbers."""
_MARK = secrets.token_hex(16)
"""Random in every process, so that no log can contain it."""


class Splicer:
    """Reads rows, with the long lists of numbers in some columns as numpy arrays.

    `columns` maps paths to the allowed dtype kinds: `{"token_ids": "i"}` for a column of the row,
    `{"calls[].token_ids": "i"}` for a column of objects in a list.
    """

    def __init__(self, columns: Mapping[str, str], every: str = "") -> None:
        """`every` are the kinds for all other keys, which only matters to `parses`."""
        self._columns = columns
        self._every = every or None
        self._kinds = {
            path.rpartition(".")[2].encode("utf-8", "surrogatepass"): kinds for path, kinds in columns.items()
        }

    def parse_row(self, index: int, data: bytes, *, cut_off: bool = False) -> RawRow:
        """The row as `storage.row.parse_row` gives it, with some lists as arrays `[N]`.

        Integers become int64, floats float64, booleans bool; mixed lists and lists of other things stay lists.
        """
        value = self._spliced(data) if len(data) >= _SHORTEST else None
        return parse_row(index, data, cut_off=cut_off) if value is None else RawRow(index, value, spliced=True)

    def parses(self, data: bytes) -> bool:
        """Whether a text is JSON; of numbers that the columns allow, no objects are made."""
        # A mark inside a string would end the string, and no JSON goes on like that.
        return parses(b"".join(self._cut(data)[1])) or parses(data)

    def _spliced(self, data: bytes) -> dict[str, Any] | None:
        """The object in `data`; None if nothing was cut out, or a mark is not found again."""
        marked, pieces = self._cut(data)
        if not marked:
            return None
        text = b"".join(pieces)
        try:
            value = parsed_json(text)
        except ValueError:
            return None
        if not isinstance(value, dict) or may_repeat_keys(text, value):
            return None
        self._put_back(value, marked)
        return value if not marked else None

    def _cut(self, data: bytes) -> tuple[dict[str, NDArray[Any]], list[bytes]]:
        """The arrays cut out, by mark, and the remaining text with the marks in it."""
        marked: dict[str, NDArray[Any]] = {}
        last: dict[bytes, _Read] = {}
        pieces: list[bytes] = []
        key = data.find(b'":')
        opening = b'": [' if data[key + 2 : key + 3] == b" " else b'":['
        copied = at = 0
        while (found := data.find(opening, at)) >= 0:
            at = found + len(opening)
            name = data[data.rfind(b'"', copied, found) + 1 : found]
            kinds = self._kinds.get(name, self._every)
            if kinds is None:
                continue
            if data[at : at + 1] not in _FIRST:
                continue
            start, at = at, data.find(b"]", at)
            if at < 0:
                break
            numbers = _numbers(data, start, at, last.get(name))
            if numbers is not None and numbers.dtype.kind in kinds:
                last[name] = start, at, numbers
                mark = f"{_MARK}{len(marked)}"
                pieces += data[copied:start], b'"%b"' % mark.encode()
                marked[mark] = numbers
                copied = at
        pieces.append(data[copied:])
        return marked, pieces

    def _put_back(self, value: dict[str, Any], marked: dict[str, NDArray[Any]]) -> None:
        """Replace marks by arrays, or by lists where no array is wanted; those not found stay in `marked`."""
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


def _numbers(data: bytes, start: int, stop: int, before: _Read | None) -> NDArray[Any] | None:
    """The array in `data[start:stop]` if it holds only numbers and is worth cutting out.

    `before` is the array of the same name before it, if there is one.
    """
    if stop - start < _SHORTEST:
        return None
    if stop - start < _SHORTEST_INTEGERS and data[start + 1] != 0x2C and data.find(b".", start, stop) < 0:
        return None
    if before is not None and before[2].dtype.kind == "i":
        numbers = _continued(data, start, stop, before)
        if numbers is not None:
            return numbers
    return numbers_of(data, start, stop)


def _continued(data: bytes, start: int, stop: int, before: _Read) -> NDArray[Any] | None:
    """The same for integers most of which also start the array before, as one call's prompt starts the next.

    Only the rest is parsed. None if nothing is gained, or if the rest are not integers.
    """
    first, end, known = before
    size = min(stop - start, end - first)
    text = np.frombuffer(data, np.uint8, size, start)
    differ = text != np.frombuffer(data, np.uint8, size, first)
    same = int(differ.argmax()) if differ.any() else size
    if same == stop - start == end - first:
        return known.copy()
    comma = data.rfind(b",", start, start + same)
    if comma - start < size // 2:
        return None
    count = int(np.count_nonzero(text[: comma - start] == _COMMA)) + 1
    rest = numbers_of(data, comma + (2 if data[comma + 1] == _SPACE else 1), stop)
    if rest is None or rest.dtype != known.dtype:
        return None
    return np.concatenate((known[:count], rest))
