"""The command line, the configuration file and the exit codes, from what parses them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from pages.words import Pages, fenced, flags_as_code, table, toctree
from tito_audit.cli import app
from tito_audit.cli._command import SUMMARIES, help_record
from tito_audit.cli._exit import EXIT_CODES
from tito_audit.settings.file import OVERRIDES
from tito_audit.settings.option import Option
from tito_audit.settings.options import FLAG_ONLY, KEYS, options_of

__all__ = ["commands", "configuration", "exit_codes", "walked"]


def walked() -> Iterator[tuple[str, Any, Any]]:
    """Every command by its whole name, with its click object and a context of it; the program itself first."""
    program = typer.main.get_command(app)
    yield from _below("tito-audit", program, None)


def _below(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    context = command.context_class(command, info_name=name.split()[-1], parent=parent, **command.context_settings)
    yield name, command, context
    for child, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _below(f"{name} {child}", one, context)


def commands(intro: str) -> Pages:
    """A page for each command, and the index with the flags of the program itself."""
    (_, program, context), *others = walked()
    names = {name: _slug(name) for name, _, _ in others}
    rows = [(f"[`{name}`]({names[name]}.md)", SUMMARIES[names[name]]) for name, _, _ in others]
    parts = ["# Command line\n", intro, table(("command", "does"), rows)]
    parts += ["```{program} tito-audit\n```\n", "## Flags of every call\n", *_parameters(program, context)]
    parts.append(toctree(names.values()))
    pages = {f"commands/{names[name]}.md": _command(name, one, context) for name, one, context in others}
    return {**pages, "commands/index.md": "\n".join(parts)}


def _slug(name: str) -> str:
    return name.removeprefix("tito-audit ").replace(" ", "-")


def _command(name: str, command: Any, context: Any) -> str:
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece)
    parts = [f"# {name}\n", f"```{{program}} {name}\n```\n", flags_as_code(str(command.help)) + "\n"]
    parts += [fenced(f"{name} {usage}"), *_parameters(command, context)]
    return "\n".join(parts)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    """A definition for each argument and flag."""
    arguments = [one for one in command.get_params(context) if one.param_type_name == "argument"]
    flags = [one for one in command.get_params(context) if one.param_type_name == "option" and not one.hidden]
    if arguments:
        yield "## Arguments\n"
    for one in arguments:
        record = help_record(one, context)
        name = one.metavar or (record[0] if record else str(one.name).upper())
        yield _option(name, record[1] if record else "", "")
    if arguments:
        yield "## Flags\n"
    keys = {option.name: option.key for option in options_of(command.name) if option.key_takes is not None}
    for one in flags:
        written, help = help_record(one, context) or ("", "")
        more = f" Key: {{confval}}`{keys[one.name]}`." if one.name in keys else ""
        yield _option(written.replace(" / ", ", "), help, more)


def _option(signature: str, help: str, more: str) -> str:
    said, bounds = re.fullmatch(r"(?s)(.*?)(?: \[([^][]*)\])?", help).groups()  # type: ignore[union-attr]
    facts = f" *{bounds[0].upper()}{bounds[1:]}.*" if bounds else ""
    return f"````{{option}} {signature}\n{flags_as_code(said)}{facts}{more}\n````\n"


def configuration(intro: str) -> Pages:
    """The page of the configuration file: every key, and every flag that is none."""
    parts = [intro, "## Keys\n"]
    for key, option in KEYS.items():
        default = option.unset or _default(option)
        said = [f"````{{confval}} {key}", f":type: {option.kind.takes}"]
        said += [f":default: {default}"] if default else []
        help = flags_as_code(re.sub(r" \[default: .*\]", "", option.help).replace(" Repeatable.", ""))
        commands = [f"{{doc}}`{one} </commands/{one}>`" for one in option.commands]
        where = "" if option.per_log else f" It may not stand in {{confval}}`{OVERRIDES}`."
        parts.append(
            "\n".join([*said, "", f"{help} Stands for `{option.flag}` of {_and(commands)}.{where}", "````\n"])
        )
    rows = [(f"`--{flag}`", str(why)) for flag, why in FLAG_ONLY.items()]
    parts += ["## What is no key\n", "Some flags are for the command line only.\n", table(("flag", "why"), rows)]
    return {"configuration.md": "\n".join(parts)}


def _default(option: Option) -> str:
    """The value without flag and file; "" for none."""
    return "" if option.default is None else str(option.default).lower()


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def exit_codes() -> str:
    """The table of exit codes."""
    return table(("code", "", "means"), ((f"`{code}`", *said) for code, said in EXIT_CODES.items()))
