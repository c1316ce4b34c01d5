"""Message headers in token ids: the tokens that open a message, its role, and what comes before its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tito_audit.record.speakers import ASSISTANT, GIVEN_SPEAKERS, Speakers, unknown_role_name


class Opener(NamedTuple):
    """A control token followed by a role."""

    close: bytes = b"\n"
    """The text that ends the role, where no control token does."""
    role: str | None = None
    """The role if the words after it are another name, or there are none."""


class Speaker(NamedTuple):
    """A control token that is a role by itself."""

    role: str
    close: bytes = b""
    """What the template writes after it."""


HARMONY = "<|start|>"
"""What opens a message of gpt-oss; after its own name the model writes the header itself."""
HARMONY_END = "<|end|>"
"""What ends a message of gpt-oss; the same call may go on with another message."""
TOOL_END = "<｜tool▁output▁end｜>"
"""What DeepSeek writes after a tool's output."""
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
class Headers:
    """Message headers, of published templates and of this template before an answer, and which roles were
    sampled."""

    speakers: Speakers = field(default_factory=Speakers)
    openers: Mapping[str, Opener] = field(default_factory=lambda: _OPENERS)
    ends: Mapping[str, bytes] = field(default_factory=lambda: _ENDS)
    """Control tokens that end a header, each with the text that the template writes after it."""
    named: Mapping[str, Speaker] = field(default_factory=lambda: _SPEAKERS)
    word: bytes = b"model"
    """The template's name for the role that answers."""
    given: bytes = b""
    """What a generation prompt writes after the header, such as an empty <think> block."""
    ids: frozenset[int] = frozenset()
    """Header tokens that the tokenizer does not mark as special."""

    @property
    def literals(self) -> frozenset[str]:
        """The texts of the control tokens in headers."""
        return frozenset((*self.openers, *self.ends, *self.named, TOOL_END))

    def speaker(self, header: bytes, opener: str) -> str | None:
        """Who speaks after a header with these words; None for a header without words."""
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
        """Whether these words, after a token that opens messages, are a message header with a known role."""
        speaker = self.speaker(header, opener)
        return speaker is not None and unknown_role_name(speaker) is None

    def own_words(self, header: bytes, opener: str) -> int:
        """How many bytes of a header were given if the model writes the rest; 0 if it does not."""
        match = _WORD.match(header) if opener == HARMONY else None
        return match.end() if match is not None else 0


def headers_of(generation_prompt: str, control_texts: Sequence[str], speakers: Speakers) -> Headers:
    """The message headers of a template with this generation prompt; "" if it is unknown."""
    headers = Headers(speakers)
    prefill = _PREFILL.search(generation_prompt)
    head = generation_prompt[: prefill.start()] if prefill else generation_prompt
    longest_first = sorted(control_texts, key=len, reverse=True)
    # Text before the first control token, then each control token and the text after it.
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", head) if control_texts else [head]
    if len(parts) < 3:
        return headers
    headers = replace(headers, given=generation_prompt[len(head) :].encode())
    *before, literal, text = parts[1:]
    word, close = text.strip().encode(), text.encode()
    if word:
        close = close[len(close.rstrip()) :] or b"\n"
        return replace(headers, openers={**headers.openers, literal: Opener(close)}, word=word)
    word = before[-1].strip().encode() if before else b""
    if word:
        openers = {before[-2]: Opener(), **headers.openers}
        return replace(headers, openers=openers, ends={**headers.ends, literal: close}, word=word)
    return replace(headers, named={**headers.named, literal: Speaker(ASSISTANT, close)})
