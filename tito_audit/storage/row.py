"""RawRow: one row as storage found it, and how bytes become one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tito_audit.format import Row
from tito_audit.record.edits import Path
from tito_audit.record.nesting import TooDeep, parsed_by_python, parsed_json
from tito_audit.storage.repeated_keys import repeated_key

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
    twice = repeated_key(data, value)
    return RawRow(index, value) if twice is None else RawRow(index, None, _unclear(twice))


def _unclear(key: str) -> str:
    """Why a row with the same key twice is not read."""
    shown = key if len(key) <= _NEAR else f"{key[:_NEAR]}…"
    return (
        f"the key {shown!r} is there twice in one object, and a reader sees only one of the two values; "
        "write each key once"
    )


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`; ValueError with a readable reason if it is not JSON.

    What the fast parser rejects is tried again with the standard library, which accepts what Python
    writes: bare NaN and Infinity, numbers beyond a float, and lone surrogates.
    """
    try:
        return parsed_json(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return parsed_by_python(data.decode("utf-8"))
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
        return _closes(data)
    except ValueError:
        return False
    return True


def _closes(data: bytes) -> bool:
    """Whether the first bracket of a text is closed at its end."""
    depth = 0
    for found in _BRACKET.finditer(data):
        depth += _DEEPER.get(found[0], 0)
        if depth <= 0:
            return not data[found.end() :].strip()
    return False


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
