"""What a call of a command was given, and the settings that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from tito_audit.cli._configured import about_config, config_of, near, on_command_line
from tito_audit.errors import SetupError
from tito_audit.settings.model import GateSettings, Override, RepairChoices, RepairSettings, Settings
from tito_audit.settings.options import KEYS, OPTIONS, filled

__all__ = ["Given", "gate_settings_of", "repair_settings_of", "settings_of"]

_T = TypeVar("_T")
_READ = ("chat_template", "messages", "tools")


@dataclass(frozen=True, slots=True)
class Given:
    """What flags, the configuration file and defaults say."""

    context: typer.Context
    values: Mapping[str, Any]
    """By option."""

    def settings(self) -> Settings:
        """The settings of the audit; SetupError naming the option that cannot be."""
        return replace(settings_of(**self.values), overrides=self.overrides())

    def gate(self) -> GateSettings:
        """What lets findings pass; SetupError naming the option that cannot be."""
        return gate_settings_of(**self.values)

    def repair(self) -> RepairSettings:
        """What is to be repaired, and how; SetupError naming the option that cannot be."""
        return repair_settings_of(**self.values)

    def overrides(self) -> tuple[Override, ...]:
        """What the configuration file says of some logs only, less what a flag says.

        SetupError names the override and the option that cannot be.
        """
        made = []
        for one in config_of(self.context).overrides:
            given = {KEYS[key].name: value for key, value in one.values.items()}
            given = {
                name: value for name, value in given.items() if name in self.values and not self.flagged(name)
            }
            try:
                settings = settings_of(**given)
            except SetupError as error:
                raise SetupError(f"{one} of {near(one.file)}, for {', '.join(one.paths)}:\n{error}") from None
            made.append(Override(one.patterns, {name: getattr(settings, name) for name in given}))
        return tuple(made)

    def flagged(self, option: str) -> bool:
        """Whether a flag says an option, and so no file does."""
        return on_command_line(self.context, option)

    def notice(self) -> str | None:
        """The settings that come from a configuration file, in a sentence; None when none does."""
        return about_config(self.context)

    def inputs(self, settings: Settings) -> list[str]:
        """What a run reads besides its logs, as named: configuration, tokenizers, templates, messages, tools."""
        config = config_of(self.context)
        read = [*([config.path] if config.path else []), *config.extended_by]
        named = {name: getattr(settings, name) for name in (*_READ, "tokenizer")}
        for given in (named, *(one.changes for one in settings.overrides)):
            read += [Path(given[name]) for name in _READ if given.get(name)]
            if given.get("tokenizer"):
                read += [Path(given["tokenizer"]) / name for name in ("tokenizer.json", "tokenizer_config.json")]
        return [str(path) for path in dict.fromkeys(read)]


def settings_of(**given: Any) -> Settings:
    """The options of an audit as Settings; SetupError naming the option that cannot be."""
    return _known(filled(Settings, given))


def gate_settings_of(**given: Any) -> GateSettings:
    """The options of a gate as GateSettings; SetupError naming the option that cannot be."""
    gate = _known(filled(GateSettings, given))
    if gate.update_baseline and gate.baseline is None:
        raise SetupError("--update-baseline: no file to write was named.\nPass --baseline FILE as well.")
    return gate


def repair_settings_of(**given: Any) -> RepairSettings:
    """The options of `repair` as RepairSettings; SetupError naming the option that cannot be."""
    choices = filled(RepairChoices, given)
    settings = replace(filled(RepairSettings, given), choices=choices)
    _refuse_unused(settings.strategies, choices)
    return settings


def _known(settings: _T) -> _T:
    """The settings; SetupError where one names the beginning of no rule's code."""
    for option in OPTIONS:
        if option.codes is not None and isinstance(settings, option.fills or ()):
            for code in option.codes(getattr(settings, option.name)):
                _refuse_unknown(code, option.flag)
    return settings


def _refuse_unknown(code: str, flag: str) -> None:
    """SetupError naming close ones, when no rule's code begins with it."""
    import difflib

    from tito_audit.rules import all_rules

    known = [rule.code for rule in all_rules()]
    if any(one.startswith(code) for one in known):
        return
    close = difflib.get_close_matches(code, known, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else "See tito-audit list rules."
    raise SetupError(f"{flag} {code}: no rule has a code that starts so.\n{hint}")


def _refuse_unused(names: Sequence[str], choices: RepairChoices) -> None:
    """SetupError when a choice was made for a repair that --with leaves out."""
    from tito_audit.repairs import all_repairs

    for repair in all_repairs():
        if names and repair.chosen(choices) and repair.name not in names:
            raise SetupError(
                f"--with leaves out {repair.name}, which --sentinel, --mask-style and --padding speak to.\n"
                f"Pass --with {','.join((*names, repair.name))}, or leave these options out."
            )
