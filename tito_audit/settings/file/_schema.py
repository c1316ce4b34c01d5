"""The JSON schema of the configuration file, for editors."""

from __future__ import annotations

from typing import Any

from tito_audit.settings.file._patterns import MEANINGLESS
from tito_audit.settings.file._toml import EXTEND, OVERRIDES, PATHS
from tito_audit.settings.option import Option
from tito_audit.settings.options import KEYS

_TEXT = {"type": "string", "minLength": 1}
_PATTERN = {**_TEXT, "not": {"pattern": MEANINGLESS}}
_JSON = {
    "description": "A value that JSON can hold.",
    "anyOf": [
        {"type": ["string", "number", "boolean"]},
        {"type": "array", "items": {"$ref": "#/$defs/json"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    ],
}


def config_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of `tito-audit.toml` and of the table in `pyproject.toml`."""
    keys = {name: _said(option) for name, option in KEYS.items()}
    some = {name: {"$ref": f"#/properties/{name}"} for name, option in KEYS.items() if option.per_log}
    paths = {
        "title": PATHS,
        "description": "Patterns of the logs that these settings are for, from this file's folder: * and ? match "
        "within one name, ** through folders; one without a slash is the name of a file anywhere.",
        "anyOf": [_PATTERN, {"type": "array", "items": _PATTERN, "minItems": 1}],
    }
    override = {
        "type": "object",
        "properties": {PATHS: paths, **some},
        "required": [PATHS],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tito-audit.toml, and the table [tool.tito-audit] of pyproject.toml",
        "type": "object",
        "properties": {
            EXTEND: {
                "title": EXTEND,
                "description": "Files whose settings apply where this one sets none.",
                "anyOf": [_TEXT, {"type": "array", "items": _TEXT}],
            },
            **keys,
            OVERRIDES: {
                "title": OVERRIDES,
                "description": "Settings for some of the logs; where several match a log, the last one wins.",
                "type": "array",
                "items": override,
            },
        },
        "additionalProperties": False,
        "$defs": {"json": _JSON},
    }


def _said(option: Option) -> dict[str, Any]:
    said = option.help.replace(" Repeatable.", "")
    at_first = {"default": option.default} if option.default is not None else {}
    return {
        "title": option.key,
        "description": f"{said} Takes {option.kind.takes}.",
        **option.kind.schema,
        **at_first,
    }
