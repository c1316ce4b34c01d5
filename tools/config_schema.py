"""The JSON schema of the configuration file, which `tests/test_config_schema.py` writes to the package."""

from __future__ import annotations

from typing import Any

from tito_audit.settings.file import EXTEND, FOREIGN_PATTERN, OVERRIDES, PATHS
from tito_audit.settings.options import KEYS
from tito_audit.settings.values import TEXT

__all__ = ["config_schema"]

_JSON = {
    "description": "A value that JSON can hold.",
    "anyOf": [
        {"type": ["string", "number", "boolean"]},
        {"type": "array", "items": {"$ref": "#/$defs/json"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
    ],
}
"""The definition that schemas of keys refer to."""


def config_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of `tito-audit.toml` and of the table in `pyproject.toml`."""
    keys = {}
    for name, option in KEYS.items():
        description = f"{option.help.replace(' Repeatable.', '')} Takes {option.kind.takes}."
        default = {"default": option.default} if option.default is not None else {}
        keys[name] = {"title": name, "description": description, **option.kind.schema, **default}
    some = {name: {"$ref": f"#/properties/{name}"} for name, option in KEYS.items() if option.per_log}
    pattern = {**TEXT, "not": {"pattern": FOREIGN_PATTERN}}
    paths = {
        "title": PATHS,
        "description": "Patterns of the logs that these settings are for, from this file's folder: * and ? match "
        "within one name, ** through folders; one without a slash is the name of a file anywhere.",
        "anyOf": [pattern, {"type": "array", "items": pattern, "minItems": 1}],
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
                "anyOf": [TEXT, {"type": "array", "items": TEXT}],
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
