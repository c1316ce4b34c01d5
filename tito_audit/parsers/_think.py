"""Reasoning between a pair of tags: `<think>…</think>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tito_audit.parser import Delta, ParseOptions, ParserRun
from tito_audit.parsers._calls import PlainRun
from tito_audit.tokens.text_stream import overlap

_OPEN, _CLOSE = "<think>", "</think>"
_TURNS = ("<|", "<｜", _OPEN)
"""Control tokens or an opening tag, between an earlier turn's reasoning and the answer."""


class ThinkRun:
    """Reasoning up to the closing tag, content after it.

    The opening tag comes first in the answer, after white space, or is missing because the generation prompt wrote
    it. If the generation prompt never does (`must_open`), an answer without it is content. Without a closing tag
    everything is reasoning.
    """

    def __init__(self, *, ends_at: Sequence[str] = (), must_open: bool = False) -> None:
        self._must_open = must_open
        self._ends = {_CLOSE: len(_CLOSE), **dict.fromkeys(ends_at, 0)}
        """What ends the reasoning, and how much of it is not content."""
        self._may_open = True
        self._held = ""
        self._open = True

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds."""
        return self._take(text, last=False)

    def close(self) -> Sequence[Delta]:
        """What is still held back, at the end of the answer."""
        return self._take("", last=True)

    def _take(self, text: str, *, last: bool) -> Sequence[Delta]:
        if not self._open:
            return (Delta(text),) if text else ()
        text, self._held = self._held + text, ""
        if self._may_open and self._must_open:
            body = text.lstrip()
            if not last and _OPEN.startswith(body) and body != _OPEN:
                self._held = text
                return ()
            if not body.startswith(_OPEN):
                self._open = False
                return _deltas("", text)
        if self._may_open and not last:
            body = text.lstrip()
            blank = text[: len(text) - len(body)]
            if _OPEN.startswith(body) and body != _OPEN:
                self._held = body
                return _deltas(blank, "")
            self._may_open = False
            text = blank + body.removeprefix(_OPEN)
        ends = [(text.index(mark), size) for mark, size in self._ends.items() if mark in text]
        if ends:
            self._open = False
            at, size = min(ends)
            return _deltas(text[:at], text[at + size :])
        overlapping = 0 if last else max(overlap(text, mark) for mark in self._ends)
        self._held = text[len(text) - overlapping :]
        return _deltas(text[: len(text) - overlapping], "")


def _deltas(reasoning: str, content: str) -> Sequence[Delta]:
    return (Delta(content, reasoning),) if reasoning or content else ()


def think(*, ends_at: Sequence[str] = (), must_open: bool = False) -> Callable[[ParseOptions], ParserRun]:
    """Starts to parse reasoning; there is none if the prompt has already closed it in this turn.

    `ends_at`: marks of tool calls, which end the reasoning too if the request has tools. `must_open`: whether
    the model opens its reasoning itself, so that an answer without the tag has none. A prompt that is not known
    may have opened it.
    """

    def start(options: ParseOptions) -> ParserRun:
        _, closed, after = options.prompt_end.rpartition(_CLOSE)
        if closed and not any(mark in after for mark in _TURNS):
            return PlainRun()  # the turn that is sampled has closed its reasoning
        opens = must_open and bool(options.prompt_end) and not options.prompt_end.rstrip().endswith(_OPEN)
        return ThinkRun(ends_at=ends_at if options.tools else (), must_open=opens)

    return start
