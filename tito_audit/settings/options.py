"""The table of all options, the source of flags, configuration keys, settings and docs.

`--help` lists the options of a command in the order of the table. `tito-audit config`, the schema and the docs
list the keys of `scan` first, then the other keys of each other command; `key_after` moves one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from tito_audit.settings.audit_options import AUDIT_OPTIONS
from tito_audit.settings.live_options import LIVE_OPTIONS
from tito_audit.settings.option import FlagOnly, Option
from tito_audit.settings.own_options import OWN_OPTIONS
from tito_audit.settings.run_options import RUN_OPTIONS

_T = TypeVar("_T")
COMMANDS = ("scan", "repair", "inspect", "show", "convert", "identify", "template", "rescore", "serve")
"""The commands that read the configuration file."""

OPTIONS: Final[tuple[Option, ...]] = (*LIVE_OPTIONS, *OWN_OPTIONS, *AUDIT_OPTIONS, *RUN_OPTIONS)


def options_of(command: str) -> tuple[Option, ...]:
    """The options that a command takes, in the order of its `--help`."""
    own = tuple(option for option in OPTIONS if command in option.commands)
    if command != "config":
        return own
    flags = {option.flag for option in own}
    return tuple(_told_apart([*own, *(option for option in _FILE.values() if option.flag not in flags)]))


def _told_apart(options: Sequence[Option]) -> Iterator[Option]:
    """The options of several commands as those of one: a short flag belongs to the first, and aliases are
    dropped.
    """
    letters: set[str] = set()
    for option in options:
        yield replace(option, short="" if option.short in letters else option.short, aliases=())
        letters.add(option.short)


def _of_the_file() -> dict[str, Option]:
    """Options with a key, and those that say which file is read, by name."""
    taken = (option for command in COMMANDS for option in OPTIONS if command in option.commands)
    return {option.name: option for option in taken if option.key_takes is not None or option.calls}


_FILE: Final = _of_the_file()


def _with_keys() -> list[Option]:
    """Options with a key, in the order of the keys."""
    keyed = [option for option in _FILE.values() if option.key_takes is not None]
    ordered = [option for option in keyed if not option.key_after]
    for option in keyed:
        if option.key_after:
            before = next(at for at, one in enumerate(ordered) if one.key == option.key_after)
            ordered.insert(before + 1, option)
    return ordered


KEYS: Final[Mapping[str, Option]] = {option.key: option for option in _with_keys()}
"""The options that a configuration file may set, by key."""
FLAG_ONLY: Final[Mapping[str, FlagOnly]] = {
    option.flag[2:]: why for why in FlagOnly for option in OPTIONS if option.flag_only is why
}
"""Why a flag has no key, by flag without dashes."""


def filled(settings: type[_T], given: Mapping[str, Any]) -> _T:
    """A settings dataclass made from values by option name; what is missing or None keeps the field's default.

    SetupError names the flag whose value is invalid.
    """
    fields = {
        option.name: option.read(given[option.name])
        for option in OPTIONS
        if option.fills is settings and given.get(option.name) is not None
    }
    return settings(**fields)
