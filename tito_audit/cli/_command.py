"""The commands, built from the table of options: their arguments, help, completion, and what is said of mistakes.

A message about a mistake in a command line says what was typed, what may have been meant, and what exists.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from tito_audit.cli import _options
from tito_audit.cli._options import Options
from tito_audit.errors import SetupError
from tito_audit.registry import module_names
from tito_audit.settings.option import Option
from tito_audit.settings.options import COMMANDS, options_of
from tito_audit.settings.values import LARGEST
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


# Completion in a shell. Names of plugins are read from file names, so that Tab imports no plugin.


def _completer(names: Callable[[], Iterable[str]], *, listed: bool = False) -> Callable[[str], list[str]]:
    """A completion function for a name, or (`listed`) for the last name of a comma-separated list; names already
    in that list are not offered again."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        there = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in there]

    return completed


def _families_and_rules() -> list[str]:
    """The rule families, then the rule codes."""
    codes = [name.partition("_")[0].upper() for name in module_names("tito_audit.rules")]
    return [*sorted({code[:3] for code in codes}), *codes]


COMPLETIONS = {
    "formats": _completer(lambda: ("auto", *module_names("tito_audit.formats"))),
    "reports": _completer(lambda: module_names("tito_audit.reports")),
    "parsers": _completer(lambda: ("auto", "none", "server", *module_names("tito_audit.parsers"))),
    "repairs": _completer(lambda: module_names("tito_audit.repairs"), listed=True),
    "codes": _completer(_families_and_rules, listed=True),
    "manuals": _completer(lambda: (*_families_and_rules(), *module_names("tito_audit.repairs"))),
    "repair_reports": _completer(lambda: importlib.import_module("tito_audit.cli.repair").REPORTS),
    "rescore_reports": _completer(lambda: importlib.import_module("tito_audit.cli.rescore").REPORTS),
    "forms": _completer(lambda: importlib.import_module("tito_audit.convert.makers").all_makers()),
    "sampled_roles": _completer(
        lambda: importlib.import_module("tito_audit.record.speakers").SAMPLED_ROLES, listed=True
    ),
}
"""By `Option.completes`; `manuals` are of an argument. `--sampled-role` also takes roles that are not known."""

_FUNCTIONS = {"list": "list_plugins"}
"""The function of a command, where it is not named like the command."""
Listable = StrEnum("Listable", ["formats", "rules", "repairs", "reports", "providers", "parsers"])
"""The kinds of plugins that `list` takes."""


def _make_argument(
    name: str, kind: Any, metavar: str, help: str, default: Any = inspect.Parameter.empty, **more: Any
) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Argument(metavar=metavar, help=help, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_LOGS = _make_argument(
    "logs",
    list[str],
    "LOG...",
    "Files, folders, globs: .jsonl, .json, .parquet, .arrow, .gz, .zst; .pt by name; - for stdin; URLs: "
    "hf://datasets/, s3://, gs://, az://, https://.",
)
_ARGUMENTS = {
    "show": _make_argument(
        "log", str, "LOG[:ROW[:TURN]]", "One file, or a place in it as printed in reports; - for standard input."
    ),
    "inspect": _make_argument("log", str, "LOG", "One file or URL, or - for stdin."),
    "template": _make_argument(
        "named", str | None, "[TOKENIZER]", "A folder with tokenizer.json, or a Hugging Face name.", None
    ),
    "config": _make_argument(
        "logs",
        list[str] | None,
        "[LOG]...",
        "Logs whose own settings are shown as well; with --schema, the name of one.",
        None,
    ),
    "explain": _make_argument(
        "name",
        str | None,
        "[CODE|FAMILY|REPAIR]",
        "A rule's code or name (TOK101), the letters of a family (TOK), or a repair's name (splice); without one, "
        "the list of all.",
        None,
        autocompletion=COMPLETIONS["manuals"],
    ),
    "list": _make_argument(
        "kind",
        Listable | None,
        "[KIND]",
        "formats, rules, repairs, reports, providers or parsers; without one, how many there are.",
        None,
    ),
    **dict.fromkeys(("scan", "repair", "convert", "view", "sft", "identify", "validate", "rescore"), _LOGS),
}
"""The positional argument of each command that takes one."""
_HELP = {
    "scan": """
Audit logs: what drifted, where, and what it did to training. Exits 1 if anything fails the gate.

A finding fails if it is at least as severe as --fail-on and not in the baseline. Findings with a --max-rate
for their code (the longest prefix counts) are judged together, not one by one: they fail if there are more of
them per generated token, or per rollout, than the rate. With --fail-on never, rates count findings of every
severity. Rules named by --require fail the gate if they could not run, whatever was found.""",
    "repair": """
Write repaired copies of logs; a row changes only if a repair is proven on it.

The logs themselves are never changed. Exits 1 if findings at or above --fail-on are left, or rows that may
have the fault that other rows of their log prove.""",
    "convert": """
Write logs in another form, to one file: calls as training rows and back, or as rows of another framework.

What would be lost is listed first; then nothing is written without --lossy. Each row is read again and
compared: tokens, masks and logprobs stay the same. Exits 1 if something would be lost and --lossy was not
passed, or if rows could not be converted.""",
    "show": """
Show one rollout as tokens, with both sides of each difference and its findings below.

A row that is one call of a conversation shows all of it, with the row of each call.""",
    "view": """
Write a site of logs: pages that a browser opens from disk, to browse, search and compare them.

Each log is audited by itself, as `scan LOG` does, and has the page that the html report writes, with all of
its rollouts token by token. A site that exists is updated.""",
    "sft": """
Show what SFT would train of chat data before it is tokenized: messages, prompts and completions, ShareGPT.

The share of tokens trained, answers without their end, prompts that differ at inference, answers that the
maximum length cuts; and one row as tokens. Exits 1 if rows cannot be tokenized, or nothing would be trained.""",
    "identify": """
Find what wrote a log: tokenizer, chat template, its arguments, date. Exits 1 unless that is certain.

A setting counts if it writes a recorded prompt exactly, token by token. What is found on a few rows is
confirmed on others. Without -t, the tokenizers named by the configuration or the log and those in the local
hub cache are tried; only what -t names is downloaded.""",
    "inspect": """
Show what a log holds: its format, its columns and how they relate, and the command to run next.""",
    "validate": """
Show what logs hold, as the level of their record. With --require-level, exits 1 below it.

L0 is text, L1 the ids of prompts and answers, L2 mask and logprobs, L3 who sampled what with which weights,
and L4 all that a trainer needs. A log has the level that all its rollouts have. What lacks for the next level
is named with the line that logs it. Nothing is audited and no tokenizer is loaded.""",
    "template": """
Show what a chat template does: whether it only appends, what it rewrites, adds and refuses. Exits 1 unless
it only appends.

It is rendered for built-in conversations with each kind of answer and message. --chat-template FILE alone,
without a tokenizer, shows the same for text but nothing about token ids. --full adds the evidence.""",
    "conformance": """
Show which chat templates keep sampled tokens, for each way to build the next prompt. With --against, exits
1 if anything got worse.

A fixed set of conversations is run through each template: plain answers, tool calls, reasoning, answers that
were cut, prefilled or sampled in other tokens. Each cell has its proof: where a prompt parts from what was
sampled, and the line of the template that decides it.""",
    "rescore": """
Score recorded tokens with a model: how far its logprobs are from the recorded ones, and what drift costs.

Each drift finding gets a price: the logprob of what was sampled, and of what replaced it. Exits 1 if recorded
logprobs disagree with the model beyond --tolerance, or if something with ids could not be scored; a price
alone never fails a log. A server's key comes from VLLM_API_KEY or SGLANG_API_KEY.

With --prompts nothing is scored: is each prompt the one that this server sees or would write? Exits 1 if one
is not.""",
    "serve": """
Serve an OpenAI-compatible gateway: agents change their base_url, and its log passes scan.

The provider gets prompts as token ids, in which sampled ids stay as they were, and returns ids and logprobs.
Each answer is in the log before its client has all of it. Ctrl-C or SIGTERM ends the gateway with exit code 0.
The provider's key comes from VLLM_API_KEY or SGLANG_API_KEY, the gateway's own from TITO_AUDIT_API_KEY.""",
    "config": """
Show the effective settings and where each comes from: a file, a flag or the default.

Takes the flags of the other commands, to show what they would change.""",
    "explain": """
Print the manual of a rule (what it finds, why it matters, how to repair it), of a family or of a repair.""",
    "list": """
List the formats, rules, repairs, reports, providers or parsers.""",
}
"""The help of each command."""


def make_command(name: str) -> Callable[..., None]:
    """The function that Typer turns into a command: its signature lists the options, its docstring is the help.

    When called, it imports the command's module and calls its function with `options` and the argument by name.
    """
    options: dict[str, Option] = {option.name: option for option in options_of(name)}

    def call(context: typer.Context, **parsed: Any) -> None:
        values = {}
        for each, option in options.items():
            # A choice arrives as an enum, and a repeatable flag that was not passed as None.
            value, several = parsed.pop(each), option.repeats and option.fills is None
            if option.takes is float and value is not None and not math.isfinite(value):
                raise SetupError(f"{option.flag} {value}: it takes a finite number.")
            values[each] = (value or []) if several else getattr(value, "value", value)
        module = importlib.import_module(f"tito_audit.cli.{name}")
        arguments = {each: getattr(value, "value", value) for each, value in parsed.items()}
        getattr(module, _FUNCTIONS.get(name, name))(Options(context, values), **arguments)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_ARGUMENTS[name]] if name in _ARGUMENTS else []
    for option in options.values():
        kind: Any
        kind, parser = (option.takes, None) if isinstance(option.takes, type) else (float, option.takes)
        if isinstance(option.takes, tuple):
            kind, parser = StrEnum("Word", {word: word for word in option.takes}), None
        default = inspect.Parameter.empty if option.required else option.default
        if option.repeats:
            kind = list[kind]
        elif isinstance(option.takes, tuple) and default is not None:
            default = kind(default)
        flag = typer.Option(
            *option.declared,
            metavar=option.metavar,
            help=option.help_for(name),
            min=option.least,
            max=LARGEST if option.takes is int else None,
            parser=parser,
            autocompletion=COMPLETIONS[option.completes] if option.completes else None,
            callback=getattr(_options, option.calls) if option.calls else None,
            is_eager=bool(option.calls),
            hidden=option.hidden,
            rich_help_panel=option.panel or None,
        )
        kind = Optional[kind] if default is None else kind  # noqa: UP045 - `kind` is a value
        annotation = Annotated[kind, flag]
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = _HELP[name].strip()
    return call


# The layout of `--help`, and the messages for mistakes.

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
    """The message for an unknown flag: which command has it, or which flag may be meant."""
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
