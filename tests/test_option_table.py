"""The table of options agrees with the settings, with the functions of the commands, and with itself."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

from tests.tables import stored
from tito_audit.cli import _options, app
from tito_audit.cli._command import COMPLETIONS
from tito_audit.settings.model import GateSettings, RepairChoices, RepairSettings, Settings
from tito_audit.settings.option import Option
from tito_audit.settings.options import FLAG_ONLY, KEYS, OPTIONS, fill_settings, options_of

CLI = Path(__file__).resolve().parents[1] / "tito_audit" / "cli"
COMMANDS = (
    *("scan", "repair", "convert", "show", "identify", "inspect", "template", "rescore", "serve", "config"),
    *("conformance", "sft", "validate", "list", "explain", "view"),
)
FILLED = (Settings, GateSettings, RepairSettings, RepairChoices)
NO_OPTION = {(Settings, "row"), (Settings, "overrides"), (RepairSettings, "choices"), (RepairChoices, "rescored")}
"""Fields that no flag says alone: a place, tables of the file, and what is filled by itself."""
BY_GIVEN = {"scan": {Settings, GateSettings}, "repair": {Settings, RepairSettings, RepairChoices}}
"""What a command makes of `Options`; Settings alone where it is not named."""


def called(option: Option) -> str:
    return f"{option.flag} of {', '.join(option.commands)}"


def plain(kind: Any) -> set[Any]:
    """The types or words that a field or parameter takes, without None."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    inner = get_args(kind) if not isinstance(kind, type) and get_origin(kind) not in (list, tuple) else ()
    kinds = {word for each in inner for word in plain(each)} if inner else {kind}
    return kinds - {NoneType}


def flag_takes(option: Option) -> set[Any]:
    """The types or words that a flag takes."""
    if isinstance(option.takes, tuple):
        return set(option.takes)
    return {option.takes} if isinstance(option.takes, type) else {float}


@pytest.mark.parametrize("settings", FILLED)
def test_a_field_of_the_settings_has_one_option_and_an_option_one_field(settings: type) -> None:
    wanted = Counter(field.name for field in fields(settings) if (settings, field.name) not in NO_OPTION)
    assert Counter(option.name for option in OPTIONS if option.fills is settings) == wanted


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.fills is not None], ids=called)
def test_an_option_takes_what_its_field_holds(option: Option) -> None:
    assert option.fills in FILLED
    field_type = get_type_hints(option.fills)[option.name]
    if option.reads is None:
        assert flag_takes(option) == plain(field_type)
        assert not option.repeats
    assert option.repeats == (get_origin(field_type) in (tuple, Mapping)), (
        "a flag repeats where a field holds several"
    )
    assert option.default is None if option.repeats else option.default == getattr(option.fills(), option.name)


@pytest.mark.parametrize("settings", FILLED)
def test_settings_of_nothing_are_the_defaults(settings: type) -> None:
    nothing: dict[str, Any] = {option.name: option.default for option in OPTIONS if option.fills is settings}
    assert fill_settings(settings, nothing) == fill_settings(settings, {}) == settings()


@cache
def options_read(module: str) -> set[str]:
    """The options that a module of the command line reads: `options.dry_run`."""
    tree = ast.parse((CLI / f"{module}.py").read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options"
    } - set(dir(_options.Options))


SHARED = options_read("_outputs") | {"output_format"}
"""What functions read that several commands call."""


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "config"])
def test_an_option_of_a_command_is_used_by_it(command: str) -> None:
    by_given = BY_GIVEN.get(command, {Settings})
    left = {
        option.flag
        for option in options_of(command)
        if option.name not in options_read(command) | SHARED and option.fills not in by_given and not option.calls
    }
    assert left == set(), "it does not read it, and no settings hold it"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_options_that_it_has(command: str) -> None:
    assert options_read(command) <= {option.name for option in options_of(command)}


def test_the_flags_of_a_command_are_those_of_the_table_in_its_order() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in COMMANDS:
        flags = [parameter for parameter in commands[name].params if parameter.param_type_name == "option"]
        assert [(parameter.name, parameter.opts) for parameter in flags] == [
            (option.name, [flag.partition("/")[0] for flag in option.declared]) for option in options_of(name)
        ]
    assert {option for option in OPTIONS if not set(option.commands) <= set(COMMANDS)} == set()


def test_flags_and_letters_of_a_command_are_told_apart() -> None:
    for name in COMMANDS:
        words = [word for option in options_of(name) for flag in option.declared for word in flag.split("/")]
        assert [word for word, times in Counter(words).items() if times > 1] == [], name


MEANINGS = stored(__file__, "MEANINGS")
"""What a flag means that several entries of the table describe, each in words for its commands."""
LETTERS = {
    **{"-t": "--tokenizer", "-f": "--output-format", "-o": "--out", "-j": "--jobs", "-q": "--quiet"},
    **{"-r": "--report", "-w": "--write", "-n": "--limit"},
}
SAME_AS = {"--rows": "--limit"}
"""Flags that take another's letter, as they mean the same where the other is missing."""
JSON = set(stored(__file__, "JSON"))


def test_a_flag_means_one_thing_over_all_commands() -> None:
    described: dict[str, list[Option]] = {}
    for option in OPTIONS:
        described.setdefault(option.flag, []).append(option)
    several = {flag: options for flag, options in described.items() if len(options) > 1}
    assert several.keys() == MEANINGS.keys(), "say what it means, or give what means something else another name"
    for flag, options in described.items():
        assert len({option.short for option in options}) == 1, f"{flag} has one letter"
        assert len({option.takes is bool for option in options}) == 1, f"{flag} is a switch or takes a value"
        commands = [command for option in options for command in option.commands]
        assert len(commands) == len(set(commands)), f"{flag} has one meaning in a command"


def test_a_letter_stands_for_one_flag_over_all_commands() -> None:
    for option in OPTIONS:
        if option.short:
            assert LETTERS[option.short] == SAME_AS.get(option.flag, option.flag)
        for alias in option.aliases:
            others = [
                other for other in OPTIONS if other.flag == alias and set(other.commands) & set(option.commands)
            ]
            assert others == [], f"{alias} is another flag of the same command"


def test_every_command_that_can_print_json_takes_f_json() -> None:
    reporting = {command for option in OPTIONS if option.flag == "--output-format" for command in option.commands}
    assert reporting == JSON
    for option in OPTIONS:
        if option.flag == "--output-format" and isinstance(option.takes, tuple):
            assert "json" in option.takes


def test_keys_are_told_apart_and_a_flag_is_a_key_or_for_the_command_line_only() -> None:
    keyed = [option for option in OPTIONS if option.key_takes is not None]
    assert sorted(KEYS) == sorted(option.key for option in keyed)
    assert all(option.flag_only is None for option in keyed)
    flags = {option.flag for option in keyed}
    read_the_file = [option for option in OPTIONS if not set(option.commands) <= {"config", "list", "explain"}]
    left = [option.flag for option in read_the_file if option.flag_only is None and option.flag not in flags]
    assert left == [], "give each a key, or a reason to have none"
    assert not flags & {f"--{flag}" for flag in FLAG_ONLY}


def test_what_an_override_may_set_is_of_settings() -> None:
    assert all(option.fills is Settings and option.key_takes is not None for option in OPTIONS if option.per_log)


def test_functions_that_options_name_are_there() -> None:
    completing = {option.completes for option in OPTIONS if option.completes}
    assert completing == COMPLETIONS.keys() - {"manuals"}, "the shell completes manuals for an argument"
    for name in completing:
        assert list(inspect.signature(COMPLETIONS[name]).parameters) == ["incomplete"]
    called_first = [option.calls for option in OPTIONS if option.calls]
    assert all(callable(getattr(_options, name)) for name in called_first)
    assert called_first == ["read_no_file", "read_file"], "a file is looked for once --no-config is known"


def test_no_command_declares_a_flag_beside_the_table() -> None:
    declaring = [
        path.name
        for path in CLI.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "Option" and ast.unparse(node) == "typer.Option"
    ]
    assert sorted(declaring) == ["__init__.py", "_command.py"], "--version, and what makes flags of the table"
