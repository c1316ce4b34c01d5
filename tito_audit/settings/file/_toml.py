"""Finds the configuration file, and the table in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.settings.values import words

_OWN_NAME = "tito-audit.toml"
PROJECT_NAME = "pyproject.toml"
TABLE = "tito-audit"
EXTEND = "extend"
OVERRIDES = "overrides"
PATHS = "paths"


@dataclass(frozen=True, slots=True)
class Search:
    """The search for a configuration file."""

    folder: Path
    """Where it started, going upwards."""
    found: Path | None
    passed_over: tuple[Path, ...] = ()
    """Each `pyproject.toml` on the way without our table."""


def look_for_config(folder: Path) -> Search:
    """The search for the configuration file of a folder, its own or the nearest above it."""
    passed_over: list[Path] = []
    for place in (folder, *folder.parents):
        own = place / _OWN_NAME
        if own.is_file():
            return Search(folder, own, tuple(passed_over))
        project = place / PROJECT_NAME
        if project.is_file():
            if _table_of_project(project) is not None:
                return Search(folder, project, tuple(passed_over))
            passed_over.append(project)
    return Search(folder, None, tuple(passed_over))


def table_of(path: Path, extended_by: Path | None = None) -> tuple[Mapping[str, Any], str]:
    """The table of a file, and the prefix of its keys in messages; SetupError when it cannot be read.

    A `pyproject.toml` without the table is empty, but an error in `extend`.
    """
    if path.name != PROJECT_NAME:
        return _parsed(path, _content(path, extended_by)), ""
    table = _table_of_project(path, extended_by)
    if table is None and extended_by is not None:
        raise SetupError(
            f"{extended_by}: extend names {path}, which has no table [tool.{TABLE}].\n"
            "Name the file that holds the settings, or remove extend."
        )
    return table or {}, f"tool.{TABLE}."


def _table_of_project(path: Path, extended_by: Path | None = None) -> Mapping[str, Any] | None:
    """The table of a `pyproject.toml`; None if it has none, and then it need not even be valid."""
    data = _content(path, extended_by)
    if TABLE.encode() not in data:
        return None
    tool = _parsed(path, data).get("tool")
    table = tool.get(TABLE) if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SetupError(f"{path}: tool.{TABLE} is {words(table)}.\nIt takes a table: [tool.{TABLE}]")
    return table


def _content(path: Path, extended_by: Path | None) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = getattr(error, "strerror", None) or error
    if extended_by is not None:
        raise SetupError(
            f"{extended_by}: extend names {path}, which cannot be read ({why}).\n"
            f"A relative path starts from {extended_by.parent}. Fix it, or remove extend."
        )
    raise SetupError(
        f"{path}: the configuration file cannot be read ({why}).\n"
        "Pass --config FILE with a readable one, or --no-config to run without."
    )


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # files from Windows may start with a BOM
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(
            f"{path}: not valid TOML ({error}).\nFix the file, or pass --no-config to run without it."
        ) from None
