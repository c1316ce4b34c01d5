"""JSON read as it arrives: where an object ends, and where its members are in the text."""

from __future__ import annotations

import json
import re
from typing import TypeAlias

from tito_audit.parsers._source import Reader, TextSource, literal, spaces

_DEEPEST = 200
"""An object nested deeper is not a call: the next reader may refuse it or run out of stack."""
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
    return (yield from _Object(source).read())


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
        if not (yield from _escape(source)):
            return None
    return None


def _escape(source: TextSource) -> Reader[bool]:
    """Whether what follows a backslash is an escape of JSON, which is then read."""
    if not (yield from source.more()) or source.peek() not in '"\\/bfnrtu':
        return False
    digits = 4 if source.peek() == "u" else 0
    source.skip()
    for _ in range(digits):
        if not (yield from source.more()) or not source.take(_HEX):
            return False
    return True


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


class _Object:
    """The reading of one object, with all that is nested in it."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._open: list[str] = []
        """The brackets that are open, the outermost first."""
        self._members: dict[str, Span] = {}
        self._name = ""
        """The member of the outermost object that is being read, and where its value begins."""
        self._begins = 0
        self._value_next = True

    def read(self) -> Reader[dict[str, Span] | None]:
        """The members of the outermost object; its brace comes next."""
        while True:
            if not (yield from (self._value() if self._value_next else self._after())):
                return None
            if not self._open:
                return self._members

    def _value(self) -> Reader[bool]:
        """Read a value, or the beginning of one that is nested."""
        if len(self._open) == 1:
            self._begins = self._source.at
        bracket = self._source.peek()
        if bracket in _CLOSES:
            return (yield from self._opened(bracket))
        if not (yield from _scalar(self._source)):
            return False
        self._ended()
        return True

    def _opened(self, bracket: str) -> Reader[bool]:
        """Read a bracket, and the one that closes it or the name of the first member."""
        self._source.skip()
        self._open.append(bracket)
        if len(self._open) > _DEEPEST or not (yield from spaces(self._source)):
            return False
        if self._source.peek() == _CLOSES[bracket]:
            self._close()
            return True
        return (yield from self._next())

    def _after(self) -> Reader[bool]:
        """Read what comes after a value: a comma and the name of the next member, or a closing bracket."""
        if not (yield from spaces(self._source)):
            return False
        character = self._source.peek()
        if character == _CLOSES[self._open[-1]]:
            self._close()
            return True
        if character != ",":
            return False
        self._source.skip()
        return (yield from spaces(self._source)) and (yield from self._next())

    def _next(self) -> Reader[bool]:
        """Read up to where the next value begins."""
        self._value_next = True
        if self._open[-1] == "[":
            return True
        span = yield from json_string(self._source)
        if span is None:
            return False
        if len(self._open) == 1:
            self._name = json.loads(self._source.text(*span))
        if not (yield from spaces(self._source)) or not (yield from literal(self._source, ":")):
            return False
        return (yield from spaces(self._source))

    def _close(self) -> None:
        self._source.skip()
        self._open.pop()
        self._ended()

    def _ended(self) -> None:
        """A value has ended here."""
        self._value_next = False
        if len(self._open) == 1:
            self._members[self._name] = (self._begins, self._source.at)
