"""The steps of an ATIF trajectory as chat messages, and which of them are model calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.formats._calls import finish_reason, turn_of_tokens, weight_versions
from tito_audit.formats._columns import flat_logprobs, is_list, other_columns
from tito_audit.formats._sources import object_at
from tito_audit.record.message import Message, as_message
from tito_audit.record.rollout import Turn

ID_NAMES = ("prompt_token_ids", "completion_token_ids")
EXTRA_PREFIX = "extra."
"""Prefix for the name of a column that is in `metrics.extra`."""

Wire = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepCall:
    """An agent's step, written by one or several model calls."""

    step: int
    """Its position in `steps`."""
    message: int
    """The index of the message it wrote."""
    metrics: Wire
    merged: bool
    """The metrics are sums over several calls."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The steps of one trajectory."""

    messages: tuple[Message, ...]
    calls: tuple[StepCall, ...]
    unread: tuple[str, ...]
    """What a model saw in a form that the trajectory does not record."""


def conversation_of(steps: object, where: str) -> Conversation:
    """The messages and calls of all steps, in order; `where` names the list of steps in errors."""
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise RecordError(f"{where} is not a list of steps")
    messages: list[Message] = []
    calls: list[StepCall] = []
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
        calls.extend(_calls(step, number, len(messages), here))
        messages.append(as_message(wire, here))
        messages.extend(_observed(step, here))
    return Conversation(tuple(messages), tuple(calls), tuple(sorted(unread)))


def step_turn(call: StepCall, where: str, *, message_index: int | None, text: str | None) -> Turn:
    """The model call of a step. If its metrics are sums over several calls, it has no ids of its own."""
    extra = object_at(call.metrics, "extra")
    if call.merged:
        return Turn(None, None, message_index=message_index, finish_reason=finish_reason(extra))
    try:
        prompt, completion = ((name, call.metrics.get(name)) for name in ID_NAMES)
        others = {EXTRA_PREFIX + name: found for name, found in other_columns(extra, ()).items()}
        turn = turn_of_tokens(prompt, completion, lambda: flat_logprobs(call.metrics, "logprobs"), others)
    except RecordError as error:
        raise RecordError(f"{where}.metrics: {error}") from None
    return replace(
        turn,
        message_index=message_index,
        completion_text=text,
        finish_reason=finish_reason(extra),
        weight_versions=weight_versions(extra),
    )


def _calls(step: Wire, number: int, message: int, where: str) -> Iterator[StepCall]:
    """The call of an agent's step, if a call made it and it was not copied from elsewhere."""
    metrics, count = step.get("metrics"), step.get("llm_call_count")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise RecordError(f"{where}.metrics is not an object")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int | float)):
        raise RecordError(f"{where}.llm_call_count is {count!r}, not a number of calls")
    metrics = {} if metrics is None else metrics
    # A table has every key, so metrics that are all null count as missing.
    told = any(value is not None for value in metrics.values())
    if step.get("is_copied_context") is True or (count is None and not told) or count == 0:
        return
    yield StepCall(number, message, metrics, count is not None and count > 1)


def _answer(step: Wire, where: str) -> dict[str, Any]:
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


def _observed(step: Wire, where: str) -> Iterator[Message]:
    """The results of a step: of tool calls as tool messages, of other actions as user messages."""
    for number, result in enumerate(_results(step, where)):
        here = f"{where}.observation.results[{number}]"
        if not isinstance(result, Mapping):
            raise RecordError(f"{here} is not a result (an object)")
        source, content = result.get("source_call_id"), result.get("content")
        if source is not None:
            yield as_message({"role": "tool", "tool_call_id": source, "content": content}, here)
        elif content is not None:
            yield as_message({"role": "user", "content": content}, here)


def _results(step: Wire, where: str) -> Sequence[Any]:
    observation = step.get("observation")
    if observation is None:
        return ()
    results = observation.get("results") if isinstance(observation, Mapping) else observation
    if results is None or isinstance(results, list | tuple):
        return () if results is None else results
    raise RecordError(f"{where}.observation has no list of results")
