"""Content with tool calls: common code of all syntaxes whose calls begin with a mark."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

from tito_audit.parser import Delta, ParsedCall, ParseOptions, ParserRun
from tito_audit.parsers._json import Span
from tito_audit.parsers._source import TextSource
from tito_audit.tokens.text_stream import overlap

Calls: TypeAlias = Generator[ParsedCall | None, None, bool]
"""Yields each call once it is complete, and None for more text. Returns whether what it read after the last call
belongs to the syntax; if not, it is content."""
CallReader: TypeAlias = Callable[[TextSource], Calls]
"""Reads calls from a source that begins with the mark."""


_PIECE = 1024
"""A long text is read in pieces: what comes after a mark is copied."""


class PlainRun:
    """An answer that is all content."""

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds."""
        return (Delta(text),) if text else ()

    def close(self) -> Sequence[Delta]:
        """Nothing: no text is held back."""
        return ()


class CallsRun:
    """Content in which marks begin tool calls.

    Text from a mark on is held back until it is a complete call or cannot become one. Then it is content,
    unchanged, and the search for marks continues where the call broke off, so the time is linear. White space
    alone between calls belongs to the syntax; everything else around them is content.
    """

    def __init__(self, marks: Mapping[str, CallReader], *, only_first: bool = False) -> None:
        self._marks = marks
        self._only_first = only_first
        """Calls come first in an answer or not at all."""
        self._held = ""
        """What may be the beginning of a mark."""
        self._source: TextSource | None = None
        self._calls: Calls | None = None
        self._taken = 0
        """How much of the source's text was read as calls."""
        self._blank = ""
        """White space since the last call or the beginning, if nothing else came."""
        self._in_text = False
        self._count = 0
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds."""
        for at in range(0, len(text), _PIECE):
            self._run(text[at : at + _PIECE], last=False)
        return self._new_deltas()

    def close(self) -> Sequence[Delta]:
        """What is still held back, at the end of the answer."""
        self._run("", last=True)
        if not self._count and self._blank:
            self._deltas.append(Delta(self._blank))
        return self._new_deltas()

    def _run(self, text: str, *, last: bool) -> None:
        rest: str | None = text
        while rest is not None:
            rest = self._search(rest, last) if self._source is None else self._read(rest, last)

    def _new_deltas(self) -> Sequence[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _search(self, text: str, last: bool) -> str | None:
        """Emit content up to the next mark; the text from there on, None without a mark."""
        text = self._held + text
        self._held = ""
        marks = [(text.index(mark), -len(mark), mark) for mark in self._marks if mark in text]
        if not marks or self._too_late(text[: min(marks)[0]]):
            overlapping = 0 if last else max(overlap(text, begin_mark) for begin_mark in self._marks)
            overlapping = 0 if self._too_late(text[: len(text) - overlapping]) else overlapping
            self._content(text[: len(text) - overlapping])
            self._held = text[len(text) - overlapping :]
            return None
        at, _, mark = min(marks)
        self._content(text[:at])
        self._source = TextSource()
        self._calls = self._marks[mark](self._source)
        self._taken = 0
        return text[at:]

    def _too_late(self, before: str) -> bool:
        """Whether this text rules out a later call."""
        return self._only_first and (self._in_text or bool(before.strip()))

    def _read(self, text: str, last: bool) -> str | None:
        """Go on reading calls; the text after them, None if more is needed."""
        source, calls = self._source, self._calls
        assert source is not None
        assert calls is not None
        source.add(text)
        source.last = last
        try:
            while (call := next(calls)) is not None:
                self._blank, self._in_text = "", False
                self._deltas.append(Delta(call=self._count, name=call.name, arguments=call.arguments))
                self._count += 1
                self._taken = source.at
        except StopIteration as ended:
            end = source.at
            self._content("" if ended.value else source.text(self._taken, end))
            self._source = self._calls = None
            return source.text(end) or None
        return None

    def _content(self, text: str) -> None:
        if not self._in_text:
            text = self._blank + text
            self._in_text = bool(text.strip())
            self._blank = "" if self._in_text else text
        if self._in_text and text:
            self._deltas.append(Delta(text))


def with_tools(
    marks: Callable[[ParseOptions], Mapping[str, CallReader]], *, only_first: bool = False
) -> Callable[[ParseOptions], ParserRun]:
    """What starts the parsing of calls; without tools in the request there are none."""

    def start(options: ParseOptions) -> ParserRun:
        return CallsRun(marks(options), only_first=only_first) if options.tools else PlainRun()

    return start


def json_call(
    source: TextSource, members: Mapping[str, Span], arguments: Sequence[str] = ("arguments",)
) -> ParsedCall | None:
    """The call in a JSON object: a `name` that is a string, and arguments under one of the given names."""
    key = next((key for key in arguments if key in members), None)
    if key is None or "name" not in members:
        return None
    name = json.loads(source.text(*members["name"])) if source.text(*members["name"])[:1] == '"' else None
    if not isinstance(name, str) or not is_text(name):
        return None
    return ParsedCall(name, source.text(*members[key]))


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: JSON can hold halves of characters."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
