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
class ValueKind:
    """What a key takes: how its values are read, shown, and described in the schema."""

    takes: str
    """What it takes, in words."""
    schema: Mapping[str, Any]
    """The same as JSON schema, for editors and for `read`, which knows only the keywords of `_allows`."""
    to_flag: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns a value that the schema allows into what the flag would give (a list of texts if it repeats), with
    paths resolved from the file's folder; ValueError if it is invalid all the same."""
    to_toml: Callable[[Any, Path], Any] = lambda value, folder: value
    """Turns what `read` returned back into a TOML value for a file in the folder."""

    def read(self, value: Any, folder: Path) -> Any:
        """What the flag would give for a TOML value; ValueError, with what is wrong in it, if it is invalid."""
        if _allows(self.schema, value):
            return self.to_flag(value, folder)
        for part in self.schema.get("anyOf", [self.schema]):
            if isinstance(value, dict) and part.get("type") == "object":
                entries = part["additionalProperties"]
                if "$ref" in entries:
                    raise ValueError("one of its values is a date or not a finite number, which JSON cannot hold")
                for name, entry in value.items():
                    if not _allows(entries, entry):
                        raise ValueError(f"{name} is {describe(entry)}")
                wrong = next(name for name in value if not _allows(part["propertyNames"], name))
                raise ValueError(f"{wrong!r} is not a code or a prefix")
            if isinstance(value, list) and part.get("type") == "array" and _allows({**part, "items": TEXT}, value):
                wrong = next(text for text in value if not _allows(part["items"], text))
                raise ValueError(f"{describe(wrong)} is in it")
        too_large = self.schema.get("type") in ("integer", "number") and type(value) is int and value > LARGEST
        raise ValueError(f"at most {LARGEST:,}" if too_large else "")


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the schema of a key, or of a part of its value, allows the value."""
    if "anyOf" in schema:
        return any(_allows(part, value) for part in schema["anyOf"])
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


def expand_user(name: str | Path) -> Path:
    """The path with `~` expanded, unless a file has this very name or there is no such user."""
    text = str(name)
    if not text.startswith("~") or os.path.lexists(text):
        return Path(name)
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def resolve(folder: Path, text: str, *, or_name: bool = False) -> str:
    """The path that `text` means in a file of the folder, normalized; a URL stays as it is.

    With `or_name`, so does what may be a name, if there is no such file.
    """
    if "://" in text:
        return text
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    whole = str(path if path.is_absolute() else folder / path)
    short = os.path.normpath(whole)
    resolved = short if os.path.realpath(short) == os.path.realpath(whole) else whole
    return text if or_name and text[0] not in "./~" and not Path(resolved).exists() else resolved


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


def _relative(value: str, folder: Path, *, or_name: bool = False, or_none: bool = False) -> str:
    """The path relative to a folder if that is shorter, else as it is.

    It begins with `./` where it would be read as a name, if names are possible, or as `none`, if that is.
    """
    near = os.path.relpath(value, folder) if Path(value).is_absolute() else value
    if len(near) >= len(value):
        return value
    is_name = or_name and not near.startswith(".") and not Path(value).exists()
    return f"./{near}" if is_name or (or_none and near == NO_TOOLS) else near


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


def _as_json_table(pairs: list[str], folder: Path) -> dict[str, Any]:
    """`TOK=0.001` and `SEQ=1%` as `{TOK: 0.001, SEQ: "1%"}`: the values are JSON or texts."""
    return {name: json_or_text(value) for name, value in _as_table(pairs, folder).items()}


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


text = partial(ValueKind, schema=TEXT)
texts = partial(ValueKind, schema=_ONE_OR_SEVERAL, to_flag=_as_list, to_toml=_split_lists)
"""A list of texts, or a single one."""
path = partial(ValueKind, schema=TEXT, to_flag=lambda value, folder: resolve(folder, value), to_toml=_relative)
"""A path, relative to the folder of the file."""
place_or_name = partial(
    ValueKind,
    schema=TEXT,
    to_flag=lambda value, folder: resolve(folder, value, or_name=True),
    to_toml=partial(_relative, or_name=True),
)
"""A path, relative to the folder of the file, or a Hugging Face name."""
pairs = partial(
    ValueKind,
    schema={"type": "object", "additionalProperties": TEXT},
    to_flag=lambda value, _: [f"{ours}={theirs}" for ours, theirs in value.items()],
    to_toml=_as_table,
)
"""A table of texts."""


def whole_number(takes: str, least: int) -> ValueKind:
    """A whole number, `least` or more."""
    schema = {"type": "integer", "minimum": least}
    return ValueKind(f"{takes}, {least} or more", schema, lambda value, _: int(value))


def one_of(*choices: str) -> ValueKind:
    """One of the given words."""
    return ValueKind(f"one of {', '.join(choices)}", {"enum": list(choices)})


CLOCK = ValueKind(
    'a date, such as "2024-07-26", or with a time "2024-07-26T14:30", or "recorded" for the date of each prompt',
    {"type": "string", "pattern": f"^(?:{DATETIME}|{RECORDED})$"},
    _check_datetime,
)
TOOLS = ValueKind(
    'the path of a file, or "none"',
    TEXT,
    lambda value, folder: NO_TOOLS if value == NO_TOOLS else resolve(folder, value),
    partial(_relative, or_none=True),
)
ARGUMENTS = ValueKind(
    "a table, such as {enable_thinking = false}",
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    lambda value, _: [f"{name}={json.dumps(argument)}" for name, argument in value.items()],
    _as_json_table,
)
CODES = texts('a list of codes or prefixes, such as ["TOK", "TPL203"]')
FLAG = ValueKind("true or false", {"type": "boolean"})
SHARE = ValueKind(
    'a number above 0 and at most 1, or a text such as "5%"',
    {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            {"type": "string", "pattern": f"^{_PERCENT}$"},
        ]
    },
    _read_share,
)
SECONDS = ValueKind(
    "a number of seconds, 0.01 or more", {"type": "number", "minimum": 0.01}, lambda value, _: float(value)
)
SENTINEL = ValueKind(
    'a number, or "null"',
    {"anyOf": [{"type": "number"}, {"const": "null"}]},
    lambda value, _: value if value == "null" else repr(value),
    lambda value, _: json_or_text(value) if value != "null" else value,
)
REQUIREMENTS = ValueKind(
    'a list of codes or prefixes, such as ["LPR", "SEQ=95%"], or a table such as {LPR = 1, SEQ = "95%"}',
    _by_code_schema({"exclusiveMinimum": 0, "maximum": 1}, _REQUIRED, _REQUIREMENT),
    _join_codes,
    _split_lists,
)
REQUIRED_SHARE = replace(SHARE, to_flag=lambda value, _: parse_share(str(value)) or _read_share(value, _))
"""As `SHARE`, but percents are exact: not divided as floats."""
RATES = ValueKind(
    'a table of codes and rates, such as {TOK = 0.001, SEQ = "0.1/rollout"}, or a list such as ["TOK=0.1%"]',
    _by_code_schema({"minimum": 0}, _RATE, _LIMIT),
    _join_codes,
    lambda rates, folder: _as_json_table(["".join(rate.split()) for rate in _split_lists(rates, folder)], folder),
)
REPORTS = ValueKind(
    'a list of names and files, such as ["text", "json=audit.json"]',
    _one_or_several(_REPORT),
    partial(_resolve_reports, place=lambda file, folder: resolve(folder, file)),
    partial(_resolve_reports, place=_relative),
)
