"""Readers of a text that arrives in pieces: of marks, words and JSON.

A reader is a generator that yields when it needs more text, and returns what it read, or None. So it is written as
if the text were whole, and reads each character once, however the text is cut.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

from tito_audit.parser import Delta
from tito_audit.tokens.text_stream import partial_match

T = TypeVar("T")
Reader: TypeAlias = Generator[None, None, T]
"""Yields for more text; returns what it read."""

_PIECE = 1024
"""The longest piece that is read at once, since what follows a mark in a piece is copied."""
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_HEX = re.compile(r"[0-9a-fA-F]")
_CLOSES = {"{": "}", "[": "]"}


class TextSource:
    """The text of an answer so far, and the offset in it of the next character to read."""

    def __init__(self) -> None:
        self.last = False
        """Whether the answer has ended: no more text comes."""
        self._pieces: list[str] = [""]
        self._starts: list[int] = [0]
        """Where each piece begins."""
        self._number = 0
        """Which piece is being read; then its text, and the place in it."""
        self._piece = ""
        self._in_piece = 0

    @property
    def offset(self) -> int:
        """The offset of the next character."""
        return self._starts[self._number] + self._in_piece

    def add(self, text: str) -> None:
        """Append text, so that a waiting reader can go on."""
        self._starts.append(self._starts[-1] + len(self._pieces[-1]))
        self._pieces.append(text)

    def more(self) -> Reader[bool]:
        """Whether there is a next character; waits for it."""
        while self._in_piece == len(self._piece):
            if self._number + 1 < len(self._pieces):
                self._number += 1
                self._piece, self._in_piece = self._pieces[self._number], 0
            elif self.last:
                return False
            else:
                yield
        return True

    def peek(self) -> str:
        """The next character; only after `more`."""
        return self._piece[self._in_piece]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Read what matches here in the current piece; the match may go on in the next one."""
        match = pattern.match(self._piece, self._in_piece)
        if match is None:
            return ""
        self._in_piece = match.end()
        return match[0]

    def skip(self) -> None:
        """Read the next character; only after `more`."""
        self._in_piece += 1

    def seek(self, offset: int) -> None:
        self._number = bisect_right(self._starts, offset) - 1
        self._piece = self._pieces[self._number]
        self._in_piece = offset - self._starts[self._number]

    def text(self, start: int, end: int | None = None) -> str:
        """The text between two offsets; without `end`, up to the last character that arrived."""
        first = bisect_right(self._starts, start) - 1
        stop = len(self._pieces) if end is None else bisect_left(self._starts, end)
        begin = self._starts[first]
        whole = "".join(self._pieces[first : max(stop, first + 1)])
        return whole[start - begin : None if end is None else end - begin]


Emit: TypeAlias = Callable[[Delta], None]


class AnswerRun:
    """A parser run made of one reader, which reads the answer from its beginning to its end."""

    def __init__(self, read: Callable[[TextSource, Emit], Reader[None]], prompt: str = "") -> None:
        """`prompt`: what the prompt wrote of the answer, read before it."""
        self._source, self._deltas = TextSource(), list[Delta]()
        self._reader = read(self._source, self._deltas.append)
        self.feed(prompt)

    def feed(self, text: str) -> Sequence[Delta]:
        for at in range(0, len(text), _PIECE):
            self._source.add(text[at : at + _PIECE])
            next(self._reader)
        return self._new_deltas()

    def close(self) -> Sequence[Delta]:
        self._source.last = True
        next(self._reader, None)
        return self._new_deltas()

    def _new_deltas(self) -> Sequence[Delta]:
        deltas = self._deltas[:]
        self._deltas.clear()
        return deltas


def search(source: TextSource, marks: Iterable[str]) -> Reader[tuple[str, str | None]]:
    """Reads the text before the next mark; that text, and the mark or None. The mark itself is not read."""
    while True:
        text = source.text(source.offset)
        places = [(text.index(mark), -len(mark), mark) for mark in marks if mark in text]
        at, _, mark = min(places, default=(len(text), 0, None))
        if mark is None and not source.last:
            at -= max((partial_match(text, each) for each in marks), default=0)
        if at or mark is not None or source.last:
            source.seek(source.offset + at)
            return text[:at], mark
        yield


def literal(source: TextSource, mark: str) -> Reader[bool]:
    """Read this mark if it comes next; whether it did."""
    start = source.offset
    for character in mark:
        if not (yield from source.more()) or source.peek() != character:
            source.seek(start)
            return False
        source.skip()
    return True


def skip_spaces(source: TextSource) -> Reader[bool]:
    """Read white space; whether anything follows it."""
    while (yield from source.more()):
        source.take(_SPACE)
        if (yield from source.more()) and source.peek() not in " \t\r\n":
            return True
    return False


def word(source: TextSource, pattern: re.Pattern[str], most: int = 256) -> Reader[str | None]:
    """Read as much as `pattern`, of single characters, matches; None if that is nothing or more than `most`."""
    text = ""
    while len(text) <= most and (yield from source.more()):
        piece = source.take(pattern)
        if not piece:
            break
        text += piece
    return text if 0 < len(text) <= most else None


def read_until(source: TextSource, mark: str) -> Reader[int | None]:
    """Read up to a mark and the mark itself; the offset where it begins, None if it never comes."""
    window = ""
    to_its_last = re.compile(f"[^{re.escape(mark[-1])}]*{re.escape(mark[-1])}?")
    while (yield from source.more()):
        window = (window + source.take(to_its_last))[-len(mark) :]
        if window == mark:
            return source.offset - len(mark)
    return None


Span: TypeAlias = tuple[int, int]
"""The offsets where a value begins and ends."""


def json_object(source: TextSource) -> Reader[dict[str, Span] | None]:
    """Read the JSON object that begins here; where the value of each member is, None if there is no object.

    Strict: no NaN, no control characters in strings. Of members with the same name the last one counts, as in
    `json.loads`. Without recursion, since a model may nest as deep as it likes.
    """
    if not (yield from source.more()) or source.peek() != "{":
        return None
    members: dict[str, Span] = {}
    # The brackets that are open, and the member of the outermost object that is read.
    open_: list[str] = []
    name, begins = "", source.offset
    while True:
        if len(open_) == 1:
            begins = source.offset
        bracket = source.peek()
        ended = bracket not in _CLOSES
        if not ended:
            source.skip()
            open_.append(bracket)
            # An object nested deeper is not a call: the next reader may refuse it or run out of stack.
            if len(open_) > 200 or not (yield from skip_spaces(source)):
                return None
            if source.peek() == _CLOSES[bracket]:
                source.skip()
                open_.pop()
                ended = True
        elif not (yield from _read_scalar(source)):
            return None
        while ended:
            if len(open_) == 1:
                members[name] = (begins, source.offset)
            if not open_:
                return members
            if not (yield from skip_spaces(source)) or source.peek() not in (",", _CLOSES[open_[-1]]):
                return None
            if source.peek() == ",":
                ended = False
            else:
                open_.pop()
            source.skip()
        # Up to where the next value begins.
        if not (yield from skip_spaces(source)):
            return None
        if open_[-1] == "{":
            span = yield from json_string(source)
            if span is None:
                return None
            if len(open_) == 1:
                name = json.loads(source.text(*span))
            if not (yield from skip_spaces(source)) or not (yield from literal(source, ":")):
                return None
            if not (yield from skip_spaces(source)):
                return None


def json_string(source: TextSource) -> Reader[Span | None]:
    """Read the JSON string that begins here; its offsets, quotes included, None if there is none."""
    start = source.offset
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
            return start, source.offset
        if not (yield from source.more()) or source.peek() not in '"\\/bfnrtu':
            return None
        digits = 4 if source.peek() == "u" else 0
        source.skip()
        for _ in range(digits):
            if not (yield from source.more()) or not source.take(_HEX):
                return None
    return None


def json_text(source: TextSource) -> Reader[str | None]:
    """Read the JSON object that begins here, after white space; its text, None if there is none."""
    yield from skip_spaces(source)
    start = source.offset
    return None if (yield from json_object(source)) is None else source.text(start, source.offset)


def _read_scalar(source: TextSource) -> Reader[bool]:
    """Read a string, a number, true, false or null; whether one begins here."""
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
