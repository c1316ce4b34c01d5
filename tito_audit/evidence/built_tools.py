"""Prompts written with other tools than the log names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tito_audit.evidence.model import Built
from tito_audit.evidence.scene import Building, Scene
from tito_audit.record.message import ToolSpec

__all__ = ["tool_sets", "tools_in"]

_DECODER = json.JSONDecoder()
_MOST = 256
"""Tools that are read out of one text."""
_LONGEST = 400_000
"""Characters in which they are looked for."""


def tool_sets(scene: Scene) -> Iterator[Building]:
    """The messages with the tools that the recorded text holds, or with none."""
    logged = scene.rollout.tools
    held = tools_in(_head(scene))
    if logged and not held:
        text = scene.write(scene.messages, ())
        if text is not None:
            yield Building(text, Built("TPL212", "all tools missing", "the tools are missing from the prompt"))
    if not held:
        return
    built = _told(logged, held)
    for tools in (held, [_wrapped(tool) for tool in held]):
        text = scene.write(scene.messages, tools)
        if text is not None:
            yield Building(text, built)


def tools_in(text: str) -> list[ToolSpec]:
    """Every tool definition that a text holds as JSON, in order."""
    found: list[ToolSpec] = []
    at = text.find("{")
    while at >= 0 and len(found) < _MOST:
        end = at + 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value = None
        if _is_tool(value):
            found.append(value)
        else:
            end = at + 1
        at = text.find("{", end)
    return found


def _head(scene: Scene) -> str:
    """The recorded text in front of the first question, where tools stand in most templates."""
    text = scene.text[:_LONGEST]
    at = text.find(scene.question) if scene.question else -1
    return text[:at] if at > 0 else text


def _is_tool(value: Any) -> bool:
    """Whether a JSON value defines a tool: it has a name, and parameters or a description, but no arguments."""
    if not isinstance(value, dict):
        return False
    inner = _inner(value)
    named = isinstance(inner.get("name"), str) and "arguments" not in inner
    return named and ("parameters" in inner or "description" in inner or inner is not value)


def _inner(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition itself, without what wraps it."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _wrapped(tool: ToolSpec) -> ToolSpec:
    return tool if _inner(tool) is not tool else {"type": "function", "function": tool}


def _told(logged: Sequence[ToolSpec], held: Sequence[ToolSpec]) -> Built:
    """In what the tools of the recorded text differ from those of the log."""
    if not logged:
        return Built("TPL212", "tools not in the log", "the prompt holds tools that the log does not name")
    mine = {str(_inner(tool).get("name")): _inner(tool) for tool in logged}
    theirs = {str(_inner(tool).get("name")): _inner(tool) for tool in held}
    missing, more = [*mine.keys() - theirs.keys()], [*theirs.keys() - mine.keys()]
    if missing and not more:
        return Built("TPL212", "tool missing", f"{_listed(missing)} of the log's tools missing from the prompt")
    if more and not missing:
        return Built("TPL212", "tool not in the log", f"the prompt holds {_listed(more)}, not in the log")
    if missing:
        return Built("TPL212", "other tools", "the prompt holds other tools than the log")
    dropped = {key for name in mine for key in _keys(mine[name]) - _keys(theirs[name])}
    added = {key for name in mine for key in _keys(theirs[name]) - _keys(mine[name])}
    if dropped and not added:
        keys = ", ".join(f"`{key}`" for key in sorted(dropped)[:3])
        return Built("TPL212", f"{keys} dropped from the tools", f"the prompt holds the tools without {keys}")
    if list(mine) != list(theirs) and all(mine[name] == theirs[name] for name in mine):
        return Built("TPL212", "tools in another order", "the tools stand in another order")
    return Built("TPL212", "tools written differently", "the prompt defines the tools in another way")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _keys(value: Any) -> set[str]:
    """Every key of a definition, however deep."""
    if isinstance(value, Mapping):
        return {str(key) for key in value} | {key for each in value.values() for key in _keys(each)}
    if isinstance(value, list | tuple):
        return {key for each in value for key in _keys(each)}
    return set()
