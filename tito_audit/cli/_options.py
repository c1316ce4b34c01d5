"""The options of a command, from flags, configuration file and defaults, and the settings built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from tito_audit.errors import SetupError
from tito_audit.settings.file import OVERRIDES, Config, find_config, read_config
from tito_audit.settings.model import GateSettings, Override, RepairChoices, RepairSettings, Settings
from tito_audit.settings.options import KEYS, OPTIONS, fill_settings
from tito_audit.unknown import unknown_name

_CONFIG = "tito_audit.config"
"""The key of the configuration in the context of a run."""


def read_file(ctx: typer.Context, file: str | None) -> str | None:
    """Take values from the configuration file where no flag is given; returns its path, None without a file."""
    if ctx.resilient_parsing or f"{_CONFIG}.off" in ctx.meta:
        if file is not None:
            raise SetupError("--config and --no-config exclude each other.\nPass only one of them.")
        return None
    path = Path(file) if file is not None else find_config(Path.cwd()).file
    if path is None:
        return None
    config = read_config(path)
    ctx.meta[_CONFIG] = config
    ctx.default_map = config.parameters(ctx.info_name or "")
    return str(path)


def read_no_file(ctx: typer.Context, wanted: bool) -> bool:
    """Ignore the configuration file if `wanted`."""
    if wanted:
        if _CONFIG in ctx.meta:
            raise SetupError("--config and --no-config exclude each other.\nPass only one of them.")
        ctx.meta[f"{_CONFIG}.off"] = True
    return wanted


def run_config(context: typer.Context) -> Config:
    """The configuration of a run; empty without a file."""
    config = context.meta.get(_CONFIG)
    return config if isinstance(config, Config) else Config()


def _source(context: typer.Context, parameter: str) -> str:
    # The name, not the enum: newer versions of typer have their own copy of the enum.
    return getattr(context.get_parameter_source(parameter), "name", "")


def config_error_lines(context: typer.Context, error: Exception) -> list[str]:
    """Lines to add to an error that is about options of the configuration file: which file sets them."""
    message, flag = str(error), getattr(error, "flag", None)
    config = run_config(context)
    places = [(name, str(relative_path(file))) for name, file in config.sources.items()]
    places += [
        (name, f"{each} of {relative_path(each.file)}") for each in config.overrides for name in each.values
    ]
    blamed: dict[str, list[str]] = {}
    for name, where in places:
        if (KEYS[name].flag in message or KEYS[name].flag == flag) and where not in message:
            blamed.setdefault(where, []).append(name)
    return [f"{', '.join(names)} may come from {where}." for where, names in blamed.items()]


def relative_path(path: Path) -> Path:
    """The path relative to the working folder, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


_T = TypeVar("_T")
_FILE_OPTIONS = ("chat_template", "messages", "tools")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Options:
    """The values of all options of a run: `options.dry_run`."""

    context: typer.Context
    values: Mapping[str, Any]
    """By the name of the option."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def settings(self) -> Settings:
        """The settings of the audit; SetupError for an invalid option."""
        return replace(settings_of(**self.values), overrides=self.overrides())

    def overrides(self) -> tuple[Override, ...]:
        """The configuration file's overrides, without options that a flag sets; SetupError for an invalid one."""
        overrides = []
        for override in run_config(self.context).overrides:
            values = {KEYS[key].name: value for key, value in override.values.items()}
            values = {
                name: value for name, value in values.items() if name in self.values and not self.is_flagged(name)
            }
            try:
                settings = settings_of(**values)
            except SetupError as error:
                where = f"{override} of {relative_path(override.file)}, for {', '.join(override.paths)}"
                raise SetupError(f"{where}:\n{error}") from None
            overrides.append(Override(override.patterns, {name: getattr(settings, name) for name in values}))
        return tuple(overrides)

    def is_flagged(self, option: str) -> bool:
        """Whether an option was set by a flag, which overrides the configuration file."""
        return _source(self.context, option) == "COMMANDLINE"

    def config_values(self, key: str) -> list[str]:
        """All values that the configuration file has for a key, those of overrides last; each once."""
        config = run_config(self.context)
        tables = (config.values, *(override.values for override in config.overrides))
        return list(dict.fromkeys(table[key] for table in tables if key in table))

    def reading_flags(self) -> list[str]:
        """The passed flags that say how logs are read, as words to append to another command."""
        words: list[str] = []
        for option in OPTIONS:
            if not option.per_log or option.name not in self.values or not self.is_flagged(option.name):
                continue
            value = self.values[option.name]
            if isinstance(value, bool):
                words.append(option.flag if value else f"--no-{option.flag[2:]}")
                continue
            for entry in value if option.repeats else [value]:
                words += [option.flag, str(entry)]
        return words

    def config_notice(self) -> str | None:
        """A sentence that names the settings taken from configuration files; None if there are none."""
        config = run_config(self.context)
        keys_of: dict[Path, list[str]] = {config.path: []} if config.path else {}
        for name, file in config.sources.items():
            if _source(self.context, KEYS[name].name) == "DEFAULT_MAP":
                keys_of.setdefault(file, []).append(name)
        for override in config.overrides:
            keys = keys_of.setdefault(override.file, [])
            keys += [OVERRIDES] if OVERRIDES not in keys else []
        parts = [f"from {relative_path(file)}: {', '.join(keys)}" for file, keys in keys_of.items() if keys]
        return f"Settings {'; '.join(parts)}." if parts else None

    def input_files(self, settings: Settings) -> list[str]:
        """The files that a run reads besides its logs: configuration, tokenizers, templates, messages, tools."""
        config = run_config(self.context)
        read = [*([config.path] if config.path else []), *config.extended_by]
        named = {name: getattr(settings, name) for name in (*_FILE_OPTIONS, "tokenizer")}
        for values in (named, *(override.changes for override in settings.overrides)):
            read += [Path(values[name]) for name in _FILE_OPTIONS if values.get(name)]
            if values.get("tokenizer"):
                read += [Path(values["tokenizer"]) / name for name in _TOKENIZER_FILES]
        return [str(path) for path in dict.fromkeys(read)]


def find_one_log(name: str) -> Path:
    """The only log that a name stands for; SetupError if there are several."""
    from tito_audit.storage import find_logs

    files = find_logs([name])
    if len(files) > 1:
        raise SetupError(f"{name}: there are {len(files)} logs here; name one of them, such as {files[0]}.")
    return files[0]


def skipped_words(logs: Sequence[str]) -> str | None:
    """A sentence about files in the given folders that are not logs; None if there are none."""
    from tito_audit.storage import first_few, skipped_files

    files = skipped_files(logs)
    if not files:
        return None
    count = "1 file that is not a log" if len(files) == 1 else f"{len(files):,} files that are not logs"
    return f"Skipped {count}: {first_few([file.name for file in files])}"


def settings_of(**values: Any) -> Settings:
    """The options of an audit as Settings; SetupError for an invalid one."""
    return _check_codes(fill_settings(Settings, values))


def gate_settings_of(**values: Any) -> GateSettings:
    """The options of a gate as GateSettings; SetupError for an invalid one."""
    gate = _check_codes(fill_settings(GateSettings, values))
    if gate.update_baseline and gate.baseline is None:
        raise SetupError("--update-baseline: no baseline file is named.\nPass --baseline FILE as well.")
    return gate


def repair_settings_of(**values: Any) -> RepairSettings:
    """The options of `repair` as RepairSettings; SetupError for one of a repair that --with leaves out."""
    from tito_audit.repairs import all_repairs

    choices = fill_settings(RepairChoices, values)
    settings = replace(fill_settings(RepairSettings, values), choices=choices)
    names = settings.strategies
    for repair in all_repairs():
        if names and repair.chosen(choices) and repair.name not in names:
            raise SetupError(
                f"--sentinel, --mask-style and --padding belong to {repair.name}, which --with does not name.\n"
                f"Pass --with {','.join((*names, repair.name))}, or leave these options out."
            )
    return settings


def _check_codes(settings: _T) -> _T:
    """Return the settings; SetupError, with similar codes, if one of them names a code that matches no rule."""
    for option in OPTIONS:
        if option.codes is None or not isinstance(settings, option.fills or ()):
            continue
        for code in option.codes(getattr(settings, option.name)):
            from tito_audit.rules import FAMILIES, all_rules

            codes = [rule.code for rule in all_rules()]
            if not any(each.startswith(code) for each in codes):
                names = (*FAMILIES, *codes)
                raise unknown_name("rule", code, names, flag=option.flag, listed_by="tito-audit list rules")
    return settings
