"""`tito-audit config`: the settings that hold, and where each comes from."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated, Any

import typer

from tito_audit.cli import _choices as choices
from tito_audit.cli import _options as options
from tito_audit.cli import convert, repair, scan, show
from tito_audit.cli import inspect as inspect_command
from tito_audit.settings.file import KEYS

__all__ = ["config", "fresh_schema"]

_COMMANDS = (scan.scan, repair.repair, inspect_command.inspect, show.show, convert.convert)
"""Those that settings are for; of a flag that several have, the first one's counts."""


class Shape(StrEnum):
    """What the command writes."""

    TEXT = "text"
    JSON = "json"


def config(
    context: typer.Context,
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="[LOG]...", help="Logs whose own settings are shown as well.")
    ] = None,
    shape: Annotated[
        Shape, typer.Option("--output-format", "-f", help="Lines for people, or one object with all of it.")
    ] = Shape.TEXT,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead, for editors.")
    ] = False,
    **flags: Any,
) -> None:
    """Show the settings that hold here and where each comes from: the file, a flag, or nobody.

    Takes the flags of the other commands, to show what they would change.
    """
    import sys

    from tito_audit.cli._effective import as_object, effective, lines
    from tito_audit.report_objects import as_json
    from tito_audit.storage import find_logs
    from tito_audit.terminal.escape import inert, visible

    if schema:
        sys.stdout.write(_shipped_schema())
        return
    _refuse_what_no_run_takes(context, logs or [], flags)
    found = effective(context, find_logs(logs or []))
    off = bool(flags["no_config"])
    if shape is Shape.JSON:
        print(as_json(as_object(found, off)))
        return
    named = options.on_command_line(context, "config")
    for line in lines(found, named, off):
        print(inert(visible(line)))


def _refuse_what_no_run_takes(context: typer.Context, logs: list[str], flags: dict[str, Any]) -> None:
    """SetupError for what would end every run with these settings."""
    from tito_audit.cli._deliver import wanted_reports
    from tito_audit.formats import format_named
    from tito_audit.repairs import repair_named

    def taken(make: Any, **other: Any) -> Any:
        return make(**{name: flags[name] for name in inspect.signature(make).parameters if name in flags}, **other)

    overrides = options.overrides_of(context)
    settings = taken(options.settings_of, template_args=flags["template_arg"], overrides=overrides)
    for format in (settings.format, *(one.changes.get("format") for one in overrides)):
        if format is not None:
            format_named(format)
    for name in taken(choices.repair_settings_of).strategies:
        repair_named(name)
    taken(options.gate_settings_of)
    wanted_reports(flags["report"] or [], logs)


def _shipped_schema() -> str:
    from importlib.resources import files

    return files("tito_audit").joinpath("schemas/config.schema.json").read_text(encoding="utf-8")


def fresh_schema(commands: dict[str, Any]) -> str:
    """The JSON schema of the file, made of the keys and of what the flags of these commands say of themselves."""
    import json

    from tito_audit.settings.file import config_schema

    helps: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for key in KEYS.values():
        for command in (command.__name__ for command in _COMMANDS):
            flag = next((one for one in commands[command].params if one.name == key.target), None)
            if flag is not None and key.name not in helps:
                helps[key.name] = flag.help or ""
                defaults[key.name] = getattr(flag.default, "value", flag.default)
    return json.dumps(config_schema(helps, defaults), indent=2, ensure_ascii=False) + "\n"


def _flags() -> list[inspect.Parameter]:
    """Every flag that is a key, as the first command that has it declares it, and those that name the file."""
    wanted = {key.target for key in KEYS.values()} | {"no_config", "config"}
    found: dict[str, inspect.Parameter] = {}
    for command in _COMMANDS:
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if name in wanted and name != "output_format":
                found.setdefault(name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return list(found.values())


_OWN = [one for one in inspect.signature(config, eval_str=True).parameters.values() if one.name != "flags"]
config.__signature__ = inspect.Signature([*_OWN, *_flags()])  # type: ignore[attr-defined]
