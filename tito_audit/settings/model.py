"""Settings: what a run was asked to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Encoder",
    "FailOn",
    "GateSettings",
    "MaskBy",
    "MaskStyle",
    "MaxRate",
    "Override",
    "Padding",
    "RepairChoices",
    "RepairSettings",
    "Settings",
    "ToolArguments",
]

FailOn = Literal["error", "warning", "note", "never"]
ToolArguments = Literal["auto", "object", "string"]
Encoder = Literal["auto", "fastokens", "tokenizers"]
MaskBy = Literal["span", "turn", "first-divergence"]
MaskStyle = Literal["labels", "binary", "float", "bool"]
Padding = Literal["none", "left", "right"]


@dataclass(frozen=True, slots=True)
class Override:
    """Settings that hold for some logs only."""

    paths: tuple[str, ...]
    """Absolute patterns of whole paths: `*` and `?` stay within one name, `**` goes through any number of folders,
    a backslash takes what follows as it stands."""
    changes: Mapping[str, Any]
    """Values by field of Settings: those that speak of one log (tokenizer, template, columns, rules, fail_on)."""

    def fits(self, file: str | Path) -> bool:
        """Whether one of the patterns is a file's path, as it is called or with all links followed."""
        called = os.path.abspath(file)  # noqa: PTH100 - Path.absolute keeps the dots
        folder, name = os.path.split(called)
        paths = {called, os.path.join(os.path.realpath(folder), name), os.path.realpath(called)}  # noqa: PTH118
        return any(_pattern(pattern).fullmatch(Path(path).as_posix()) for pattern in self.paths for path in paths)


@dataclass(frozen=True, slots=True)
class MaxRate:
    """How often findings may occur before they fail a gate."""

    prefix: str
    """Beginning of codes; "" for all."""
    limit: float
    per: Literal["token", "rollout"] = "token"
    """Of what: generated tokens, or rollouts."""

    @property
    def number(self) -> str:
        """The limit as text, without what arithmetic left at its end."""
        return f"{self.limit:.12g}"

    def __str__(self) -> str:
        return f"{self.prefix or 'ALL'}={self.number}" + ("/rollout" if self.per == "rollout" else "")


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What lets findings pass that `Settings.fail_on` would refuse."""

    max_rates: tuple[MaxRate, ...] = ()
    """Codes under one of these are judged by their rate, the longest prefix first, not one by one."""
    baseline: str | None = None
    """A file of findings that are known and fail nothing."""
    update_baseline: bool = False
    """Write that file anew with what was found."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One frozen value for a whole run; the command line and Python callers fill the same fields."""

    tokenizer: str | None = None
    """A folder with tokenizer.json, or a Hugging Face hub name; None: rules that need one are skipped."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's own template."""
    template_name: str | None = None
    """Which of several named templates to use."""
    template_args: Mapping[str, object] = field(default_factory=dict)
    """Extra arguments for the template, such as enable_thinking=False."""
    template_seconds: float = 10.0
    """How long the template may write one prompt; one that takes longer is not run again."""
    tool_arguments: ToolArguments = "auto"
    """How templates get tool-call arguments: parsed, as servers do, or the string as logged."""
    sampled_roles: tuple[str, ...] = ()
    """Roles whose messages were sampled, in messages and in the ids (`--sampled-role`); (): `assistant` and the
    other names that models are given."""
    encoder: Encoder = "auto"
    """Who encodes first: `fastokens` where logs are large and it agrees with `tokenizers`, which proves every
    difference before it is reported; `tokenizers` alone; `auto` chooses."""
    format: str | None = None
    """Name of the format; None or "auto": detected row by row."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column name to the log's, for logs of no known format (`--map`)."""
    rows_at: str | None = None
    """Where in each document or line of a log its rows lie, as `data.rollouts`; None: they are the rows."""
    messages: str | None = None
    """A file (or folder, or glob) that holds the messages of the rollouts, joined by id (`--messages`)."""
    tools: str | None = None
    """A file with one list of tools for all rollouts, or with rows of an id and tools (`--tools`)."""
    on: Mapping[str, str] = field(default_factory=dict)
    """The columns to join on, those of the log to those of the other file; {}: the first id that both have."""
    select: tuple[str, ...] = ()
    """Code prefixes to run; () runs all."""
    extend_select: tuple[str, ...] = ()
    """Code prefixes to run beside those of `select`, whatever `ignore` says of shorter ones."""
    ignore: tuple[str, ...] = ()
    """Code prefixes to leave out."""
    fail_on: FailOn = "error"
    limit: int | None = None
    """Stop after so many rows of all logs together; with `sample` those that are audited count."""
    sample: float | None = None
    """Audit about this share of the rows only, above 0 and at most 1; which ones depends on the log alone."""
    row: int | None = None
    """Audit this row of each log only, counted from 0."""
    max_row_bytes: int = 256 * 1024 * 1024
    """A longer row is not read: it becomes a REC001 finding."""
    trust_remote_code: bool = False
    """Allow a tokenizer's own Python code to run (transformers fallback only)."""
    jobs: int | None = None
    """Processes that work at once; None: this one alone. Results are the same whatever the number. With more than
    one, the rollout of a result holds its place and format only: the rest stays where it was audited."""

    overrides: tuple[Override, ...] = ()
    """Other settings for some of the logs; of those that fit a log, the later one wins."""

    def __post_init__(self) -> None:
        if self.format == "auto":
            object.__setattr__(self, "format", None)

    def at(self, file: str | Path) -> Settings:
        """The settings of one log, without overrides; these themselves when no override fits it."""
        fitting = [override for override in self.overrides if override.fits(file)]
        if not fitting:
            return self
        changes = {name: value for override in fitting for name, value in override.changes.items()}
        return replace(self, **changes, overrides=())


@dataclass(frozen=True, slots=True)
class RepairChoices:
    """What a user chose of what repairs can be asked for."""

    mask_by: MaskBy = "span"
    """How much `mask` takes out of the loss."""
    sentinel: float | Literal["null"] | None = None
    """What `normalize` writes where no logprob exists; "null": null; None: as it is."""
    mask_style: MaskStyle | None = None
    """How `normalize` writes masks; None: as they are."""
    padding: Padding | None = None
    """Where `normalize` puts padding; None: as it is."""


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """What a repair run was asked to do, beside the Settings of its audit."""

    strategies: tuple[str, ...] = ()
    """Names of repairs in the order in which they are tried (`--with`); () is every safe one."""
    unsafe: bool = False
    """Let unsafe repairs run."""
    quarantine: str | None = None
    """A file for the rows that no repair cured, with the reason; None: they stay as they were."""
    force: bool = False
    """Replace files that exist at the target."""
    provenance: bool = True
    """Write a `tito_audit` column that says what was cured by what."""
    choices: RepairChoices = field(default_factory=RepairChoices)


_PART = re.compile(
    r"(?P<through>(?<![^/])(?:\*\*/)+)|(?P<below>(?<![^/])\*\*\Z)|(?P<any>\*+)|(?P<one>\?)|\\?(?P<plain>.)",
    re.DOTALL,
)
_EXPRESSIONS = {"through": "(?:[^/]+/)*", "below": ".+", "any": "[^/]*", "one": "[^/]"}


@lru_cache(maxsize=256)
def _pattern(pattern: str) -> re.Pattern[str]:
    """What `Override.paths` says, as a regular expression of whole paths."""
    parts = _PART.finditer(pattern)
    text = "".join(_EXPRESSIONS.get(part.lastgroup or "", "") or re.escape(part["plain"]) for part in parts)
    return re.compile(text, re.DOTALL)
