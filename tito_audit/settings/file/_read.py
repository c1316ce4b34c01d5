"""Reads a configuration file, with the files that it extends and its overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.settings.file._patterns import MEANINGLESS, patterns_of
from tito_audit.settings.file._toml import EXTEND, OVERRIDES, PATHS, PROJECT_NAME, TABLE, look_for_config, table_of
from tito_audit.settings.options import FLAG_ONLY, KEYS, options_of
from tito_audit.settings.values import joined, words
from tito_audit.unknown import did_you_mean, quoted

_PER_LOG = [name for name, key in KEYS.items() if key.per_log]
_PATHS_TAKE = 'a pattern of files or a list of patterns, such as ["legacy/**", "*.parquet"]'
_CALLED = {flag.lstrip("-"): key for key, option in KEYS.items() for flag in (option.short, option.flag) if flag}
"""Keys by their flags, long and short."""
_EXTEND_TAKES = 'the path of a file or a list of paths, such as "../base.toml"'


@dataclass(frozen=True, slots=True, eq=False)
class FileOverride:
    """Settings in a file for some of the logs."""

    file: Path
    index: int
    """Its position among the overrides of the file, counted from 0."""
    paths: tuple[str, ...]
    """As written in the file."""
    patterns: tuple[str, ...]
    """The same for `Override.paths`."""
    values: Mapping[str, Any]
    """By key, as read by its kind."""

    def __str__(self) -> str:
        return f"{OVERRIDES}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of a configuration file; empty without one."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By key, as read by its kind."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """The file that sets each key: this one or one that it extends."""
    overrides: tuple[FileOverride, ...] = ()
    """Those of extended files first."""
    extended_by: Mapping[Path, Path] = field(default_factory=dict)
    """For each extended file, the file that extends it."""

    def parameters(self, command: str) -> dict[str, Any]:
        """The values that apply to a command, by parameter."""
        held = [
            option for option in options_of(command) if option.key_takes is not None and option.key in self.values
        ]
        return {option.name: self.values[option.key] for option in held}


def find_config(folder: Path) -> Path | None:
    """The configuration file of a folder, its own or the nearest above it; None if there is none."""
    return look_for_config(folder).found


def read_config(path: Path) -> Config:
    """The contents of the file and of those that it extends; SetupError, with file and key, if one is invalid.

    Its own keys override those of the files that it extends, and later ones of these override earlier ones; tables
    and lists are replaced whole. A `pyproject.toml` without the table is empty.
    """
    return _read(path, ())


def _read(path: Path, opened: tuple[Path, ...]) -> Config:
    """One file, merged over those that it extends; `opened` are the files that led to it."""
    if any(path.resolve() == one.resolve() for one in opened):
        circle = " → ".join(str(one) for one in (*opened, path))
        raise SetupError(f"{opened[-1]}: extend goes in a circle: {circle}.\nRemove it from one of them.")
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
                    f"{path}: {inside}.{key} applies to a whole run, so it cannot differ from log to log.\n"
                    f"Set it above the overrides. Keys that can differ: {', '.join(_PER_LOG)}."
                )
        values = _values(path, f"{inside}.", rest, (PATHS, *_PER_LOG))
        if PATHS not in entry:
            raise SetupError(f"{path}: {inside} does not say which logs it is for.\nAdd paths, {_PATHS_TAKE}.")
        paths = _texts(path, f"{inside}.{PATHS}", entry[PATHS], _PATHS_TAKE)
        if not paths:
            raise SetupError(f"{path}: {inside}.{PATHS} is an empty list.\nIt takes {_PATHS_TAKE}.")
        for text in paths:
            if re.search(MEANINGLESS, text) is not None:
                raise SetupError(
                    f"{path}: {inside}.{PATHS} has {words(text)}, which matches no log.\n"
                    "Patterns know only *, ? and **, with / between folders: list several patterns for several "
                    "names, and write \\[ or \\{ for a name with such a character."
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
        raise SetupError(f"{path}: {full} holds a character that no path can have, \\x00.\nRemove it.")
    return given


def _about_unknown(path: Path, full: str, name: str, known: tuple[str, ...]) -> str:
    flag = name.replace("_", "-")
    if flag in FLAG_ONLY:
        return (
            f"{path}: {full} cannot be set in a file: {FLAG_ONLY[flag]}.\n"
            f"Remove it, and pass --{flag} where you need it."
        )
    if name in ("tool", TABLE):
        return (
            f"{path}: unknown key {quoted(full)}.\n"
            f"In {path.name} the keys are at the top, without a header: [tool.{TABLE}] is for {PROJECT_NAME}."
        )
    flag = _CALLED.get(name, flag.lower())
    hint = f"did you mean {flag}?" if flag in known else did_you_mean(flag, known, 2)
    return f"{path}: unknown key {quoted(full)}" + (f": {hint}" if hint else f".\nKeys: {', '.join(known)}.")
