"""Options that several commands share, and the Settings they become."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from tito_audit.config import FailOn, Settings, ToolArguments
from tito_audit.config_file import Config, find_config, read_config
from tito_audit.errors import SetupError

__all__ = [
    "MAX_ROW_BYTES",
    "TEMPLATE_SECONDS",
    "ChatTemplate",
    "ConfigFile",
    "EncoderOption",
    "EncoderWord",
    "FailOnWord",
    "FormatName",
    "Ignore",
    "Jobs",
    "Map",
    "MaxRowBytes",
    "Messages",
    "NoConfig",
    "On",
    "Select",
    "TemplateArgs",
    "TemplateName",
    "TemplateSeconds",
    "Tokenizer",
    "ToolArgumentsOption",
    "ToolArgumentsWord",
    "Tools",
    "TrustRemoteCode",
    "about_config",
    "blamed_file",
    "settings_of",
]


MAX_ROW_BYTES = Settings().max_row_bytes
TEMPLATE_SECONDS = Settings().template_seconds


class FailOnWord(StrEnum):
    """Severities that `--fail-on` takes."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"


class EncoderWord(StrEnum):
    """Encoders that `--encoder` takes."""

    AUTO = "auto"
    FASTOKENS = "fastokens"
    TOKENIZERS = "tokenizers"


class ToolArgumentsWord(StrEnum):
    """Forms that `--tool-arguments` takes."""

    AUTO = "auto"
    OBJECT = "object"
    STRING = "string"


Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="DIR|NAME",
        help="A folder with tokenizer.json, or a Hugging Face name. Without one, rules that need it are "
        "skipped and counted.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE", help="A Jinja file to use as the chat template."),
]
TemplateName = Annotated[
    str | None,
    typer.Option("--template-name", metavar="NAME", help="Which of the tokenizer's named templates to use."),
]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="K=V",
        help="An argument for the template, as enable_thinking=false. JSON, else text. Repeatable.",
    ),
]
TemplateSeconds = Annotated[
    float,
    typer.Option(
        "--template-seconds", min=0.01, help="How long the template may write one prompt; then it is given up."
    ),
]
ToolArgumentsOption = Annotated[
    ToolArgumentsWord,
    typer.Option("--tool-arguments", help="How the template gets tool-call arguments."),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Format of the log, when detection errs (see list formats). [default: auto, row by row]",
    ),
]
Map = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="OURS=THEIRS",
        help="Name a column of the log, as token_ids=tokens. Repeatable.",
    ),
]
Messages = Annotated[
    str | None,
    typer.Option(
        "--messages",
        metavar="FILE",
        help="A file that holds the messages of the rollouts, where the log does not; joined by id.",
    ),
]
Tools = Annotated[
    str | None,
    typer.Option(
        "--tools", metavar="FILE", help="A JSON array of tools for all rollouts, or rows with an id and tools."
    ),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="KEY[=OTHER]",
        help="The id to join on, as the log and as the other file call it. Repeatable. [default: the first that "
        "both have]",
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="CODES", help="Rules to run, by code or prefix: TOK,TPL203."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="CODES", help="Rules to leave out, by code or prefix."),
]
MaxRowBytes = Annotated[
    int,
    typer.Option("--max-row-bytes", min=1, help="A longer row is not read; it becomes a finding (REC001)."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        min=1,
        help="Processes that audit at once; the findings are the same. [default: one a core]",
    ),
]
EncoderOption = Annotated[
    EncoderWord,
    typer.Option(
        "--encoder",
        help="Who encodes first; tokenizers proves every difference before it is reported. auto: fastokens where "
        "logs are large.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow a tokenizer's own Python code to run.")
]
_CONFIG = "tito_audit.config"
"""Where a run keeps what its configuration file says."""
_FLAGS = {"template-args": "--template-arg"}
"""Flags that are called otherwise than the key of the file."""


def _read_file(ctx: typer.Context, given: str | None) -> str | None:
    """Let the configuration file say what flags do not; the file's name, None without one."""
    if ctx.resilient_parsing or f"{_CONFIG}.off" in ctx.meta:
        if given is not None:
            raise SetupError("--config and --no-config exclude each other.\nPass one of them.")
        return None
    path = Path(given) if given is not None else find_config(Path.cwd())
    if path is None:
        return None
    config = read_config(path)
    ctx.meta[_CONFIG] = config
    known = {parameter.name for parameter in ctx.command.params}
    ctx.default_map = {name: value for name, value in config.parameters.items() if name in known}
    return str(path)


def _read_no_file(ctx: typer.Context, wanted: bool) -> bool:
    if wanted:
        if _CONFIG in ctx.meta:
            raise SetupError("--config and --no-config exclude each other.\nPass one of them.")
        ctx.meta[f"{_CONFIG}.off"] = True
    return wanted


# Both are read before all other options, in this order where neither is given.
NoConfig = Annotated[
    bool,
    typer.Option("--no-config", help="Read no configuration file.", callback=_read_no_file, is_eager=True),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read settings from this file. [default: tito-audit.toml or pyproject.toml, here or above]",
        callback=_read_file,
        is_eager=True,
    ),
]


def about_config(context: typer.Context) -> str | None:
    """The settings that come from a configuration file, in a sentence; None when none does."""
    config = context.meta.get(_CONFIG, Config())
    keys = [
        key
        for key, parameter in zip(config.values, config.parameters, strict=True)
        # By name, since typer has its own copy of the enumeration from some version on.
        if getattr(context.get_parameter_source(parameter), "name", "") == "DEFAULT_MAP"
    ]
    return f"Settings from {_near(config.path)}: {', '.join(keys)}." if config.path and keys else None


def blamed_file(context: typer.Context, message: str) -> list[str]:
    """A line that names the configuration file, when a message is about an option that it sets."""
    config = context.meta.get(_CONFIG, Config())
    flags = {name: _FLAGS.get(name, f"--{name}") for name in config.values}
    named = [name for name, flag in flags.items() if flag in message and name in config.values]
    return [f"{', '.join(named)} may come from {_near(config.path)}."] if named and config.path else []


def _near(path: Path) -> Path:
    """The path as seen from the working folder, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def settings_of(
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    template_name: str | None = None,
    template_args: Sequence[str] | None = None,
    template_seconds: float = TEMPLATE_SECONDS,
    tool_arguments: str = "auto",
    format: str | None = None,
    columns: Sequence[str] | None = None,
    messages: str | None = None,
    tools: str | None = None,
    on: Sequence[str] | None = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    fail_on: str = "error",
    limit: int | None = None,
    row: int | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    encoder: str = "auto",
) -> Settings:
    """The options of a command as Settings; SetupError naming the option that cannot be."""
    mapped = dict(_pair(text, "--map", "token_ids=tokens") for text in columns or ())
    arguments = [_pair(text, "--template-arg", "enable_thinking=false") for text in template_args or ()]
    return Settings(
        tokenizer=tokenizer,
        chat_template=chat_template,
        template_name=template_name,
        template_args={key: _value(text) for key, text in arguments},
        template_seconds=template_seconds,
        tool_arguments=cast(ToolArguments, str(tool_arguments)),
        format=format,
        columns=mapped,
        messages=messages,
        tools=tools,
        on=dict(_columns_pair(text) for text in on or ()),
        select=_codes(select, "--select"),
        ignore=_codes(ignore, "--ignore"),
        fail_on=cast(FailOn, str(fail_on)),
        limit=limit,
        row=row,
        max_row_bytes=max_row_bytes,
        trust_remote_code=trust_remote_code,
        jobs=jobs,
        encoder=cast(Literal["auto", "fastokens", "tokenizers"], str(encoder)),
    )


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SetupError(f"{option} {text}: no name and value were found.\nWrite it as {option} {example}")
    return key.strip(), value


def _columns_pair(text: str) -> tuple[str, str]:
    ours, equals, theirs = (part.strip() for part in text.partition("="))
    if not ours or (equals and not theirs):
        raise SetupError(f"--on {text}: no column was found.\nWrite it as --on id, or as --on id=other_name")
    return ours, theirs or ours


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _codes(given: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """Code prefixes out of comma lists; each has to be the beginning of at least one code."""
    codes = tuple(code.strip().upper() for part in given or () for code in part.split(",") if code.strip())
    if not codes:
        return ()
    from tito_audit.rules import all_rules

    known = [rule.code for rule in all_rules()]
    for code in codes:
        if not any(one.startswith(code) for one in known):
            close = difflib.get_close_matches(code, known, n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(close)}?" if close else "See tito-audit list rules."
            raise SetupError(f"{option} {code}: no rule has a code that starts so.\n{hint}")
    return codes
