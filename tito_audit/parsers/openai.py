"""gpt-oss: OpenAI's harmony syntax, read from its control tokens as text.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The channel `analysis` is reasoning, `final` and `commentary` are content, and a message addressed to a function is
a call.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TypeAlias

from tito_audit.parser import Delta, ParseOptions, Parser, ParserRun, Reads
from tito_audit.parsers._source import AnswerRun, Emit, Reader, TextSource, literal, search, spaces, word

_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = (_START, _CHANNEL)
_WORD = re.compile(r"[^\s<]+")
_FUNCTIONS = "functions."


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    RAW = auto()
    """Unknown to clients: passed on as content, with its control tokens."""


_CHANNELS = {"analysis": _Kind.REASONING, "final": _Kind.CONTENT, "commentary": _Kind.CONTENT}
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


def _start(options: ParseOptions) -> ParserRun:
    """Messages in sequence; after its header, each is emitted as it arrives."""
    names = {tool.get("function", tool).get("name") for tool in options.tools}

    def read(source: TextSource, emit: Emit) -> Reader[None]:
        kind, calls, started = _Kind.RAW, 0, False
        fresh = False  # nothing of this message was emitted yet
        emitted: set[_Kind] = set()

        def give(text: str) -> None:
            """Emit text of the current message; messages of one kind are joined by a line break."""
            nonlocal fresh
            if not text:
                return
            if kind is _Kind.CALL:
                emit(Delta(call=calls - 1, arguments=text))
                return
            if fresh and kind in emitted and kind is not _Kind.RAW:
                text = f"\n{text}"
            fresh = False
            emitted.add(kind)
            emit(Delta(reasoning=text) if kind is _Kind.REASONING else Delta(text))

        while not started or (yield from source.more()):
            begin = source.at
            header = yield from _header(source, started)
            started = True
            if header is not None:
                channel, recipient = header
                fresh = True
                if recipient is not None:
                    called = names and (recipient.startswith(_FUNCTIONS) or recipient in names)
                    kind = _Kind.CALL if called else _Kind.RAW
                else:
                    kind = _CHANNELS.get(channel or "", _Kind.RAW)
                if recipient is not None and kind is _Kind.CALL:
                    emit(Delta(call=calls, name=recipient.removeprefix(_FUNCTIONS)))
                    calls += 1
            if header is None or kind is _Kind.RAW:
                give(source.text(begin, source.at))
            # Only the tokens that end a message end it, as in the reference; outside of messages comes a header.
            mark = None
            while mark is None and (yield from source.more()):
                before, mark = yield from search(source, _BEGINS if kind is _Kind.RAW else _ENDS)
                give(before)
            if mark is not None and kind is not _Kind.RAW:
                kind = _Kind.RAW
                source.go(source.at + len(mark))

    # The generation prompt may have written the beginning of a header, or a whole one.
    _, begun, written = options.prompt_end.rpartition(_START)
    return AnswerRun(read, written if begun and written.strip() else "")


PARSER = Parser(
    name="openai",
    title="harmony: the channels of gpt-oss",
    reads=Reads.REASONING | Reads.TOOLS,
    start=_start,
    aliases=("openai_gptoss", "harmony"),
    templates=("<|channel|>", "<|message|>", "<|start|>"),
)
