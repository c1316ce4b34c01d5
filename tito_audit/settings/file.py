"""The configuration file: the settings of a project, under the names of the flags.

It is the nearest `tito-audit.toml`, or `pyproject.toml` with a table `[tool.tito-audit]`, from the working folder
upwards; in one folder `tito-audit.toml` comes first. Flags override it. Relative paths start from its folder.
`extend` names files whose settings apply where this one sets none; `overrides` are settings for some logs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.settings.options import FLAG_ONLY, KEYS, options_of
from tito_audit.settings.values import describe, resolve
from tito_audit.unknown import did_you_mean, quoted

_OWN_NAME = "tito-audit.toml"
_PROJECT_NAME = "pyproject.toml"
_TABLE = "tito-audit"
EXTEND = "extend"
OVERRIDES = "overrides"
PATHS = "paths"
_PER_LOG = [name for name, key in KEYS.items() if key.per_log]
_PATHS_TAKE = 'a pattern of files or a list of patterns, such as ["legacy/**", "*.parquet"]'
_EXTEND_TAKES = 'the path of a file or a list of paths, such as "../base.toml"'
FOREIGN_PATTERN = r"(?:^|[^\\])(?:\[[^/]*\]|\{[^/]*,[^/]*\})|^!|\\[A-Za-z0-9]"
"""Syntax of other tools' patterns that ours lack: sets, alternatives, exceptions, backslashes between folders.
Read literally, it would silently match nothing."""


@dataclass(frozen=True, slots=True)
class FileSearch:
    """The configuration file that a search found, if any."""

    file: Path | None
    passed_over: tuple[Path, ...] = ()
    """Each `pyproject.toml` on the way that lacks our table."""


def find_config(folder: Path) -> FileSearch:
    """Search for the configuration file of a folder: its own or the nearest above it."""
    passed_over: list[Path] = []
    for place in (folder, *folder.parents):
        own = place / _OWN_NAME
        if own.is_file():
            return FileSearch(own, tuple(passed_over))
        project = place / _PROJECT_NAME
        if project.is_file():
            if _read_project_table(project) is not None:
                return FileSearch(project, tuple(passed_over))
            passed_over.append(project)
    return FileSearch(None, tuple(passed_over))


def read_table(path: Path, extended_by: Path | None = None) -> tuple[Mapping[str, Any], str]:
    """The table of a file, and the prefix of its keys in messages; SetupError if it cannot be read.

    A `pyproject.toml` without our table gives an empty one, or SetupError if a file extends it.
    """
    if path.name != _PROJECT_NAME:
        return _parse_toml(path, _read_bytes(path, extended_by)), ""
    table = _read_project_table(path, extended_by)
    if table is None and extended_by is not None:
        raise SetupError(
            f"{extended_by}: extend names {path}, which has no table [tool.{_TABLE}].\n"
            "Name the file that holds the settings, or remove extend."
        )
    return table or {}, f"tool.{_TABLE}."


def _read_project_table(path: Path, extended_by: Path | None = None) -> Mapping[str, Any] | None:
    """Our table of a `pyproject.toml`; None without one, and then the file need not even be valid."""
    data = _read_bytes(path, extended_by)
    if _TABLE.encode() not in data:
        return None
    tool = _parse_toml(path, data).get("tool")
    table = tool.get(_TABLE) if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SetupError(f"{path}: tool.{_TABLE} is {describe(table)}.\nIt takes a table: [tool.{_TABLE}]")
    return table


def _read_bytes(path: Path, extended_by: Path | None) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = getattr(error, "strerror", None) or error
    if extended_by is not None:
        raise SetupError(
            f"{extended_by}: extend names {path}, which cannot be read ({why}).\n"
            f"A relative path starts from {extended_by.parent}. Fix it, or remove extend."
        )
    raise SetupError(
        f"{path}: the configuration file cannot be read ({why}).\n"
        "Pass --config FILE with a readable one, or --no-config to run without."
    )


def _parse_toml(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # files from Windows may start with a BOM
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(
            f"{path}: not valid TOML ({error}).\nFix the file, or pass --no-config to run without it."
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class FileOverride:
    """Settings in a file for some of the logs."""

    file: Path
    index: int
    """Its index among the overrides of the file."""
    paths: tuple[str, ...]
    """As written in the file."""
    patterns: tuple[str, ...]
    """The same as absolute patterns, for `Override.paths`."""
    values: Mapping[str, Any]
    """By key: its value as `ValueKind.read` returns it."""

    def __str__(self) -> str:
        return f"{OVERRIDES}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of a configuration file; empty without one."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By key: its value as `ValueKind.read` returns it."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """The file that sets each key: this one or one that it extends."""
    overrides: tuple[FileOverride, ...] = ()
    """Those of extended files first."""
    extended_by: Mapping[Path, Path] = field(default_factory=dict)
    """For each extended file, the file that extends it."""

    def parameters(self, command: str) -> dict[str, Any]:
        """The values that apply to a command, by option name."""
        keyed = (option for option in options_of(command) if option.key_takes is not None)
        return {option.name: self.values[option.key] for option in keyed if option.key in self.values}


def read_config(path: Path, opened: tuple[Path, ...] = ()) -> Config:
    """The contents of a file merged with those it extends; SetupError, with file and key, if something is invalid.

    Its own keys override those of the files it extends, of which later ones override earlier ones; tables and
    lists are replaced whole. `opened` are the files that extend it, outermost first.
    """
    if any(path.resolve() == file.resolve() for file in opened):
        circle = " → ".join(map(str, (*opened, path)))
        raise SetupError(f"{opened[-1]}: extend goes in a circle: {circle}.\nRemove it from one of them.")
    table, prefix = read_table(path, opened[-1] if opened else None)
    values: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    extended_by: dict[Path, Path] = {}
    overrides: dict[tuple[Path, int], FileOverride] = {}
    for text in _read_texts(path, prefix + EXTEND, table.get(EXTEND, []), _EXTEND_TAKES):
        base = read_config(Path(resolve(path.parent, text)), (*opened, path))
        values |= base.values
        sources |= base.sources
        extended_by |= {base.path or path: path, **base.extended_by}
        overrides |= {(override.file, override.index): override for override in base.overrides}
    rest = {name: value for name, value in table.items() if name not in (EXTEND, OVERRIDES)}
    own = _read_values(path, prefix, rest, (*KEYS, EXTEND, OVERRIDES))
    overrides |= {(path, override.index): override for override in _read_overrides(path, prefix, table)}
    sources |= dict.fromkeys(own, path)
    return Config(path, values | own, sources, tuple(overrides.values()), extended_by)


def _read_overrides(path: Path, prefix: str, table: Mapping[str, Any]) -> Iterator[FileOverride]:
    name, entries = prefix + OVERRIDES, table.get(OVERRIDES, [])
    if not isinstance(entries, list):
        raise SetupError(
            f"{path}: {name} is {describe(entries)}.\nIt takes a list of tables: begin each with [[{name}]]"
        )
    for index, entry in enumerate(entries):
        inside = f"{name}[{index}]"
        if not isinstance(entry, dict):
            raise SetupError(f"{path}: {inside} is {describe(entry)}.\nIt takes a table: begin it with [[{name}]]")
        rest = {name: value for name, value in entry.items() if name != PATHS}
        for key in rest:
            if key in (EXTEND, OVERRIDES) or (key in KEYS and not KEYS[key].per_log):
                raise SetupError(
                    f"{path}: {inside}.{key} applies to a whole run, so it cannot differ from log to log.\n"
                    f"Set it above the overrides. Keys that can differ: {', '.join(_PER_LOG)}."
                )
        values = _read_values(path, f"{inside}.", rest, (PATHS, *_PER_LOG))
        if PATHS not in entry:
            raise SetupError(f"{path}: {inside} does not say which logs it is for.\nAdd paths, {_PATHS_TAKE}.")
        paths = _read_texts(path, f"{inside}.{PATHS}", entry[PATHS], _PATHS_TAKE)
        if not paths:
            raise SetupError(f"{path}: {inside}.{PATHS} is an empty list.\nIt takes {_PATHS_TAKE}.")
        for text in paths:
            if re.search(FOREIGN_PATTERN, text) is not None:
                raise SetupError(
                    f"{path}: {inside}.{PATHS} has {describe(text)}, which matches no log.\n"
                    "Patterns know only *, ? and **, with / between folders: list several patterns for several "
                    "names, and write \\[ or \\{ for a name with such a character."
                )
        patterns = tuple(pattern for text in paths for pattern in _override_patterns(text, path.parent))
        yield FileOverride(path, index, tuple(paths), patterns, values)


def _read_values(path: Path, prefix: str, table: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The values of a table by key, as `ValueKind.read` returns them; SetupError if one is invalid."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        option = KEYS.get(name)
        if option is None:
            full, flag = prefix + name, name.replace("_", "-")
            if flag in FLAG_ONLY:
                raise SetupError(
                    f"{path}: {full} cannot be set in a file: {FLAG_ONLY[flag]}.\n"
                    f"Remove it, and pass --{flag} where you need it."
                )
            if name in ("tool", _TABLE):
                raise SetupError(
                    f"{path}: unknown key {quoted(full)}.\n"
                    f"In {path.name} the keys are at the top, without a header: [tool.{_TABLE}] is for "
                    f"{_PROJECT_NAME}."
                )
            flags = {
                spelled.lstrip("-"): key for key, option in KEYS.items() for spelled in (option.short, option.flag)
            }
            key = flags.get(name, flag.lower())
            hint = f"did you mean {key}?" if key in names else did_you_mean(key, names, 2)
            advice = f": {hint}" if hint else f".\nKeys: {', '.join(names)}."
            raise SetupError(f"{path}: unknown key {quoted(full)}{advice}")
        try:
            values[name] = option.kind.read(value, path.parent)
        except ValueError as error:
            why = f" ({error})" if str(error) else ""
            raise SetupError(
                f"{path}: {prefix}{name} is {describe(value)}{why}.\nIt takes {option.kind.takes}."
            ) from None
    return values


def _read_texts(path: Path, full: str, value: Any, takes: str) -> list[str]:
    """The texts of the key `full`, which takes one text or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise SetupError(f"{path}: {full} is {describe(value)}.\nIt takes {takes}.")
    if any("\0" in text for text in texts):
        raise SetupError(f"{path}: {full} holds a character that no path can have, \\x00.\nRemove it.")
    return texts


def _override_patterns(text: str, folder: Path) -> tuple[str, ...]:
    """The patterns for `Override.paths` that a pattern in a file of this folder stands for.

    Without a slash it is the name of a file anywhere, or of a folder below this one with everything in it. With a
    slash it is a path from this folder, and everything in it if it is a folder. Links are resolved up to the first
    `*` or `?`.
    """
    name = text.rstrip("/")
    if "://" in text:  # a remote log, or those below a folder
        return (name, f"{name}/**")
    if "/" not in name and name not in ("", ".", "..", "~"):
        here = Path(os.path.realpath(folder))
        below = f"{_escape_pattern(here)}/**/{name}/**"
        return (below,) if text.endswith("/") else (f"{_escape_pattern(Path(here.anchor))}/**/{name}", below)
    parts = os.path.expanduser(text).split("/")  # noqa: PTH111 - Path drops the slash at the end
    first_wild = next((at for at, part in enumerate(parts) if re.search(r"(?<!\\)[*?]", part)), len(parts))
    head = re.sub(r"\\(.)", r"\1", "/".join(parts[:first_wild]) or "/" * first_wild)
    wild: list[str] = []
    for part in parts[first_wild:]:
        if part == ".." and wild:
            wild.pop()
        elif part not in ("", "."):
            wild.append(part)
    whole = "/".join([_escape_pattern(Path(os.path.realpath(folder / head))), *wild])
    inside = whole if wild[-1:] == ["**"] else f"{whole}/**"
    return (inside,) if text.endswith("/") or inside == whole else (whole, inside)


def _escape_pattern(path: Path) -> str:
    """The pattern that matches this path alone, without a slash at its end."""
    return re.sub(r"([\\*?])", r"\\\1", path.as_posix()).rstrip("/")


@dataclass(frozen=True, slots=True)
class MergedConfig:
    """The text of a configuration file with keys written into it."""

    text: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    """Keys that had another value, and keys that were removed."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the file already had all keys."""
        return not self.added and not self.changed


def merge_config(
    path: Path, keys: Mapping[str, Any], unset: Iterable[str] = (), *, force: bool = False
) -> MergedConfig:
    """Write keys with TOML values into the text of a configuration file, and remove those in `unset`.

    Everything else stays, comments too. SetupError if the file or a value is invalid, or if the file sets a key
    differently and `force` is not given; values are compared as a run reads them.
    """
    import tomllib

    text, table = "", {}
    if path.exists():
        read_config(path)
        text = path.read_text(encoding="utf-8-sig")
        table = dict(read_table(path)[0])
    for name, value in keys.items():
        try:
            toml_value(value)
            KEYS[name].kind.read(value, path.parent)
        except ValueError:
            raise SetupError(
                f"{path}: {name} cannot hold {value!r}.\nPass it as a flag instead, as the page shows it."
            ) from None
    added = [name for name in keys if name not in table]
    differing = [
        name
        for name, value in keys.items()
        if name in table
        and KEYS[name].kind.read(table[name], path.parent) != KEYS[name].kind.read(value, path.parent)
    ]
    removed = [name for name in unset if name in table]
    if (differing or removed) and not force:
        changes = [
            f"{name} = {_short(table[name])}, found: {_short(keys[name]) if name in keys else 'none'}"
            for name in (*differing, *removed)
        ]
        lines = "\n  ".join(changes)
        raise SetupError(f"{path} sets these keys to something else:\n  {lines}\nPass --force to replace them.")
    new = {name: keys[name] for name in (*differing, *added)}
    wanted = {name: value for name, value in table.items() if name not in removed} | new
    edited = _edit_toml(path, text, new, removed) if new or removed else text
    try:  # the file has to be TOML with exactly the wanted keys, and with everything else as it was
        if path.name == _PROJECT_NAME:
            before = tomllib.loads(text)
            wanted = {**before, "tool": {**before.get("tool", {}), _TABLE: wanted}}
        is_right = tomllib.loads(edited) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise SetupError(
            f"{path}: keys cannot be added to this file.\nAdd them by hand, or write to another file."
        )
    return MergedConfig(edited, tuple(added), (*differing, *removed))


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _edit_toml(path: Path, text: str, new: Mapping[str, Any], removed: Iterable[str]) -> str:
    """The text with keys of our table set and others removed; comments and layout stay."""
    import tomlkit  # takes 40 ms to import

    document = tomlkit.parse(text)
    table: Any = document
    if path.name == _PROJECT_NAME:
        tool: Any = document.setdefault("tool", tomlkit.table(is_super_table=True))
        if _TABLE not in tool and text:
            tool.add(tomlkit.nl())
        table = tool.setdefault(_TABLE, tomlkit.table())
    for name in removed:
        del table[name]
    for name, value in new.items():
        table[name] = tomlkit.value(toml_value(value))
    edited: str = tomlkit.dumps(document)
    return edited


def toml_value(value: Any) -> str:
    """A value as TOML writes it on one line; ValueError if TOML has no such value."""
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(str(name))} = {toml_value(entry)}" for name, entry in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if value is None:
        raise ValueError("TOML has no null")
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007F")


def toml_key(name: str) -> str:
    """A key as TOML writes it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
