"""What a session holds: calls, their prompts, and why one did not continue another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.policy_columns import WeightSpans


class Branch(StrEnum):
    """How a call's prompt was made."""

    START = "start"
    """The first call of its session: the whole prompt is rendered and encoded."""
    CONTINUES = "continues"
    """Stored ids of the parent call, then new text, proved."""
    FORK = "fork"
    """A later call that does not continue the answer its history ends with, as `Prompt.fork` says. It may keep the
    ids of an earlier one (`Prompt.parent`)."""


class Proof(StrEnum):
    """How it is known that a prompt continues its parent."""

    SAME_TEXT = "same_text"
    """The template writes the parent's prompt and completion exactly, stop token included."""
    SAME_SUFFIX = "same_suffix"
    """The template writes the history the same with and without new messages; what it adds is encoded alone."""
    SAME_IDS = "same_ids"
    """The client sent the text or the ids of the parent's prompt and answer, or asks to continue the answer."""


class ForkReason(StrEnum):
    """Why a prompt does not continue an earlier call of its session."""

    NEW_CONVERSATION = "new_conversation"
    """The history that the client sent has no answer of this session."""
    EDITED = "edited"
    """The client changed a message of the history."""
    SHORTENED = "shortened"
    """The client left out messages of the history."""
    TOOLS_CHANGED = "tools_changed"
    ARGUMENTS_CHANGED = "arguments_changed"
    """Other template arguments (`chat_template_kwargs`)."""
    TEMPLATE_REWRITES = "template_rewrites"
    """The template rewrites the history once new messages follow: it strips reasoning or moves a system prompt."""
    NO_PLACE = "no_place"
    """The end of the sampled turn is not found in what the template writes."""
    STOP_LEFT_OUT = "stop_left_out"
    """A text prompt goes on without the stop token that ended the answer."""
    LEFT_MEMORY = "left_memory"
    """The session was idle or grew past its limits, so its answers left memory; they are in the log."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The part of a client's request that the prompt depends on."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    """False where the last message, the assistant's, is to be continued."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a call does not continue the answer before it."""

    reason: ForkReason
    detail: str
    """In words: which message, or what the template writes on both sides."""
    message: int | None = None
    """The first message of the request that is not what the session holds."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """The messages of a prompt, and length and digest of what the template wrote for them."""

    messages: tuple[Message, ...]
    """The history with the session's own answers in full, reasoning included."""
    sent: tuple[Message, ...]
    """The history as the client has it."""
    keys: tuple[bytes, ...]
    """The key of each message of `sent`."""
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to send for a call, and where they come from."""

    branch: Branch
    new_ids: Ids
    """`[P - kept]` what was encoded for this call."""
    parent: Node | None = None
    """The answer that it continues; None for a start, and for a fork that keeps nothing."""
    kept: int = 0
    """How many leading ids are the parent's prompt and completion, unchanged."""
    added: str = ""
    """The text of `ids[kept:]`."""
    proof: Proof | None = None
    """None where nothing is kept."""
    fork: Fork | None = None
    alike: int = 0
    """How many other answers, with other ids, fit the history equally well; the latest was taken."""
    written: SentPrompt | None = None
    """None for a text prompt."""
    text: str | None = None
    """A text prompt as the client sent it; None for a chat, and where the client sent ids."""

    @property
    def ids(self) -> Ids:
        """`[P]` the whole prompt, joined on each call, because ids that calls share are stored once."""
        pieces: list[Ids] = [self.new_ids]
        prompt, count = self, self.kept
        while prompt.parent is not None:
            node = prompt.parent
            prompt = node.prompt
            pieces.append(node.output_ids[: max(count - prompt.length, 0)])
            pieces.append(prompt.new_ids[: max(count - prompt.kept, 0)])
            count = min(count, prompt.kept)
        return np.concatenate(pieces[::-1])

    @property
    def length(self) -> int:
        """P, the number of ids."""
        return self.kept + len(self.new_ids)


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt whose new text, `prompt.added`, is still to be encoded unless `encoded`."""

    prompt: Prompt
    after: int | None = None
    """The token that the new text follows; None at the beginning of a prompt."""
    encoded: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One sampled answer: a prompt, what was sampled after it, and the message that the client was given."""

    call_id: str
    choice: int
    """Which of the call's `n` answers."""
    prompt: Prompt
    call: ChatCall
    """Without messages for a text prompt."""
    output_ids: Ids
    """`[C]` as sampled, the end token included when it was sampled."""
    logprobs: Logprobs
    """`[C]`"""
    answer: Mapping[str, Any]
    """The assistant message as the client got it, in OpenAI chat form; `{"text": …}` for a text prompt."""
    message: Message
    """The message that the template is given for it in later prompts: reasoning and calls included."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: str | None = None
    weight_spans: WeightSpans = ()

    @property
    def parent(self) -> Node | None:
        """The answer that its prompt continues."""
        return self.prompt.parent

    @property
    def length(self) -> int:
        """P + C, the number of ids."""
        return self.prompt.length + len(self.output_ids)

    @property
    def seen_ids(self) -> Ids:
        """`[P + C]` its prompt and what was sampled."""
        return np.concatenate([self.prompt.ids, self.output_ids])

    def has_ids_of(self, other: Node) -> bool:
        """Whether another answer has the same ids after the same prompt."""
        a, b = self.prompt, other.prompt
        return np.array_equal(self.output_ids, other.output_ids) and (
            a is b or (a.length == b.length and np.array_equal(a.ids, b.ids))
        )
