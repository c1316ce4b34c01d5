"""Explanations of a log: the tokenizer, template and arguments that wrote its prompts, and how well they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from tito_audit.record.rollout import Place
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.render.template import TIME_LIMIT
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.settings.readers import json_or_text
from tito_audit.tokens.tokenizer import Tokenizer


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tokenizer with the templates to try for it."""

    tokenizer: Tokenizer
    templates: tuple[NamedTemplate, ...] = (OWN_TEMPLATE,)


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
        return make_renderer(
            tokenizer,
            chat_template=self.template.source,
            template_name=self.template.template_name,
            template_args=self.template_args,
            tool_arguments=self.tool_arguments,
            clock=Clock(self.clock) if self.clock is not None else None,
            without_tools=self.without_tools,
            time_limit=time_limit,
        )

    def applied(self, renderer: Renderer) -> Renderer:
        """The same renderer with its settings, as far as flags can express them."""
        return replace(
            renderer,
            template_args=dict(self.template_args),
            tool_arguments=self.tool_arguments,
            clock=Clock(self.clock) if self.clock is not None else None,
            without_tools=self.without_tools,
        )


def _as_flag(value: object) -> str:
    """A value as `--template-arg` reads it back."""
    if isinstance(value, str) and json_or_text(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Share:
    """How many prompts, turns and tokens an explanation writes exactly, out of how many."""

    prompts: int = 0
    """First prompts of rollouts."""
    of_prompts: int = 0
    turns: int = 0
    """Prompts of later calls, with the answers before them; training rows without prompt boundaries count if only
    their answers differ.
    """
    of_turns: int = 0
    tokens: int = 0
    """Tokens of all these prompts."""
    of_tokens: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(
            self.prompts + other.prompts,
            self.of_prompts + other.of_prompts,
            self.turns + other.turns,
            self.of_turns + other.of_turns,
            self.tokens + other.tokens,
            self.of_tokens + other.of_tokens,
        )


@dataclass(frozen=True, slots=True)
class Left:
    """What an explanation does not write exactly, by cause."""

    cause: str
    """A rule code with its cause, or why no text could be written."""
    number: int
    place: Place
    """Its first place."""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """A token that ends sampled turns."""

    token_id: int
    piece: str
    turns: int
    followed_by: str | None = None
    """The text between it and the next message in later prompts; None if no later prompt shows it."""


@dataclass(frozen=True, slots=True)
class Found:
    """An explanation, and which of the confirming rows it explains."""

    explanation: Explanation
    share: Share
    equal: tuple[Explanation, ...] = ()
    """Other explanations that write the same in all these rows, with more flags."""
    undetermined: tuple[str, ...] = ()
    """Template arguments that change nothing in these rows; also `tool_arguments`, if no prompt has a tool call or
    the template writes every form the same.
    """


class Lack(StrEnum):
    """Why there is no explanation at all."""

    NO_IDS = "no token ids"
    NO_MESSAGES = "no messages"
    NO_TOKENIZER = "no tokenizer fits"
    NO_TEMPLATE = "no chat template"


@dataclass(frozen=True, slots=True)
class TokenizerFit:
    """How well the ids of a log fit a tokenizer."""

    tokenizer: str
    fits: bool
    because: str = ""
    """Why it cannot have written the ids."""
    same: float = 0.0
    """The share of the unsampled ids that re-encoding their text reproduces; 0 if not measured."""


@dataclass(frozen=True, slots=True)
class Identified:
    """What explains the recorded ids of a log."""

    found: tuple[Found, ...] = ()
    """Explanations with their shares, best first."""
    sure: bool = False
    """Whether the first is certain: it writes nearly all prompts of rows outside the search, and nothing else does
    as well.
    """
    unsure_because: str = ""
    left: tuple[Left, ...] = ()
    """The prompts that the first explanation does not write, by cause, most frequent first."""
    endings: tuple[Ending, ...] = ()
    tokenizers: tuple[TokenizerFit, ...] = ()
    """Every candidate, in the order given."""
    lack: Lack | None = None
    rows_searched: int = 0
    rows_confirmed: int = 0

    @property
    def best(self) -> Found | None:
        """The explanation that writes most."""
        return self.found[0] if self.found else None
