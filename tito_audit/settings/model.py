"""Settings: what a run is asked to do."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from tito_audit.errors import SetupError
from tito_audit.unknown import close_names, unknown_name

FailOn = Literal["error", "warning", "note", "never"]
ToolArguments = Literal["auto", "object", "string"]
Encoder = Literal["auto", "fastokens", "tokenizers"]
Engine = Literal["local", "ray"]
RowKind = Literal["auto", "sft", "rl"]
RequiredLevel = Literal["L0", "L1", "L2", "L3", "L4"]
MaskBy = Literal["span", "turn", "first-divergence"]
MaskStyle = Literal["labels", "binary", "float", "bool"]
Padding = Literal["none", "left", "right"]
RECORDED: Literal["recorded"] = "recorded"
"""`Settings.clock` to render each prompt with the date it holds."""
NO_TOOLS = "none"
"""`Settings.tools` to render prompts without tools."""
_CHOICES = {
    "fail_on": get_args(FailOn),
    "tool_arguments": get_args(ToolArguments),
    "encoder": get_args(Encoder),
    "engine": get_args(Engine),
    "kind": get_args(RowKind),
    "require_level": (*get_args(RequiredLevel), None),
}
_T = TypeVar("_T")
_CLASS_OF_ARGUMENT: dict[str, str] = {}
"""By argument of any settings class: the class that takes it."""


def _explain_wrong_keywords(cls: type[_T]) -> type[_T]:
    """Let the constructor of a settings class say what an unknown keyword may mean, or which class takes it."""
    construct = cls.__init__
    names = construct.__annotations__.keys() - {"return"}
    _CLASS_OF_ARGUMENT.update(dict.fromkeys(names, cls.__name__))

    @wraps(construct)
    def __init__(self: Any, *values: Any, **keywords: Any) -> None:
        for name in keywords.keys() - names:
            close = close_names(name, names) or [each for each in names if name.startswith(each)]
            hint = f"did you mean {' or '.join(close)}?" if close else f"it takes {', '.join(sorted(names))}."
            hint = f"{_CLASS_OF_ARGUMENT[name]} takes it." if name in _CLASS_OF_ARGUMENT else hint
            raise TypeError(f"{cls.__name__}() takes no argument {name!r}: {hint}")
        construct(self, *values, **keywords)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@dataclass(frozen=True, slots=True)
class Override:
    """Settings for some of the logs."""

    paths: tuple[str, ...]
    """Absolute patterns of whole paths: `*` and `?` match within one name, `**` matches any number of folders, a
    backslash escapes the next character."""
    changes: Mapping[str, Any]
    """Values by field of Settings; only fields that can differ from log to log, such as tokenizer or fail_on."""

    def fits(self, file: str | Path) -> bool:
        """Whether a pattern matches the path of a file, as given or with links resolved."""
        if "://" in str(file):
            return any(_regex(pattern).fullmatch(str(file)) for pattern in self.paths)
        called = os.path.abspath(file)  # noqa: PTH100 - Path.absolute keeps the dots
        folder, name = os.path.split(called)
        paths = {called, os.path.join(os.path.realpath(folder), name), os.path.realpath(called)}  # noqa: PTH118
        return any(_regex(pattern).fullmatch(Path(path).as_posix()) for pattern in self.paths for path in paths)


@dataclass(frozen=True, slots=True)
class MaxRate:
    """A rate up to which findings pass the gate."""

    prefix: str
    """Prefix of the codes; "" for all."""
    limit: float
    per: Literal["token", "rollout"] = "token"
    """Per generated token or per rollout."""

    @property
    def number(self) -> str:
        """The limit as text, without digits from rounding errors."""
        return f"{self.limit:.12g}"

    def __str__(self) -> str:
        return f"{self.prefix or 'ALL'}={self.number}" + ("/rollout" if self.per == "rollout" else "")


@dataclass(frozen=True, slots=True)
class Requirement:
    """Rules that have to cover a share of the rollouts."""

    prefix: str
    """Prefix of the codes; "" for all."""
    share: float = 1.0
    """Above 0 and at most 1."""

    def __str__(self) -> str:
        return (self.prefix or "ALL") + ("" if self.share == 1 else f"={share_text(self.share)}")


def share_text(share: float) -> str:
    """A share as options write it: `95%`, `0.5%`."""
    return f"{share * 100:.12g}%"


@_explain_wrong_keywords
@dataclass(frozen=True, slots=True)
class GateSettings:
    """What a gate requires besides `Settings.fail_on`, and what it lets pass."""

    max_rates: tuple[MaxRate, ...] = ()
    """Findings whose code has one of these prefixes, of which the longest counts, are judged by their rate."""
    baseline: str | None = None
    """A file of known findings, which do not fail."""
    update_baseline: bool = False
    """Rewrite that file with the findings of this run."""
    notes: bool = False
    """Let that file also accept notes, which fail nothing, as they are shown."""
    required: tuple[Requirement, ...] = ()
    """Rules that have to cover the rollouts, or a share of them."""
    min_audited: float | None = None
    """The least share of rollouts that has to be audited, above 0 and at most 1; None: any."""


@_explain_wrong_keywords
@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run; the command line and Python callers fill the same fields."""

    tokenizer: str | None = None
    """A folder with tokenizer.json, or a Hugging Face NAME or NAME@REVISION; None: rules that need one are
    skipped."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's own template."""
    template_name: str | None = None
    """Which of the tokenizer's named templates to use."""
    template_args: Mapping[str, object] = field(default_factory=dict)
    """Extra arguments for the template, such as enable_thinking=False."""
    template_seconds: float = 3.0
    """Time limit for rendering one prompt; a template that exceeds it is not run again."""
    tool_arguments: ToolArguments = "auto"
    """How templates get tool-call arguments: parsed, as servers do, or the string as logged."""
    kind: RowKind = "auto"
    """What training rows without calls are for; `auto`: what their columns show."""
    clock: datetime | Literal["recorded"] | None = None
    """When the log was written, for templates that write the date; "recorded": as each first prompt says; None:
    now."""
    sampled_roles: tuple[str, ...] = ()
    """The roles that were sampled, in messages and in the ids (`--sampled-role`); (): `assistant` and other common
    names for models."""
    conventions: Mapping[str, str] = field(default_factory=dict)
    """How training rows were written (`--convention`): `first` is `whole`, `prefill:N` or `left-out:N` tokens of
    each answer, `end` is `trained` or `untrained`; {}: as each row shows."""
    assume: Mapping[str, int] = field(default_factory=dict)
    """How many places late (+) or early (-) `mask` and `logprobs` are in every row that allows it (`--assume`)."""
    encoder: Encoder = "auto"
    """What encodes first: `fastokens`, where `tokenizers` confirms every difference before it is reported;
    `tokenizers` alone; or `auto`: `fastokens` for large logs on which the two agree."""
    format: str | None = None
    """Name of the format; None or "auto": detected row by row."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column names to the log's, for logs in no known format (`--map`)."""
    rows_at: str | None = None
    """Path to the rows inside each document or line of a log, such as `data.rollouts`; None: each is a row."""
    messages: str | None = None
    """A file, folder or glob with the messages of the rollouts, joined by id (`--messages`)."""
    tools: str | None = None
    """A file with one list of tools for all rollouts, or with rows of an id and tools (`--tools`); "none": the
    prompts were rendered without tools."""
    on: Mapping[str, str] = field(default_factory=dict)
    """The columns to join on, the log's to the other file's; {}: the first id that both have."""
    join: bool = True
    """Join rows that are one call each into conversations (`--no-join`: each row is a rollout)."""
    session: str | None = None
    """The key whose value names the conversation of a row that is one call (`--session`), a column or a path such
    as `metadata.session_id`; None: a key that logs commonly have, else the history of the calls."""
    select: tuple[str, ...] = ()
    """Prefixes of the codes to run; () runs all."""
    extend_select: tuple[str, ...] = ()
    """Prefixes of codes to run in addition to `select`; one overrules any shorter prefix in `ignore`."""
    ignore: tuple[str, ...] = ()
    """Prefixes of codes to leave out."""
    fail_on: FailOn = "error"
    require_level: RequiredLevel | None = None
    """The level that every rollout has to have, from L0 (text) to L4 (all that a trainer needs); None: any."""
    limit: int | None = None
    """Stop after this many rows of all logs together; with `sample`, only audited rows count."""
    sample: float | None = None
    """Audit about this share of the rows, above 0 and at most 1; the log alone decides which."""
    row: int | None = None
    """Audit only this row of each log, counted from 0."""
    max_row_bytes: int = 256 * 1024 * 1024
    """A longer row is not read but reported as REC001."""
    trust_remote_code: bool = False
    """Allow a tokenizer's own Python code to run (transformers fallback only)."""
    jobs: int | None = None
    """How many processes work at once; None: only this one. The results are the same; with more than one, the
    rollout of a result keeps only its place and format."""
    engine: Engine = "local"
    """Where to work: in processes on this machine, or in tasks of a Ray cluster, with the same results. With
    `ray`, `jobs` is how many tasks run at once (None: one for each CPU of the cluster), and rollouts are as bare
    as with several processes."""
    address: str | None = None
    """For `ray`, the cluster: `HOST:PORT`, `auto` for the one that runs on this machine, `local` for a new one;
    None: RAY_ADDRESS, else the one that runs here, else a new one."""

    overrides: tuple[Override, ...] = ()
    """Settings for some of the logs; where several match a log, the last one wins."""
    map: dataclasses.InitVar[Mapping[str, str] | None] = None
    """`columns` by the name of its flag: what is passed as `map` is added to them."""

    def __post_init__(self, map: Mapping[str, str] | None) -> None:
        changes: dict[str, Any] = {"format": None} if self.format == "auto" else {}
        for name, columns in (("columns", self.columns), ("map", map or {})):
            if not isinstance(columns, Mapping):
                raise SetupError(f'{name}: not a dict of our columns and the log\'s: {{"token_ids": "tokens"}}')
        if map:
            changes["columns"] = {**self.columns, **map}
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise unknown_name(name, str(getattr(self, name)), [word for word in words if word is not None])
        for name in ("tokenizer", "chat_template", "messages", "tools"):
            if isinstance(path := getattr(self, name), Path):
                changes[name] = str(path)
        for name in ("select", "extend_select", "ignore", "sampled_roles"):
            if isinstance(text := getattr(self, name), str):
                changes[name] = tuple(part.strip() for part in text.split(",") if part.strip())
        if isinstance(self.clock, str) and self.clock != RECORDED:
            changes["clock"] = datetime.fromisoformat(self.clock)
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @property
    def tools_file(self) -> str | None:
        """The file with tools; None without one."""
        return None if self.tools == NO_TOOLS else self.tools

    @classmethod
    def given(cls, settings: Settings | None) -> Settings:
        """The settings that a caller passed, the defaults for None; SetupError for anything else."""
        if settings is not None and not isinstance(settings, cls):
            kind = type(settings).__name__
            raise SetupError(f"settings: this is a {kind}, not Settings.\nPass Settings(tokenizer=…).")
        return cls() if settings is None else settings

    def at(self, file: str | Path) -> Settings:
        """The settings of one log, with its overrides applied; these settings themselves if none matches."""
        fitting = [override for override in self.overrides if override.fits(file)]
        if not fitting:
            return self
        changes = {name: value for override in fitting for name, value in override.changes.items()}
        return replace(self, **changes, overrides=())


@_explain_wrong_keywords
@dataclass(frozen=True, slots=True)
class RepairChoices:
    """Choices for single repairs."""

    mask_by: MaskBy = "span"
    """How much `mask` takes out of the loss."""
    sentinel: float | Literal["null"] | None = None
    """What `normalize` writes where there is no logprob; "null": null; None: unchanged."""
    mask_style: MaskStyle | None = None
    """How `normalize` writes masks; None: unchanged."""
    padding: Padding | None = None
    """Where `normalize` puts padding; None: unchanged."""
    rescored: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)
    """For `rescore`: gives a model's `ModelScores` of a rollout's `Evidence`, or None; None: there is no model."""


@_explain_wrong_keywords
@dataclass(frozen=True, slots=True)
class RepairSettings:
    """The settings of a repair, in addition to the Settings of its audit."""

    strategies: tuple[str, ...] = ()
    """Names of repairs in the order to try them (`--with`); (): all safe ones."""
    unsafe: bool = False
    """Let unsafe repairs run."""
    quarantine: str | None = None
    """A file for the rows that no repair fixed, with the reason; None: they stay in the log."""
    force: bool = False
    """Replace existing files."""
    provenance: bool = True
    """Write a `tito_audit` column that names the repair of each fixed finding."""
    choices: RepairChoices = field(default_factory=RepairChoices)


_PART = re.compile(
    r"(?P<through>(?<![^/])(?:\*\*/)+)|(?P<below>(?<![^/])\*\*\Z)|(?P<any>\*+)|(?P<char>\?)|\\?(?P<plain>.)",
    re.DOTALL,
)
_EXPRESSIONS = {"through": "(?:[^/]+/)*", "below": ".+", "any": "[^/]*", "char": "[^/]"}


@lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern of `Override.paths` as a regular expression for whole paths."""
    parts = _PART.finditer(pattern)
    text = "".join(_EXPRESSIONS.get(part.lastgroup or "", "") or re.escape(part["plain"]) for part in parts)
    return re.compile(text, re.DOTALL)
