"""gpt-oss: OpenAI's harmony syntax, read from its control tokens as text.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The channel `analysis` is reasoning, `final` and `commentary` are content, and a message addressed to a function is
a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import TypeAlias

from tito_audit.parser import Delta, ParseOptions, Parser, Reads
from tito_audit.parsers._source import Reader, TextSource, literal, spaces, word
from tito_audit.tokens.text_stream import overlap

_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = (_START, _CHANNEL)
_WORD = re.compile(r"[^\s<]+")
_FUNCTIONS = "functions."
_PIECE = 1024


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    RAW = auto()
    """Unknown to clients: passed on as content, with its control tokens."""


_Header: TypeAlias = tuple[str | None, str | None]
"""What comes before a message: its channel and its recipient."""


def _header(source: TextSource, started: bool) -> Reader[_Header | None]:
    """The header that begins here, up to `<|message|>`; None if there is none. `started`: the answer has begun."""
    if started:
        yield from literal(source, _START)
    yield from spaces(source)
    recipient = yield from _recipient(source)
    yield from spaces(source)
    channel: str | None = None
    if (yield from literal(source, _CHANNEL)):
        channel = yield from word(source, _WORD, 64)
        yield from spaces(source)
        recipient = (yield from _recipient(source)) or recipient
    if channel is None and recipient is None:
        return None
    yield from spaces(source)
    yield from literal(source, "<|constrain|>")
    yield from word(source, _WORD, 64)  # the type of the content: json, code
    yield from spaces(source)
    return (channel, recipient) if (yield from literal(source, _MESSAGE)) else None


def _recipient(source: TextSource) -> Reader[str | None]:
    """Who a message is addressed to, if it says so here."""
    return (yield from word(source, _WORD)) if (yield from literal(source, "to=")) else None


class HarmonyRun:
    """Messages in sequence; after its header, each is emitted as it arrives."""

    def __init__(self, options: ParseOptions) -> None:
        self._names = {tool.get("function", tool).get("name") for tool in options.tools}
        self._kind = _Kind.RAW
        self._calls = 0
        self._given = dict.fromkeys(_Kind, False)
        """The kinds of text emitted so far."""
        self._fresh = False
        """Nothing of this message was emitted yet."""
        self._held = ""
        self._deltas: list[Delta] = []
        self._source: TextSource | None = None
        self._attempt: Reader[_Header | None] | None = None
        # The generation prompt may have written the beginning of a header, or a whole one.
        prompt = options.prompt_end
        at = prompt.rfind(_START)
        self._try(started=False)
        if at >= 0 and prompt[at + len(_START) :].strip():
            self._run(prompt[at + len(_START) :], last=False)
            self._deltas.clear()

    def feed(self, text: str) -> Sequence[Delta]:
        """What the next piece of text adds."""
        for at in range(0, len(text), _PIECE):
            self._run(text[at : at + _PIECE], last=False)
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> Sequence[Delta]:
        """What is still held back, at the end of the answer."""
        self._run("", last=True)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _try(self, *, started: bool) -> None:
        self._source = TextSource()
        self._attempt = _header(self._source, started)

    def _run(self, text: str, *, last: bool) -> None:
        rest: str | None = text
        while rest is not None:
            rest = self._body(rest, last) if self._source is None else self._read(rest, last)

    def _read(self, text: str, last: bool) -> str | None:
        """Go on reading a header; the text after it, None if more is needed."""
        source, attempt = self._source, self._attempt
        assert source is not None
        assert attempt is not None
        source.add(text)
        source.last = last
        try:
            next(attempt)
        except StopIteration as ended:
            header = source.text(0, source.at)
            rest = source.text(source.at)
            self._source = self._attempt = None
            if ended.value is None:
                self._give(header)
            else:
                # Begin the message of a header.
                self._kind, name = self._kind_of(*ended.value)
                self._fresh = True
                if self._kind is _Kind.CALL:
                    self._deltas.append(Delta(call=self._calls, name=name))
                    self._calls += 1
                elif self._kind is _Kind.RAW:
                    self._give(header)
            return rest or None
        return None

    def _kind_of(self, channel: str | None, recipient: str | None) -> tuple[_Kind, str | None]:
        if recipient is not None:
            called = self._names and (recipient.startswith(_FUNCTIONS) or recipient in self._names)
            return (_Kind.CALL, recipient.removeprefix(_FUNCTIONS)) if called else (_Kind.RAW, None)
        if channel == "analysis":
            return _Kind.REASONING, None
        return (_Kind.CONTENT if channel in ("final", "commentary") else _Kind.RAW), None

    def _body(self, text: str, last: bool) -> str | None:
        """Emit text up to the next mark; the rest, None without a mark.

        As in the reference, only the tokens that end a message end it. Outside of messages the search is for a
        header.
        """
        text, self._held = self._held + text, ""
        looked_for = _BEGINS if self._kind is _Kind.RAW else _ENDS
        marks = [(text.index(mark), mark) for mark in looked_for if mark in text]
        if not marks:
            overlapping = 0 if last else max(overlap(text, mark) for mark in looked_for)
            self._give(text[: len(text) - overlapping])
            self._held = text[len(text) - overlapping :]
            return None
        at, mark = min(marks)
        self._give(text[:at])
        self._try(started=True)
        if self._kind is _Kind.RAW:
            return text[at:]
        self._kind = _Kind.RAW
        return text[at + len(mark) :]

    def _give(self, text: str) -> None:
        """Emit text of the current message; messages of one kind are joined by a line break."""
        if not text:
            return
        if self._kind is _Kind.CALL:
            self._deltas.append(Delta(call=self._calls - 1, arguments=text))
            return
        if self._fresh and self._given[self._kind] and self._kind is not _Kind.RAW:
            text = f"\n{text}"
        self._fresh, self._given[self._kind] = False, True
        reasons = self._kind is _Kind.REASONING
        self._deltas.append(Delta(reasoning=text) if reasons else Delta(text))


PARSER = Parser(
    name="openai",
    title="harmony: the channels of gpt-oss",
    reads=Reads.REASONING | Reads.TOOLS,
    start=HarmonyRun,
    aliases=("openai_gptoss", "harmony"),
    templates=("<|channel|>", "<|message|>", "<|start|>"),
)
