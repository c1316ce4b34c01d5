"""`tito-audit config`: the effective settings, and where each comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tito_audit.cli._command import command
from tito_audit.cli._options import Options, config_of, on_command_line
from tito_audit.cli._outs import print_object
from tito_audit.settings.file import OVERRIDES, PATHS, Config, FileOverride, look_for_config, toml_value
from tito_audit.settings.model import Override
from tito_audit.settings.option import Option
from tito_audit.settings.options import KEYS
from tito_audit.unknown import unknown

SCHEMAS = ("config", "record", "report", "rescore", "rescore-prompts", "validate")
"""What `--schema` prints the JSON schema of."""


@command("config")
def config(
    options: Options,
    shape: str,
    schema: bool,
    no_config: bool,
    report: list[str],
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG]...", help="Logs whose own settings are shown as well; with --schema, the name of one."
        ),
    ] = None,
) -> None:
    """Show the effective settings and where each comes from: a file, a flag or the default.

    Takes the flags of the other commands, to show what they would change.
    """
    from importlib.resources import files

    from tito_audit.cli._deliver import wanted_reports
    from tito_audit.formats import format_named
    from tito_audit.repairs import repair_named
    from tito_audit.reports import report_named
    from tito_audit.storage import find_logs
    from tito_audit.terminal.encoding import print_json
    from tito_audit.terminal.escape import inert, visible

    if schema:
        name = logs[0] if logs else "config"
        if name not in SCHEMAS:
            raise unknown("schema", name, SCHEMAS)
        text = files("tito_audit").joinpath(f"schemas/{name}.schema.json").read_text(encoding="utf-8")
        print_json(text.rstrip("\n"))
        return
    # What no run could start with is refused here too.
    settings = options.settings()
    for format in (settings.format, *(override.changes.get("format") for override in settings.overrides)):
        if format is not None:
            format_named(format)
    for name in options.repair().strategies:
        repair_named(name)
    options.gate()
    for name, _ in wanted_reports(report, None, logs or []):
        report_named(name)
    current = effective(options.context, find_logs(logs or []))
    if shape == "json":
        print_object(as_object(current, no_config))
        return
    for line in lines(current, options.flagged("config"), no_config):
        print(inert(visible(line)))


_NAMED = 3
"""How many logs a line names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value, as a file in the working folder would write it."""

    option: Option
    value: Any
    """None: unset, and there is no default."""
    origin: str
    """default, file or flag."""
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class _Effective:
    """The settings that a run would use here."""

    config: Config
    settings: Mapping[str, _Setting]
    """By key, for logs without overrides."""
    flags: frozenset[str]
    """Keys set by a flag, which overrides do not change."""
    logs: Mapping[str, tuple[FileOverride, ...]]
    """By file: the overrides that match it; the last one wins."""

    def at(self, fitting: Sequence[FileOverride]) -> dict[str, _Setting]:
        """The settings that these overrides change, by key."""
        return {
            name: _Setting(KEYS[name], _shown(KEYS[name], value), "file", override.file)
            for override in fitting
            for name, value in override.values.items()
            if name not in self.flags
        }


def effective(context: typer.Context, files: Sequence[Path]) -> _Effective:
    """The settings for a command line, and for each of its logs."""
    config = config_of(context)
    flags = frozenset(name for name, option in KEYS.items() if on_command_line(context, option.name))
    settings = {}
    for name, option in KEYS.items():
        in_file = name in config.values and name not in flags
        value = config.values[name] if in_file else context.params.get(option.name)
        origin = "flag" if name in flags else "file" if in_file else "default"
        settings[name] = _Setting(option, _shown(option, value), origin, config.sources[name] if in_file else None)
    patterns = {each: Override(each.patterns, {}) for each in config.overrides}
    logs = {str(file): tuple(each for each, override in patterns.items() if override.fits(file)) for file in files}
    return _Effective(config, settings, flags, logs)


def _shown(option: Option, value: Any) -> Any:
    plain = getattr(value, "value", value)  # for an enum, the word on the command line
    return None if plain is None or plain == () else option.kind.shown(plain, Path.cwd())


def lines(current: _Effective, named: bool, off: bool) -> Iterator[str]:
    """The page; `named` if --config named the file, `off` if --no-config was passed."""
    config = current.config
    if config.path is not None:
        yield f"# Settings from {_seen(config.path)}" + (", given by --config" if named else "")
        for file, by in config.extended_by.items():
            yield f"# and from {_seen(file)}, which {_seen(by)} extends"
    elif off:
        yield "# No configuration file (--no-config)"
    else:
        search = look_for_config(Path.cwd())
        yield "# No configuration file: no tito-audit.toml, and no pyproject.toml with a table [tool.tito-audit],"
        yield f"# in {search.folder} or a folder above it"
        for passed in search.passed_over:
            yield f"# {_seen(passed)} was skipped: it has no table [tool.tito-audit]"
    yield ""
    for name, setting in current.settings.items():
        if setting.value is None:
            yield f"# {name} is not set" + (f": {setting.option.unset}" if setting.option.unset else "")
        else:
            yield _line(name, setting.value, _origin(setting, config))
    for override in config.overrides:
        yield ""
        yield _line(f"[[{OVERRIDES}]]", None, _source(override.file, config))
        yield _line(PATHS, list(override.paths), "")
        for name, value in override.values.items():
            overruled = f"not in effect: {KEYS[name].flag} was passed" if name in current.flags else ""
            yield _line(name, _shown(KEYS[name], value), overruled)
    groups: dict[tuple[FileOverride, ...], list[str]] = {}
    for log, fitting in current.logs.items():
        groups.setdefault(fitting, []).append(log)
    for fitting, files in groups.items():
        yield ""
        names = ", ".join(files[:_NAMED]) + (f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else "")
        if not fitting:
            yield f"# {names}: as above, no override matches"
            continue
        others = (f" of {_seen(each.file)}" if each.file != config.path else "" for each in fitting)
        overrides = [f"{each}{where}" for each, where in zip(fitting, others, strict=True)]
        yield f"# {names}: as above, with {', '.join(overrides)}"
        for name, setting in current.at(fitting).items():
            yield _line(name, setting.value, _origin(setting, config))


def _origin(setting: _Setting, config: Config) -> str:
    if setting.origin == "flag":
        return setting.option.flag
    return _source(setting.file, config) if setting.file is not None else "default"


def _source(file: Path, config: Config) -> str:
    """A file, and the one that extends it."""
    by = config.extended_by.get(file)
    return _seen(file) if by is None else f"{_seen(file)}, extended by {_seen(by)}"


def _seen(path: Path) -> str:
    """The path relative to the working folder, if that is shorter."""
    near = os.path.relpath(path)
    return near if len(near) < len(str(path)) else str(path)


def _line(name: str, value: Any, remark: str) -> str:
    text = name if value is None else f"{name} = {toml_value(value)}"
    # Remarks start at this column, unless the value is longer.
    return f"{text:<48}  # {remark}" if remark else text


def as_object(current: _Effective, off: bool) -> dict[str, Any]:
    """Everything as one object; paths are relative to the working folder where that is shorter."""
    config = current.config
    search = look_for_config(Path.cwd()) if config.path is None and not off else None
    return {
        "schema_version": 1,
        "folder": str(Path.cwd()),
        "file": _seen(config.path) if config.path is not None else None,
        "extended": [{"file": _seen(file), "by": _seen(by)} for file, by in config.extended_by.items()],
        "passed_over": [_seen(file) for file in search.passed_over] if search is not None else [],
        "settings": {name: _as_entry(setting) for name, setting in current.settings.items()},
        "overrides": [
            {
                "name": str(override),
                "file": _seen(override.file),
                "paths": list(override.paths),
                "settings": {name: _shown(KEYS[name], value) for name, value in override.values.items()},
                "overruled_by_flags": [name for name in override.values if name in current.flags],
            }
            for override in config.overrides
        ],
        "logs": [
            {
                "file": file,
                "overrides": [config.overrides.index(override) for override in fitting],
                "settings": {
                    name: _as_entry(setting)
                    for name, setting in {**current.settings, **current.at(fitting)}.items()
                },
            }
            for file, fitting in current.logs.items()
        ],
    }


def _as_entry(setting: _Setting) -> dict[str, Any]:
    return {
        "value": setting.value,
        "from": setting.origin,
        "file": _seen(setting.file) if setting.file is not None else None,
    }
