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
from tito_audit.parsers._source import AnswerRun, Emit, Reader, TextSource, literal, search, skip_spaces, word

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
    """Not known to clients: content, with its control tokens."""


_CHANNELS = {"analysis": _Kind.REASONING, "final": _Kind.CONTENT, "commentary": _Kind.CONTENT}
_Header: TypeAlias = tuple[str | None, str | None]
"""The channel and the recipient of a message."""


def _read_header(source: TextSource, started: bool) -> Reader[_Header | None]:
    """Read a header up to `<|message|>`; None if there is none. `started`: False for the first of an answer."""
    if started:
        yield from literal(source, _START)
    yield from skip_spaces(source)
    recipient = yield from _read_recipient(source)
    yield from skip_spaces(source)
    channel: str | None = None
    if (yield from literal(source, _CHANNEL)):
        channel = yield from word(source, _WORD, 64)
        yield from skip_spaces(source)
        recipient = (yield from _read_recipient(source)) or recipient
    if channel is None and recipient is None:
        return None
    yield from skip_spaces(source)
    yield from literal(source, "<|constrain|>")
    yield from word(source, _WORD, 64)  # the type of the content: json, code
    yield from skip_spaces(source)
    return (channel, recipient) if (yield from literal(source, _MESSAGE)) else None


def _read_recipient(source: TextSource) -> Reader[str | None]:
    """Read `to=RECIPIENT`; None if it does not come next."""
    return (yield from word(source, _WORD)) if (yield from literal(source, "to=")) else None


def _start(options: ParseOptions) -> ParserRun:
    """Start a parser that emits the text of each message as it arrives, after its header."""
    names = {tool.get("function", tool).get("name") for tool in options.tools}

    def read(source: TextSource, emit: Emit) -> Reader[None]:
        kind, calls, started = _Kind.RAW, 0, False
        fresh = False  # nothing of this message was emitted yet
        emitted: set[_Kind] = set()

        def emit_text(text: str) -> None:
            """Emit text of the current message; a line break joins messages of one kind."""
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
            begin = source.offset
            header = yield from _read_header(source, started)
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
                emit_text(source.text(begin, source.offset))
            # As in the reference, nothing but an end token ends a message; outside a message, look for a header.
            mark = None
            while mark is None and (yield from source.more()):
                before, mark = yield from search(source, _BEGINS if kind is _Kind.RAW else _ENDS)
                emit_text(before)
            if mark is not None and kind is not _Kind.RAW:
                kind = _Kind.RAW
                source.seek(source.offset + len(mark))

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
