"""ATIF trajectories (Agent Trajectory Interchange Format): one JSON document each, written by Harbor agents.

Tool results are inside the agent's step, and a call's ids are in the step's metrics. Each embedded sub-agent is
another rollout. harbor RFC 0001 and `harbor/models/trajectories/`; the package `atif` 1.8.0 has the same models.
They forbid unknown keys, but keep what is in an `extra`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import (
    TOOLS_MISSING,
    build_turn,
    calls_unknown_tools,
    errors_at,
    finish_reason,
    one_model_name,
    only_text,
)
from tito_audit.formats._columns import as_object, is_list, logprob_column, move_policy, other_columns
from tito_audit.formats._extras import read_extras
from tito_audit.formats._responses import nonempty_text
from tito_audit.formats._update import object_at, path_text, sources_at, sources_of_calls
from tito_audit.formats._writer import count_tokens, listed_calls
from tito_audit.record.column import MovePolicy
from tito_audit.record.edits import ABSENT, Edit, Path
from tito_audit.record.message import Message, as_message, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Sources
from tito_audit.record.stated import Stated, Unread

_SUBAGENTS = "subagent_trajectories"
_ID_NAMES = ("prompt_token_ids", "completion_token_ids")
_EXTRA_PREFIX = "extra."
"""Prefix for the name of a column that is in `metrics.extra`."""
_Wire = Mapping[str, Any]


def read(row: Row, place: Place) -> Sequence[Rollout]:
    rollouts = []
    for item, (path, trajectory) in enumerate(_find_trajectories(row, ())):
        where = f"{path_text(path)}." if path else ""
        agent = as_object(trajectory.get("agent"), f"{where}agent is not an object that names the agent")
        messages, calls, unread = _read_steps(trajectory.get("steps"), f"{where}steps")
        tools = as_tools(agent.get("tool_definitions"), f"{where}agent.tool_definitions")
        steps = trajectory["steps"]
        usual = agent.get("model_name")
        named = [steps[call.step].get("model_name") for call in calls] or [usual]
        stated = Stated(model=one_model_name([name if isinstance(name, str) else usual for name in named]))
        if unread:
            because = "an observation of a step without an agent has no known form"
            stated = stated.with_facts(items_not_read=unread).not_read(Unread.MESSAGES, because)
        elif calls_unknown_tools(messages, tools):
            stated = stated.not_read(Unread.MESSAGES, TOOLS_MISSING)
        readable = not stated.reasons
        turns: tuple[Turn, ...] = ()
        if any(call.metrics.get(name) is not None for call in calls for name in _ID_NAMES):
            turns = tuple(
                _step_turn(call, f"{where}steps[{call.step}]", messages[call.message] if readable else None)
                for call in calls
            )
        else:
            stated = stated.without_ids()
        own, shown = replace(place, item=item), messages if readable else ()
        rollouts.append(Rollout(own, FORMAT.name, shown, tools, turns=turns, stated=stated))
    return tuple(rollouts)


def _find_trajectories(value: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A trajectory and those embedded in it, with their paths, outer ones first."""
    yield path, as_object(value, f"{path_text(path)} is not a trajectory (an object)")
    inner = value.get(_SUBAGENTS)
    if inner is None:
        return
    if not isinstance(inner, list | tuple):
        raise RecordError(f"{path_text((*path, _SUBAGENTS))} is not a list of trajectories")
    for number, embedded in enumerate(inner):
        yield from _find_trajectories(embedded, (*path, _SUBAGENTS, number))


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    sources: list[list[CallSource]] = []
    for above, trajectory in _find_trajectories(row, ()):
        sources.append([])
        for call in _read_steps(trajectory.get("steps"), "steps")[1]:
            path, extra = (*above, "steps", call.step, "metrics"), object_at(call.metrics, "extra")
            routing = [name for name in extra if extra[name] is not None and move_policy(name) is MovePolicy.DROP]
            columns = {_EXTRA_PREFIX + name: sources_at([(*path, "extra", name)]) for name in extra}
            prompts, scored = (
                sources_at([(*path, name)] if is_list(call.metrics.get(name)) else [])
                for name in ("prompt_token_ids", "logprobs")
            )
            source = CallSource(
                prompts=prompts,
                logprobs=scored,
                columns={**columns, "logprobs": scored},
                routing=tuple((*path, "extra", name) for name in routing),
                counters=(Counter(path),),
            )
            sources[-1].append(source)
    return sources_of_calls(sources)


def total_edits(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to `final_metrics.total_prompt_tokens`, by as much as the prompts that it counts grew."""
    for (path, trajectory), old, new in zip(_find_trajectories(row, ()), before, after, strict=True):
        total = object_at(trajectory, "final_metrics").get("total_prompt_tokens")
        steps = trajectory["steps"]
        counted = [object_at(step, "metrics").get("prompt_tokens") for step in steps]
        if not old.turns or type(total) is not int or total != sum(n for n in counted if type(n) is int):
            continue
        grown = 0
        for call, was, now in zip(_read_steps(steps, "steps")[1], old.turns, new.turns, strict=True):
            size, to = count_tokens([was])[0], count_tokens([now])[0]
            grown += to - size if counted[call.step] == size else 0
        if grown:
            yield Edit((*path, "final_metrics", "total_prompt_tokens"), total + grown)


@dataclass(frozen=True, slots=True)
class _StepCall:
    """An agent's step, written by one or several model calls."""

    step: int
    """Its position in `steps`."""
    message: int
    """The index of the message it wrote."""
    metrics: _Wire
    merged: bool
    """The metrics are sums over several calls."""


def _read_steps(steps: object, where: str) -> tuple[tuple[Message, ...], tuple[_StepCall, ...], tuple[str, ...]]:
    """The messages and the calls of all steps, in order, and what models saw that no message can hold.

    `where` names the list of steps in errors.
    """
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise RecordError(f"{where} is not a list of steps")
    messages: list[Message] = []
    calls: list[_StepCall] = []
    unread: set[str] = set()
    for number, step in enumerate(steps):
        here = f"{where}[{number}]"
        source = step.get("source") if isinstance(step, Mapping) else None
        if not isinstance(source, str) or source not in ("system", "user", "agent"):
            raise RecordError(f"{here} is not a step: an object whose `source` is system, user or agent")
        if source != "agent":
            messages.append(as_message({"role": source, "content": step.get("message")}, here))
            if len(_observation_results(step, here)):
                # Harnesses have no common format for what they show the model.
                unread.add("observation of a step without an agent")
            continue
        wire = _answer_wire(step, here)
        metrics, count = step.get("metrics"), step.get("llm_call_count")
        metrics = {} if metrics is None else as_object(metrics, f"{here}.metrics is not an object")
        if count is not None and (isinstance(count, bool) or not isinstance(count, int | float)):
            raise RecordError(f"{here}.llm_call_count is {count!r}, not a number of calls")
        # A table has every key, so metrics that are all null count as missing.
        is_call = any(value is not None for value in metrics.values()) if count is None else count != 0
        if is_call and step.get("is_copied_context") is not True:
            calls.append(_StepCall(number, len(messages), metrics, count is not None and count > 1))
        messages.append(as_message(wire, here))
        # Results of tool calls are tool messages, those of other actions user messages.
        for place, result in enumerate(_observation_results(step, here)):
            at = f"{here}.observation.results[{place}]"
            result = as_object(result, f"{at} is not a result (an object)")
            called, content = result.get("source_call_id"), result.get("content")
            if called is not None:
                messages.append(as_message({"role": "tool", "tool_call_id": called, "content": content}, at))
            elif content is not None:
                messages.append(as_message({"role": "user", "content": content}, at))
    return tuple(messages), tuple(calls), tuple(sorted(unread))


def _step_turn(call: _StepCall, where: str, answer: Message | None) -> Turn:
    """The model call of a step: no ids if its metrics are sums of several, no message if `answer` is None."""
    index = None if answer is None else call.message
    extra = object_at(call.metrics, "extra")
    if call.merged:
        return Turn(None, None, message_index=index, finish_reason=finish_reason(extra))
    with errors_at(f"{where}.metrics"):
        prompt, completion = ((name, call.metrics.get(name)) for name in _ID_NAMES)
        others = {_EXTRA_PREFIX + name: column for name, column in other_columns(extra, ()).items()}
        return build_turn(
            prompt,
            completion,
            lambda: logprob_column(call.metrics, "logprobs"),
            others,
            extra,
            message_index=index,
            completion_text=only_text(answer) if answer is not None and isinstance(answer.content, str) else None,
            finish_reason=finish_reason(extra),
            extras=read_extras(extra),
        )


def _answer_wire(step: _Wire, where: str) -> dict[str, Any]:
    """An agent's step in chat form; arguments of tool calls stay parsed, as the log has them."""
    calls = step.get("tool_calls")
    content = step.get("message")
    wire: dict[str, Any] = {"role": "assistant", "content": content}
    if isinstance(step.get("reasoning_content"), str):
        wire["reasoning_content"] = step["reasoning_content"]
    if calls is None or (is_list(calls) and not len(calls)):
        return wire
    if not isinstance(calls, list | tuple) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function_name"), str) for call in calls
    ):
        raise RecordError(f"{where}.tool_calls is not a list of calls with a `function_name`")
    # `message` is required, so an answer that is only tool calls has "" where chat servers have null.
    return {
        **wire,
        "content": None if isinstance(content, str) and not content else content,
        "tool_calls": [
            {
                "id": call.get("tool_call_id"),
                "type": "function",
                "function": {"name": call["function_name"], "arguments": call.get("arguments")},
            }
            for call in calls
        ],
    }


def _observation_results(step: _Wire, where: str) -> Sequence[Any]:
    observation = step.get("observation")
    if observation is None:
        return ()
    results = observation.get("results") if isinstance(observation, Mapping) else observation
    if results is None or isinstance(results, list | tuple):
        return () if results is None else results
    raise RecordError(f"{where}.observation has no list of results")


FORMAT = Format(
    name="atif",
    title="ATIF trajectories (Harbor)",
    signature=Signature("{schema_version} that starts with `ATIF-v`, {agent}, {steps}"),
    precedence=30,
    matches=lambda row: (nonempty_text(row.get("schema_version")) or "").startswith("ATIF-v"),
    **listed_calls(read, sources, dropped_as=ABSENT, only_numbers=True, totals=total_edits),
    shows="Messages, tools and every call whose step has ids, of sub-agents too. Parsed arguments hide how a "
    "call was spelled; steps copied from elsewhere and sums over several calls are not audited; most coding "
    "agents log no ids.",
    # The ATIF models forbid other keys.
    open_object="extra",
)
