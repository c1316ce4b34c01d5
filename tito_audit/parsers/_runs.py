"""The usual parsers: no syntax, calls that begin with a mark, reasoning between `<think>` tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tito_audit.parser import Delta, ParsedCall, ParseOptions, ParserRun
from tito_audit.parsers._source import (
    AnswerRun,
    Emit,
    Reader,
    TextSource,
    json_object,
    literal,
    search,
    skip_spaces,
)

CallReader: TypeAlias = Callable[[TextSource, Callable[[ParsedCall], None]], Reader[bool]]
"""Reads calls from a source at their mark, and passes on each complete one. Returns whether what it read after the
last call is part of the syntax; if not, it is content."""
_OPEN, _CLOSE = "<think>", "</think>"
_BLANK = re.compile(r"\s+")
_TURNS = ("<|", "<｜", _OPEN)
"""What shows that the reasoning which a prompt closed is that of an earlier turn."""


class PlainRun:
    """An answer that is all content."""

    def feed(self, text: str) -> Sequence[Delta]:
        return (Delta(text),) if text else ()

    def close(self) -> Sequence[Delta]:
        return ()


def tool_parser(
    marks: Callable[[ParseOptions], Mapping[str, CallReader]], *, only_first: bool = False
) -> Callable[[ParseOptions], ParserRun]:
    """Starts parsers of content with calls; `marks` names the texts that begin one, and their readers.

    Without tools in the request no call is parsed. Text from a mark on is held back until it is a complete call or
    cannot become one. Then it is content, unchanged, and the search goes on where the call broke off, so the time
    is linear. White space between calls is part of the syntax; all else around them is content. `only_first`:
    calls come first in an answer or not at all.
    """

    def read(source: TextSource, emit: Emit, readers: Mapping[str, CallReader]) -> Reader[None]:
        blank, in_text, count = "", False, 0
        end = 0  # of the last call

        def add_content(text: str) -> None:
            nonlocal blank, in_text
            if not in_text:
                text = blank + text
                in_text = bool(text.strip())
                blank = "" if in_text else text
            if in_text and text:
                emit(Delta(text))

        def add_call(call: ParsedCall) -> None:
            nonlocal blank, in_text, count, end
            emit(Delta(call=count, name=call.name, arguments=call.arguments))
            blank, in_text, count, end = "", False, count + 1, source.offset

        while (yield from source.has_more()):
            before, mark = yield from search(source, () if only_first and in_text else readers)
            add_content(before)
            if mark is not None and not (only_first and in_text):
                end = source.offset
                if not (yield from readers[mark](source, add_call)):
                    add_content(source.text(end, source.offset))
        if not count and blank:
            emit(Delta(blank))

    def start(options: ParseOptions) -> ParserRun:
        readers = marks(options)
        return AnswerRun(lambda source, emit: read(source, emit, readers)) if options.tools else PlainRun()

    return start


def think_parser(*, ends_at: Sequence[str] = (), must_open: bool = False) -> Callable[[ParseOptions], ParserRun]:
    """Starts parsers of reasoning: all up to the closing tag; none if the prompt has closed it already.

    The opening tag comes first in the answer, after white space, or is missing because the prompt wrote it; an
    unknown prompt may have written it. `ends_at`: marks of tool calls, which also end the reasoning if the request
    has tools. `must_open`: the model opens its reasoning itself; an answer without the tag is all content.
    """

    def read(source: TextSource, emit: Emit, ends: Sequence[str], opens: bool) -> Reader[None]:
        while (yield from source.has_more()) and (blank := source.take(_BLANK)):
            if not opens:
                emit(Delta(reasoning=blank))
        start = source.offset
        opened = yield from literal(source, _OPEN)
        reasons = opened or not opens
        if opens and opened and start:
            emit(Delta(reasoning=source.text(0, start)))
        elif not reasons:
            source.seek(0)
        while (yield from source.has_more()):
            before, mark = yield from search(source, ends if reasons else ())
            if before:
                emit(Delta(reasoning=before) if reasons else Delta(before))
            if mark is not None:
                reasons = False
            if mark == _CLOSE:
                source.seek(source.offset + len(_CLOSE))

    def start(options: ParseOptions) -> ParserRun:
        _, closed, after = options.prompt_end.rpartition(_CLOSE)
        if closed and not any(mark in after for mark in _TURNS):
            return PlainRun()  # the prompt has closed the reasoning of this turn
        opens = must_open and bool(options.prompt_end) and not options.prompt_end.rstrip().endswith(_OPEN)
        ends = (_CLOSE, *(ends_at if options.tools else ()))
        return AnswerRun(lambda source, emit: read(source, emit, ends, opens))

    return start


def json_call(source: TextSource, arguments: Sequence[str] = ("arguments",)) -> Reader[ParsedCall | None]:
    """The call in the JSON object that begins here: a string `name`, and arguments under one of these names."""
    members = (yield from json_object(source)) or {}
    key = next((key for key in arguments if key in members), None)
    if key is None or "name" not in members:
        return None
    name = json.loads(source.text(*members["name"])) if source.text(*members["name"])[:1] == '"' else None
    if not isinstance(name, str) or not is_encodable(name):
        return None
    return ParsedCall(name, source.text(*members[key]))


def tagged_call(
    opening: str, read_call: Callable[[TextSource], Reader[ParsedCall | None]], closing: str
) -> CallReader:
    """A reader of one call between tags. At the end of an answer the closing tag may be missing, as in vLLM."""

    def read(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
        yield from literal(source, opening)
        yield from skip_spaces(source)
        call = yield from read_call(source)
        if call is None or ((yield from skip_spaces(source)) and not (yield from literal(source, closing))):
            return False
        add(call)
        return True

    return read


def is_encodable(value: str) -> bool:
    """Whether a string can be written as UTF-8; one from JSON may hold half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
