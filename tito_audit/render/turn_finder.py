"""The model's turns in a rendered conversation, found between marked texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tito_audit.errors import RenderError
from tito_audit.render.renderer import Chat, Renderer
from tito_audit.render.sentinels import Found, Marking
from tito_audit.render.span_builder import SpanBuilder, common_start, first_of

_ROLE = re.compile(r"assistant|model")
"""Template names for the role that answers."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that the template accepted, what it wrote, and how to render parts of them."""

    renderer: Renderer
    chat: Chat
    text: str
    given: Mapping[str, Any]
    opens_answer: bool
    run: Callable[[Mapping[str, Any]], str]
    fixed_opener: str | None
    """What a generation prompt adds after any of the messages; None if that may depend on them."""
    answers: frozenset[int]
    """The messages that were sampled."""

    def write(self, chat: Chat, *, opens_answer: bool) -> str:
        """What the template writes for these messages."""
        return self.run({**self.given, "messages": chat, "add_generation_prompt": opens_answer})

    def prefix_length(self, count: int, *, opens_answer: bool) -> int | None:
        """The length of the rendering of the first `count` messages; None if it is not a prefix of the text."""
        try:
            text = self.write(self.chat[:count], opens_answer=opens_answer) if count else ""
        except RenderError:
            return None
        return len(text) if self.text.startswith(text) and (count or not opens_answer) else None

    def opener(self, count: int) -> str:
        """What a generation prompt adds after the first `count` messages; "" if nothing or unknown."""
        if not count:
            return ""
        if self.fixed_opener is not None:
            return self.fixed_opener
        try:
            closed = self.write(self.chat[:count], opens_answer=False)
            opened = self.write(self.chat[:count], opens_answer=True)
        except RenderError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def new_builder(self) -> SpanBuilder:
        """A builder for the spans of the text."""
        return SpanBuilder(len(self.text), [message.get("role") for message in self.chat])


class Turn(NamedTuple):
    """Where an assistant message opens, where the model's part starts, and where its end token is."""

    opened: int
    start: int
    closer: int
    end: int

    @property
    def sampled(self) -> tuple[int, int]:
        """What a model would have sampled: from after the generation prompt through the turn end."""
        return self.start, self.end


class TurnFinder:
    """Finds what a model would have sampled, between the marked texts."""

    def __init__(self, job: Conversation, found: list[Found], marking: Marking) -> None:
        self._job = job
        self._text = job.text
        self._marking = marking
        self._openers: dict[object, str] = {}
        self._found: list[list[Found]] = [[] for _ in job.chat]
        for piece in found:
            self._found[piece.message_index].append(piece)
        # Where the first marked text of any later message begins.
        self._next: list[int] = [len(job.text)] * (len(job.chat) + 1)
        for index in range(len(job.chat) - 1, -1, -1):
            # Marked texts are in text order.
            own = self._found[index]
            self._next[index] = min(self._next[index + 1], own[0].start) if own else self._next[index + 1]

    def of(self, index: int) -> list[Found]:
        """The marked texts of one message."""
        return self._found[index]

    def turn(self, index: int, earliest: int) -> Turn | None:
        """The turn of an assistant message, from `earliest` on; None if it is not found."""
        own = self.of(index)
        calls = bool(self._job.chat[index].get("tool_calls"))
        if calls and not self._marking.tool_calls:
            return None
        opening = self._opening(index, earliest, own[0].start if own else None)
        later = self._next[index + 1]
        if opening is None or opening[1] > later or any(piece.start < opening[1] for piece in own):
            return None
        closer = self._closer(max([opening[1], *(piece.end for piece in own)]), later, calls)
        return Turn(*opening, *closer) if closer is not None else None

    def _opening(self, index: int, earliest: int, first: int | None) -> tuple[int, int] | None:
        """Where the generation prompt of a message begins and ends; None if unknown."""
        opener = self._opener(index)
        if opener and not self._spelled(opener, index):
            at = self._text.find(opener, earliest, first)
            if at >= 0:
                return at, at + len(opener)
            # A past turn may have a shorter opener than a new one, for example no empty <think> block.
            head = opener[: opener.find("\n") + 1]
            at = self._text.find(head, earliest, first) if head and first is not None else -1
            if at >= 0:
                return at, at + common_start(self._text[at:first], opener)
        start = self._job.prefix_length(index, opens_answer=True)
        if start is None or start < earliest:
            return None
        return (start - len(opener) if self._text.endswith(opener, earliest, start) else start), start

    def _opener(self, index: int) -> str:
        """What a generation prompt adds after a message with the role of the previous one.

        If the message's role is not `assistant`, that role replaces it in the opener.
        """
        before = self._job.chat[index - 1].get("role") if index else None
        if before not in self._openers:
            self._openers[before] = self._job.opener(index)
        role = str(self._job.chat[index].get("role"))
        return (
            self._openers[before] if role == "assistant" else _ROLE.sub(lambda _: role, self._openers[before], 1)
        )

    def _spelled(self, opener: str, index: int) -> bool:
        """Whether an earlier unmarked message contains the opener, in which case finding it proves nothing."""
        if not self._marking.assistant_only:
            return False
        head = opener.strip().split("\n")[0]
        unmarked = [one for at, one in enumerate(self._job.chat[:index]) if at not in self._job.answers]
        return any(head in str(list(message.values())) for message in unmarked)

    def _closer(self, start: int, stop: int, calls: bool) -> tuple[int, int] | None:
        """The first special token in `[start, stop)`; after tool calls the first end token, if there is one.

        Templates wrap tool calls in special tokens that do not end a turn.
        """
        renderer = self._job.renderer
        ends = first_of(renderer.end_texts, self._text, start, stop) if calls else None
        return ends or first_of(renderer.control_texts, self._text, start, stop)
