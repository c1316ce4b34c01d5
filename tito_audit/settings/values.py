"""Kinds of values that keys take: how each is read, described in the schema and shown."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
    """The same as JSON schema, for editors and for `read`."""
    converted: Callable[[Any, Path], Any] = lambda value, folder: value
    """Converts a value that the schema allows to the form of the command line (a list of texts for a repeatable
    flag), with relative paths joined to the file's folder; ValueError if the value is invalid all the same."""
    shown: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns what `read` returned back into the TOML value for a file in a folder."""

    def read(self, value: Any, folder: Path) -> Any:
        """A TOML value in the form of the command line; ValueError, with what is wrong in it, if it is invalid."""
        if not _allows(self.schema, value):
            raise ValueError(_wrong(self.schema, value))
        return self.converted(value, folder)


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the schema of a key, or of a part of its value, allows a TOML value."""
    if "anyOf" in schema:
        return any(_allows(each, value) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return isinstance(value, str) and value in schema.get("enum", [schema.get("const")])
    if "$ref" in schema:
        try:
            return bool(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            return False
    kind = schema.get("type", "string")
    if kind in ("integer", "number"):
        number = (type(value) is int and abs(value) <= LARGEST) or (type(value) is float and math.isfinite(value))
        if (
            not number
            or (kind == "integer" and value != int(value))
            or value <= schema.get("exclusiveMinimum", -math.inf)
        ):
            return False
        return bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))
    if kind == "object":
        names, entries = schema.get("propertyNames", {}), schema["additionalProperties"]
        return isinstance(value, dict) and all(
            _allows(names, name) and _allows(entries, entry) for name, entry in value.items()
        )
    if kind == "array":
        return isinstance(value, list) and all(_allows(schema["items"], entry) for entry in value)
    if kind == "boolean":
        return isinstance(value, bool)
    fits = isinstance(value, str) and len(value) >= schema.get("minLength", 0)
    return fits and (
        "pattern" not in schema or ("\n" not in value and re.search(schema["pattern"], value) is not None)
    )


def _wrong(schema: Mapping[str, Any], value: Any) -> str:
    """What is wrong in a value; "" if it is wrong as a whole."""
    for part in schema.get("anyOf", [schema]):
        if isinstance(value, dict) and part.get("type") == "object":
            entries = part["additionalProperties"]
            if "$ref" in entries:
                return "one of its values is a date or not a finite number, which JSON cannot hold"
            wrong = (f"{name} is {words(entry)}" for name, entry in value.items() if not _allows(entries, entry))
            odd = (
                f"{name!r} is not a code or a prefix" for name in value if not _allows(part["propertyNames"], name)
            )
            return next(chain(wrong, odd))
        if isinstance(value, list) and part.get("type") == "array" and all(_allows(TEXT, text) for text in value):
            return f"{words(next(text for text in value if not _allows(part['items'], text)))} is in it"
    too_large = schema.get("type") in ("integer", "number") and type(value) is int and value > LARGEST
    return f"at most {LARGEST:,}" if too_large else ""


def user_path(name: str | Path) -> Path:
    """The path for a name: as it is if there is such a file, else with `~` as a user's folder, if there is one."""
    text = str(name)
    if not text.startswith("~") or os.path.lexists(text):
        return Path(name)
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user


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


def _near(value: str, folder: Path) -> str:
    """The path relative to a folder, if that is shorter."""
    near = os.path.relpath(value, folder) if Path(value).is_absolute() else value
    return near if len(near) < len(value) else value


def _near_or_name(value: str, folder: Path) -> str:
    """The path relative to a folder, written so that it cannot be mistaken for a name."""
    near = _near(value, folder)
    return near if near == value or near.startswith(".") or Path(value).exists() else f"./{near}"


def _place_or_name(value: str, folder: Path) -> str:
    """A path if it exists or cannot be a name; else the name."""
    path = joined(folder, value)
    return path if value.startswith((".", "/", "~")) or Path(path).exists() else value


def _near_or_none(value: str, folder: Path) -> str:
    """The path relative to a folder, written so that it cannot be mistaken for the word for no tools."""
    near = value if value == NO_TOOLS else _near(value, folder)
    return f"./{near}" if near == NO_TOOLS != value else near


def _texts(value: Any, folder: Path) -> list[str]:
    return [value] if isinstance(value, str) else value


def _split(texts: list[str], folder: Path) -> list[str]:
    """The entries of comma-separated lists."""
    return [entry.strip() for text in texts for entry in text.split(",") if entry.strip()]


def _share(value: Any, folder: Path) -> float:
    return float(value.removesuffix("%")) / 100 if isinstance(value, str) else float(value)


def _moment(value: str, folder: Path) -> str:
    if value != RECORDED and moment(value) is None:
        raise ValueError
    return value


def _table(pairs: list[str], folder: Path) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    return {ours: theirs if equals else ours for ours, equals, theirs in split}


def _by_code(value: Any, folder: Path) -> list[str]:
    """`TOK = 0.001` as `TOK=0.001`; texts as they are."""
    if not isinstance(value, dict):
        return _texts(value, folder)
    return [f"{codes}={number if isinstance(number, str) else repr(number)}" for codes, number in value.items()]


def _shown_rates(rates: list[str], folder: Path) -> dict[str, Any]:
    table = _table([rate.strip() for text in rates for rate in text.split(",")], folder)
    return {codes.strip(): json_or_text(rate.strip()) for codes, rate in table.items()}


def _reports(reports: Any, folder: Path, place: Callable[[str, Path], str]) -> list[str]:
    """`NAME` and `NAME=FILE` with the place of each file; `-` is stdout."""
    split = [report.partition("=") for report in _texts(reports, folder)]
    return [f"{name}={file if file == '-' else place(file, folder)}" if file else name for name, _, file in split]


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


text = partial(Kind, schema=TEXT)
texts = partial(Kind, schema=_ONE_OR_SEVERAL, converted=_texts, shown=_split)
"""A list of texts, or a single one."""
path = partial(Kind, schema=TEXT, converted=lambda value, folder: joined(folder, value), shown=_near)
"""A path, relative to the folder of the file."""
place_or_name = partial(Kind, schema=TEXT, converted=_place_or_name, shown=_near_or_name)
"""A path, relative to the folder of the file, or a Hugging Face name."""
pairs = partial(
    Kind,
    schema={"type": "object", "additionalProperties": TEXT},
    converted=lambda value, _: [f"{ours}={theirs}" for ours, theirs in value.items()],
    shown=_table,
)
"""A table of texts."""


def whole(takes: str, least: int) -> Kind:
    """A whole number, `least` or more."""
    schema = {"type": "integer", "minimum": least}
    return Kind(f"{takes}, {least} or more", schema, lambda value, _: int(value))


def seconds(takes: str) -> Kind:
    """A time of at least 0.01 seconds."""
    schema = {"type": "number", "minimum": 0.01}
    return Kind(f"{takes}, 0.01 or more", schema, lambda value, _: float(value))


def one_of(*choices: str) -> Kind:
    """One of the given words."""
    return Kind(f"one of {', '.join(choices)}", {"enum": list(choices)})


CLOCK = Kind(
    'a date, such as "2024-07-26", or with a time "2024-07-26T14:30", or "recorded" for the date of each prompt',
    {"type": "string", "pattern": f"^(?:{MOMENT}|{RECORDED})$"},
    _moment,
)
TOOLS = Kind(
    'the path of a file, or "none"',
    TEXT,
    lambda value, folder: NO_TOOLS if value == NO_TOOLS else joined(folder, value),
    _near_or_none,
)
ARGUMENTS = Kind(
    "a table, such as {enable_thinking = false}",
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    lambda value, _: [f"{name}={json.dumps(argument)}" for name, argument in value.items()],
    lambda pairs, folder: {name: json_or_text(value) for name, value in _table(pairs, folder).items()},
)
CODES = texts('a list of codes or prefixes, such as ["TOK", "TPL203"]')
FLAG = Kind("true or false", {"type": "boolean"})
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
    lambda value, _: value if value == "null" else repr(value),
    lambda value, _: json_or_text(value) if value != "null" else value,
)
REQUIREMENTS = Kind(
    'a list of codes or prefixes, such as ["LPR", "SEQ=95%"], or a table such as {LPR = 1, SEQ = "95%"}',
    _by_code_schema({"exclusiveMinimum": 0, "maximum": 1}, _REQUIRED, _REQUIREMENT),
    _by_code,
    _split,
)
REQUIRED_SHARE = Kind(
    SHARE.takes,
    SHARE.schema,
    lambda value, folder: required_share(str(value)) or _share(value, folder),  # exact, without dividing
)
RATES = Kind(
    'a table of codes and rates, such as {TOK = 0.001, SEQ = "0.1/rollout"}, or a list such as ["TOK=0.1%"]',
    _by_code_schema({"minimum": 0}, _RATE, _LIMIT),
    _by_code,
    _shown_rates,
)
REPORTS = Kind(
    'a list of names and files, such as ["text", "json=audit.json"]',
    _one_or_several(_REPORT),
    partial(_reports, place=lambda file, folder: joined(folder, file)),
    partial(_reports, place=_near),
)
