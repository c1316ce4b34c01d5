"""A way to write a conversation: what is changed, and the messages and settings that a template then gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeAlias

from tito_audit.record.message import Message, ToolSpec, as_message
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments
from tito_audit.ways.reading import PROBE

Reasoning: TypeAlias = Literal["as logged", "dropped", "in content"]
CLOCK = "strftime_now"
"""The name of the clock among values that vary."""
SYSTEM = "system prompt"
"""The name of system prompts that the messages lack, among these; no argument can have it."""
SYSTEM_ROLES = ("system", "developer")
CHARACTERS = 16
"""This many characters of text that was read cost as much as a flag."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"\A\s*(<think>)?.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write a conversation."""

    args: tuple[tuple[str, object], ...] = ()
    tool_arguments: ToolArguments = "auto"
    clock: datetime | None = None
    """The date that the template writes; that of `PROBE` shows where it does."""
    without_tools: bool = False
    tools: tuple[ToolSpec, ...] | None = None
    """The tools, instead of the log's."""
    uses_stated: bool = True
    opens: bool = True
    prefill: str = ""
    bos: int = 0
    """How many BOS tokens are added before the text; -1: the template's own is missing."""
    system: str | None = None
    """The system prompt, instead of the messages' own."""
    drops_system: bool = False
    folds: str | None = None
    """What stands between the system prompt and the question, if both are the first user message."""
    left_out: tuple[int, int] = (0, 0)
    """Messages that are left out, half-open."""
    reasoning: Reasoning = "as logged"
    """What becomes of the reasoning of earlier answers."""
    varies: frozenset[str] = frozenset()
    """Names of arguments, the clock or the system prompt, whose values vary from row to row."""

    @classmethod
    def of(cls, renderer: Renderer) -> Way:
        """The way in which a renderer writes."""
        clock = renderer.clock.at if renderer.clock is not None else None
        return cls(tuple(renderer.template_args.items()), renderer.tool_arguments, clock, renderer.without_tools)

    def states(self, name: str) -> bool:
        """Whether it has a value for an argument."""
        return any(name == argument for argument, _ in self.args)

    def with_arg(self, name: str, value: object) -> Way:
        """The same with another value of an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=(*others, (name, value)), varies=self.varies - {name})

    def without_arg(self, name: str) -> Way:
        """The same without an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=others, varies=self.varies - {name})

    def with_system(self, text: str | None) -> Way:
        """The same with one system prompt for all prompts."""
        return replace(self, system=text, drops_system=False, varies=self.varies - {SYSTEM})

    @property
    def departs(self) -> int:
        """How many departures it has that no flag can express."""
        departures = (not self.uses_stated, not self.opens, self.prefill, self.bos, self.system is not None)
        return sum(map(bool, (*departures, self.drops_system, self.reasoning != "as logged"))) + len(self.varies)

    @property
    def cost(self) -> int:
        """How much it claims: a flag counts once; what no flag can express and text that was read count more."""
        flags = (self.tool_arguments != "auto", self.clock is not None, self.without_tools)
        texts = (*(str(value) for _, value in self.args), self.system or "", self.prefill)
        return len(self.args) + sum(flags) + 4 * self.departs + sum(len(text) // CHARACTERS for text in texts)

    @property
    def key(self) -> str:
        """A text that differs for any two ways."""
        return repr(self)

    def renderer(self, renderer: Renderer) -> Renderer:
        """The same renderer with the arguments, the date and the form of tool calls of this way."""
        return replace(
            renderer,
            template_args=dict(self.args),
            tool_arguments=self.tool_arguments,
            clock=None if self.clock is None else PROBE if self.clock == PROBE.at else Clock(self.clock),
            without_tools=self.without_tools,
        )

    def messages(self, logged: Sequence[Message]) -> list[Message]:
        """The messages as the template gets them in this way."""
        sent = [*logged[: self.left_out[0]], *logged[self.left_out[1] :]]
        has_system = bool(sent) and sent[0].role in SYSTEM_ROLES
        if self.folds is not None and has_system and len(sent) > 1:
            content = f"{sent[0].text}{self.folds}{sent[1].text}"
            sent[:2] = [replace(sent[1], content=content, wire={**sent[1].wire, "content": content})]
        elif self.drops_system and has_system:
            del sent[0]
            has_system = False
        if self.system is not None:
            role = sent[0].role if has_system else "system"
            sent[:has_system] = [as_message({"role": role, "content": self.system}, "system prompt")]
        if self.reasoning != "as logged":
            sent = [_with_reasoning(message, self.reasoning) for message in sent]
        return sent


def has_reasoning(message: Message) -> bool:
    """Whether an answer holds reasoning, in a field of its own or in its content."""
    return message.sampled and (message.reasoning is not None or "</think>" in message.text)


def _with_reasoning(message: Message, reasoning: Reasoning) -> Message:
    """An answer without its reasoning, or with that as a part of its content."""
    if not has_reasoning(message) or not isinstance(message.content, str | None):
        return message
    wire = {key: value for key, value in message.wire.items() if key not in _REASONING}
    content = message.content or ""
    if reasoning == "dropped":
        wire["content"] = _THOUGHT.sub("", content, count=1)
    elif message.reasoning is not None:
        thought = message.reasoning.strip("\n")
        wire["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
    return replace(message, wire=wire, reasoning=None)
