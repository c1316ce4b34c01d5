"""What a file says, with what it extends and what it says of some logs only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.settings.file._patterns import MEANINGLESS, patterns_of
from tito_audit.settings.file._toml import (
    EXTEND,
    OVERRIDES,
    PATHS,
    PROJECT_NAME,
    TABLE,
    Search,
    look_for_config,
    table_of,
)
from tito_audit.settings.options import FLAG_ONLY, KEYS, options_of
from tito_audit.settings.values import joined, words

__all__ = ["Config", "FileOverride", "Search", "find_config", "look_for_config", "read_config"]

_PER_LOG = [name for name, key in KEYS.items() if key.per_log]
_PATHS_TAKE = 'a pattern of files or a list of them, as ["legacy/**", "*.parquet"]'
_CALLED = {flag.lstrip("-"): key for key, option in KEYS.items() for flag in (option.short, option.flag) if flag}
"""Keys by what a command line calls them."""
_EXTEND_TAKES = 'the path of a file or a list of them, as "../base.toml"'


@dataclass(frozen=True, slots=True, eq=False)
class FileOverride:
    """Settings that a file has for some logs only."""

    file: Path
    index: int
    """Which of the file's own it is, counted from 0."""
    paths: tuple[str, ...]
    """As the file has them."""
    patterns: tuple[str, ...]
    """As `Override.paths` wants them."""
    values: Mapping[str, Any]
    """By key, as its kind reads them."""

    def __str__(self) -> str:
        return f"{OVERRIDES}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says; nothing without a file."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By key, as its kind reads them."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """By key: the file that says it, this one or one that it extends."""
    overrides: tuple[FileOverride, ...] = ()
    """Those of extended files first."""
    extended_by: Mapping[Path, Path] = field(default_factory=dict)
    """By file that is extended: the one that names it."""

    def parameters(self, command: str) -> dict[str, Any]:
        """The values by parameter, those that hold for a command."""
        held = [
            option for option in options_of(command) if option.key_takes is not None and option.key in self.values
        ]
        return {option.name: self.values[option.key] for option in held}


def find_config(folder: Path) -> Path | None:
    """The file that holds for a folder, its own or the nearest above it; None when there is none."""
    return look_for_config(folder).found


def read_config(path: Path) -> Config:
    """What the file and those that it extends say; SetupError naming file and key when one cannot be read or says
    what cannot be.

    Its own keys win over those that it extends, a later one of these over an earlier one; each value is taken
    whole, tables and lists as well. A `pyproject.toml` without the table says nothing.
    """
    return _read(path, ())


def _read(path: Path, opened: tuple[Path, ...]) -> Config:
    """One file after those that it extends; `opened` are the files that led to it."""
    if any(path.resolve() == one.resolve() for one in opened):
        circle = " → ".join(str(one) for one in (*opened, path))
        raise SetupError(f"{opened[-1]}: extend goes in a circle: {circle}.\nTake it out of one of them.")
    table, prefix = table_of(path, opened[-1] if opened else None)
    values: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    extended_by: dict[Path, Path] = {}
    overrides: dict[tuple[Path, int], FileOverride] = {}
    for text in _texts(path, prefix + EXTEND, table.get(EXTEND, []), _EXTEND_TAKES):
        base = _read(Path(joined(path.parent, text)), (*opened, path))
        values |= base.values
        sources |= base.sources
        extended_by |= {base.path or path: path, **base.extended_by}
        overrides |= {(one.file, one.index): one for one in base.overrides}
    own = {name: value for name, value in table.items() if name not in (EXTEND, OVERRIDES)}
    mine = _values(path, prefix, own, (*KEYS, EXTEND, OVERRIDES))
    overrides |= {(path, one.index): one for one in _overrides(path, prefix, table.get(OVERRIDES, []))}
    sources |= dict.fromkeys(mine, path)
    return Config(path, values | mine, sources, tuple(overrides.values()), extended_by)


def _overrides(path: Path, prefix: str, entries: Any) -> Iterable[FileOverride]:
    name = prefix + OVERRIDES
    if not isinstance(entries, list):
        raise SetupError(
            f"{path}: {name} is {words(entries)}.\nIt takes a list of tables: begin each with [[{name}]]"
        )
    for index, entry in enumerate(entries):
        inside = f"{name}[{index}]"
        if not isinstance(entry, dict):
            raise SetupError(f"{path}: {inside} is {words(entry)}.\nIt takes a table: begin it with [[{name}]]")
        rest = {name: value for name, value in entry.items() if name != PATHS}
        for key in rest:
            if key in (EXTEND, OVERRIDES) or (key in KEYS and not KEYS[key].per_log):
                raise SetupError(
                    f"{path}: {inside}.{key} holds for a whole run, so it cannot differ from log to log.\n"
                    f"Set it above the overrides. Keys that can differ: {', '.join(_PER_LOG)}."
                )
        values = _values(path, f"{inside}.", rest, (PATHS, *_PER_LOG))
        if PATHS not in entry:
            raise SetupError(f"{path}: {inside} does not say which logs it is for.\nGive it paths, {_PATHS_TAKE}.")
        paths = _texts(path, f"{inside}.{PATHS}", entry[PATHS], _PATHS_TAKE)
        if not paths:
            raise SetupError(f"{path}: {inside}.{PATHS} is an empty list.\nIt takes {_PATHS_TAKE}.")
        for text in paths:
            if re.search(MEANINGLESS, text) is not None:
                raise SetupError(
                    f"{path}: {inside}.{PATHS} has {words(text)}, which fits no log.\n"
                    "A pattern has *, ? and ** only, and / between folders: give several patterns for several "
                    "names, and \\[ or \\{ where a name has such a sign."
                )
        patterns = tuple(pattern for text in paths for pattern in patterns_of(text, path.parent))
        yield FileOverride(path, index, tuple(paths), patterns, values)


def _values(path: Path, prefix: str, table: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The values of a table by key, each as its kind reads it."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        option = KEYS.get(name)
        if option is None:
            raise SetupError(_about_unknown(path, prefix + name, name, known))
        try:
            values[name] = option.kind.read(value, path.parent)
        except ValueError as error:
            said = f" ({error})" if str(error) else ""
            raise SetupError(
                f"{path}: {prefix}{name} is {words(value)}{said}.\nIt takes {option.kind.takes}."
            ) from None
    return values


def _texts(path: Path, full: str, value: Any, takes: str) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise SetupError(f"{path}: {full} is {words(value)}.\nIt takes {takes}.")
    if any("\0" in one for one in given):
        raise SetupError(f"{path}: {full} has a character in it that no path has, \\x00.\nTake it out.")
    return given


def _about_unknown(path: Path, full: str, name: str, known: tuple[str, ...]) -> str:
    flag = name.replace("_", "-")
    if flag in FLAG_ONLY:
        return (
            f"{path}: {full} is not set in a file: {FLAG_ONLY[flag]}.\n"
            f"Take it out, and pass --{flag} where it is wanted."
        )
    if name in ("tool", TABLE):
        return (
            f"{path}: there is no key {full!r}.\n"
            f"In {path.name} the keys stand at the top, without a header: [tool.{TABLE}] is for {PROJECT_NAME}."
        )
    import difflib  # of no use but here, and slow to load

    flag = _CALLED.get(name, flag.lower())
    close = [flag] if flag in known else difflib.get_close_matches(flag, known, n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Keys: {', '.join(known)}."
    return f"{path}: there is no key {full!r}.\n{hint}"
