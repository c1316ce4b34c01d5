"""`--config` and `--no-config`: what the configuration file says of a command's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tito_audit.errors import SetupError
from tito_audit.settings.file import KEYS, OVERRIDES, Config, find_config, read_config

__all__ = [
    "ConfigFile",
    "NoConfig",
    "about_config",
    "blamed_file",
    "config_of",
    "flag_of",
    "near",
    "on_command_line",
]

_CONFIG = "tito_audit.config"
"""Where a run keeps what its configuration file says."""
_FLAGS = {"template-args": "--template-arg"}
"""Flags that are called otherwise than the key of the file."""


def _read_file(ctx: typer.Context, given: str | None) -> str | None:
    """Let the configuration file say what flags do not; the file's name, None without one."""
    if ctx.resilient_parsing or f"{_CONFIG}.off" in ctx.meta:
        if given is not None:
            raise SetupError("--config and --no-config exclude each other.\nPass one of them.")
        return None
    path = Path(given) if given is not None else find_config(Path.cwd())
    if path is None:
        return None
    config = read_config(path)
    ctx.meta[_CONFIG] = config
    known = {parameter.name for parameter in ctx.command.params}
    command = ctx.info_name if ctx.info_name != "config" else "scan"
    ctx.default_map = {name: value for name, value in config.parameters(command or "").items() if name in known}
    return str(path)


def _read_no_file(ctx: typer.Context, wanted: bool) -> bool:
    if wanted:
        if _CONFIG in ctx.meta:
            raise SetupError("--config and --no-config exclude each other.\nPass one of them.")
        ctx.meta[f"{_CONFIG}.off"] = True
    return wanted


# Both are read before all other options, in this order where neither is given.
NoConfig = Annotated[
    bool,
    typer.Option("--no-config", help="Read no configuration file.", callback=_read_no_file, is_eager=True),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read settings from this file. [default: tito-audit.toml or pyproject.toml, here or above]",
        callback=_read_file,
        is_eager=True,
    ),
]


def config_of(context: typer.Context) -> Config:
    """What the configuration file of a run says; nothing without one."""
    config = context.meta.get(_CONFIG)
    return config if isinstance(config, Config) else Config()


def on_command_line(context: typer.Context, parameter: str) -> bool:
    """Whether a flag of this run says a parameter, and so no file does."""
    return _source(context, parameter) == "COMMANDLINE"


def _source(context: typer.Context, parameter: str) -> str:
    # By name, since typer has its own copy of the enumeration from some version on.
    return getattr(context.get_parameter_source(parameter), "name", "")


def about_config(context: typer.Context) -> str | None:
    """The settings that come from a configuration file, in a sentence; None when none does."""
    config = config_of(context)
    said: dict[Path, list[str]] = {config.path: []} if config.path else {}
    for name, file in config.sources.items():
        if _source(context, KEYS[name].target) == "DEFAULT_MAP":
            said.setdefault(file, []).append(name)
    for override in config.overrides:
        keys = said.setdefault(override.file, [])
        keys += [OVERRIDES] if OVERRIDES not in keys else []
    parts = [f"from {near(file)}: {', '.join(keys)}" for file, keys in said.items() if keys]
    return f"Settings {'; '.join(parts)}." if parts else None


def blamed_file(context: typer.Context, message: str) -> list[str]:
    """Lines that name the configuration file, when a message is about an option that it sets."""
    config = config_of(context)
    said = [(name, str(near(file))) for name, file in config.sources.items()]
    said += [(name, f"{one} of {near(one.file)}") for one in config.overrides for name in one.values]
    blamed: dict[str, list[str]] = {}
    for name, where in said:
        if flag_of(name) in message and where not in message:
            blamed.setdefault(where, []).append(name)
    return [f"{', '.join(names)} may come from {where}." for where, names in blamed.items()]


def flag_of(key: str) -> str:
    """The flag that a key stands for."""
    return _FLAGS.get(key, f"--{key}")


def near(path: Path) -> Path:
    """The path as seen from the working folder, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
