"""A text that arrives in pieces, and readers that wait for more of it.

A reader is a generator: it yields when it needs more text, and returns what it found, or None. So it is written as
if the text were whole, buffers little, and reads each character once, however the text is cut.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reader: TypeAlias = Generator[None, None, T]
"""Yields for more text; returns what it read."""

_SPACE = re.compile(r"[ \t\r\n]*")


class TextSource:
    """The text of one attempt to read something; offsets count from where the attempt began."""

    def __init__(self) -> None:
        self.last = False
        """Whether the answer has ended: no more text comes."""
        self._pieces: list[str] = [""]
        self._starts: list[int] = [0]
        """The offset of each piece."""
        self._number = 0
        """The current piece, and the place in it."""
        self._piece = ""
        self._in_piece = 0

    @property
    def at(self) -> int:
        """The offset of the next character."""
        return self._starts[self._number] + self._in_piece

    def add(self, text: str) -> None:
        """Append text: the reader that waits can go on."""
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
        """Reads what matches here in the current piece; a match may continue in the next piece."""
        match = pattern.match(self._piece, self._in_piece)
        if match is None:
            return ""
        self._in_piece = match.end()
        return match[0]

    def skip(self) -> None:
        """Go over the next character; only after `more`."""
        self._in_piece += 1

    def back(self, offset: int) -> None:
        """Go back to an offset."""
        self._number = bisect_right(self._starts, offset) - 1
        self._piece = self._pieces[self._number]
        self._in_piece = offset - self._starts[self._number]

    def text(self, start: int, end: int | None = None) -> str:
        """The text from one offset to another, or to the end of what there is."""
        first = bisect_right(self._starts, start) - 1
        stop = len(self._pieces) if end is None else bisect_left(self._starts, end)
        begin = self._starts[first]
        whole = "".join(self._pieces[first : max(stop, first + 1)])
        return whole[start - begin : None if end is None else end - begin]


def literal(source: TextSource, mark: str) -> Reader[bool]:
    """Reads this mark if it comes next; whether it did."""
    start = source.at
    for character in mark:
        if not (yield from source.more()) or source.peek() != character:
            source.back(start)
            return False
        source.skip()
    return True


def spaces(source: TextSource) -> Reader[bool]:
    """Read white space; whether anything follows."""
    while (yield from source.more()):
        source.take(_SPACE)
        if (yield from source.more()) and source.peek() not in " \t\r\n":
            return True
    return False


def word(source: TextSource, pattern: re.Pattern[str], most: int = 256) -> Reader[str | None]:
    """The longest run of characters that a pattern of single characters matches; None for none or too many."""
    text = ""
    while len(text) <= most and (yield from source.more()):
        piece = source.take(pattern)
        if not piece:
            break
        text += piece
    return text if 0 < len(text) <= most else None


def until(source: TextSource, mark: str) -> Reader[int | None]:
    """The offset where a mark begins, which is then read; None if it never comes."""
    window = ""
    to_its_last = re.compile(f"[^{re.escape(mark[-1])}]*{re.escape(mark[-1])}?")
    while (yield from source.more()):
        window = (window + source.take(to_its_last))[-len(mark) :]
        if window == mark:
            return source.at - len(mark)
    return None
