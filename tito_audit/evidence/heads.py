"""What heads a message in the ids: the tokens that open it, the word for its role, what lies before its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tito_audit.record.speakers import ASSISTANT, GIVEN_SPEAKERS, Speakers, unknown_role_name

__all__ = ["HARMONY", "HARMONY_END", "SAMPLED_HEADERS", "TOOL_END", "Heads", "Opener", "Speaker", "heads_of"]


class Opener(NamedTuple):
    """A control token behind which a role is written."""

    close: bytes = b"\n"
    """What ends the role, where text does."""
    role: str | None = None
    """The role where the words behind it are another name, or none."""


class Speaker(NamedTuple):
    """A control token that is a role by itself."""

    role: str
    close: bytes = b""
    """What the template writes behind it."""


HARMONY = "<|start|>"
"""What opens a message of gpt-oss; a model writes all of the header itself that lies behind its own name."""
HARMONY_END = "<|end|>"
"""What ends a message of gpt-oss behind which the same call can go on with another."""
TOOL_END = "<｜tool▁output▁end｜>"
"""What DeepSeek puts behind what a tool returned."""
SAMPLED_HEADERS = frozenset(("<|channel|>", "<|constrain|>", "<|message|>"))
"""Header tokens that a model writes itself (the harmony format of gpt-oss)."""
_TOOL = re.compile(rb"functions\.|.*\sto=assistant\b")
_WORD = re.compile(rb"[ \t]*([^\s<>|:,;]+)")

_OPENERS: Mapping[str, Opener] = {
    **dict.fromkeys(("<|im_start|>", "<start_of_turn>", HARMONY, "<|turn>"), Opener()),
    **dict.fromkeys(("<|start_header_id|>", "<|header_start|>", "<|start_of_role|>"), Opener()),
    "<|im_assistant|>": Opener(role=ASSISTANT),
    "<|im_user|>": Opener(role="user"),
    "<|im_system|>": Opener(role="system"),
}
_ENDS: Mapping[str, bytes] = {
    **dict.fromkeys(("<|end_header_id|>", "<|header_end|>"), b"\n\n"),
    **dict.fromkeys(("<|im_sep|>", "<|im_middle|>", "<|end_of_role|>"), b""),
}
_SPEAKERS: Mapping[str, Speaker] = {
    "<｜User｜>": Speaker("user"),
    "<｜Assistant｜>": Speaker(ASSISTANT),
    "<｜tool▁outputs▁begin｜>": Speaker("tool"),
    "<｜tool▁output▁begin｜>": Speaker("tool"),
    "<｜tool▁outputs▁end｜>": Speaker(ASSISTANT),
    "<|user|>": Speaker("user", b"\n"),
    "<|assistant|>": Speaker(ASSISTANT, b"\n"),
    "<|system|>": Speaker("system", b"\n"),
    "<|observation|>": Speaker("tool", b"\n"),
    "<|CHATBOT_TOKEN|>": Speaker(ASSISTANT),
    "<|USER_TOKEN|>": Speaker("user"),
    "<|SYSTEM_TOKEN|>": Speaker("system"),
    "[INST]": Speaker("user"),
    "[/INST]": Speaker(ASSISTANT),
    "[SYSTEM_PROMPT]": Speaker("system"),
    "[AVAILABLE_TOOLS]": Speaker("system"),
    "[TOOL_RESULTS]": Speaker("tool"),
    "[/TOOL_RESULTS]": Speaker(ASSISTANT),
}
_PREFILL = re.compile(r"<\|?(?:\w+:)?think(?:ing)?\b|<\|?START_THINKING|\[THINK\]")


@dataclass(frozen=True, slots=True)
class Heads:
    """How messages are headed, and which roles were sampled: what published templates write, and what the
    template at hand writes for an answer."""

    speakers: Speakers = field(default_factory=Speakers)
    openers: Mapping[str, Opener] = field(default_factory=lambda: _OPENERS)
    ends: Mapping[str, bytes] = field(default_factory=lambda: _ENDS)
    """Control tokens that end a header, each with the text that the template writes behind it."""
    named: Mapping[str, Speaker] = field(default_factory=lambda: _SPEAKERS)
    word: bytes = b"model"
    """What the template calls whoever answers."""
    given: bytes = b""
    """What a generation prompt writes behind the header, such as an empty <think> block."""
    ids: frozenset[int] = frozenset()
    """Tokens that head messages although the tokenizer does not mark them as special."""

    @property
    def literals(self) -> frozenset[str]:
        """How the control tokens of headers are written."""
        return frozenset((*self.openers, *self.ends, *self.named, TOOL_END))

    def speaker(self, header: bytes, opener: str) -> str | None:
        """Who speaks behind a header with these words in it; None where it has none."""
        match = _WORD.match(header)
        if match is None:
            return None
        own = self.speakers.speaker(match[1].decode("utf-8", "replace"))
        if own != ASSISTANT and match[1] == self.word:
            return self.speakers.speaker(ASSISTANT)
        if own in GIVEN_SPEAKERS or own == ASSISTANT:
            return own
        if opener == HARMONY and _TOOL.match(header):
            return self.speakers.speaker("tool")
        default = self.openers[opener].role
        return own if default is None else self.speakers.speaker(default)

    def knows(self, header: bytes, opener: str) -> bool:
        """Whether these words behind a token that opens messages are the header of one."""
        speaker = self.speaker(header, opener)
        return speaker is not None and unknown_role_name(speaker) is None

    def own_words(self, header: bytes, opener: str) -> int:
        """How many bytes of a header were given where a model writes the rest of it; 0 where it does not."""
        match = _WORD.match(header) if opener == HARMONY else None
        return match.end() if match is not None else 0


def heads_of(opener: str, control_texts: Sequence[str], speakers: Speakers) -> Heads:
    """How messages are headed by a template that opens an answer with this text, "" if nobody knows."""
    heads = Heads(speakers)
    prefill = _PREFILL.search(opener)
    head = opener[: prefill.start()] if prefill else opener
    longest_first = sorted(control_texts, key=len, reverse=True)
    # Text in front of the first control token, then each control token and the text behind it.
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", head) if control_texts else [head]
    if len(parts) < 3:
        return heads
    heads = replace(heads, given=opener[len(head) :].encode())
    *before, literal, text = parts[1:]
    word, close = text.strip().encode(), text.encode()
    if word:
        close = close[len(close.rstrip()) :] or b"\n"
        return replace(heads, openers={**heads.openers, literal: Opener(close)}, word=word)
    word = before[-1].strip().encode() if before else b""
    if word:
        openers = {before[-2]: Opener(), **heads.openers}
        return replace(heads, openers=openers, ends={**heads.ends, literal: close}, word=word)
    return replace(heads, named={**heads.named, literal: Speaker(ASSISTANT, close)})
