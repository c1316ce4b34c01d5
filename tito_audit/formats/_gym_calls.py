"""The model calls of a NeMo-Gym row: in one list of items, in a list of lists, or in chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import filled
from tito_audit.formats._responses_items import (
    TEXT_KEYS,
    TOKEN_KEYS,
    Item,
    Step,
    filled_list,
    input_steps,
    message_wire,
    steps,
    text_of,
)
from tito_audit.formats._sources import object_at
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, as_message

CALL_KEYS = (*TOKEN_KEYS, *TEXT_KEYS, "routed_experts")
"""Keys of an item or message that hold a call's tokens and that no template reads."""


@dataclass(frozen=True, slots=True)
class GymCall:
    """One model call: what it was sent, what it wrote, and the objects that hold it."""

    prompt: tuple[Message, ...]
    answer: Message
    token_item: Item | None
    """The item or message that holds its tokens."""
    items: tuple[Item, ...]
    """All items that it wrote, including `token_item`."""
    transition: int | None = None
    """The number of the output's inner list that it ends; None if the output is one list."""


@dataclass(frozen=True, slots=True)
class GymLayout:
    """The messages and calls of a row, before its tokens are read."""

    messages: tuple[Message, ...]
    calls: tuple[GymCall, ...]
    has_request: bool
    """Whether the row holds what came before the output."""


def is_chat(row: Row) -> bool:
    """True for the chat form, whose tokens are on messages."""
    return "responses_create_params" not in row and "output" not in row


def output_path(row: Row) -> Path:
    """The path of the list that holds the calls."""
    if is_chat(row):
        return ("messages",)
    return ("response", "output") if "responses_create_params" in row else ("output",)


def request_of(row: Row) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The request and the answer of a row that is not in chat form."""
    response = row["response"] if "responses_create_params" in row else row
    params = row.get("responses_create_params", row)
    if not isinstance(params, Mapping):
        raise RecordError("responses_create_params is not an object, so the request is unknown")
    return params, response


def layout_of(row: Row) -> GymLayout:
    """All messages of a row and its calls, in order."""
    if is_chat(row):
        messages, calls = _chat(row["messages"])
        return GymLayout(messages, tuple(calls), True)
    params, response = request_of(row)
    before, output = _before(params, response), response["output"]
    if len(output) and isinstance(output[0], list | tuple):
        messages, calls = _transitions(before, output)
    else:
        messages, calls = _conversation([*before, *steps(output, "response.output")], len(before))
        calls = _captured(calls)
    return GymLayout(messages, tuple(calls), bool(before))


def starts_conversation(messages: Sequence[Message]) -> bool:
    """True if the first message is neither an answer nor a tool's, so that a conversation starts here."""
    return bool(messages) and messages[0].role not in ("assistant", "tool")


def holds_tokens(item: Item) -> bool:
    """True if an item or message has ids in its token fields."""
    return filled(item.get("prompt_token_ids")) or filled(item.get("generation_token_ids"))


def cut_by_length(response: Mapping[str, Any]) -> bool:
    """True if the answer says that its last call hit the token limit."""
    return text_of(object_at(response, "incomplete_details").get("reason")) == "max_output_tokens"


def _chat(wires: Sequence[Any]) -> tuple[tuple[Message, ...], list[GymCall]]:
    messages = tuple(
        as_message(message_wire(wire, CALL_KEYS) if isinstance(wire, Mapping) else wire, f"messages[{i}]")
        for i, wire in enumerate(wires)
    )
    calls = [
        GymCall(messages[:i], messages[i], wire, (wire,))
        for i, wire in enumerate(wires)
        if messages[i].role == "assistant" and any(wire.get(key) is not None for key in CALL_KEYS)
    ]
    return messages, calls


def _before(params: Mapping[str, Any], response: Mapping[str, Any]) -> list[Step]:
    """The messages before the output: the request's input, or the agent's own version of it."""
    agent_input = response.get("agent_input")
    if isinstance(agent_input, list):
        return input_steps({**params, "input": agent_input}, "response.agent_input")
    found = input_steps(params, "responses_create_params")
    found.extend(steps(filled_list(response.get("seed_obs")), "response.seed_obs"))
    return found


def _conversation(
    found: Sequence[Step], first: int, transition: int | None = None
) -> tuple[tuple[Message, ...], list[GymCall]]:
    """All messages, and the calls from step `first` on; earlier answers are history."""
    messages = tuple(step.message for step in found)
    calls = [
        GymCall(messages[:i], step.message, step.token_item, step.items, transition)
        for i, step in enumerate(found)
        if i >= first and step.is_call
    ]
    return messages, calls


def _captured(calls: list[GymCall]) -> list[GymCall]:
    """The calls from the first one with token fields on; all calls if none has any.

    Earlier answers are history, as in a row that holds the later part of a rollout: the first prompt repeats
    them, and training on the row skips them.
    """
    first = next((i for i, call in enumerate(calls) if call.token_item is not None), 0)
    return calls[first:] if calls and holds_tokens(calls[first].token_item or {}) else calls


def _transitions(
    before: Sequence[Step], output: Sequence[Sequence[Item]]
) -> tuple[tuple[Message, ...], list[GymCall]]:
    """The messages and calls of an output that is a list of lists, each with the history of its last call."""
    messages: tuple[Message, ...] = ()
    calls: list[GymCall] = []
    for number, inner in enumerate(output):
        found = steps(inner, f"response.output[{number}]")
        system = [step for step in before if not step.items and step.message.role == "system"]
        # A history that starts a conversation already holds the request, but not its instructions.
        found = [*(system if starts_conversation([step.message for step in found]) else before), *found]
        messages, own = _conversation(found, 0, number)
        calls.extend(own[-1:])
    return messages, calls
