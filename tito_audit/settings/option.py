"""What an option is: a flag of some commands, the field of the settings that it fills, and its key of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from tito_audit.settings.values import Kind

__all__ = ["FlagOnly", "Option"]


class FlagOnly(StrEnum):
    """Why no file sets an option."""

    READ = "it says which file is read"
    WRITTEN = "it names what one run writes"
    PURPOSE = "it says what one run is made for"
    PLACE = "it names what one run looks at"
    KNOWN = "it makes what was found known, which one run does on purpose"
    CODE = "it lets code run, which a file that lies in a folder must not decide"
    SAFEGUARD = "it gives up a safeguard, which should be seen where it is done"


@dataclass(frozen=True, slots=True)
class Option:
    """One option; of a flag that means another thing to another command there are several."""

    name: str
    """The field of `fills` that it sets, or else the parameter of the commands' functions."""
    help: str
    """What `--help` and the docs say of it. A default that is no value ends it, as `[default: ...]`."""
    commands: tuple[str, ...]
    """Those that take it. `config` takes besides what has a key or says which file is read."""

    # The flag
    flag_name: str = ""
    """Without dashes; "": the name with dashes between its words."""
    short: str = ""
    """Its one letter with the dash, where it has one."""
    metavar: str | None = None
    takes: type | tuple[str, ...] | Callable[[Any], Any] = str
    """A type, the words to choose from, or what makes a value of the text (SetupError when it cannot)."""
    repeats: bool = False
    default: Any = None
    """The value without flag and file; where it fills settings, that of the field. A switch is off."""
    required: bool = False
    least: float | None = None
    helps: Mapping[str, str] = field(default_factory=dict)
    """By command: what its `--help` says instead of `help`."""
    completes: str = ""
    """The function of `cli/_complete.py` that the shell asks for values."""
    calls: str = ""
    """The function of `cli/_configured.py` that gets the value before any other option is read."""

    # The settings
    fills: type | None = None
    """The dataclass of `settings/model.py` of which it is a field; None: the command itself uses it."""
    reads: Callable[[Any, str], Any] | None = None
    """The value of the field, of what the flag was given and the flag's name; SetupError when it cannot be."""
    codes: Callable[[Any], Iterable[str]] | None = None
    """The beginnings of rules' codes that a value of the field names."""

    # The key
    key_takes: Kind | None = None
    """What its key in the configuration file takes; None: no file sets it."""
    key_name: str = ""
    """"": called as the flag is."""
    key_after: str = ""
    """The key that its own follows in lists of keys, where they are not in the order of `--help`."""
    unset: str = ""
    """What holds when no one sets it, for people; "" where the flag has a default."""
    per_log: bool = False
    """Whether it may differ from log to log, and so be set in an override."""
    flag_only: FlagOnly | None = None
    """Why it has no key; None as well where another option of the same flag has one."""

    def __post_init__(self) -> None:
        if self.takes is bool and self.fills is None:
            object.__setattr__(self, "default", False)
        if self.fills is not None and not self.repeats:
            (filled,) = (one for one in fields(self.fills) if one.name == self.name)
            object.__setattr__(self, "default", filled.default)

    @property
    def flag(self) -> str:
        """The long flag."""
        return f"--{self.flag_name or self.name.replace('_', '-')}"

    @property
    def declared(self) -> tuple[str, ...]:
        """Its flags as they are declared; what a file can turn on, a flag turns off."""
        off = f"/--{self.flag[5:]}" if self.flag.startswith("--no-") else f"/--no-{self.flag[2:]}"
        long = self.flag + (off if self.takes is bool and self.key_takes is not None else "")
        return (long, self.short) if self.short else (long,)

    @property
    def key(self) -> str:
        """The name of its key in the file."""
        return self.key_name or self.flag[2:]

    @property
    def kind(self) -> Kind:
        """What its key in the file takes."""
        assert self.key_takes is not None, f"{self.flag} has no key"
        return self.key_takes

    def said(self, command: str) -> str:
        """Its help in one command."""
        return self.helps.get(command, self.help)

    def read(self, given: Any) -> Any:
        """The value, of what the flag was given; SetupError when it cannot be."""
        if self.reads is not None:
            return self.reads(given, self.flag)
        if isinstance(self.takes, tuple):
            return str(given)
        return given if isinstance(self.takes, type) else self.takes(given)
