"""ATIF trajectories (Agent Trajectory Interchange Format): one JSON document each, written by Harbor agents.

Tool results are inside the agent's step, and a call's ids are in the step's metrics. Each embedded sub-agent is
another rollout. harbor RFC 0001 and `harbor/models/trajectories/`; the package `atif` 1.8.0 has the same models.
They forbid unknown keys, but keep what is in an `extra`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._atif import (
    EXTRA_PREFIX,
    ID_NAMES,
    Conversation,
    StepCall,
    conversation_of,
    step_turn,
)
from tito_audit.formats._columns import is_list, policy_of
from tito_audit.formats._known_tools import TOOLS_MISSING, calls_unknown_tools
from tito_audit.formats._models import one_model
from tito_audit.formats._sources import object_at, of_calls, path_text, plain_sources
from tito_audit.formats._writer import calls_written, lengths_of
from tito_audit.record.column import MovePolicy
from tito_audit.record.edits import ABSENT, Edit, Path
from tito_audit.record.message import as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Sources
from tito_audit.record.stated import Stated, Unread
from tito_audit.signature import keys, one_way

_INNER = "subagent_trajectories"


def _matches(row: Row) -> bool:
    version = row.get("schema_version")
    return isinstance(version, str) and version.startswith("ATIF-v")


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    return tuple(
        _rollout(trajectory, f"{path_text(path)}." if path else "", replace(place, item=item))
        for item, (path, trajectory) in enumerate(_trajectories(row, ()))
    )


def _trajectories(value: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A trajectory and all trajectories embedded in it with their paths, outer ones first."""
    if not isinstance(value, Mapping):
        raise RecordError(f"{path_text(path)} is not a trajectory (an object)")
    yield path, value
    inner = value.get(_INNER)
    if inner is None:
        return
    if not isinstance(inner, list | tuple):
        raise RecordError(f"{path_text((*path, _INNER))} is not a list of trajectories")
    for number, one in enumerate(inner):
        yield from _trajectories(one, (*path, _INNER, number))


def _rollout(trajectory: Mapping[str, Any], where: str, place: Place) -> Rollout:
    agent = trajectory.get("agent")
    if not isinstance(agent, Mapping):
        raise RecordError(f"{where}agent is not an object that names the agent")
    found = conversation_of(trajectory.get("steps"), f"{where}steps")
    tools = as_tools(agent.get("tool_definitions"), f"{where}agent.tool_definitions")
    stated = _stated(trajectory["steps"], agent, found)
    if found.unread:
        because = "an observation of a step without an agent has no known form"
        stated = stated.with_facts(items_not_read=found.unread).not_read(Unread.MESSAGES, because)
    elif calls_unknown_tools(found.messages, tools):
        # The agent parsed these calls from the model's text, or their tools were not logged; either way no
        # prompt can be rendered again.
        stated = stated.not_read(Unread.MESSAGES, TOOLS_MISSING)
    told = not stated.reasons
    turns: tuple[Turn, ...] = ()
    if any(call.metrics.get(name) is not None for call in found.calls for name in ID_NAMES):
        turns = tuple(_turn(call, found, f"{where}steps[{call.step}]", told) for call in found.calls)
    else:
        stated = stated.without_ids()
    return Rollout(place, FORMAT.name, found.messages if told else (), tools, turns=turns, stated=stated)


def _turn(call: StepCall, found: Conversation, where: str, told: bool) -> Turn:
    message = found.messages[call.message]
    # The message's text does not contain reasoning and tool calls, which are part of the completion.
    whole = told and not message.tool_calls and message.reasoning is None and isinstance(message.content, str)
    index = call.message if told else None
    return step_turn(call, where, message_index=index, text=message.text if whole else None)


def _stated(steps: Sequence[Any], agent: Mapping[str, Any], found: Conversation) -> Stated:
    """The model, unless the steps of the trajectory name several."""
    usual = agent.get("model_name")
    named = [steps[call.step].get("model_name") for call in found.calls] or [usual]
    model = one_model([name if isinstance(name, str) else usual for name in named])
    return Stated(model=model)


def _sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    return of_calls(
        [
            _source(call, (*path, "steps", call.step, "metrics"))
            for call in conversation_of(trajectory.get("steps"), "steps").calls
        ]
        for path, trajectory in _trajectories(row, ())
    )


def _source(call: StepCall, path: Path) -> CallSource:
    extra = object_at(call.metrics, "extra")
    routing = [name for name in extra if extra[name] is not None and policy_of(name) is MovePolicy.DROP]
    columns = {EXTRA_PREFIX + name: plain_sources([(*path, "extra", name)]) for name in extra}
    prompt, scored = (
        plain_sources([(*path, name)] if is_list(call.metrics.get(name)) else [])
        for name in ("prompt_token_ids", "logprobs")
    )
    return CallSource(
        prompts=prompt,
        logprobs=scored,
        columns={**columns, "logprobs": scored},
        routing=tuple((*path, "extra", name) for name in routing),
        counters=(Counter(path),),
    )


def _totals(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to `final_metrics.total_prompt_tokens`, by as much as the prompts it counts have grown."""
    for (path, trajectory), old, new in zip(_trajectories(row, ()), before, after, strict=True):
        total = object_at(trajectory, "final_metrics").get("total_prompt_tokens")
        steps = trajectory["steps"]
        counted = [object_at(step, "metrics").get("prompt_tokens") for step in steps]
        if not old.turns or type(total) is not int or total != sum(one for one in counted if type(one) is int):
            continue
        grown = 0
        for call, was, now in zip(conversation_of(steps, "steps").calls, old.turns, new.turns, strict=True):
            size, to = lengths_of([was])[0], lengths_of([now])[0]
            grown += to - size if counted[call.step] == size else 0
        if grown:
            yield Edit((*path, "final_metrics", "total_prompt_tokens"), total + grown)


FORMAT = Format(
    name="atif",
    title="ATIF trajectories (Harbor)",
    signature=one_way(keys("schema_version", after=" that starts with `ATIF-v`"), "agent", "steps"),
    precedence=30,
    matches=_matches,
    read=_read,
    sources=_sources,
    update=calls_written(_read, _sources, gone=ABSENT, only_numbers=True, totals=_totals),
    shows="Messages, tools and every call whose step has ids, of sub-agents too. Parsed arguments hide how a "
    "call was spelled; steps copied from elsewhere and sums over several calls are not audited; most coding "
    "agents log no ids.",
    # Its models forbid keys of other names.
    open_object="extra",
)
