"""Way: one way to write a conversation with a template. Explanation: a way in terms of command-line flags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from tito_audit.record.message import Message, ToolSpec, as_message
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.settings.readers import json_or_text
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.recorded_values import PROBE

Reasoning: TypeAlias = Literal["as logged", "dropped", "in content"]
CLOCK = "strftime_now"
"""The clock in `Way.varies`."""
SYSTEM = "system prompt"
"""System prompts that the messages lack, in `Way.varies`; no argument can have this name."""
SYSTEM_ROLES = ("system", "developer")
CHARACTERS = 16
"""Characters of text read from prompts that cost as much as a flag."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"\A\s*(<think>)?.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Way:
    """What differs from the messages as logged, rendered with the template's defaults."""

    args: tuple[tuple[str, object], ...] = ()
    """Template arguments."""
    tool_arguments: ToolArguments = "auto"
    clock: datetime | None = None
    """The date that the template writes; `PROBE.at` makes it write marks instead."""
    without_tools: bool = False
    tools: tuple[ToolSpec, ...] | None = None
    """Replace the log's tools."""
    uses_stated: bool = True
    """Whether the template arguments that the log states apply."""
    generation_prompt: bool = True
    prefill: str = ""
    """Text after the generation prompt."""
    bos: int = 0
    """BOS tokens added before the text; -1: the template's own is missing."""
    system: str | None = None
    """Replaces the system prompt of the messages, or is added."""
    drops_system: bool = False
    fold_separator: str | None = None
    """The text between the system prompt and the first question, if both are one user message."""
    left_out: tuple[int, int] = (0, 0)
    """`[start, end)` of messages that are left out."""
    reasoning: Reasoning = "as logged"
    """Where the template gets the reasoning of earlier answers."""
    varies: frozenset[str] = frozenset()
    """Arguments, CLOCK or SYSTEM whose values are read from each prompt."""

    @classmethod
    def from_renderer(cls, renderer: Renderer) -> Way:
        """The way in which a renderer is set to write."""
        clock = renderer.clock.at if renderer.clock is not None else None
        return cls(tuple(renderer.template_args.items()), renderer.tool_arguments, clock, renderer.without_tools)

    def with_arg(self, name: str, value: object) -> Way:
        """With a value for an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=(*others, (name, value)), varies=self.varies - {name})

    def without_arg(self, name: str) -> Way:
        """Without an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=others, varies=self.varies - {name})

    def with_system(self, text: str | None) -> Way:
        """With one system prompt for all prompts; None: that of the messages."""
        return replace(self, system=text, drops_system=False, varies=self.varies - {SYSTEM})

    @property
    def departure_count(self) -> int:
        """How many departures it has that no flag can express."""
        changes = (
            self.prefill,
            self.bos,
            self.system is not None,
            self.drops_system,
            self.reasoning != "as logged",
        )
        departures = (not self.uses_stated, not self.generation_prompt, *changes)
        return sum(map(bool, departures)) + len(self.varies)

    @property
    def cost(self) -> int:
        """How much it claims: 1 per flag, 4 per departure, and 1 per CHARACTERS of text."""
        flags = len(self.args) + (self.tool_arguments != "auto") + (self.clock is not None) + self.without_tools
        texts = (*(str(value) for _, value in self.args), self.system or "", self.prefill)
        return flags + 4 * self.departure_count + sum(len(text) // CHARACTERS for text in texts)

    def apply_to(self, renderer: Renderer) -> Renderer:
        """The renderer with the arguments, the date and the form of tool calls of this way."""
        return replace(
            renderer,
            template_args=dict(self.args),
            tool_arguments=self.tool_arguments,
            clock=None if self.clock is None else PROBE if self.clock == PROBE.at else Clock(self.clock),
            without_tools=self.without_tools,
        )

    def rewrite(self, logged: Sequence[Message]) -> list[Message]:
        """The messages that the template gets in this way."""
        sent = [*logged[: self.left_out[0]], *logged[self.left_out[1] :]]
        has_system = bool(sent) and sent[0].role in SYSTEM_ROLES
        if self.fold_separator is not None and has_system and len(sent) > 1:
            content = f"{sent[0].text}{self.fold_separator}{sent[1].text}"
            sent[:2] = [replace(sent[1], content=content, wire={**sent[1].wire, "content": content})]
        elif self.drops_system and has_system:
            del sent[0]
            has_system = False
        if self.system is not None:
            role = sent[0].role if has_system else "system"
            sent[:has_system] = [as_message({"role": role, "content": self.system}, "system prompt")]
        for at, message in enumerate(sent if self.reasoning != "as logged" else ()):
            if not has_reasoning(message) or not isinstance(message.content, str | None):
                continue
            wire = {key: value for key, value in message.wire.items() if key not in _REASONING}
            content = message.content or ""
            if self.reasoning == "dropped":
                wire["content"] = _THOUGHT.sub("", content, count=1)
            elif message.reasoning is not None:
                thought = message.reasoning.strip("\n")
                wire["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
            sent[at] = replace(message, wire=wire, reasoning=None)
        return sent


def has_reasoning(message: Message) -> bool:
    """Whether an answer holds reasoning, in its own field or in the content."""
    return message.sampled and (message.reasoning is not None or "</think>" in message.text)


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat template to try."""

    label: str
    """`its own template`, the name of one of several, or a file."""
    source: str | None = None
    """Jinja source of a file; None: one of the tokenizer's templates."""
    chat_template: str | None = None
    """The value of `--chat-template`."""
    template_name: str | None = None
    """The value of `--template-name`."""

    def renderer(
        self, tokenizer: Tokenizer, *, time_limit: float = TIME_LIMIT, size_limit: int = SIZE_LIMIT
    ) -> Renderer:
        """A renderer with this template; SetupError if the tokenizer lacks it or it does not compile."""
        return make_renderer(
            tokenizer,
            chat_template=self.source,
            template_name=self.template_name,
            time_limit=time_limit,
            size_limit=size_limit,
        )


OWN_TEMPLATE = NamedTemplate("its own template")
"""The tokenizer's default."""
GIVEN_TEMPLATE = NamedTemplate("the given template")
"""The template of an existing renderer."""


class DepartureKind(StrEnum):
    """How prompts differ from what the template writes for the logged messages with one set of arguments.

    A flag exists only for dates that vary: `--clock recorded`.
    """

    SYSTEM_ADDED = "system prompt not in the messages"
    SYSTEM_VARIES = "each prompt opens with a system prompt that the messages lack"
    SYSTEM_REPLACED = "another system prompt than in the messages"
    SYSTEM_DROPPED = "system prompt of the messages not rendered"
    NO_GENERATION_PROMPT = "no generation prompt"
    PREFILL = "text after the generation prompt"
    BOS_ADDED = "another BOS token before the text"
    BOS_MISSING = "no BOS token where the template writes one"
    REASONING_DROPPED = "reasoning of earlier answers not rendered"
    REASONING_IN_CONTENT = "reasoning of earlier answers as part of their content"
    CLOCK_VARIES = "the date differs from row to row"
    ARGUMENT_VARIES = "an argument differs from row to row"
    STATED_UNUSED = "the template arguments that the log states were not used"


@dataclass(frozen=True, slots=True)
class Departure:
    """One departure of a log's prompts from what flags can express."""

    kind: DepartureKind
    text: str = ""
    """The added text, or the argument that varies."""
    values: tuple[str, ...] = ()
    """Some of the varying values."""

    def __str__(self) -> str:
        return self.kind.value


@dataclass(frozen=True, slots=True)
class Explanation:
    """The tokenizer, template and flags that write the prompts of a log, and what no flag can express."""

    tokenizer: str
    """The value of `-t`."""
    template: NamedTemplate = OWN_TEMPLATE
    template_args: Mapping[str, object] = field(default_factory=dict)
    tool_arguments: ToolArguments = "auto"
    clock: datetime | None = None
    without_tools: bool = False
    """Whether the prompts were written without the log's tools."""
    departures: tuple[Departure, ...] = ()

    def settings(self, base: Settings) -> Settings:
        """`base` with everything of it that flags can express."""
        flags: dict[str, Any] = {}
        if self.template != GIVEN_TEMPLATE:
            flags = {
                "tokenizer": self.tokenizer,
                "chat_template": self.template.chat_template,
                "template_name": self.template.template_name,
            }
        return replace(
            base,
            **flags,
            template_args=dict(self.template_args),
            tool_arguments=self.tool_arguments,
            clock=RECORDED if self.dates_vary else self.clock,
            tools=NO_TOOLS if self.without_tools else base.tools,
        )

    @property
    def dates_vary(self) -> bool:
        """Whether each prompt has a date of its own; `clock` is then the most frequent one."""
        return any(departure.kind is DepartureKind.CLOCK_VARIES for departure in self.departures)

    def flags(self) -> tuple[str, ...]:
        """The flags for `scan` and `repair`, one word each, unquoted."""
        words: list[str] = []
        for key, value in self.config().items():
            if key != "template-args":
                words += ["-t" if key == "tokenizer" else f"--{key}", str(value)]
                continue
            for name, argument in self.template_args.items():  # as `--template-arg` reads them back
                is_plain = isinstance(argument, str) and json_or_text(argument) == argument
                text = argument if is_plain else json.dumps(argument, ensure_ascii=False)
                words += ["--template-arg", f"{name}={text}"]
        return tuple(words)

    def config(self) -> Mapping[str, object]:
        """The equivalent keys of `tito-audit.toml`."""
        keys: dict[str, object] = {"tokenizer": self.tokenizer}
        if self.template.chat_template is not None:
            keys["chat-template"] = self.template.chat_template
        if self.template.template_name is not None:
            keys["template-name"] = self.template.template_name
        if self.template_args:
            keys["template-args"] = dict(self.template_args)
        if self.tool_arguments != "auto":
            keys["tool-arguments"] = self.tool_arguments
        if self.dates_vary:
            keys["clock"] = RECORDED
        elif self.clock is not None:
            is_midnight = self.clock == datetime(*self.clock.timetuple()[:3])
            keys["clock"] = (
                self.clock.date().isoformat() if is_midnight else self.clock.isoformat(timespec="seconds")
            )
        if self.without_tools:
            keys["tools"] = NO_TOOLS
        return keys

    def renderer(self, tokenizer: Tokenizer, *, time_limit: float = TIME_LIMIT) -> Renderer:
        """A renderer with its template and flags; SetupError if the tokenizer has no such template."""
        return self.apply_to(self.template.renderer(tokenizer, time_limit=time_limit))

    def apply_to(self, renderer: Renderer) -> Renderer:
        """The renderer with its flags."""
        args = tuple(self.template_args.items())
        return Way(args, self.tool_arguments, self.clock, self.without_tools).apply_to(renderer)
