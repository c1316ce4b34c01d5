"""Whether a message that a client sends back is the message that the session holds.

Two messages are the same if their role, content and tool calls are: no content, null and "" are one, as are a text
and a single part with that text; arguments are equal as JSON, with numbers exact and typed (1 is not 1.0, 1.0 is
1.00) and repeated keys refused. The ids of tool calls are names: what counts is the call that a result refers to.
Reasoning is compared separately, because clients leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any

from tito_audit.record.message import Message, ToolCall

START = b""
"""The key of an empty history."""
_COMPARED = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_OF_ANSWERS = frozenset({"assistant"})
_SIZE = 16
_LONG = 500
"""Characters of a text that is compared by its digest."""


def history_keys(keys: Sequence[bytes]) -> list[bytes]:
    """A key for each beginning of a history, `[L + 1]`: equal where all messages up to there are the same."""
    found = [START]
    for key in keys:
        found.append(blake2b(found[-1] + key, digest_size=_SIZE).digest())
    return found


def message_keys(messages: Sequence[Message]) -> list[bytes]:
    """A key for each message, equal where the messages are the same, reasoning aside."""
    calls: dict[str, tuple[int, int]] = {}
    keys: list[bytes] = []
    for index, message in enumerate(messages):
        keys.append(_digest(_canonical(message, calls, index)))
        calls.update({call.id: (index, k) for k, call in enumerate(message.tool_calls) if call.id is not None})
    return keys


def reasoning_agrees(sent: Message, held: Message) -> bool:
    """Whether the client left the reasoning out, or sent it as it was."""
    return not sent.reasoning or sent.reasoning == held.reasoning


def call_ids(message: Message) -> tuple[str | None, ...]:
    """The ids of its tool calls."""
    return tuple(call.id for call in message.tool_calls)


def _digest(value: object) -> bytes:
    # repr of tuples, texts and numbers is injective, so equal digests mean equal messages.
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=_SIZE).digest()


def _canonical(message: Message, calls: Mapping[str, tuple[int, int]], index: int) -> tuple[object, ...]:
    wire = message.wire
    answered = wire.get("tool_call_id")
    refers: object = None
    if answered is not None:
        place = calls.get(answered) if isinstance(answered, str) else None
        # Counted back from here, as the message before may have been compacted.
        refers = ("call", index - place[0], place[1]) if place is not None else plain(answered)
    said = tuple((call.name, arguments_of(call)) for call in message.tool_calls)
    others = () if message.role in _OF_ANSWERS else tuple(sorted(_others(wire)))
    return message.role, _content(message), said, refers, others


def _others(wire: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The other fields of a message, as sortable texts."""
    for key, value in wire.items():
        if key not in _COMPARED and value is not None:
            yield str(key), repr(plain(value))


def _content(message: Message) -> object:
    """The text of a message; its parts where they are more than one text."""
    content = message.content
    if content is None or isinstance(content, str):
        return _short(content or "")
    if all(_is_text(part) for part in content) and (len(content) < 2 or message.role in _OF_ANSWERS):
        return _short(message.text)
    return plain(content)


def _short(text: str) -> object:
    """A text, or the digest of a long one, which is cheaper than its repr."""
    if len(text) <= _LONG:
        return text
    return "long", len(text), blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_SIZE).digest()


def _is_text(part: Mapping[str, Any]) -> bool:
    said = {key for key, value in part.items() if value is not None}
    return said == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def arguments_of(call: ToolCall) -> object:
    """The arguments of a call as comparable JSON; their text if it is not JSON or repeats a key."""
    given = call.arguments
    if not isinstance(given, str):
        return "json", plain(given)
    try:
        parsed = json.loads(
            given, object_pairs_hook=_Pairs, parse_float=_Number, parse_int=int, parse_constant=_Number
        )
        return "json", plain(parsed)
    except (ValueError, RecursionError):
        return "text", given


class _Number(str):
    """A number with a fraction or an exponent, as written."""

    __slots__ = ()


class _Pairs(dict[str, Any]):
    """An object of JSON text; ValueError if it repeats a key."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        listed = list(pairs)
        super().__init__(listed)
        if len(self) != len(listed):
            raise ValueError("a key is repeated")


def plain(value: object) -> object:
    """A JSON value as tuples, texts and numbers whose repr is the same where the values are."""
    if isinstance(value, _Number):
        return "number", _exact(value)
    if isinstance(value, float):
        return "number", _exact(repr(value))
    if isinstance(value, Mapping):
        return "object", tuple(sorted((str(key), plain(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return "list", tuple(plain(item) for item in value)
    if value is None or isinstance(value, str | bool | int):
        return value
    return type(value).__name__, str(value)


def _exact(number: str) -> object:
    """The exact value of a decimal number, however it is written."""
    try:
        sign, digits, exponent = Decimal(number).as_tuple()
    except InvalidOperation:
        return number
    if not isinstance(exponent, int):
        return number
    kept = len(digits)
    while kept > 1 and digits[kept - 1] == 0:
        kept -= 1
    if digits[:kept] == (0,):
        return sign, (0,), 0
    return sign, digits[:kept], exponent + len(digits) - kept
