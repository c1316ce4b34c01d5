"""What a message says, however it is spelled: no reasoning, tool calls by name and arguments."""

from __future__ import annotations

import json
import re
from typing import Any
from zlib import crc32

from tito_audit.join.history._trie import hash_of
from tito_audit.record.message import Message, ToolCall

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT_END = "</think>"
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters|function|type|id)"\s*:')
_MARKERS = re.compile(
    r"</?tool_calls?>|```(?:json)?|<\|/?tool_calls?(?:_begin|_end|s_begin|s_end)?\|>|\[/?TOOL_CALLS?\]|<\|python_tag\|>"
)
_MOST_CALLS = 64
_DECODER = json.JSONDecoder()


def digest(message: Message) -> int:
    """A 64-bit hash of what a message says: the same for two spellings of one answer."""
    text = message.text
    if message.sampled:
        text, calls = said(text, message.tool_calls)
    else:
        text, calls = text.strip(), [_spelled(call) for call in message.tool_calls]
    # What a message holds besides text, such as images.
    if message.content is None or isinstance(message.content, str):
        other_parts = []
    else:
        other_parts = [_canonical(dict(part)) for part in message.content if not isinstance(part.get("text"), str)]
    parts = [message.speaker, text, *calls, *other_parts]
    return hash_of("\0".join(parts).encode("utf-8", "surrogatepass"))


def exact_digest(message: Message) -> int:
    """A 32-bit hash, never 0, that distinguishes an answer from others that say the same.

    It covers the ids of its tool calls or, if there are none, its exact text and reasoning.
    """
    ids = [call.id for call in message.tool_calls if call.id]
    spelled = "\0".join(ids) if ids else f"{message.reasoning or ''}\0{message.text}"
    return crc32(spelled.encode("utf-8", "surrogatepass")) or 1


def said(text: str, calls: tuple[ToolCall, ...] = ()) -> tuple[str, list[str]]:
    """The text of an answer without reasoning and tool calls, and the tool calls in one spelling."""
    text = without_reasoning(text)
    spelled = [_spelled(call) for call in calls]
    if "{" in text:
        text, inside = _calls_apart(text)
        spelled += inside
    return ("".join(_MARKERS.sub("", text).split()) if spelled else text.strip()), spelled


def without_reasoning(text: str) -> str:
    """Text without `<think>…</think>`, even if the prompt opened it, and without analysis messages."""
    if "<|channel|>analysis" in text:
        text = _ANALYSIS.sub("", text)
    if _THOUGHT_END not in text:
        return text
    thought, end, rest = text.rpartition(_THOUGHT_END)
    text = _THOUGHT.sub("", thought + end) + rest
    return text.rpartition(_THOUGHT_END)[2]


def _calls_apart(text: str) -> tuple[str, list[str]]:
    """Text without the tool calls that it spells as JSON, and those calls in one spelling."""
    calls: list[str] = []
    rest, at = [], 0
    for match in _CALL.finditer(text):
        if match.start() < at or len(calls) == _MOST_CALLS:
            continue
        call, end = _call_at(text, match.start())
        if call is not None:
            calls.append(call)
            rest.append(text[at : match.start()])
            at = end
    return "".join([*rest, text[at:]]) if calls else text, calls


def _call_at(text: str, at: int) -> tuple[str | None, int]:
    """The tool call at a place of a text, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    inner = value.get("function")
    call = inner if isinstance(inner, dict) else value
    name = call.get("name")
    if not isinstance(name, str) or not ("arguments" in call or "parameters" in call):
        return None, at
    return _spelled(ToolCall(name, call.get("arguments", call.get("parameters")))), end


def _spelled(call: ToolCall) -> str:
    return f"{call.name}({_canonical(call.arguments)})"


def _canonical(value: Any) -> str:
    """Arguments as JSON with one spacing and one key order; text that is not JSON unchanged."""
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else {}
        value = value if value is not None else {}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=repr)
    except (ValueError, RecursionError, TypeError):
        return str(value).strip() if isinstance(value, str) else type(value).__name__
