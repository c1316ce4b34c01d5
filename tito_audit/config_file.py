"""The configuration file: settings that a project keeps, under the names of the flags.

`tito-audit.toml`, or the table `[tool.tito-audit]` of a `pyproject.toml`: the nearest one, from the working folder
upwards, and in one folder `tito-audit.toml` before `pyproject.toml`. A flag stands in place of the file's value.
Relative paths are relative to the file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError

__all__ = ["COMMAND_LINE_ONLY", "KEYS", "Config", "Key", "find_config", "read_config"]

OWN_NAME = "tito-audit.toml"
PROJECT_NAME = "pyproject.toml"
_TABLE = "tito-audit"

COMMAND_LINE_ONLY: Mapping[str, str] = {
    **dict.fromkeys(("config", "no-config"), "it says which file is read"),
    **dict.fromkeys(("out", "report", "quarantine", "quiet", "worst"), "it belongs to one run"),
    **dict.fromkeys(("dry-run", "diff"), "it belongs to one run"),
    "trust-remote-code": "it lets code run, which a file that lies in a folder must not decide",
    **dict.fromkeys(("unsafe", "force"), "it gives up a safeguard, which should be seen where it is done"),
}
"""Flags of scan and repair that no file sets, and why."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key that the file may have."""

    name: str
    """The long flag, or the table that stands for a flag that repeats."""
    takes: str
    """What its value has to be, for people."""
    read: Callable[[Any, Path], Any]
    """The value as the command line has it (texts of flags that repeat as a list), relative paths made whole with
    the folder of the file; ValueError when it is something else."""
    parameter: str = ""
    """Name of the parameter of the commands; "" for the name itself, with underscores."""

    @property
    def target(self) -> str:
        """The parameter of the commands that it sets."""
        return self.parameter or self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says; nothing without a file."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By key, as its `Key.read` returns them."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The values by parameter of a command."""
        return {KEYS[name].target: value for name, value in self.values.items()}


def find_config(folder: Path) -> Path | None:
    """The file that holds for a folder, its own or the nearest above it; None when there is none."""
    for place in (folder, *folder.parents):
        own = place / OWN_NAME
        if own.is_file():
            return own
        project = place / PROJECT_NAME
        if project.is_file() and _table_of_project(project) is not None:
            return project
    return None


def read_config(path: Path) -> Config:
    """What the file says; SetupError naming file and key when it cannot be read or says what cannot be.

    A `pyproject.toml` without the table says nothing.
    """
    if path.name == PROJECT_NAME:
        table = _table_of_project(path)
        prefix = f"tool.{_TABLE}."
    else:
        table, prefix = _parsed(path, _content(path)), ""
    values: dict[str, Any] = {}
    for name, value in (table or {}).items():
        key = KEYS.get(name)
        if key is None:
            raise SetupError(_about_unknown(path, prefix + name, name))
        try:
            values[name] = key.read(value, path.parent)
        except ValueError as error:
            said = f" ({error})" if str(error) else ""
            raise SetupError(f"{path}: {prefix}{name} is {_words(value)}{said}.\nIt takes {key.takes}.") from None
    return Config(path, values)


def _table_of_project(path: Path) -> Mapping[str, Any] | None:
    """The table of a `pyproject.toml`; None when it has none, and then the rest of the file does not matter."""
    data = _content(path)
    if _TABLE.encode() not in data:
        return None
    tool = _parsed(path, data).get("tool")
    table = tool.get(_TABLE) if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SetupError(f"{path}: tool.{_TABLE} is {_words(table)}.\nIt takes a table: [tool.{_TABLE}]")
    return table


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(
            f"{path}: the configuration file cannot be read ({error.strerror or error}).\n"
            "Pass --config FILE with one that can, or --no-config to run without."
        ) from None


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(
            f"{path}: this is not TOML ({error}).\nMend the file, or pass --no-config to run without it."
        ) from None


def _about_unknown(path: Path, full: str, name: str) -> str:
    if name in COMMAND_LINE_ONLY:
        return (
            f"{path}: {full} is not set in a file: {COMMAND_LINE_ONLY[name]}.\n"
            f"Take it out, and pass --{name} where it is wanted."
        )
    close = difflib.get_close_matches(name.replace("_", "-"), KEYS, n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Keys: {', '.join(KEYS)}."
    return f"{path}: there is no key {full!r}.\n{hint}"


def _words(value: Any) -> str:
    """What a value is, for people, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list" + (f" with {_words(bad)} in it" if (bad := _first_bad(value)) is not None else "")
    if isinstance(value, str):
        text = value if len(value) <= 60 else f"{value[:60]}…"
        return f"the text {text!r}"
    return f"the number {value}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _first_bad(values: list[Any]) -> Any:
    return next((value for value in values if not isinstance(value, str)), None)


def _text(value: Any, folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _path(value: Any, folder: Path) -> str:
    path = Path(_text(value, folder)).expanduser()
    return str(path if path.is_absolute() else folder / path)


def _place_or_name(value: Any, folder: Path) -> str:
    """A path where one is, or where nothing else can be meant; else the name as it stands."""
    text = _text(value, folder)
    path = _path(value, folder)
    return path if text.startswith((".", "/", "~")) or Path(path).exists() else text


def _texts(value: Any, folder: Path) -> list[str]:
    if isinstance(value, str) and value:
        return [value]
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError
    return value


def _count(value: Any, folder: Path) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _seconds(value: Any, folder: Path) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0.01:
        raise ValueError
    return float(value)


def _flag(value: Any, folder: Path) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _one_of(*words: str) -> tuple[str, Callable[[Any, Path], Any]]:
    def read(value: Any, folder: Path) -> str:
        if value not in words or not isinstance(value, str):
            raise ValueError
        return value

    return f"one of {', '.join(words)}", read


def _pairs(value: Any, folder: Path) -> list[str]:
    """`ours = "theirs"` as `--map` takes them."""
    if not isinstance(value, dict) or not all(isinstance(theirs, str) and theirs for theirs in value.values()):
        raise ValueError(_wrong_entry(value, str))
    return [f"{ours}={theirs}" for ours, theirs in value.items()]


def _arguments(value: Any, folder: Path) -> list[str]:
    """`name = value` as `--template-arg` takes them, the values as JSON."""
    import json

    if not isinstance(value, dict):
        raise ValueError
    try:
        return [f"{name}={json.dumps(argument, allow_nan=False)}" for name, argument in value.items()]
    except (TypeError, ValueError):
        raise ValueError("one of its values is a date or no finite number, which JSON cannot write") from None


def _sentinel(value: Any, folder: Path) -> str:
    if value == "null" and isinstance(value, str):
        return "null"
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return repr(value)


def _wrong_entry(value: Any, kind: type) -> str:
    if not isinstance(value, dict):
        return ""
    name, wrong = next((name, entry) for name, entry in value.items() if not isinstance(entry, kind) or not entry)
    return f"{name} is {_words(wrong)}"


_CODES = 'a list of codes or beginnings of codes, as ["TOK", "TPL203"]'

KEYS: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key("tokenizer", "a folder with tokenizer.json, or a Hugging Face name", _place_or_name),
        Key("chat-template", "the path of a Jinja file", _path),
        Key("template-name", "the name of one of the tokenizer's templates", _text),
        Key("template-args", "a table, as {enable_thinking = false}", _arguments, "template_arg"),
        Key("template-seconds", "a number of seconds, 0.01 or more", _seconds),
        Key("tool-arguments", *_one_of("auto", "object", "string")),
        Key("encoder", *_one_of("auto", "fastokens", "tokenizers")),
        Key("format", 'the name of a format, or "auto"', _text),
        Key("map", 'a table of our columns and the log\'s, as {token_ids = "tokens"}', _pairs, "columns"),
        Key("messages", "the path of a file, a folder or a pattern", _path),
        Key("tools", "the path of a file", _path),
        Key("on", "a table of the log's columns and the other file's, as {id = \"uid\"}", _pairs),
        Key("select", _CODES, _texts),
        Key("ignore", _CODES, _texts),
        Key("fail-on", *_one_of("error", "warning", "note", "never")),
        Key("limit", "a number of rows, 1 or more", _count),
        Key("max-row-bytes", "a number of bytes, 1 or more", _count),
        Key("jobs", "a number of processes, 1 or more", _count),
        Key("with", 'a list of repairs in the order to try them, as ["splice", "mask"]', _texts, "strategies"),
        Key("mask-by", *_one_of("span", "turn", "first-divergence")),
        Key("sentinel", 'a number, or "null"', _sentinel),
        Key("mask-style", *_one_of("labels", "binary", "float", "bool")),
        Key("padding", *_one_of("none", "left", "right")),
        Key("provenance", "true or false", _flag),
    )
}
"""Every key that a file may have, by name."""
