"""Builds the Typer commands from the table of options, their arguments and their help texts."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Optional

import typer

from tito_audit.cli import _complete, _options
from tito_audit.cli._options import Options
from tito_audit.errors import SetupError
from tito_audit.settings.option import Option
from tito_audit.settings.options import options_of
from tito_audit.settings.values import LARGEST

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
        autocompletion=_complete.manuals,
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
            autocompletion=getattr(_complete, option.completes) if option.completes else None,
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
