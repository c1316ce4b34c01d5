"""RawRow: a row as a file holds it, parsed from bytes and dumped as a line of JSON.

RowSample: the rows of a log that a sample takes, however the log is split among processes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.format import Row
from tito_audit.record.edits import Path
from tito_audit.record.nesting import TooDeep, load_json, load_python_json

_EXCERPT = 24
"""Bytes that are shown on each side of a syntax error."""
_BRACKET = re.compile(rb'[\[\]{}]|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A bracket, or a whole string, whose brackets do not count."""
_DEEPER = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a log, or why it could not be read: exactly one of `value` and `error` is set."""

    index: int
    """From 0: the line (blank ones count), the element of an array, or the row of a table."""
    value: Row | None
    error: str | None = None
    text: bytes | None = None
    """Its bytes in the decompressed file, stripped, if the log keeps text; None for rows that are too long, and in
    binary files."""
    lead: bytes = b""
    """The bytes between the row before and this one, if the log keeps text."""
    lost: bool = False
    """True for the error row that says that the file cannot be read further."""
    nesting: Nesting | None = None
    """Where it is nested in a row of the file; None if it is one itself."""
    extensible: bool = False
    """True for an object in memory, which may get new keys at any depth, as JSON may."""
    has_arrays: bool = False
    """True if some lists of numbers were read as arrays, which an audit may: see `without_arrays`."""

    @property
    def accepts_new_keys(self) -> bool:
        """Whether objects in it may get new keys: those of JSON whose text is kept, and those in memory."""
        in_json = self.text is not None or (self.nesting is not None and self.nesting.outer.accepts_new_keys)
        return self.extensible or in_json

    @property
    def without_arrays(self) -> RawRow:
        """The row parsed without numpy arrays, as it can be written back; itself if it has none."""
        return replace(self, value=parse_json(self.text or b""), has_arrays=False) if self.has_arrays else self


@dataclass(frozen=True, slots=True)
class Nesting:
    """The place of a row that is nested in a row of the file."""

    outer: RawRow
    path: Path
    """Keys and positions that lead to it, as far as they exist."""
    before: tuple[RawRow, ...] = ()
    """Rows of the file that contain no rows, between the nested row before and this one."""


def parse_row(index: int, data: bytes, *, cut_off: bool = False) -> RawRow:
    """The JSON object in `data` as a row, or an error row.

    `cut_off`: the file ends here without a line end, so a row that does not parse was most likely being written
    when the run stopped.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        if cut_off:
            return RawRow(
                index,
                None,
                f"the file ends in the middle of a row ({len(data):,} bytes of it are there, {error}): "
                "the writer was stopped, or the copy is incomplete",
            )
        return RawRow(index, None, str(error))
    if not isinstance(value, dict):
        return RawRow(index, None, no_object_reason(value))
    key = find_repeated_key(data, value)
    if key is None:
        return RawRow(index, value)
    shown = key if len(key) <= _EXCERPT else f"{key[:_EXCERPT]}…"
    return RawRow(
        index,
        None,
        f"the key {shown!r} is there twice in one object, and a reader sees only one of the two values; "
        "write each key once",
    )


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`; ValueError with a reason for people if it is none.

    What orjson rejects, the standard library tries again. It accepts all that Python writes: bare NaN and
    Infinity, numbers beyond a float, and lone surrogates.
    """
    try:
        return load_json(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return load_python_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        near = data[max(0, error.start - _EXCERPT) : error.start + _EXCERPT]
        raise ValueError(f"not UTF-8 at byte {error.start:,}, near {near!r}") from None
    except json.JSONDecodeError as error:
        near_text = error.doc[max(0, error.pos - _EXCERPT) : error.pos + _EXCERPT]
        raise ValueError(f"not JSON: {error.msg}, character {error.pos:,}, near {near_text!r}") from None


def is_json(data: bytes) -> bool:
    """Whether `data` is a JSON value, also one that is nested too deeply to be read."""
    try:
        parse_json(data)
    except TooDeep:
        # It is taken for JSON if its first bracket closes at its end.
        depth = 0
        for bracket in _BRACKET.finditer(data):
            depth += _DEEPER.get(bracket[0], 0)
            if depth <= 0:
                return not data[bracket.end() :].strip()
        return False
    except ValueError:
        return False
    return True


def too_long_row(index: int, size: int, limit: int) -> RawRow:
    """The error row for a row that is too long to be read."""
    return RawRow(
        index,
        None,
        f"the row is {size:,} bytes long, over the limit of {limit:,}, and was not read; "
        "raise --max-row-bytes to read it",
    )


def no_object_reason(value: object) -> str:
    """Why a value is no row, if it is no object."""
    if isinstance(value, list):
        if value and all(isinstance(entry, dict) for entry in value):
            return (
                f"the line is a list of {len(value)} objects, not an object; "
                "write one object a line (jq -c '.[]' LOG > LOG.jsonl)"
            )
        return "the row is a list, not an object with named columns"
    kind = "null" if value is None else type(value).__name__
    return f"the row is {kind}, not an object with named columns"


_ESCAPED_QUOTE = b"\\u0022"


def may_repeat_keys(text: bytes, value: Any) -> bool:
    """Whether an object in the text may repeat a key; False is certain.

    `value` is what orjson makes of the text. Dumped again it has as many quotes, unless a key was dropped.
    """
    escapes = b"\\" in text and _ESCAPED_QUOTE in text
    return escapes or text.count(b'"') != orjson.dumps(value).count(b'"')


def find_repeated_key(text: bytes, value: Any) -> str | None:
    """A key that an object in the text repeats, the first of the innermost object; None if there is none."""
    try:
        if not may_repeat_keys(text, value):
            return None
    except TypeError:
        pass  # the standard library read it
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            repeated.extend({key} & seen)
            seen.add(key)

    json.loads(text, object_pairs_hook=note)
    return repeated[0] if repeated else None


_SIMPLE = {int, float, bool, str, type(None)}


def dump_row(row: Row) -> bytes:
    """A row as one line of JSON: NaN as null, infinity as Python writes it, bytes as base64."""
    try:
        data = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=json_default)
    except (TypeError, ValueError):
        return _dump_with_stdlib(row)
    # orjson writes infinity as null, which means "not recorded".
    return _dump_with_stdlib(row) if _holds_infinity(row) else data


def json_default(value: object) -> object:
    """A value that JSON lacks in JSON's terms: arrays as lists, bytes as base64, else text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Set) else str(value)


def _dump_with_stdlib(row: Row) -> bytes:
    """A row as the standard library writes it: also lone surrogates, huge integers and infinity."""
    return json.dumps(_plain_json(row), separators=(",", ":"), default=json_default).encode("ascii")


def _plain_json(value: Any) -> Any:
    """A value with arrays as lists and NaN as None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): _plain_json(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain_json(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value


def _holds_infinity(value: Any) -> bool:
    if isinstance(value, float):
        return value in (np.inf, -np.inf)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and bool(np.isinf(value).any())
    if isinstance(value, Mapping):
        return any(map(_holds_infinity, value.values()))
    if isinstance(value, list | tuple) and value:
        if {*map(type, value)} <= _SIMPLE:
            return np.inf in value or -np.inf in value
        return any(map(_holds_infinity, value))
    return False


_EDGE = 256
"""Bytes at the start and the end of a row that identify it."""
_SPACE = 1 << 64


class RowSample:
    """Chooses about a share of the rows of one file, and counts those that it leaves out.

    A row of text is chosen by a hash of its position, beginning and end, a row of a table by its number and a hash
    of its block. So the file's name and appended rows do not change the sample, and different files lose different
    rows. A larger share takes the rows of a smaller one and more.
    """

    __slots__ = ("_bound", "last", "left_out")

    def __init__(self, share: float) -> None:
        self.left_out = 0
        """Rows that were seen and not sampled."""
        self.last = -1
        """The index of the last row that was seen; -1 before the first."""
        self._bound = int(share * _SPACE)

    def takes(self, index: int, at: int, data: bytes | None, size: int) -> bool:
        """Whether a row of `size` bytes at position `at` is sampled; its `data` are None if they are too long."""
        self.last = index
        ends = data[:_EDGE] + data[-_EDGE:] if data is not None else b""
        sampled = _hash64(b"%d %d %b" % (at, size, ends)) < self._bound
        self.left_out += not sampled
        return sampled

    def sampled_rows(self, seed: int, first: int, count: int) -> NDArray[np.int64]:
        """`[N]` which of `count` rows are sampled, from 0; the first is row `first` of the file. Counts none."""
        rows = np.arange(first, first + count, dtype=np.uint64)
        # The finalizer of splitmix64 scatters consecutive numbers over 64 bits.
        rows = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
        rows = (rows ^ (rows >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        rows = (rows ^ (rows >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        rows ^= rows >> np.uint64(31)
        return (rows < np.uint64(min(self._bound, _SPACE - 1))).nonzero()[0].astype(np.int64)

    def count_left_out(self, rows: Iterable[RawRow], first: int, count: int) -> Iterator[RawRow]:
        """The sampled ones of `count` rows from row `first` on; counts the others as left out."""
        before, passed = self.left_out, 0
        for row in rows:
            self.left_out, self.last = before + row.index - first - passed, row.index
            passed += 1
            yield row
        self.left_out, self.last = before + count - passed, first + count - 1

    def count_skipped(self, index: int, count: int) -> None:
        """Count `count` rows as left out, the last of which has this index."""
        self.left_out += count
        self.last = index


def block_seed(*what: object) -> int:
    """A 64-bit seed for a part of a file, for `RowSample.sampled_rows`."""
    return _hash64(repr(what).encode())


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
