"""RawRow: one row as storage found it, how bytes become one, and how a row becomes a line of JSON.

RowSample: which rows of a log a sample takes, however the log is split among processes.
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

_NEAR = 24
"""Bytes shown on each side of the place where JSON is invalid."""
_BRACKET = re.compile(rb'[\[\]{}]|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A bracket, or a string, in which brackets are text."""
_DEEPER = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a log, or why it could not be read: exactly one of `value` and `error` is set."""

    index: int
    """From 0: the line (blank ones counted), the element of an array, the row of a table."""
    value: Row | None
    error: str | None = None
    text: bytes | None = None
    """Its bytes in the decompressed file, stripped, if the log keeps text; None also for a row that is too long
    and for rows of binary files."""
    lead: bytes = b""
    """Everything between the end of the previous row and the start of this one, if the log keeps text."""
    lost: bool = False
    """True for the error row at the place past which the file cannot be read."""
    within: Within | None = None
    """Where it is nested in a row of the file; None if it is a row of the file itself."""
    open: bool = False
    """True for an object in memory, which may get keys at any depth, as JSON may."""
    spliced: bool = False
    """True if some of its lists of numbers were read as arrays, which is only right for an audit: see `plain`."""

    @property
    def of_text(self) -> bool:
        """Whether it is an object that may get keys: from text that is kept, its own or that of the row of the
        file around it, or in memory."""
        return self.open or self.text is not None or (self.within is not None and self.within.outer.of_text)

    @property
    def plain(self) -> RawRow:
        """The row as its text has it, without arrays; itself if it has none."""
        return replace(self, value=parse_json(self.text or b""), spliced=False) if self.spliced else self


@dataclass(frozen=True, slots=True)
class Within:
    """Where a row is nested in a row of the file."""

    outer: RawRow
    path: Path
    """The keys and positions that lead to it, as far as they exist."""
    before: tuple[RawRow, ...] = ()
    """Rows of the file between the previous nested row and this one that contain no rows."""


def parse_row(index: int, data: bytes, *, cut_off: bool = False) -> RawRow:
    """The JSON object in `data` as a row, or the reason why there is none.

    `cut_off`: the file ends here without closing the row, so a row that does not parse was most likely being
    written when the run stopped.
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
        return RawRow(index, None, not_an_object(value))
    key = repeated_key(data, value)
    if key is None:
        return RawRow(index, value)
    shown = key if len(key) <= _NEAR else f"{key[:_NEAR]}…"
    return RawRow(
        index,
        None,
        f"the key {shown!r} is there twice in one object, and a reader sees only one of the two values; "
        "write each key once",
    )


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`; ValueError with a readable reason if it is not JSON.

    What the fast parser rejects is tried again with the standard library, which accepts what Python
    writes: bare NaN and Infinity, numbers beyond a float, and lone surrogates.
    """
    try:
        return load_json(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return load_python_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        near = data[max(0, error.start - _NEAR) : error.start + _NEAR]
        raise ValueError(f"not UTF-8 at byte {error.start:,}, near {near!r}") from None
    except json.JSONDecodeError as error:
        near_text = error.doc[max(0, error.pos - _NEAR) : error.pos + _NEAR]
        raise ValueError(f"not JSON: {error.msg}, character {error.pos:,}, near {near_text!r}") from None


def parses(data: bytes) -> bool:
    """Whether `data` is a JSON value, if only one nested too deeply to be read."""
    try:
        parse_json(data)
    except TooDeep:
        # Whether the first bracket of a text is closed at its end.
        depth = 0
        for bracket in _BRACKET.finditer(data):
            depth += _DEEPER.get(bracket[0], 0)
            if depth <= 0:
                return not data[bracket.end() :].strip()
        return False
    except ValueError:
        return False
    return True


def too_long(index: int, size: int, limit: int) -> RawRow:
    """The error row for a row that was skipped because of its size."""
    return RawRow(
        index,
        None,
        f"the row is {size:,} bytes long, over the limit of {limit:,}, and was not read; "
        "raise --max-row-bytes to read it",
    )


def not_an_object(value: object) -> str:
    """Why a value that is no object is no row."""
    if isinstance(value, list):
        if value and all(isinstance(entry, dict) for entry in value):
            return (
                f"the line is a list of {len(value)} objects, not an object; "
                "write one object a line (jq -c '.[]' LOG > LOG.jsonl)"
            )
        return "the row is a list, not an object with named columns"
    kind = "null" if value is None else type(value).__name__
    return f"the row is {kind}, not an object with named columns"


_QUOTE_BY_NUMBER = b"\\u0022"


def may_repeat_keys(text: bytes, value: Any) -> bool:
    """Whether a key may be there twice in the text of a value; False is certain.

    `text` is JSON and `value` what orjson makes of it. Written again, the value has as many quotes as the text,
    unless a key was dropped.
    """
    return text.count(b'"') != orjson.dumps(value).count(b'"') or _QUOTE_BY_NUMBER in text


def repeated_key(text: bytes, value: Any) -> str | None:
    """A key that is there twice in one object of the text, the innermost first; None if there is none."""
    try:
        if not may_repeat_keys(text, value):
            return None
    except TypeError:
        pass  # orjson did not read it
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
    """A row as one line of JSON; NaN becomes null, infinity is written as Python writes it, bytes as base64."""
    try:
        data = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=json_form)
    except (TypeError, ValueError):
        return _dump_slowly(row)
    # orjson writes infinity as null, which would say "not recorded".
    return _dump_slowly(row) if _holds_infinity(row) else data


def json_form(value: object) -> object:
    """The JSON form of a value that JSON has no place for: lists of arrays, base64 of bytes, else text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Set) else str(value)


def _dump_slowly(row: Row) -> bytes:
    """The row as the standard library writes it: lone surrogates, huge integers and infinity included."""
    return json.dumps(_plain(row), separators=(",", ":"), default=json_form).encode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
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
"""Bytes at the start and end of a row that identify it."""
_SPACE = 1 << 64


class RowSample:
    """The rows of one file that a share takes, and how many were left out so far.

    A text row is identified by its position and by how it begins and ends, a table row by its number and its
    part of the file. So neither the file's name nor rows appended later change the sample, and different files
    lose different rows. A larger share takes the rows of a smaller one and more.
    """

    __slots__ = ("_bound", "last", "left_out")

    def __init__(self, share: float) -> None:
        self.left_out = 0
        """Rows seen and not sampled."""
        self.last = -1
        """The index of the last row seen; -1 before the first."""
        self._bound = int(share * _SPACE)

    def takes(self, index: int, at: int, data: bytes | None, size: int) -> bool:
        """Whether the row with this index, which begins at `at`, is sampled; `data` is None if it is too long."""
        self.last = index
        ends = data[:_EDGE] + data[-_EDGE:] if data is not None else b""
        sampled = _number(b"%d %d %b" % (at, size, ends)) < self._bound
        self.left_out += not sampled
        return sampled

    def among(self, seed: int, first: int, count: int) -> NDArray[np.int64]:
        """`[N]` which of `count` rows are sampled, counted from 0; the first is row `first` of the file.

        Does not count what is left out.
        """
        rows = np.arange(first, first + count, dtype=np.uint64)
        # Consecutive numbers scattered over 64 bits (the finalizer of splitmix64).
        rows = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
        rows = (rows ^ (rows >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        rows = (rows ^ (rows >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        rows ^= rows >> np.uint64(31)
        return (rows < np.uint64(min(self._bound, _SPACE - 1))).nonzero()[0].astype(np.int64)

    def counted(self, rows: Iterable[RawRow], first: int, count: int) -> Iterator[RawRow]:
        """The sampled rows of the `count` rows from row `first` on; the others count as left out."""
        before, passed = self.left_out, 0
        for row in rows:
            self.left_out, self.last = before + row.index - first - passed, row.index
            passed += 1
            yield row
        self.left_out, self.last = before + count - passed, first + count - 1

    def skip(self, index: int, count: int) -> None:
        """Count `count` rows as left out; the last has this index."""
        self.left_out += count
        self.last = index


def seed_of(*what: object) -> int:
    """A 64-bit seed for a part of a file, for `RowSample.among`."""
    return _number(repr(what).encode())


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
