"""`--config` and `--no-config`: how the configuration file sets the options of a command."""

from __future__ import annotations

from pathlib import Path

import typer

from tito_audit.errors import SetupError
from tito_audit.settings.file import OVERRIDES, Config, find_config, read_config
from tito_audit.settings.options import KEYS

_CONFIG = "tito_audit.config"
"""The key of the configuration in the context of a run."""


def read_file(ctx: typer.Context, given: str | None) -> str | None:
    """Apply the configuration file where no flag is given; the file's name, or None."""
    if ctx.resilient_parsing or f"{_CONFIG}.off" in ctx.meta:
        if given is not None:
            raise SetupError("--config and --no-config exclude each other.\nPass only one of them.")
        return None
    path = Path(given) if given is not None else find_config(Path.cwd())
    if path is None:
        return None
    config = read_config(path)
    ctx.meta[_CONFIG] = config
    ctx.default_map = config.parameters(ctx.info_name or "")
    return str(path)


def read_no_file(ctx: typer.Context, wanted: bool) -> bool:
    """Turn the configuration file off, if `wanted`."""
    if wanted:
        if _CONFIG in ctx.meta:
            raise SetupError("--config and --no-config exclude each other.\nPass only one of them.")
        ctx.meta[f"{_CONFIG}.off"] = True
    return wanted


def config_of(context: typer.Context) -> Config:
    """The configuration of a run; empty without a file."""
    config = context.meta.get(_CONFIG)
    return config if isinstance(config, Config) else Config()


def on_command_line(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was set by a flag, which overrides the file."""
    return _source(context, parameter) == "COMMANDLINE"


def _source(context: typer.Context, parameter: str) -> str:
    # By name, since newer versions of typer have their own copy of the enum.
    return getattr(context.get_parameter_source(parameter), "name", "")


def about_config(context: typer.Context) -> str | None:
    """A sentence that lists the settings taken from a configuration file; None if there are none."""
    config = config_of(context)
    said: dict[Path, list[str]] = {config.path: []} if config.path else {}
    for name, file in config.sources.items():
        if _source(context, KEYS[name].name) == "DEFAULT_MAP":
            said.setdefault(file, []).append(name)
    for override in config.overrides:
        keys = said.setdefault(override.file, [])
        keys += [OVERRIDES] if OVERRIDES not in keys else []
    parts = [f"from {near(file)}: {', '.join(keys)}" for file, keys in said.items() if keys]
    return f"Settings {'; '.join(parts)}." if parts else None


def blamed_file(context: typer.Context, error: Exception) -> list[str]:
    """Lines that name the configuration file if an error is about an option that it sets."""
    message, flag = str(error), getattr(error, "flag", None)
    config = config_of(context)
    said = [(name, str(near(file))) for name, file in config.sources.items()]
    said += [(name, f"{one} of {near(one.file)}") for one in config.overrides for name in one.values]
    blamed: dict[str, list[str]] = {}
    for name, where in said:
        if (KEYS[name].flag in message or KEYS[name].flag == flag) and where not in message:
            blamed.setdefault(where, []).append(name)
    return [f"{', '.join(names)} may come from {where}." for where, names in blamed.items()]


def near(path: Path) -> Path:
    """The path relative to the working folder, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
