"""The command line, the configuration file and the exit codes, from what parses them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from pages.words import Pages, fenced, flags_as_code, table, toctree
from tito_audit.cli import app
from tito_audit.cli._exits import EXIT_CODES
from tito_audit.cli._help import SUMMARIES, record_of
from tito_audit.settings.file import COMMAND_LINE_ONLY, KEYS, OVERRIDES, Key

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
        record = record_of(one, context)
        name = one.metavar or (record[0] if record else str(one.name).upper())
        yield _option(name, record[1] if record else "", "")
    if arguments:
        yield "## Flags\n"
    keys = {key.target: key for key in KEYS.values()}
    for one in flags:
        written, help = record_of(one, context) or ("", "")
        key = keys.get(one.name)
        yield _option(written.replace(" / ", ", "), help, _about_key(key, command.name))


def _option(signature: str, help: str, more: str) -> str:
    said, bounds = re.fullmatch(r"(?s)(.*?)(?: \[([^][]*)\])?", help).groups()  # type: ignore[union-attr]
    facts = f" *{bounds[0].upper()}{bounds[1:]}.*" if bounds else ""
    return f"````{{option}} {signature}\n{flags_as_code(said)}{facts}{more}\n````\n"


def _about_key(key: Key | None, command: str) -> str:
    if key is None or (key.only and command not in key.only):
        return ""
    return f" Key: {{confval}}`{key.name}`."


def configuration(intro: str) -> Pages:
    """The page of the configuration file: every key, and every flag that is none."""
    helps, defaults, flags, takers = _flags()
    parts = [intro, "## Keys\n"]
    for key in KEYS.values():
        said = [f"````{{confval}} {key.name}", f":type: {key.kind.takes}"]
        said += [f":default: {key.unset or defaults[key.target]}"] if key.unset or defaults[key.target] else []
        help = flags_as_code(helps[key.target].replace(" Repeatable.", ""))
        commands = [f"{{doc}}`{one} </commands/{one}>`" for one in takers[key.target]]
        stands = f"{_and(flags[key.target])} of {_and(commands)}"
        where = "" if key.per_log else f" It may not stand in {{confval}}`{OVERRIDES}`."
        parts.append("\n".join([*said, "", f"{help} Stands for {stands}.{where}", "````\n"]))
    rows = [(f"`--{flag}`", why) for flag, why in COMMAND_LINE_ONLY.items()]
    parts += ["## What is no key\n", "Some flags are for the command line only.\n", table(("flag", "why"), rows)]
    return {"configuration.md": "\n".join(parts)}


def _flags() -> tuple[dict[str, str], dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    """By parameter: the help of its flag, its default, the flag, and the commands that have it."""
    helps: dict[str, str] = {}
    defaults: dict[str, str] = {}
    flags: dict[str, list[str]] = {}
    takers: dict[str, list[str]] = {}
    only = {key.target: key.only for key in KEYS.values()}
    for name, command, context in walked():
        short = _slug(name)
        for one in command.get_params(context):
            if (
                one.param_type_name != "option"
                or short == "config"
                or short not in (only.get(one.name) or (short,))
            ):
                continue
            helps.setdefault(one.name, re.sub(r" \[default: .*\]", "", str(one.help)))
            bounds = (record_of(one, context) or ("", ""))[1]
            default = str(one.default).lower() if one.is_flag else _found(r"\[default: ([^];]*)", bounds)
            defaults.setdefault(one.name, default)
            flags.setdefault(one.name, [f"`{one.opts[0]}`"])
            takers.setdefault(one.name, []).append(short)
    return helps, defaults, flags, takers


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found is not None else ""


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def exit_codes() -> str:
    """The table of exit codes."""
    return table(("code", "", "means"), ((f"`{code}`", *said) for code, said in EXIT_CODES.items()))
