"""Kinds of values that keys take: how each is read, described in the schema and shown."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tito_audit.settings.model import NO_TOOLS, RECORDED
from tito_audit.settings.readers import MOMENT, json_or_text, moment, required_share

LARGEST = 2**63 - 1
"""The largest whole number that a setting takes."""
TEXT = {"type": "string", "minLength": 1}
_ONE_OR_SEVERAL = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
_RATE = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?%?(?:/(?:token|rollout))?"
_LIMIT = rf"^[A-Za-z]+[0-9]*={_RATE}$"
_PERCENT = r"(?!0+(?:\.0+)?%)(?:100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?)%"
_REQUIRED = rf"(?:0\.[0-9]*[1-9][0-9]*|1(?:\.0+)?|{_PERCENT})"
_REQUIREMENT = rf"^[A-Za-z]+[0-9]*(?:={_REQUIRED})?$"
_REPORT = r"^[a-z][a-z0-9_-]*(?:=.+)?$"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key takes."""

    takes: str
    """In words."""
    schema: Mapping[str, Any]
    """The JSON schema of what `read` accepts, for editors."""
    read: Callable[[Any, Path], Any]
    """Converts a TOML value to the form of the command line (a list of texts for a repeatable flag), with relative
    paths joined to the file's folder; ValueError if the value is invalid.
    """
    shown: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns what `read` returned back into the TOML value for a file in a folder."""


def joined(folder: Path, text: str) -> str:
    """The path that `text` names in a file of the folder, without needless dots; a URL as it is."""
    if "://" in text:
        return text
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    whole = str(path if path.is_absolute() else folder / path)
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole


def words(value: Any) -> str:
    """A value described in a few words, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        bad = next((entry for entry in value if not isinstance(entry, str)), None)
        return "a list" + (f" with {words(bad)} in it" if bad is not None else "")
    if isinstance(value, str):
        text = value if len(value) <= 60 else f"{value[:60]}…"
        return f"the text {text!r}"
    return f"the number {value}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _right(value: Any, is_right: bool) -> Any:
    if not is_right:
        raise ValueError
    return value


def _text(value: Any, folder: Path) -> str:
    text: str = _right(value, isinstance(value, str) and bool(value))
    return text


def _path(value: Any, folder: Path) -> str:
    return joined(folder, _text(value, folder))


def _near(value: str, folder: Path) -> str:
    """The path relative to a folder, if that is shorter."""
    near = os.path.relpath(value, folder) if Path(value).is_absolute() else value
    return near if len(near) < len(value) else value


def _near_or_name(value: str, folder: Path) -> str:
    """The path relative to a folder, written so that it cannot be mistaken for a name."""
    near = _near(value, folder)
    return near if near == value or near.startswith(".") or Path(value).exists() else f"./{near}"


def _place_or_name(value: Any, folder: Path) -> str:
    """A path if it exists or cannot be a name; else the name."""
    path = _path(value, folder)
    return path if value.startswith((".", "/", "~")) or Path(path).exists() else str(value)


def _near_or_none(value: str, folder: Path) -> str:
    """The path relative to a folder, written so that it cannot be mistaken for the word for no tools."""
    near = value if value == NO_TOOLS else _near(value, folder)
    return f"./{near}" if near == NO_TOOLS != value else near


def _texts(value: Any, folder: Path) -> list[str]:
    if isinstance(value, str) and value:
        return [value]
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError
    return value


def _split(texts: list[str], folder: Path) -> list[str]:
    """The entries of comma-separated lists."""
    return [entry.strip() for text in texts for entry in text.split(",") if entry.strip()]


def _at_least(least: float, kind: type[float]) -> Callable[[Any, Path], float]:
    """A reader of numbers of a type, `least` or more."""

    def read(value: Any, folder: Path) -> float:
        if type(value) is int and value > LARGEST:
            raise ValueError(f"at most {LARGEST:,}")
        if not _is_number(value) or value < least or value != kind(value):
            raise ValueError
        return kind(value)

    return read


def _share(value: Any, folder: Path) -> float:
    if isinstance(value, str) and _fits(_PERCENT, value):
        return float(value.removesuffix("%")) / 100
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError
    return float(value)


def _is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) <= LARGEST) or (type(value) is float and math.isfinite(value))


def _pairs(value: Any, folder: Path) -> list[str]:
    """`ours = "theirs"` as `--map` takes it."""
    if not isinstance(value, dict) or not all(isinstance(theirs, str) and theirs for theirs in value.values()):
        raise ValueError(_wrong_entry(value, lambda entry: isinstance(entry, str) and entry))
    return [f"{ours}={theirs}" for ours, theirs in value.items()]


def _table(pairs: list[str], folder: Path) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    return {ours: theirs if equals else ours for ours, equals, theirs in split}


def _arguments(value: Any, folder: Path) -> list[str]:
    """`name = value` as `--template-arg` takes it, the value as JSON."""
    if not isinstance(value, dict):
        raise ValueError
    try:
        return [f"{name}={json.dumps(argument, allow_nan=False)}" for name, argument in value.items()]
    except (TypeError, ValueError):
        raise ValueError("one of its values is a date or not a finite number, which JSON cannot hold") from None


def _by_code(pattern: str, right: Callable[[Any], bool]) -> Callable[[Any, Path], list[str]]:
    """A reader of tables such as `TOK = 0.001`, and of texts such as `TOK=0.001` that match a pattern."""

    def read(value: Any, folder: Path) -> list[str]:
        if not isinstance(value, dict):
            return _matching(pattern)(value, folder)
        if not all(right(number) for number in value.values()):
            raise ValueError(_wrong_entry(value, right))
        odd = next((codes for codes in value if not _fits("[A-Za-z]+[0-9]*", codes)), None)
        if odd is not None:
            raise ValueError(f"{odd!r} is not a code or a prefix")
        return [
            f"{codes}={number if isinstance(number, str) else repr(number)}" for codes, number in value.items()
        ]

    return read


def _fits(pattern: str, text: str) -> bool:
    return re.search(rf"\A{pattern}\Z", text) is not None


def _shown_rates(rates: list[str], folder: Path) -> dict[str, Any]:
    table = _table([rate.strip() for text in rates for rate in text.split(",")], folder)
    return {codes.strip(): json_or_text(rate.strip()) for codes, rate in table.items()}


def _required_share(value: Any, folder: Path) -> float:
    part = _share(value, folder)
    return required_share(str(value)) or part  # exact, without dividing


def _matching(pattern: str) -> Callable[[Any, Path], list[str]]:
    """A reader of one text or a list of texts that match the pattern."""

    def read(value: Any, folder: Path) -> list[str]:
        texts = _texts(value, folder)
        odd = next((text for text in texts if "\n" in text or not re.search(pattern, text)), None)
        if odd is not None:
            raise ValueError("" if odd is value else f"{words(odd)} is in it")
        return texts

    return read


def _reports(value: Any, folder: Path) -> list[str]:
    """`NAME` and `NAME=FILE`, the file relative to the folder; `-` is stdout."""
    split = [report.partition("=") for report in _matching(_REPORT)(value, folder)]
    return [
        name + (f"={file if file == '-' else joined(folder, file)}" if file else "") for name, _, file in split
    ]


def _shown_reports(reports: list[str], folder: Path) -> list[str]:
    split = [report.partition("=") for report in reports]
    return [f"{name}{equals}{_near(file, folder) if file else ''}" for name, equals, file in split]


def _wrong_entry(value: Any, right: Callable[[Any], Any]) -> str:
    if not isinstance(value, dict):
        return ""
    name, wrong = next((name, entry) for name, entry in value.items() if not right(entry))
    return f"{name} is {words(wrong)}"


def _one_or_several(pattern: str) -> dict[str, Any]:
    entry = {"type": "string", "pattern": pattern}
    return {"anyOf": [entry, {"type": "array", "items": entry}]}


def _by_code_schema(number: Mapping[str, Any], text: str, pattern: str) -> dict[str, Any]:
    """The schema of what `_by_code` reads: numbers or texts by code, or texts with both."""
    table = {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z]+[0-9]*$"},
        "additionalProperties": {
            "anyOf": [{"type": "number", **number}, {"type": "string", "pattern": f"^{text}$"}]
        },
    }
    return {"anyOf": [table, *_one_or_several(pattern)["anyOf"]]}


text = partial(Kind, schema=TEXT, read=_text)
texts = partial(Kind, schema=_ONE_OR_SEVERAL, read=_texts, shown=_split)
"""A list of texts, or a single one."""
path = partial(Kind, schema=TEXT, read=_path, shown=_near)
"""A path, relative to the folder of the file."""
place_or_name = partial(Kind, schema=TEXT, read=_place_or_name, shown=_near_or_name)
"""A path, relative to the folder of the file, or a Hugging Face name."""
pairs = partial(Kind, schema={"type": "object", "additionalProperties": TEXT}, read=_pairs, shown=_table)
"""A table of texts."""


def whole(takes: str, least: int) -> Kind:
    """A whole number, `least` or more."""
    return Kind(f"{takes}, {least} or more", {"type": "integer", "minimum": least}, _at_least(least, int))


def seconds(takes: str) -> Kind:
    """A time of at least 0.01 seconds."""
    return Kind(f"{takes}, 0.01 or more", {"type": "number", "minimum": 0.01}, _at_least(0.01, float))


def one_of(*choices: str) -> Kind:
    """One of the given words."""
    return Kind(
        f"one of {', '.join(choices)}",
        {"enum": list(choices)},
        lambda value, _: _right(value, isinstance(value, str) and value in choices),
    )


CLOCK = Kind(
    'a date, such as "2024-07-26", or with a time "2024-07-26T14:30", or "recorded" for the date of each prompt',
    {"type": "string", "pattern": f"^(?:{MOMENT}|{RECORDED})$"},
    lambda value, folder: _right(_text(value, folder), value == RECORDED or moment(value) is not None),
)
TOOLS = Kind(
    'the path of a file, or "none"',
    TEXT,
    lambda value, folder: NO_TOOLS if value == NO_TOOLS else _path(value, folder),
    _near_or_none,
)
ARGUMENTS = Kind(
    "a table, such as {enable_thinking = false}",
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    _arguments,
    lambda pairs, folder: {name: json_or_text(value) for name, value in _table(pairs, folder).items()},
)
CODES = texts('a list of codes or prefixes, such as ["TOK", "TPL203"]')
FLAG = Kind("true or false", {"type": "boolean"}, lambda value, _: _right(value, isinstance(value, bool)))
SHARE = Kind(
    'a number above 0 and at most 1, or a text such as "5%"',
    {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            {"type": "string", "pattern": f"^{_PERCENT}$"},
        ]
    },
    _share,
)
SENTINEL = Kind(
    'a number, or "null"',
    {"anyOf": [{"type": "number"}, {"const": "null"}]},
    lambda value, _: value if value == "null" else repr(_right(value, _is_number(value))),
    lambda value, _: json_or_text(value) if value != "null" else value,
)
REQUIREMENTS = Kind(
    'a list of codes or prefixes, such as ["LPR", "SEQ=95%"], or a table such as {LPR = 1, SEQ = "95%"}',
    _by_code_schema({"exclusiveMinimum": 0, "maximum": 1}, _REQUIRED, _REQUIREMENT),
    _by_code(
        _REQUIREMENT,
        lambda share: _fits(_REQUIRED, share) if isinstance(share, str) else _is_number(share) and 0 < share <= 1,
    ),
    _split,
)
REQUIRED_SHARE = Kind(SHARE.takes, SHARE.schema, _required_share)
RATES = Kind(
    'a table of codes and rates, such as {TOK = 0.001, SEQ = "0.1/rollout"}, or a list such as ["TOK=0.1%"]',
    _by_code_schema({"minimum": 0}, _RATE, _LIMIT),
    _by_code(_LIMIT, lambda rate: _fits(_RATE, rate) if isinstance(rate, str) else _is_number(rate) and rate >= 0),
    _shown_rates,
)
REPORTS = Kind(
    'a list of names and files, such as ["text", "json=audit.json"]',
    _one_or_several(_REPORT),
    _reports,
    _shown_reports,
)
