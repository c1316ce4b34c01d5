"""Explanations: the tokenizer, template and settings that wrote prompts, and what flags cannot express."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.render.template import TIME_LIMIT
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.settings.readers import json_or_text
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.way import Way


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat template to try."""

    label: str
    """Its name: "its own template", one of several named ones, or a file."""
    source: str | None = None
    """The Jinja text of a file; None: one of the tokenizer's templates."""
    chat_template: str | None = None
    """The path for `--chat-template`."""
    template_name: str | None = None
    """The name for `--template-name`."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that choose it, as words of a command."""
        file = () if self.chat_template is None else ("--chat-template", self.chat_template)
        return file if self.template_name is None else (*file, "--template-name", self.template_name)


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
    """One such departure."""

    kind: DepartureKind
    text: str = ""
    """The added text, or the name of the argument that varies."""
    values: tuple[str, ...] = ()
    """Some of the values, if they vary."""

    def __str__(self) -> str:
        return self.kind.value


@dataclass(frozen=True, slots=True)
class Explanation:
    """One way to write the prompts of a log."""

    tokenizer: str
    """As for `-t`."""
    template: NamedTemplate = OWN_TEMPLATE
    template_args: Mapping[str, object] = field(default_factory=dict)
    tool_arguments: ToolArguments = "auto"
    clock: datetime | None = None
    without_tools: bool = False
    """Whether the prompts were written without the log's tools."""
    departures: tuple[Departure, ...] = ()

    def settings(self, base: Settings) -> Settings:
        """The settings with everything of it that flags can express."""
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
        """Whether prompts have dates of their own; `clock` is then the most frequent one."""
        return any(departure.kind is DepartureKind.CLOCK_VARIES for departure in self.departures)

    @property
    def _clock(self) -> str | None:
        """The date as `--clock` reads it; None for the current one."""
        if self.dates_vary:
            return RECORDED
        return (
            (
                self.clock.date().isoformat()
                if self.clock == datetime(*self.clock.timetuple()[:3])
                else self.clock.isoformat(timespec="seconds")
            )
            if self.clock is not None
            else None
        )

    def flags(self) -> tuple[str, ...]:
        """The flags for `scan` and `repair`, as words of a command, not quoted."""
        words = ["-t", self.tokenizer, *self.template.flags]
        for name, value in self.template_args.items():
            words += ["--template-arg", f"{name}={_as_flag(value)}"]
        if self.tool_arguments != "auto":
            words += ["--tool-arguments", self.tool_arguments]
        if self._clock is not None:
            words += ["--clock", self._clock]
        if self.without_tools:
            words += ["--tools", NO_TOOLS]
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
        if self._clock is not None:
            keys["clock"] = self._clock
        if self.without_tools:
            keys["tools"] = NO_TOOLS
        return keys

    def renderer(self, tokenizer: Tokenizer, *, time_limit: float = TIME_LIMIT) -> Renderer:
        """A renderer with its settings, as far as flags can express them; SetupError without a template."""
        own = make_renderer(
            tokenizer,
            chat_template=self.template.source,
            template_name=self.template.template_name,
            time_limit=time_limit,
        )
        return self.applied(own)

    def applied(self, renderer: Renderer) -> Renderer:
        """The same renderer with its settings, as far as flags can express them."""
        args = tuple(self.template_args.items())
        return Way(args, self.tool_arguments, self.clock, self.without_tools).renderer(renderer)


def _as_flag(value: object) -> str:
    """A value as `--template-arg` reads it back."""
    if isinstance(value, str) and json_or_text(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
