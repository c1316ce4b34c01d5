"""Messages and tool calls in the OpenAI chat form that templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.record.speakers import ASSISTANT, UNSAMPLED_SPEAKERS, USUAL_SPEAKERS, speaker_of

ToolSpec = Mapping[str, Any]
"""One tool definition as logged, in OpenAI chat form: `{"type": "function", "function": {...}}`."""

_ARRAYS = (np.ndarray, np.generic)
_SCALARS = frozenset((str, int, float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, with its arguments as logged."""

    name: str
    arguments: str | Mapping[str, Any] | None
    """The string as sampled, or the object if logged parsed; None if absent."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `wire` is what a chat template gets: the message as logged, in OpenAI chat form, unknown keys included. The
    other fields are read from it, for rules and reports.
    """

    role: str
    wire: Mapping[str, Any] = field(repr=False)
    content: str | tuple[Mapping[str, Any], ...] | None = None
    """Text, content parts, or None where the log has null or nothing (tool calls only)."""
    reasoning: str | None = None
    """Reasoning that is logged apart from the content; None if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    stated_speaker: str | None = field(default=None, compare=False, repr=False)
    """Who speaks, if the run states which roles were sampled; None: the role decides."""

    @property
    def speaker(self) -> str:
        """Who speaks: `assistant` for the model under training, else see `Speakers.speaker`."""
        return self.stated_speaker or speaker_of(self.role)

    @property
    def sampled(self) -> bool:
        """Whether the model under training wrote the message, going by its role."""
        return (self.stated_speaker or USUAL_SPEAKERS.get(self.role) or speaker_of(self.role)) == ASSISTANT

    @property
    def known_unsampled(self) -> bool:
        """Whether the message is known not to be from the model under training."""
        return self.speaker in UNSAMPLED_SPEAKERS

    @property
    def text(self) -> str:
        """The content as one string; parts that are not text are left out."""
        if isinstance(self.content, str):
            return self.content
        parts = self.content or ()
        return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def sampled_indices(messages: Iterable[Message]) -> list[int]:
    """The indices of the messages that are `sampled`, found in one call of a function for all of them."""
    usual, indices = USUAL_SPEAKERS, []
    for index, message in enumerate(messages):
        if (message.stated_speaker or usual.get(message.role) or speaker_of(message.role)) == ASSISTANT:
            indices.append(index)
    return indices


def as_message(value: object, where: str) -> Message:
    """A logged message object as a Message; RecordError if it is none, naming it by `where`.

    `reasoning` and `thinking` are copied to `reasoning_content`, the key that chat templates read.
    """
    if not (type(value) is dict and _SCALARS.issuperset(map(type, value.values()))) and _holds_array(value):
        value = _arrays_to_lists(value)
    if not (type(value) is dict or _is_object(value)) or not isinstance(value.get("role"), str):
        raise RecordError(f"{where} is not a message: an object with a `role` is expected")
    content = value.get("content")
    if content is not None and type(content) is not str and not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise RecordError(f"{where}.content is neither text nor a list of parts")
        if not all(map(_is_object, content)):
            raise RecordError(f"{where}.content is a list, but not of content parts (objects)")
        content = tuple(content)
    reasoning = None
    for key in ("reasoning_content", "reasoning", "thinking"):
        text = value.get(key)
        if isinstance(text, str):
            reasoning = text
            break
    calls = value.get("tool_calls")
    tool_calls = []
    if calls is not None and (len(calls) if isinstance(calls, Sized) else calls):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RecordError(f"{where}.tool_calls is not a list")
        for number, call in enumerate(calls):
            function = call.get("function", call) if _is_object(call) else None
            if not _is_object(call) or not _is_object(function) or not isinstance(function.get("name"), str):
                raise RecordError(
                    f"{where}.tool_calls[{number}] is not a tool call: an object with a `name` is expected"
                )
            arguments, identifier = function.get("arguments"), call.get("id")
            if arguments is not None and not isinstance(arguments, str) and not _is_object(arguments):
                raise RecordError(f"{where}.tool_calls[{number}].arguments is neither a string nor an object")
            identifier = identifier if isinstance(identifier, str) else None
            tool_calls.append(ToolCall(function["name"], arguments, identifier))
    wire: Mapping[str, Any] = value
    if reasoning is not None and "reasoning_content" not in value:
        wire = {**value, "reasoning_content": reasoning}
    return Message(value["role"], wire, content, reasoning, tuple(tool_calls))


def as_messages(values: object, where: str) -> tuple[Message, ...]:
    """A logged list of messages; () when None or absent."""
    if values is None:
        return ()
    if not isinstance(values, list | Sequence) or isinstance(values, str):
        raise RecordError(f"{where} is not a list of messages")
    messages = []
    for index, value in enumerate(values):
        # The fast path: most messages have only a role and a text.
        if type(value) is dict and len(value) == 2:
            role, content = value.get("role"), value.get("content")
            if type(role) is str and type(content) is str:
                messages.append(Message(role, value, content))
                continue
        messages.append(as_message(value, f"{where}[{index}]"))
    return tuple(messages)


def as_tools(values: object, where: str) -> tuple[ToolSpec, ...]:
    """A logged list of tool definitions in chat form; () when None or absent."""
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RecordError(f"{where} is not a list of tools")
    if not all(isinstance(tool, Mapping) for tool in values):
        raise RecordError(f"{where} holds something that is not a tool definition (an object)")
    return tuple(without_arrays(tool) for tool in values)


def without_arrays(value: Any) -> Any:
    """The value with numpy arrays, which templates can neither compare nor write, as lists; itself without any."""
    return _arrays_to_lists(value) if _holds_array(value) else value


def _holds_array(value: Any) -> bool:
    """Whether a value is or holds a numpy array or scalar."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return isinstance(value, _ARRAYS)
    for entry in value.values() if kind is dict else value:
        if type(entry) not in _SCALARS and _holds_array(entry):
            return True
    return False


def _arrays_to_lists(value: Any) -> Any:
    if type(value) is dict:
        return {key: _arrays_to_lists(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_arrays_to_lists(entry) for entry in value]
    return value.tolist() if isinstance(value, _ARRAYS) else value


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    # Most are plain dicts from JSON, and an exact type check is cheaper than isinstance with Mapping.
    return type(value) is dict or isinstance(value, Mapping)
