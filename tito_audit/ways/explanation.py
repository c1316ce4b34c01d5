"""Explanations: the tokenizer, template and settings that wrote prompts, and what flags cannot express."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT
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

    def renderer(
        self, tokenizer: Tokenizer, *, time_limit: float = TIME_LIMIT, size_limit: int = SIZE_LIMIT
    ) -> Renderer:
        """A renderer with it; SetupError if the tokenizer has no such template, or it does not compile."""
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

    def flags(self) -> tuple[str, ...]:
        """The flags for `scan` and `repair`, as words of a command, not quoted."""
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
        """A renderer with its settings, as far as flags can express them; SetupError without a template."""
        return self.applied(self.template.renderer(tokenizer, time_limit=time_limit))

    def applied(self, renderer: Renderer) -> Renderer:
        """The same renderer with its settings, as far as flags can express them."""
        args = tuple(self.template_args.items())
        return Way(args, self.tool_arguments, self.clock, self.without_tools).renderer(renderer)
