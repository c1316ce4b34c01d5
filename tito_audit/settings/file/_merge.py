"""Writes keys into an existing configuration file without losing other keys or comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.settings.file._read import read_config
from tito_audit.settings.file._toml import PROJECT_NAME, TABLE
from tito_audit.settings.options import KEYS

_HEADER = re.compile(rf"(?m)^[ \t]*\[[ \t]*tool[ \t]*\.[ \t]*\"?{TABLE}\"?[ \t]*\][^\n]*\n?")


@dataclass(frozen=True, slots=True)
class Merged:
    """A configuration file with keys written into it."""

    text: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    """Keys that had another value, or that were removed."""

    @property
    def same(self) -> bool:
        """Whether the file already has all keys."""
        return not self.added and not self.changed


def merged_config(
    path: Path, keys: Mapping[str, Any], unset: Iterable[str] = (), *, force: bool = False
) -> Merged:
    """The text of a configuration file with these keys, as TOML values, and without those in `unset`.

    SetupError if the file cannot be read, or sets one of them differently and `force` is not given. Each key is
    read as a run would read it.
    """
    old, table = _content(path)
    for name, value in keys.items():
        _refuse_unreadable(path, name, value)
    differing = [
        name for name, value in keys.items() if name in table and not _equal(path, name, table[name], value)
    ]
    gone = [name for name in unset if name in table]
    if (differing or gone) and not force:
        raise SetupError(_differs(path, table, keys, [*differing, *gone]))
    text = old
    for name in (*differing, *gone):
        text = _without(path, text, name)
    added = [name for name in keys if name not in table]
    wanted = {name: keys[name] for name in (*differing, *added)}
    return Merged(_with(path, text, wanted), tuple(added), (*differing, *gone))


def toml_value(value: Any) -> str:
    """A value as TOML writes it on one line; ValueError if TOML has no such value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(name))} = {toml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if value is None:
        raise ValueError("TOML has no null")
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007F")


def toml_key(name: str) -> str:
    """A key as TOML writes it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _content(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The text of a file, "" if there is none, and the table of our keys in it."""
    if not path.exists():
        return "", {}
    read_config(path)
    text = path.read_text(encoding="utf-8-sig")
    return text, _table(path, text)


def _table(path: Path, text: str) -> dict[str, Any]:
    import tomllib

    whole = tomllib.loads(text)
    return dict(whole.get("tool", {}).get(TABLE, {})) if path.name == PROJECT_NAME else whole


def _refuse_unreadable(path: Path, name: str, value: Any) -> None:
    try:
        toml_value(value)
        KEYS[name].kind.read(value, path.parent)
    except ValueError:
        raise SetupError(
            f"{path}: {name} cannot hold {value!r}.\nPass it as a flag instead, as the page shows it."
        ) from None


def _equal(path: Path, name: str, old: Any, new: Any) -> bool:
    read = KEYS[name].kind.read
    return bool(read(old, path.parent) == read(new, path.parent))


def _differs(path: Path, table: Mapping[str, Any], keys: Mapping[str, Any], names: list[str]) -> str:
    said = [
        f"{name} = {_short(table[name])}, found: {_short(keys[name]) if name in keys else 'none'}"
        for name in names
    ]
    return f"{path} sets these keys to something else:\n  " + "\n  ".join(said) + "\nPass --force to replace them."


def _short(value: Any) -> str:
    said = str(value) if isinstance(value, bool) else repr(value)
    return said if len(said) <= 80 else f"{said[:80]}…"


def _with(path: Path, text: str, keys: Mapping[str, Any]) -> str:
    """The text with more keys: first in the file, or first in our table of a `pyproject.toml`."""
    if not keys:
        return text
    lines = "".join(f"{name} = {toml_value(value)}\n" for name, value in keys.items())
    if path.name != PROJECT_NAME:
        made = lines + ("\n" if text and not text.startswith("\n") else "") + text
    elif (header := _HEADER.search(text)) is not None:
        head = header[0] if header[0].endswith("\n") else header[0] + "\n"
        made = text[: header.start()] + head + lines + text[header.end() :]
    else:
        made = text.rstrip("\n") + ("\n\n" if text.strip() else "") + f"[tool.{TABLE}]\n{lines}"
    return _proved(path, made, {**_table(path, text), **keys}, text)


def _without(path: Path, text: str, name: str) -> str:
    """The text without the lines that set a key."""
    wanted = {key: value for key, value in _table(path, text).items() if key != name}
    lines = text.splitlines(keepends=True)
    begins = re.compile(rf"[ \t]*(\[[ \t]*)?(tool\.\"?{TABLE}\"?\.)?\"?{re.escape(name)}\"?[ \t]*[=\]]")
    for start in (number for number, line in enumerate(lines) if begins.match(line)):
        for end in range(start + 1, len(lines) + 1):
            rest = "".join(lines[:start] + lines[end:])
            if _says(path, rest, wanted, text):
                return rest
    raise SetupError(
        f"{path}: {name} shares a line with another key.\nChange it by hand, or write to another file."
    )


def _proved(path: Path, text: str, table: Mapping[str, Any], before: str) -> str:
    """The text, if it says what it should; else SetupError."""
    if _says(path, text, table, before):
        return text
    raise SetupError(f"{path}: keys cannot be added to this file.\nAdd them by hand, or write to another file.")


def _says(path: Path, text: str, table: Mapping[str, Any], before: str) -> bool:
    """Whether a text holds this table, and everything else as before."""
    import tomllib

    try:
        return _table(path, text) == table and _others(path, text) == _others(path, before)
    except (tomllib.TOMLDecodeError, AttributeError):
        return False


def _others(path: Path, text: str) -> Any:
    """What a file holds besides our keys."""
    import tomllib

    if path.name != PROJECT_NAME:
        return None
    whole = tomllib.loads(text)
    tool = {name: value for name, value in whole.pop("tool", {}).items() if name != TABLE}
    return whole, tool
