"""Prompts rendered with tools other than the log's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tito_audit.evidence.model import Construction
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.unmatched import Candidate, UnmatchedSequence
from tito_audit.record.message import ToolSpec
from tito_audit.record.rollout import Rollout

_DECODER = json.JSONDecoder()
_MOST_TOOLS = 256
"""The most tools read from one text."""
_STRICT = "strict"
"""An instruction to a hosted service, which converters of tools keep or drop."""
_LONGEST_TEXT = 400_000
"""Characters searched for tools."""


def tool_sets(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered with the tools that the recorded text holds, or with none."""
    logged = sequence.rollout.tools
    recorded = tools_in(_head(sequence))
    if logged and not recorded:
        text = sequence.write(sequence.messages, ())
        if text is not None:
            yield Candidate(
                text, Construction("TPL212", "all tools missing", "the tools are missing from the prompt")
            )
    if not recorded:
        return
    construction = _difference(logged, recorded)
    for tools in (recorded, [_wrapped(tool) for tool in recorded]):
        text = sequence.write(sequence.messages, tools)
        if text is not None:
            yield Candidate(text, construction)


def tools_as_sent(rollout: Rollout, reference: Reference) -> tuple[ToolSpec, ...]:
    """The tools of a rollout, with `strict` where its first prompt has it, if they differ in nothing else."""
    prompt = next((turn.prompt_ids for turn in rollout.turns if turn.prompt_ids is not None), None)
    if prompt is None or not rollout.tools:
        return rollout.tools
    recorded = tools_in(reference.text(prompt)[:_LONGEST_TEXT])[: len(rollout.tools)]
    ours, theirs = [[dict(_inner(tool)) for tool in tools] for tools in (rollout.tools, recorded)]
    strict = [[tool.pop(_STRICT, _STRICT) for tool in tools] for tools in (ours, theirs)]
    return rollout.tools if ours != theirs or strict[0] == strict[1] else tuple(map(_wrapped, recorded))


def tools_in(text: str) -> list[ToolSpec]:
    """Every tool definition that a text holds as JSON, in order."""
    tools: list[ToolSpec] = []
    at = text.find("{")
    while at >= 0 and len(tools) < _MOST_TOOLS:
        end = at + 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value = None
        # Whether a JSON value defines a tool: it has a name, and parameters or a description, but no arguments.
        if not isinstance(value, dict):
            is_tool = False
        else:
            inner = _inner(value)
            named = isinstance(inner.get("name"), str) and "arguments" not in inner
            is_tool = named and ("parameters" in inner or "description" in inner or inner is not value)
        if is_tool:
            tools.append(value)
        else:
            end = at + 1
        at = text.find("{", end)
    return tools


def _head(sequence: UnmatchedSequence) -> str:
    """The recorded text before the first question, where most templates write the tools."""
    text = sequence.text[:_LONGEST_TEXT]
    at = text.find(sequence.question) if sequence.question else -1
    return text[:at] if at > 0 else text


def _inner(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition itself, without what wraps it."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _wrapped(tool: ToolSpec) -> ToolSpec:
    return tool if _inner(tool) is not tool else {"type": "function", "function": tool}


def _difference(logged: Sequence[ToolSpec], recorded: Sequence[ToolSpec]) -> Construction:
    """How the tools in the recorded text differ from the log's."""
    if not logged:
        return Construction("TPL212", "tools not in the log", "the prompt holds tools that the log does not name")
    old = {str(_inner(tool).get("name")): _inner(tool) for tool in logged}
    new = {str(_inner(tool).get("name")): _inner(tool) for tool in recorded}
    missing, more = [*old.keys() - new.keys()], [*new.keys() - old.keys()]
    if missing and not more:
        return Construction("TPL212", "tool missing", f"the prompt lacks {_listed(missing)}, which the log has")
    if more and not missing:
        return Construction(
            "TPL212", "tool not in the log", f"the prompt holds {_listed(more)}, which the log lacks"
        )
    if missing:
        return Construction("TPL212", "other tools", "the prompt holds tools other than the log's")
    dropped = {key for name in old for key in _keys(old[name]) - _keys(new[name])}
    added = {key for name in old for key in _keys(new[name]) - _keys(old[name])}
    if dropped and not added:
        keys = ", ".join(f"`{key}`" for key in sorted(dropped)[:3])
        return Construction(
            "TPL212", f"{keys} dropped from the tools", f"the prompt holds the tools without {keys}"
        )
    if list(old) != list(new) and all(old[name] == new[name] for name in old):
        return Construction("TPL212", "tools in another order", "the tools are in a different order")
    return Construction("TPL212", "tools written differently", "the prompt writes the tools differently")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _keys(value: Any) -> set[str]:
    """Every key of a definition, at any depth."""
    if isinstance(value, Mapping):
        return {str(key) for key in value} | {key for each in value.values() for key in _keys(each)}
    if isinstance(value, list | tuple):
        return {key for each in value for key in _keys(each)}
    return set()
