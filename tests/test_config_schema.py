"""The JSON schema of the configuration file: valid, fresh, and of one mind with what reads the file."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tables import stored, table
from tito_audit.errors import SetupError
from tito_audit.settings.file import read_config
from tito_audit.settings.options import FLAG_ONLY, KEYS
from tools.config_schema import config_schema

SHIPPED = Path(__file__).resolve().parents[1] / "tito_audit" / "schemas" / "config.schema.json"
VALUES: list[Any] = stored(__file__, "VALUES")


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return (
        str(value) if isinstance(value, datetime.date | datetime.time) else json.dumps(value, ensure_ascii=False)
    )


def valid(table: dict[str, Any]) -> bool:
    return schema().is_valid(table)


def takes(folder: Path, text: str, name: str = "tito-audit.toml") -> bool:
    path = folder / name
    path.unlink(missing_ok=True)  # to cut a file that is there takes milliseconds
    path.write_text(text, encoding="utf-8")
    try:
        read_config(path)
    except SetupError:
        return False
    return True


@cache
def schema() -> Any:
    """The schema that ships; what reads schemas takes seconds to import."""
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(SHIPPED.read_text(encoding="utf-8")))


def test_the_schema_that_ships_is_what_the_options_say() -> None:
    fresh = json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        SHIPPED.write_text(fresh, encoding="utf-8")
    assert SHIPPED.read_text(encoding="utf-8") == fresh, (
        "UPDATE_GOLDENS=1 pytest tests/test_config_schema.py renews the schema"
    )


def test_the_schema_is_one_and_describes_every_key() -> None:
    schema().check_schema(schema().schema)
    properties = schema().schema["properties"]
    assert set(properties) == {*KEYS, "extend", "overrides"}
    assert not set(properties) & set(FLAG_ONLY)
    for name, entry in properties.items():
        assert entry["title"] == name
        assert len(entry["description"]) > 20, name
    inside = properties["overrides"]["items"]["properties"]
    assert set(inside) == {"paths", *(name for name, key in KEYS.items() if key.per_log)}


@pytest.mark.parametrize("name", KEYS)
def test_the_schema_takes_the_values_of_a_key_that_the_file_takes_and_no_others(tmp_path: Path, name: str) -> None:
    accepted = refused = 0
    for value in VALUES:
        took = takes(tmp_path, f"{name} = {toml(value)}\n")
        assert valid({name: value}) == took, f"{name} = {toml(value)}: taken by the file: {took}"
        accepted, refused = accepted + took, refused + (not took)
        table = {"overrides": [{"paths": "x", name: value}]}
        inside = takes(tmp_path, f"overrides = {toml(table['overrides'])}\n")
        assert valid(table) == inside == (took and KEYS[name].per_log)
    assert accepted
    assert refused


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["jobs", "sample", "template-seconds", "sentinel", "worst", "max-rate.TOK"])
def test_no_key_takes_a_number_that_json_cannot_write(tmp_path: Path, name: str, number: str) -> None:
    assert not takes(tmp_path, f"{name} = {number}\n")


COLUMNS, TABLES = table(__file__, "schema_and_file_take_the_same_tables_in_either_file")
TABLES = [*TABLES, *([f"{flag} = true", False] for flag in FLAG_ONLY)]


@pytest.mark.parametrize(COLUMNS, TABLES, ids=lambda value: str(value)[:60])
def test_schema_and_file_take_the_same_tables_in_either_file(tmp_path: Path, text: str, right: bool) -> None:
    for name in ("base.toml", "pyproject-of-old.toml"):
        (tmp_path / name).write_text("jobs = 1\n", encoding="utf-8")
    assert takes(tmp_path, text) == right
    assert takes(tmp_path, f"[tool.tito-audit]\n{text}\n", "pyproject.toml") == right
    document = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))
    assert valid(document["tool"]["tito-audit"]) == right


def first_good(name: str) -> Any:
    return next(value for value in VALUES if valid({name: value}) and value not in ("", []))


def test_every_key_together_is_taken_by_both_and_reaches_each_command_that_has_it(tmp_path: Path) -> None:
    table = {name: first_good(name) for name in KEYS}
    assert valid(table)
    assert takes(tmp_path, "".join(f"{name} = {toml(value)}\n" for name, value in table.items()))
    config = read_config(tmp_path / "tito-audit.toml")
    for command in ("scan", "repair", "convert", "show", "inspect"):
        assert config.parameters(command) == {
            option.name: option.kind.read(table[key], tmp_path)
            for key, option in KEYS.items()
            if command in option.commands
        }


@pytest.mark.parametrize("name", KEYS)
def test_what_is_shown_of_a_value_reads_as_that_value(tmp_path: Path, name: str) -> None:
    kind = KEYS[name].kind
    for value, folder in itertools.product(VALUES, (tmp_path, tmp_path / "below", tmp_path.parent)):
        try:
            read = kind.read(value, folder)
        except ValueError:
            continue
        if read is not None and read != []:
            assert kind.read(kind.to_toml(read, tmp_path), tmp_path) == read


def test_rates_with_blanks_and_a_last_comma_are_shown_as_a_file_may_hold_them(tmp_path: Path) -> None:
    kind = KEYS["max-rate"].kind
    shown = kind.to_toml(["TOK = 0.001,", "SEQ=0.1 / rollout"], tmp_path)
    assert kind.read(shown, tmp_path) == ["TOK=0.001", "SEQ=0.1/rollout"]
