"""The chunks of a streamed chat answer joined, with where in the chunks each token's logprob is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.formats._columns import is_list
from tito_audit.formats._responses_items import text_of
from tito_audit.formats._sources import plain_sources
from tito_audit.record.edits import Path
from tito_audit.record.sources import CallSource, Layout, Source

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_SILENT = ("role", "tool_calls", *_TEXTS)


@dataclass(frozen=True, slots=True)
class Joined:
    """A streamed answer, joined."""

    response: Mapping[str, Any]
    chunks: Sequence[Mapping[str, Any]]

    def source(self, path: Path) -> CallSource:
        """Where the chunks at `path` hold the call."""
        prompts = [
            (*path, number, "prompt_token_ids")
            for number, chunk in enumerate(self.chunks)
            if is_list(chunk.get("prompt_token_ids")) and len(chunk["prompt_token_ids"])
        ]
        logprobs = []
        start = 0
        for number, chunk in enumerate(self.chunks):
            end = start + len(_content(chunk))
            where = (*path, number, "choices", 0, "logprobs", "content")
            if end > start:
                logprobs.append(Source(where, Layout.ENTRIES, (start, end)))
            start = end
        whole = "a stream's chunks hold ids, logprobs and texts together, so none of them can be dropped"
        return CallSource(plain_sources(prompts), tuple(logprobs), whole=whole)


def is_chunks(value: object) -> bool:
    """True for a list of stream chunks."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) for one in value)


def joined(chunks: Sequence[Mapping[str, Any]]) -> Joined:
    """The answer that the chunks of one choice add up to; RecordError for several choices and unknown deltas."""
    message: dict[str, Any] = {"role": "assistant"}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None}
    response: dict[str, Any] = {"choices": [choice]}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key in ("id", "model", "created", "usage"):
            if chunk.get(key) is not None:
                response[key] = chunk[key]
        if is_list(chunk.get("prompt_token_ids")) and len(chunk["prompt_token_ids"]):
            response.setdefault("prompt_token_ids", chunk["prompt_token_ids"])
        piece = _choice(chunk)
        if piece is None:
            continue
        if piece.get("finish_reason") is not None:
            choice["finish_reason"] = piece["finish_reason"]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(_plain(piece["token_ids"], "token_ids"))
        if piece.get("logprobs") is not None:
            choice.setdefault("logprobs", {"content": []})["content"].extend(_content(chunk))
        _add(message, calls, piece.get("delta"))
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return Joined(response, chunks)


def _choice(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice of a chunk; None for one that only has counts, like the last one of a stream."""
    listed = chunk.get("choices")
    if listed is None or (is_list(listed) and not len(listed)):
        return None
    if not isinstance(listed, list | tuple) or len(listed) != 1 or not isinstance(listed[0], Mapping):
        raise RecordError("a stream of several choices cannot be joined. Log the joined answer")
    index = listed[0].get("index")
    if index is not None and (type(index) is not int or index):
        raise RecordError("a stream of several choices cannot be joined. Log the joined answer")
    return listed[0]


def _add(message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: object) -> None:
    """Add a delta to the message it belongs to."""
    if delta is None:
        return
    if not isinstance(delta, Mapping):
        raise RecordError("a stream's `delta` is not an object")
    unknown = [key for key, value in delta.items() if key not in _SILENT and value]
    if unknown:
        raise RecordError(f"a stream's delta holds {unknown[0]!r}, which is not joined. Log the joined answer")
    for key in _TEXTS:
        if isinstance(delta.get(key), str):
            message[key] = message.get(key, "") + delta[key]
    parts = delta.get("tool_calls")
    for part in () if parts is None else _plain(parts, "tool_calls"):
        function = part.get("function") if isinstance(part, Mapping) else None
        if not isinstance(function, Mapping) or type(part.get("index", 0)) is not int:
            raise RecordError("a stream's delta holds a tool call without a function")
        call = calls.setdefault(
            part.get("index", 0), {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = text_of(call["id"], part.get("id"))
        for key in ("name", "arguments"):
            call["function"][key] += function[key] if isinstance(function.get(key), str) else ""


def _content(chunk: Mapping[str, Any]) -> list[Any]:
    """The entries of a chunk's logprobs."""
    piece = _choice(chunk)
    logged = piece.get("logprobs") if piece is not None else None
    entries = logged.get("content") if isinstance(logged, Mapping) else None
    return _plain(entries, "logprobs.content") if entries is not None else []


def _plain(value: Any, name: str) -> list[Any]:
    if not is_list(value):
        raise RecordError(f"a stream's {name} is not a list")
    return value.tolist() if hasattr(value, "tolist") else list(value)
