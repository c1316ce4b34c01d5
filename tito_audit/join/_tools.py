"""Files of tools: one list for all rollouts, or rows with an id and tools."""

from __future__ import annotations

from collections.abc import Mapping

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Row
from tito_audit.formats import chat_tools
from tito_audit.record.message import ToolSpec
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs, open_log

_SHAPES = ("parameters", "input_schema", "description")
"""Keys that show that an object with a name describes a tool."""


def shared_tools(named: str, settings: Settings) -> tuple[ToolSpec, ...] | None:
    """The list of tools in a file; None if the file has rows with tools instead. SetupError if it has neither."""
    (file, *more) = find_logs([named])
    rows: list[Row] = []
    for raw in open_log(file, max_row_bytes=settings.max_row_bytes):
        if raw.value is None:
            raise SetupError(f"--tools {file}: row {raw.index} cannot be read: {raw.error}")
        rows.append(raw.value)
        if not _is_tool(raw.value):
            break
    if not rows:
        raise SetupError(
            f"--tools {file}: it holds no tools. Write a JSON array of them, or rows with an id and `tools`."
        )
    if all(map(_is_tool, rows)) and not more:
        return _listed(rows, file.name)
    if "tools" not in rows[-1]:
        raise SetupError(
            f"--tools {file}: row {len(rows) - 1} is neither a tool (an object with `function`) nor a "
            f"row with `tools`; it has {', '.join(map(str, list(rows[-1])[:12]))}."
        )
    if rows[-1].keys() <= {"tools", "tool_choice", "parallel_tool_calls"} and not more:
        return _listed(rows[-1]["tools"], file.name)
    return None


def _listed(tools: object, where: str) -> tuple[ToolSpec, ...]:
    try:
        found = chat_tools(tools, f"--tools {where}")
    except RecordError as error:
        raise SetupError(f"{error}.") from None
    if not found:
        raise SetupError(f"--tools {where}: the list of tools is empty.")
    return found


def _is_tool(row: Row) -> bool:
    if isinstance(row.get("function"), Mapping):
        return True
    return isinstance(row.get("name"), str) and "tools" not in row and any(name in row for name in _SHAPES)
