"""The keys of the machine-readable reports, from their JSON schema."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pages.words import Pages, table

__all__ = ["SCHEMAS", "schema"]

SCHEMAS = (
    *("report.schema.json", "config.schema.json", "rescore.schema.json", "rescore-prompts.schema.json"),
    *("record.schema.json", "validate.schema.json"),
)
"""Files of the package that the site offers as they are."""


def schema(intro: str) -> Pages:
    """One page: what each object of a report holds."""
    said = json.loads(files("tito_audit").joinpath("schemas", SCHEMAS[0]).read_text(encoding="utf-8"))
    parts = [intro]
    for name, one in said["$defs"].items():
        if "properties" not in one:
            continue
        parts.append(f"## {name.replace('_', ' ')}\n")
        if "description" in one:
            parts.append(f"{one['description']}\n")
        rows = []
        for key, value in one["properties"].items():
            always = "" if key in one.get("required", ()) else " It may be missing."
            rows.append((f"`{key}`", _type(value, said["$defs"]), value.get("description", "") + always))
        parts.append(table(("key", "holds", ""), rows))
    return {"schema.md": "\n".join(parts)}


def _type(value: dict[str, Any], named: dict[str, Any]) -> str:
    """What a value is, in a few words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        there = named[name]
        return (
            f"[{name.replace('_', ' ')}](#{name.replace('_', '-')})"
            if "properties" in there
            else _type(there, named)
        )
    for word in ("anyOf", "oneOf"):
        if word in value:
            return " or ".join(_type(one, named) for one in value[word])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    types = value.get("type", "anything")
    types = [types] if isinstance(types, str) else types
    return " or ".join(_of(one, value, named) for one in types)


def _of(type: str, value: dict[str, Any], named: dict[str, Any]) -> str:
    if type == "array" and isinstance(value.get("items"), dict):
        return f"list of {_type(value['items'], named)}"
    inner = value.get("additionalProperties", value.get("unevaluatedProperties"))
    if type == "object" and isinstance(inner, dict):
        return f"object of {_type(inner, named)}"
    if type == "object" and "properties" in value:
        return f"object with {', '.join(f'`{key}`' for key in value['properties'])}"
    return type
