"""JSON read as it arrives: where an object ends, and where its members are in the text."""

from __future__ import annotations

import json
import re
from typing import TypeAlias

from tito_audit.parsers._source import Reader, TextSource, literal, spaces

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_HEX = re.compile(r"[0-9a-fA-F]")
_CLOSES = {"{": "}", "[": "]"}

Span: TypeAlias = tuple[int, int]
"""Where a value begins and ends in the text of its source."""


def json_object(source: TextSource) -> Reader[dict[str, Span] | None]:
    """The members of the JSON object that begins here; None if there is none.

    Strict: no NaN, no control characters in strings. Of members with the same name the last counts, as in
    `json.loads`. No recursion.
    """
    if not (yield from source.more()) or source.peek() != "{":
        return None
    members: dict[str, Span] = {}
    # The brackets that are open, and the member of the outermost object that is read.
    open_: list[str] = []
    name, begins = "", source.at
    while True:
        if len(open_) == 1:
            begins = source.at
        bracket = source.peek()
        ended = bracket not in _CLOSES
        if not ended:
            source.skip()
            open_.append(bracket)
            # An object nested deeper is not a call: the next reader may refuse it or run out of stack.
            if len(open_) > 200 or not (yield from spaces(source)):
                return None
            if source.peek() == _CLOSES[bracket]:
                source.skip()
                open_.pop()
                ended = True
        elif not (yield from _scalar(source)):
            return None
        while ended:
            if len(open_) == 1:
                members[name] = (begins, source.at)
            if not open_:
                return members
            if not (yield from spaces(source)) or source.peek() not in (",", _CLOSES[open_[-1]]):
                return None
            if source.peek() == ",":
                ended = False
            else:
                open_.pop()
            source.skip()
        # Up to where the next value begins.
        if not (yield from spaces(source)):
            return None
        if open_[-1] == "{":
            span = yield from json_string(source)
            if span is None:
                return None
            if len(open_) == 1:
                name = json.loads(source.text(*span))
            if not (yield from spaces(source)) or not (yield from literal(source, ":")):
                return None
            if not (yield from spaces(source)):
                return None


def json_string(source: TextSource) -> Reader[Span | None]:
    """Where the JSON string that begins here is, quotes included."""
    start = source.at
    if not (yield from literal(source, '"')):
        return None
    while (yield from source.more()):
        if source.take(_PLAIN):
            continue
        character = source.peek()
        if character not in '"\\':
            return None
        source.skip()
        if character == '"':
            return start, source.at
        if not (yield from source.more()) or source.peek() not in '"\\/bfnrtu':
            return None
        digits = 4 if source.peek() == "u" else 0
        source.skip()
        for _ in range(digits):
            if not (yield from source.more()) or not source.take(_HEX):
                return None
    return None


def _scalar(source: TextSource) -> Reader[bool]:
    """Whether a string, a number, true, false or null is here, which is then read."""
    first = source.peek()
    if first == '"':
        return (yield from json_string(source)) is not None
    if first in _WORDS:
        return (yield from literal(source, _WORDS[first]))
    pieces: list[str] = []
    while (yield from source.more()):
        piece = source.take(_NUMERIC)
        if not piece:
            break
        pieces.append(piece)
    return _NUMBER.fullmatch("".join(pieces)) is not None
