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
from tito_audit.format import Format, Row
from tito_audit.formats._beside import beside_of
from tito_audit.formats._calls import (
    TOOLS_MISSING,
    calls_unknown_tools,
    finish_reason,
    one_model,
    text_alone,
    turn_of_tokens,
    within,
)
from tito_audit.formats._columns import as_object, flat_logprobs, is_list, other_columns, policy_of
from tito_audit.formats._responses import text_of
from tito_audit.formats._update import object_at, of_calls, path_text, plain_sources
from tito_audit.formats._writer import call_rows, lengths_of
from tito_audit.record.column import MovePolicy
from tito_audit.record.edits import ABSENT, Edit, Path
from tito_audit.record.message import Message, as_message, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Sources
from tito_audit.record.stated import Stated, Unread
from tito_audit.signature import Signature

_INNER = "subagent_trajectories"
_ID_NAMES = ("prompt_token_ids", "completion_token_ids")
_EXTRA_PREFIX = "extra."
"""Prefix for the name of a column that is in `metrics.extra`."""
_Wire = Mapping[str, Any]


def read(row: Row, place: Place) -> Sequence[Rollout]:
    return tuple(
        _rollout(trajectory, f"{path_text(path)}." if path else "", replace(place, item=item))
        for item, (path, trajectory) in enumerate(_trajectories(row, ()))
    )


def _trajectories(value: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A trajectory and all trajectories embedded in it with their paths, outer ones first."""
    yield path, as_object(value, f"{path_text(path)} is not a trajectory (an object)")
    inner = value.get(_INNER)
    if inner is None:
        return
    if not isinstance(inner, list | tuple):
        raise RecordError(f"{path_text((*path, _INNER))} is not a list of trajectories")
    for number, embedded in enumerate(inner):
        yield from _trajectories(embedded, (*path, _INNER, number))


def _rollout(trajectory: Mapping[str, Any], where: str, place: Place) -> Rollout:
    agent = as_object(trajectory.get("agent"), f"{where}agent is not an object that names the agent")
    messages, calls, unread = _conversation_of(trajectory.get("steps"), f"{where}steps")
    tools = as_tools(agent.get("tool_definitions"), f"{where}agent.tool_definitions")
    # The model, unless the steps of the trajectory name several.
    steps = trajectory["steps"]
    usual = agent.get("model_name")
    named = [steps[call.step].get("model_name") for call in calls] or [usual]
    model = one_model([name if isinstance(name, str) else usual for name in named])
    stated = Stated(model=model)
    if unread:
        because = "an observation of a step without an agent has no known form"
        stated = stated.with_facts(items_not_read=unread).not_read(Unread.MESSAGES, because)
    elif calls_unknown_tools(messages, tools):
        # The agent parsed these calls from the model's text, or their tools were not logged; either way no
        # prompt can be rendered again.
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
    return Rollout(place, FORMAT.name, messages if readable else (), tools, turns=turns, stated=stated)


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    sources: list[list[CallSource]] = []
    for above, trajectory in _trajectories(row, ()):
        sources.append([])
        for call in _conversation_of(trajectory.get("steps"), "steps")[1]:
            path, extra = (*above, "steps", call.step, "metrics"), object_at(call.metrics, "extra")
            routing = [name for name in extra if extra[name] is not None and policy_of(name) is MovePolicy.DROP]
            columns = {_EXTRA_PREFIX + name: plain_sources([(*path, "extra", name)]) for name in extra}
            prompts, scored = (
                plain_sources([(*path, name)] if is_list(call.metrics.get(name)) else [])
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
    return of_calls(sources)


def totals(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to `final_metrics.total_prompt_tokens`, by as much as the prompts it counts have grown."""
    for (path, trajectory), old, new in zip(_trajectories(row, ()), before, after, strict=True):
        total = object_at(trajectory, "final_metrics").get("total_prompt_tokens")
        steps = trajectory["steps"]
        counted = [object_at(step, "metrics").get("prompt_tokens") for step in steps]
        if not old.turns or type(total) is not int or total != sum(n for n in counted if type(n) is int):
            continue
        grown = 0
        for call, was, now in zip(_conversation_of(steps, "steps")[1], old.turns, new.turns, strict=True):
            size, to = lengths_of([was])[0], lengths_of([now])[0]
            grown += to - size if counted[call.step] == size else 0
        if grown:
            yield Edit((*path, "final_metrics", "total_prompt_tokens"), total + grown)


# Steps


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


def _conversation_of(
    steps: object, where: str
) -> tuple[tuple[Message, ...], tuple[_StepCall, ...], tuple[str, ...]]:
    """The messages and calls of all steps, in order, and what a model saw in a form that is not recorded.

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
            if len(_results(step, here)):
                # Harnesses share no format for what they report to a model.
                unread.add("observation of a step without an agent")
            continue
        wire = _answer(step, here)
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
        for place, result in enumerate(_results(step, here)):
            at = f"{here}.observation.results[{place}]"
            result = as_object(result, f"{at} is not a result (an object)")
            called, content = result.get("source_call_id"), result.get("content")
            if called is not None:
                messages.append(as_message({"role": "tool", "tool_call_id": called, "content": content}, at))
            elif content is not None:
                messages.append(as_message({"role": "user", "content": content}, at))
    return tuple(messages), tuple(calls), tuple(sorted(unread))


def _step_turn(call: _StepCall, where: str, answer: Message | None) -> Turn:
    """The model call of a step, without a place for its `answer` if the messages cannot be read.

    If its metrics are sums over several calls, it has no ids of its own.
    """
    index = None if answer is None else call.message
    extra = object_at(call.metrics, "extra")
    if call.merged:
        return Turn(None, None, message_index=index, finish_reason=finish_reason(extra))
    with within(f"{where}.metrics"):
        prompt, completion = ((name, call.metrics.get(name)) for name in _ID_NAMES)
        others = {_EXTRA_PREFIX + name: column for name, column in other_columns(extra, ()).items()}
        return turn_of_tokens(
            prompt,
            completion,
            lambda: flat_logprobs(call.metrics, "logprobs"),
            others,
            extra,
            message_index=index,
            completion_text=text_alone(answer) if answer is not None and isinstance(answer.content, str) else None,
            finish_reason=finish_reason(extra),
            extras=beside_of(extra),
        )


def _answer(step: _Wire, where: str) -> dict[str, Any]:
    """An agent's step in chat form; arguments stay the objects that the log has."""
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


def _results(step: _Wire, where: str) -> Sequence[Any]:
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
    matches=lambda row: (text_of(row.get("schema_version")) or "").startswith("ATIF-v"),
    **call_rows(read, sources, gone=ABSENT, only_numbers=True, totals=totals),
    shows="Messages, tools and every call whose step has ids, of sub-agents too. Parsed arguments hide how a "
    "call was spelled; steps copied from elsewhere and sums over several calls are not audited; most coding "
    "agents log no ids.",
    # Its models forbid keys of other names.
    open_object="extra",
)
