"""What an option is: a flag of some commands, a field of the settings, a key of the configuration file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, get_args

from tito_audit.settings.values import ValueKind, one_of, whole_number


class FlagOnly(StrEnum):
    """Why an option has no key in the configuration file."""

    READ = "it says which file is read"
    WRITTEN = "it names what a single run writes"
    PURPOSE = "it says what a single run is for"
    PLACE = "it names what a single run shows"
    KNOWN = "it accepts findings as known, which has to be a decision for each run"
    CODE = "it lets code run, which a file in the working folder must not decide"
    SAFEGUARD = "it gives up a safeguard, which should be visible in the command"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. A flag that means different things to different commands has several."""

    name: str
    """The field of `fills` that it sets, or else the parameter of the commands' functions."""
    help: str
    """Its text in `--help` and the docs. It ends with `[default: ...]` if the default is not a plain value."""
    commands: tuple[str, ...]
    """The commands that take it. `config` also takes every option that has a key or says which file is read."""

    # The flag
    flag_name: str = ""
    """The flag without dashes; "": the name, with dashes between its words."""
    short: str = ""
    """The short flag with its dash, if it has one."""
    aliases: tuple[str, ...] = ()
    """Other spellings that its commands take and no help shows."""
    hidden: bool = False
    """Whether help hides it: an old spelling of another flag."""
    panel: str = ""
    """The heading under which `--help` lists it."""
    metavar: str | None = None
    takes: Any = str
    """A type, the words to choose from, or a function that parses the text (SetupError when it cannot). A
    `Literal` gives the words of the flag and of its key."""
    repeats: bool = False
    default: Any = None
    """The value if neither flag nor file sets it; that of the field if it fills settings. Switches are off."""
    required: bool = False
    least: float | None = None
    helps: Mapping[str, str] = field(default_factory=dict)
    """By command: the text of its `--help`, instead of `help`."""
    completes: str = ""
    """What completes its values in a shell, in `cli/_command.py`."""
    calls: str = ""
    """The function of `cli/_options.py` that gets the value before any other option is parsed."""

    # The settings
    fills: type | None = None
    """The dataclass of `settings/model.py` with its field; None: the command itself uses it."""
    reads: Callable[[Any, str], Any] | None = None
    """Makes the value of the field from the flag's values and its name; may raise SetupError."""
    codes: Callable[[Any], Iterable[str]] | None = None
    """The prefixes of rule codes in a value of the field."""

    # The key
    key_takes: ValueKind | None = None
    """What its key in the configuration file takes; None: no key."""
    key_name: str = ""
    """"": the key has the flag's name."""
    key_after: str = ""
    """The key that comes before its own in lists of keys, if not the one before it in `--help`."""
    unset: str = ""
    """Shown when unset; "" if the flag has a default."""
    per_log: bool = False
    """Whether it may differ from log to log, and so be set in an override."""
    flag_only: FlagOnly | None = None
    """Why it has no key; None if it has one, or if another option with the same flag has."""

    def __post_init__(self) -> None:
        if words := get_args(self.takes):
            object.__setattr__(self, "takes", words)
            object.__setattr__(self, "key_takes", one_of(*words))
        if self.takes is bool and self.fills is None:
            object.__setattr__(self, "default", False)
        if self.fills is not None and not self.repeats:
            (filled,) = (field for field in fields(self.fills) if field.name == self.name)
            object.__setattr__(self, "default", filled.default)

    @property
    def flag(self) -> str:
        return f"--{self.flag_name or self.name.replace('_', '-')}"

    @property
    def declared(self) -> tuple[str, ...]:
        """Its flags as Typer declares them; a switch with a key also has a flag that turns it off."""
        off = f"/--{self.flag[5:]}" if self.flag.startswith("--no-") else f"/--no-{self.flag[2:]}"
        long = self.flag + (off if self.takes is bool and self.key_takes is not None else "")
        return (long, *((self.short,) if self.short else ()), *self.aliases)

    @property
    def key(self) -> str:
        return self.key_name or self.flag[2:]

    @property
    def kind(self) -> ValueKind:
        assert self.key_takes is not None, f"{self.flag} has no key"
        return self.key_takes

    def help_for(self, command: str) -> str:
        return self.helps.get(command, self.help)

    def read(self, value: Any) -> Any:
        """The value for its field, from what the flag got; SetupError if that is invalid."""
        if self.reads is not None:
            return self.reads(value, self.flag)
        if isinstance(self.takes, tuple):
            return str(value)
        return value if isinstance(self.takes, type) else self.takes(value)


def flag(name: str, commands: tuple[str, ...], **facts: Any) -> Callable[..., Option]:
    """A maker of an option: call it with the help, and a keyword per command that has its own."""
    return lambda help, **helps: Option(name, help, commands, helps=helps, **facts)


def in_panel(panel: str, *options: Option) -> tuple[Option, ...]:
    """The options with this heading in `--help`, unless they have their own."""
    return tuple(option if option.panel else replace(option, panel=panel) for option in options)


def number_flag(name: str, commands: tuple[str, ...], of: str, least: int, **facts: Any) -> Callable[..., Option]:
    """A maker of an option that takes a whole number, `least` or more, as flag and key; `of`: in words."""
    facts = {"metavar": "N", **facts}
    return flag(name, commands, takes=int, least=least, key_takes=whole_number(of, least), **facts)
