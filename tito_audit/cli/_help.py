"""The layout of `--help`: a line per command, flags under headings, bounds in words, each default once."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

SUMMARIES = {
    "scan": "Audit logs: what drifted, where and why. Exit 1 if the gate fails.",
    "repair": "Write a repaired copy of a log, with every repair proven.",
    "convert": "Write a log in another form, or as another framework's rows.",
    "show": "Show one rollout token by token, with its findings.",
    "identify": "Find what wrote a log: tokenizer, template, arguments.",
    "inspect": "Show a log's columns, its format and why, and a mapping to paste.",
    "template": "Show what a chat template does, and whether it only appends.",
    "rescore": "Compare logprobs with a model's, and price the drift.",
    "serve": "Serve an OpenAI-compatible gateway that leaves clean logs.",
    "config": "Show the effective settings, and where each comes from.",
    "explain": "Print the manual of a rule, a family of rules or a repair.",
    "list": "List formats, rules, repairs, reports, providers or parsers.",
}
"""What each command does, short enough not to be cut off in the list of commands."""


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What Typer raises for a mistake in a command line; newer versions have their own copy of the class."""

PANELS = (
    *("Place", "View", "Model", "Server", "Repairs", "Output"),
    *("Tokenizer and template", "Input", "Rules", "Gate", "Reports", "Running"),
)
"""The headings of flags, in the order of a page; a flag without one belongs to the last."""
_FEW = 3
"""A page whose flags all belong to these headings has no headings."""


class Command(TyperCommand):
    """A command with a readable help."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Parse the arguments; a mistake gets the context of its command."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            vars(error).update(ctx=getattr(error, "ctx", None) or ctx)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Its arguments, without braces around required ones."""
        return [re.sub(r"^\{(.*)\}$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Its arguments, then its flags under their headings."""
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS)}
        for one in self.get_params(ctx):
            title = "Arguments" if one.param_type_name == "argument" else getattr(one, "rich_help_panel", None)
            if (record := record_of(one, ctx)) is not None:
                panels[title or PANELS[-1]].append(record)
        if sum(map(bool, panels.values())) <= _FEW:
            flags = [record for title, records in panels.items() if title != "Arguments" for record in records]
            panels = {"Arguments": panels["Arguments"], "Options": flags}
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def record_of(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """The help of a parameter: its names with what they take, and its text, which ends with default and bounds in
    one pair of brackets. A switch states its default only if it is on."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    names, said = re.sub(r"<(.*)>$", r"\1", record[0]), parameter.help or ""
    for alias in [flag for flag in parameter.opts if flag.startswith("--")][1:]:
        names = names.replace(f", {alias}", "")
    default = re.search(r"\[default: ([^][;]*)", record[1])
    facts = [f"default: {default[1]}"] if default is not None else []
    if getattr(parameter, "secondary_opts", ()):
        facts = ["default: on"] if parameter.default is True else []
    lowest = getattr(parameter.type, "min", None)
    facts += [f"at least {lowest:g}"] if lowest else []
    facts += ["required"] if parameter.required else []
    said = re.sub(r"\s*\[default: [^][]*\]", "", said)
    return names, f"{said} [{'; '.join(facts)}]" if facts else said
