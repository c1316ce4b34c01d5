"""Options that several commands share, and the Settings they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from tito_audit.cli import _complete
from tito_audit.cli._configured import (
    ConfigFile,
    NoConfig,
    about_config,
    blamed_file,
    config_of,
    near,
    on_command_line,
)
from tito_audit.cli._option_words import EncoderWord, FailOnWord, ToolArgumentsWord
from tito_audit.cli._rates import gate_settings_of, known_prefix, share_of
from tito_audit.errors import SetupError
from tito_audit.settings.file import KEYS
from tito_audit.settings.model import FailOn, Override, Settings, ToolArguments

__all__ = [
    "MAX_ROW_BYTES",
    "TEMPLATE_SECONDS",
    "Baseline",
    "ChatTemplate",
    "ConfigFile",
    "EncoderOption",
    "EncoderWord",
    "ExtendSelect",
    "FailOnWord",
    "FormatName",
    "Ignore",
    "Jobs",
    "Map",
    "MaxRates",
    "MaxRowBytes",
    "Messages",
    "NoConfig",
    "On",
    "RowsAt",
    "Sample",
    "SampledRoles",
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
    "gate_settings_of",
    "inputs_of",
    "on_command_line",
    "overrides_of",
    "settings_of",
]


MAX_ROW_BYTES = Settings().max_row_bytes
TEMPLATE_SECONDS = Settings().template_seconds

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
        "--template-seconds",
        metavar="SECONDS",
        min=0.01,
        help="How long the template may write one prompt; then it is given up.",
    ),
]
ToolArgumentsOption = Annotated[
    ToolArgumentsWord,
    typer.Option("--tool-arguments", help="How the template gets tool-call arguments."),
]
SampledRoles = Annotated[
    list[str] | None,
    typer.Option(
        "--sampled-role",
        metavar="ROLE",
        help="A role whose messages were sampled; those of all others were not. Repeatable. [default: assistant "
        "and other names of models]",
        autocompletion=_complete.sampled_roles,
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Format of the log, when detection errs (`tito-audit list formats`). [default: auto, row by row]",
        autocompletion=_complete.formats,
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
RowsAt = Annotated[
    str | None,
    typer.Option(
        "--rows-at",
        metavar="PATH",
        help="Where in each document or line the rows lie, as data.rollouts; * for the entries of a list.",
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
    typer.Option(
        "--select",
        metavar="CODES",
        help="Rules to run, by code or prefix: TOK,TPL203. [default: all]",
        autocompletion=_complete.codes,
    ),
]
ExtendSelect = Annotated[
    list[str] | None,
    typer.Option(
        "--extend-select",
        metavar="CODES",
        help="Rules to run beside those selected, unless --ignore names them more closely.",
        autocompletion=_complete.codes,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CODES",
        help="Rules to leave out, by code or prefix.",
        autocompletion=_complete.codes,
    ),
]
MaxRates = Annotated[
    list[str] | None,
    typer.Option(
        "--max-rate",
        metavar="CODES=RATE",
        help="Let findings of these rules pass up to a rate: TOK=0.001 (a generated token), TOK=0.1%, "
        "SEQ=0.5/rollout, ALL=0.01. Repeatable.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="FILE", help="A file of known findings, which fail nothing."),
]
Sample = Annotated[
    float | None,
    typer.Option(
        "--sample",
        metavar="SHARE",
        parser=share_of,
        help="Audit about this share of the rows, as 0.05 or 5%; the same rows every time.",
    ),
]
MaxRowBytes = Annotated[
    int,
    typer.Option(
        "--max-row-bytes",
        metavar="BYTES",
        min=1,
        help="A longer row is not read; it becomes a finding (REC001).",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        min=1,
        help="Processes that work at once; the results are the same. [default: one a core]",
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


def settings_of(
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    template_name: str | None = None,
    template_args: Sequence[str] | None = None,
    template_seconds: float = TEMPLATE_SECONDS,
    tool_arguments: str = "auto",
    sampled_roles: Sequence[str] | None = None,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    rows_at: str | None = None,
    messages: str | None = None,
    tools: str | None = None,
    on: Sequence[str] | None = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    extend_select: Sequence[str] | None = None,
    fail_on: str = "error",
    limit: int | None = None,
    sample: float | None = None,
    row: int | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    encoder: str = "auto",
    overrides: Sequence[Override] = (),
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
        sampled_roles=_roles(sampled_roles),
        format=format,
        columns=mapped,
        rows_at=rows_at,
        messages=messages,
        tools=tools,
        on=dict(_columns_pair(text) for text in on or ()),
        select=_codes(select, "--select"),
        extend_select=_codes(extend_select, "--extend-select"),
        ignore=_codes(ignore, "--ignore"),
        fail_on=cast(FailOn, str(fail_on)),
        limit=limit,
        sample=None if sample is None else share_of(sample),
        row=row,
        max_row_bytes=max_row_bytes,
        trust_remote_code=trust_remote_code,
        jobs=jobs,
        encoder=cast(Literal["auto", "fastokens", "tokenizers"], str(encoder)),
        overrides=tuple(overrides),
    )


def overrides_of(context: typer.Context) -> tuple[Override, ...]:
    """What the configuration file of a run says of some logs only, less what a flag says; SetupError naming the
    override and the option that cannot be."""
    config, made = config_of(context), []
    known = {parameter.name for parameter in context.command.params}
    for one in config.overrides:
        given: dict[str, Any] = {KEYS[name].target: value for name, value in one.values.items()}
        given = {
            name: value for name, value in given.items() if name in known and not on_command_line(context, name)
        }
        fields = {"template_args" if name == "template_arg" else name: value for name, value in given.items()}
        try:
            settings = settings_of(**fields)
        except SetupError as error:
            raise SetupError(f"{one} of {near(one.file)}, for {', '.join(one.paths)}:\n{error}") from None
        made.append(Override(one.patterns, {name: getattr(settings, name) for name in fields}))
    return tuple(made)


def inputs_of(context: typer.Context, settings: Settings) -> list[str]:
    """What a run reads besides its logs, as named: configuration, tokenizers, templates, messages, tools."""
    config = config_of(context)
    read = [*([config.path] if config.path else []), *config.extended_by]
    named = {name: getattr(settings, name) for name in (*_READ, "tokenizer")}
    for given in (named, *(one.changes for one in settings.overrides)):
        read += [Path(given[name]) for name in _READ if given.get(name)]
        if given.get("tokenizer"):
            read += [Path(given["tokenizer"]) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return [str(path) for path in dict.fromkeys(read)]


_READ = ("chat_template", "messages", "tools")


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


def _roles(given: Sequence[str] | None) -> tuple[str, ...]:
    """Roles out of comma lists, each once."""
    roles = [role.strip() for part in given or () for role in part.split(",")]
    if not all(roles):
        raise SetupError(
            f"--sampled-role {','.join(given or ())!r}: no role was found.\nWrite it as --sampled-role assistant"
        )
    return tuple(dict.fromkeys(roles))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _codes(given: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """Code prefixes out of comma lists; each has to be the beginning of at least one code."""
    codes = (code.strip().upper() for part in given or () for code in part.split(",") if code.strip())
    return tuple(known_prefix(code, option) for code in codes)
