"""Kinds of values of configuration keys: how each is read, shown, and described in the JSON schema."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tito_audit.settings.model import NO_TOOLS, RECORDED
from tito_audit.settings.readers import DATETIME, json_or_text, parse_datetime, parse_share

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
    """A kind of value of a key."""

    takes: str
    """What it takes, in words."""
    schema: Mapping[str, Any]
    """The same as JSON schema, for editors and for `read`. Only the keywords of `_is_allowed` have an effect."""
    converted: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns a value that the schema allows into what the flag would give (a list of texts if it repeats), with
    paths resolved from the file's folder; ValueError if it is invalid all the same."""
    shown: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns what `read` returned back into a TOML value for a file in the folder."""

    def read(self, value: Any, folder: Path) -> Any:
        """What the flag would give for a TOML value; ValueError, with what is wrong in it, if it is invalid."""
        if not _allows(self.schema, value):
            raise ValueError(_why_invalid(self.schema, value))
        return self.converted(value, folder)


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the schema of a key, or of a part of its value, allows the value."""
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


def _why_invalid(schema: Mapping[str, Any], value: Any) -> str:
    """Which part of a value is wrong; "" if the whole is."""
    for part in schema.get("anyOf", [schema]):
        if isinstance(value, dict) and part.get("type") == "object":
            entries = part["additionalProperties"]
            if "$ref" in entries:
                return "one of its values is a date or not a finite number, which JSON cannot hold"
            for name, entry in value.items():
                if not _allows(entries, entry):
                    return f"{name} is {describe(entry)}"
            wrong = next(name for name in value if not _allows(part["propertyNames"], name))
            return f"{wrong!r} is not a code or a prefix"
        if isinstance(value, list) and part.get("type") == "array" and all(_allows(TEXT, text) for text in value):
            return f"{describe(next(text for text in value if not _allows(part['items'], text)))} is in it"
    too_large = schema.get("type") in ("integer", "number") and type(value) is int and value > LARGEST
    return f"at most {LARGEST:,}" if too_large else ""


def expand_user(name: str | Path) -> Path:
    """The path with `~` expanded, unless a file has this very name or there is no such user."""
    text = str(name)
    if not text.startswith("~") or os.path.lexists(text):
        return Path(name)
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def resolve(folder: Path, text: str) -> str:
    """The path that `text` in a file of the folder means, normalized; a URL stays."""
    if "://" in text:
        return text
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    whole = str(path if path.is_absolute() else folder / path)
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole


def describe(value: Any) -> str:
    """A TOML value in a few words: `the text 'a'`, `a list with the number 1 in it`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        bad = next((entry for entry in value if not isinstance(entry, str)), None)
        return "a list" + (f" with {describe(bad)} in it" if bad is not None else "")
    if isinstance(value, str):
        text = value if len(value) <= 60 else f"{value[:60]}…"
        return f"the text {text!r}"
    return f"the number {value}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _relative(value: str, folder: Path) -> str:
    """The path relative to a folder if that is shorter, else as it is."""
    near = os.path.relpath(value, folder) if Path(value).is_absolute() else value
    return near if len(near) < len(value) else value


def _relative_or_name(value: str, folder: Path) -> str:
    """The path relative to a folder, with `./` where it would be read as a name."""
    near = _relative(value, folder)
    return near if near == value or near.startswith(".") or Path(value).exists() else f"./{near}"


def _resolve_or_name(value: str, folder: Path) -> str:
    """The resolved path if it exists or cannot be a name, else the name as it is."""
    path = resolve(folder, value)
    return path if value.startswith((".", "/", "~")) or Path(path).exists() else value


def _relative_or_none(value: str, folder: Path) -> str:
    """The path relative to a folder, with `./` where it would be read as `none`."""
    near = value if value == NO_TOOLS else _relative(value, folder)
    return f"./{near}" if near == NO_TOOLS != value else near


def _as_list(value: Any, folder: Path) -> list[str]:
    return [value] if isinstance(value, str) else value


def _split_lists(texts: list[str], folder: Path) -> list[str]:
    """The entries of comma-separated lists."""
    return [entry.strip() for text in texts for entry in text.split(",") if entry.strip()]


def _read_share(value: Any, folder: Path) -> float:
    return float(value.removesuffix("%")) / 100 if isinstance(value, str) else float(value)


def _check_datetime(value: str, folder: Path) -> str:
    """The text as it is; ValueError if it is no date and not "recorded"."""
    if value != RECORDED and parse_datetime(value) is None:
        raise ValueError
    return value


def _as_table(pairs: list[str], folder: Path) -> dict[str, str]:
    """`a=b` as `{a: b}`, and `a` as `{a: a}`."""
    split = [pair.partition("=") for pair in pairs]
    return {ours: theirs if equals else ours for ours, equals, theirs in split}


def _join_codes(value: Any, folder: Path) -> list[str]:
    """A table `{TOK = 0.001}` as `["TOK=0.001"]`; texts as they are."""
    if not isinstance(value, dict):
        return _as_list(value, folder)
    return [f"{codes}={number if isinstance(number, str) else repr(number)}" for codes, number in value.items()]


def _rates_as_table(rates: list[str], folder: Path) -> dict[str, Any]:
    """`["TOK=0.001,SEQ=1%"]` as `{TOK: 0.001, SEQ: "1%"}`."""
    table = _as_table([rate.strip() for text in rates for rate in text.split(",")], folder)
    return {codes.strip(): json_or_text(rate.strip()) for codes, rate in table.items()}


def _resolve_reports(reports: Any, folder: Path, place: Callable[[str, Path], str]) -> list[str]:
    """`NAME` and `NAME=FILE`, each file through `place`; `-` is stdout."""
    split = [report.partition("=") for report in _as_list(reports, folder)]
    return [f"{name}={file if file == '-' else place(file, folder)}" if file else name for name, _, file in split]


def _one_or_several(pattern: str) -> dict[str, Any]:
    entry = {"type": "string", "pattern": pattern}
    return {"anyOf": [entry, {"type": "array", "items": entry}]}


def _by_code_schema(number: Mapping[str, Any], text: str, pattern: str) -> dict[str, Any]:
    """The schema of what `_join_codes` reads: a table of numbers or texts by code, or texts such as `TOK=0.1%`."""
    table = {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z]+[0-9]*$"},
        "additionalProperties": {
            "anyOf": [{"type": "number", **number}, {"type": "string", "pattern": f"^{text}$"}]
        },
    }
    return {"anyOf": [table, *_one_or_several(pattern)["anyOf"]]}


text = partial(Kind, schema=TEXT)
texts = partial(Kind, schema=_ONE_OR_SEVERAL, converted=_as_list, shown=_split_lists)
"""A list of texts, or a single one."""
path = partial(Kind, schema=TEXT, converted=lambda value, folder: resolve(folder, value), shown=_relative)
"""A path, relative to the folder of the file."""
place_or_name = partial(Kind, schema=TEXT, converted=_resolve_or_name, shown=_relative_or_name)
"""A path, relative to the folder of the file, or a Hugging Face name."""
pairs = partial(
    Kind,
    schema={"type": "object", "additionalProperties": TEXT},
    converted=lambda value, _: [f"{ours}={theirs}" for ours, theirs in value.items()],
    shown=_as_table,
)
"""A table of texts."""


def whole_number(takes: str, least: int) -> Kind:
    """A whole number, `least` or more."""
    schema = {"type": "integer", "minimum": least}
    return Kind(f"{takes}, {least} or more", schema, lambda value, _: int(value))


def one_of(*choices: str) -> Kind:
    """One of the given words."""
    return Kind(f"one of {', '.join(choices)}", {"enum": list(choices)})


CLOCK = Kind(
    'a date, such as "2024-07-26", or with a time "2024-07-26T14:30", or "recorded" for the date of each prompt',
    {"type": "string", "pattern": f"^(?:{DATETIME}|{RECORDED})$"},
    _check_datetime,
)
TOOLS = Kind(
    'the path of a file, or "none"',
    TEXT,
    lambda value, folder: NO_TOOLS if value == NO_TOOLS else resolve(folder, value),
    _relative_or_none,
)
ARGUMENTS = Kind(
    "a table, such as {enable_thinking = false}",
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    lambda value, _: [f"{name}={json.dumps(argument)}" for name, argument in value.items()],
    lambda pairs, folder: {name: json_or_text(value) for name, value in _as_table(pairs, folder).items()},
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
    _read_share,
)
SECONDS = Kind(
    "a number of seconds, 0.01 or more", {"type": "number", "minimum": 0.01}, lambda value, _: float(value)
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
    _join_codes,
    _split_lists,
)
REQUIRED_SHARE = replace(SHARE, converted=lambda value, _: parse_share(str(value)) or _read_share(value, _))
"""As `SHARE`, but percents are exact: not divided as floats."""
RATES = Kind(
    'a table of codes and rates, such as {TOK = 0.001, SEQ = "0.1/rollout"}, or a list such as ["TOK=0.1%"]',
    _by_code_schema({"minimum": 0}, _RATE, _LIMIT),
    _join_codes,
    _rates_as_table,
)
REPORTS = Kind(
    'a list of names and files, such as ["text", "json=audit.json"]',
    _one_or_several(_REPORT),
    partial(_resolve_reports, place=lambda file, folder: resolve(folder, file)),
    partial(_resolve_reports, place=_relative),
)
