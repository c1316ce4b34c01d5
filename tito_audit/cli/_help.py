"""The layout of `--help`, and the messages for mistakes in a command line.

A message says what was typed, what may have been meant, and what exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from tito_audit.errors import SetupError
from tito_audit.settings.options import COMMANDS, options_of
from tito_audit.unknown import did_you_mean, unknown_name

SUMMARIES = {
    "scan": "Audit logs: what drifted, where and why. Exit 1 on a failure.",
    "repair": "Write a repaired copy of a log, with every repair proven.",
    "convert": "Write a log in another form, or as another framework's rows.",
    "show": "Show one rollout token by token, with its findings.",
    "view": "Write a site to browse, search and compare logs.",
    "sft": "Show what SFT would train of chat data, before it is tokenized.",
    "identify": "Find what wrote a log: tokenizer, template, arguments.",
    "inspect": "Show a log's columns and format, and a mapping to paste.",
    "validate": "Show what a log holds: its level, and what it lacks.",
    "template": "Show what a chat template does, and whether it only appends.",
    "conformance": "Show which templates keep tokens, by each way to prompt.",
    "rescore": "Compare logprobs with a model's, and price the drift.",
    "serve": "Serve an OpenAI-compatible gateway that leaves clean logs.",
    "config": "Show the effective settings, and where each comes from.",
    "explain": "Print the manual of a rule, a family of rules or a repair.",
    "list": "List formats, rules, repairs, reports, providers or parsers.",
}
"""What each command does, short enough not to be cut off in the list of commands."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What Typer raises for a mistake in a command line. It may be Typer's own copy of click's class."""

PANELS = (
    *("Place", "View", "Model", "Server", "Repairs", "Output"),
    *("Tokenizer and template", "Input", "Rules", "Gate", "Reports", "Running"),
)
"""The headings of flags in a help page, in order; a flag without a heading is listed under the last."""


class Command(TyperCommand):
    """A command whose help lists flags under headings, with default and bounds in words."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Parse the arguments; a usage error carries the context of this command."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            vars(error).update(ctx=getattr(error, "ctx", None) or ctx)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The arguments, without click's braces around required ones."""
        return [re.sub(r"^\{(.*)\}$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the flags under their headings."""
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS)}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None)
            title = "Arguments" if parameter.param_type_name == "argument" else panel
            if (record := help_record(parameter, ctx)) is not None:
                panels[title or PANELS[-1]].append(record)
        if sum(map(bool, panels.values())) <= 3:  # too few for headings
            flags = [record for title, records in panels.items() if title != "Arguments" for record in records]
            panels = {"Arguments": panels["Arguments"], "Options": flags}
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """A parameter's names and its help text, which ends with default and bounds in brackets; None if hidden.

    A switch states its default only if it is on.
    """
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    names, text = re.sub(r"<(.*)>$", r"\1", record[0]), parameter.help or ""
    for alias in [flag for flag in parameter.opts if flag.startswith("--")][1:]:
        names = names.replace(f", {alias}", "")
    default = re.search(r"\[default: ([^][;]*)", record[1])
    facts = [f"default: {default[1]}"] if default is not None else []
    if getattr(parameter, "secondary_opts", ()):
        facts = ["default: on"] if parameter.default is True else []
    lowest = getattr(parameter.type, "min", None)
    facts += [f"at least {lowest:g}"] if lowest else []
    facts += ["required"] if parameter.required else []
    text = re.sub(r"\s*\[default: [^][]*\]", "", text)
    return names, f"{text} [{'; '.join(facts)}]" if facts else text


_FLAGS_ELSEWHERE = {
    "--json": "-f json",
    "--markdown": "-f markdown",
    "--html": "-r html=FILE",
    "--output": "-o OUT",
    "--fix": "tito-audit repair",
    "--rules": "--select CODES",
    "--exclude": "--ignore CODES",
    "--disable": "--ignore CODES",
    "--column": "--map OURS=THEIRS",
    "--workers": "--jobs",
    "--template": "--chat-template",
    "--verbose": "--worst N",
}
"""Flags of other tools, and what to pass here instead."""
_VALUE_KINDS = {"int": "a whole number", "float": "a number", "boolean": "true or false"}


def explain_mistake(error: Any, ctx: Any) -> SetupError | None:
    """The message for a mistake in a command line; None if there is none because the help is wanted."""
    here = getattr(error, "ctx", None) or ctx
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        return None
    if kind == "NoSuchOption":
        return SetupError(_unknown_flag(error.option_name, here))
    if kind == "BadOptionUsage":
        # A flag without its value, or a switch with one.
        options = (each for each in here.command.params if error.option_name in (*each.opts, *each.secondary_opts))
        option = next(options, None)
        if option is None or getattr(option, "is_flag", False):
            return SetupError(f"{error.option_name} takes no value.")
        return SetupError(f"{error.option_name} needs a value: {error.option_name} {_value_name(option, here)}")
    if kind == "MissingParameter":
        flag = f"{error.param.opts[0]} " if error.param.param_type_name == "option" else ""
        about = (error.param.help or "").partition(". ")[0].rstrip(".")
        needs = f"{flag}{_value_name(error.param, here)}"
        return SetupError(f"{here.info_name} needs {needs}: {about}.\n{_usage(here)}")
    if getattr(error, "message", "").startswith("Got unexpected extra argument"):
        extra = error.message.rpartition("(")[2].rpartition(")")[0]
        return SetupError(f"{here.info_name} does not know what to do with {extra}.\n{_usage(here)}")
    parameter = getattr(error, "param", None)
    if parameter is not None:
        # A value that the option or argument does not accept.
        option = parameter.opts[0] if parameter.param_type_name == "option" else None
        quote = error.message[:1]
        typed = error.message[1 : error.message.find(quote, 1)] if quote in ("'", '"') else None
        choices = getattr(parameter.type, "choices", None)
        if choices and typed is not None:
            what = "report" if option == "--output-format" else option or parameter.name
            return unknown_name(what, typed, [getattr(choice, "value", choice) for choice in choices], flag=option)
        for word, meaning in _VALUE_KINDS.items():
            if typed is not None and f"valid {word}" in error.message:
                return SetupError(f'{option} "{typed}": not {meaning}.', flag=option)
        least = getattr(parameter.type, "min", None)
        if least is not None and "not in the range" in error.message:
            return SetupError(
                f"{option} {error.message.partition(' ')[0]}: it takes {least:g} or more.", flag=option
            )
        return SetupError(f"{option or _value_name(parameter, here)}: {error.message}", flag=option)
    return SetupError(f"{_command_name(here)}: {error.format_message()}\n{_try_help(here)}")


def refuse_unknown_command(name: str, commands: Sequence[str]) -> None:
    """Raise SetupError for an unknown command, with a hint if it is a file or a misspelt name."""
    if Path(name).exists():
        raise SetupError(f"{name}: this is a file, not a command.\nTo audit it: tito-audit scan {name}")
    raise unknown_name("command", name, commands)


def _unknown_flag(flag: str, ctx: Any) -> str:
    others = [
        command
        for command in COMMANDS
        if any(flag in (option.flag, option.short) for option in options_of(command) if not option.hidden)
    ]
    if flag in ("-o", "--out", "--output") and ctx.info_name == "scan":
        hint = "a report is written with -r NAME=FILE, such as -r json=audit.json"
    elif others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        hint = f"{ctx.info_name} has no such flag, {others[0]}{more} has"
    else:
        habit = _FLAGS_ELSEWHERE.get(flag, "")
        wanted = {word for word in habit.split() if word.startswith("-")}
        letters = (opt for parameter in ctx.command.get_params(ctx) for opt in parameter.opts if len(opt) == 2)
        has_it = bool(habit) and wanted <= {*_long_flags(ctx), *letters}
        hint = f"did you mean {habit}?" if has_it else did_you_mean(flag, _long_flags(ctx), 2)
    return f'Unknown flag "{flag}"' + (f": {hint} ({_try_help(ctx)})" if hint else f". ({_try_help(ctx)})")


def _value_name(parameter: Any, ctx: Any) -> str:
    """The placeholder of a parameter's value in its help, such as `FILE`."""
    named: str = parameter.make_metavar(ctx)
    return named.strip("<>{}")


def _long_flags(ctx: Any) -> Iterator[str]:
    """The long flags that a command's help lists."""
    for each in ctx.command.get_params(ctx):
        if each.param_type_name == "option" and not getattr(each, "hidden", False):
            yield from (flag for flag in (*each.opts[:1], *each.secondary_opts) if flag.startswith("--"))


def _command_name(ctx: Any) -> str:
    return f"tito-audit {ctx.info_name}" if ctx.parent is not None else "tito-audit"


def _usage(ctx: Any) -> str:
    pieces = [piece for piece in ctx.command.collect_usage_pieces(ctx) if piece != "[OPTIONS]"]
    return f"Usage: {_command_name(ctx)} {' '.join([*pieces, '[OPTIONS]'])}"


def _try_help(ctx: Any) -> str:
    return f"{_command_name(ctx)} -h lists all flags"
