"""Agent Lightning events as its server lists them, one per row, and lines that archive a rollout with its events.

A `model_request` is a call: its request and the answer of a vLLM server or, if requested with `?format=triplet`,
only its ids. Other events, such as rewards, hold no tokens. Of calls with the same prompt in one attempt the
framework trains only on the last, so an archived rollout is read without the others.
microsoft/agent-lightning `agentlightning/server/routes/events.py`, `server/proxy.py` (c632d8dd).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import (
    FindSource,
    LoggedCall,
    Thread,
    build_thread,
    chat_calls,
    group_into_threads,
    thread_rows,
)
from tito_audit.formats._calls import model_name, read_turn
from tito_audit.formats._columns import first_text, has_entries, is_list, to_list
from tito_audit.formats._responses import nonempty_text
from tito_audit.formats._update import object_at, sources_at
from tito_audit.record.edits import Path
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import CallSource, Counter, Layout, Source
from tito_audit.record.stated import Stated

_TEXT_KEYS = ("content", "reasoning", "reasoning_content", "refusal")
_DELTA_KEYS = ("role", "tool_calls", *_TEXT_KEYS)


def matches(row: Row) -> bool:
    if _is_event(row):
        return True
    events = row.get("events")
    return (
        isinstance(events, list | tuple)
        and isinstance(row.get("rollout"), Mapping)
        and (_is_event(events[0]) if len(events) else "resources" in row)
    )


def read_threads(row: Row, place: Place) -> Sequence[Thread]:
    if _is_event(row):
        events: Sequence[tuple[Any, Path]] = [(row, ())]
        holder = row
    else:
        events = [(event, ("events", number)) for number, event in enumerate(row["events"])]
        holder = row["rollout"]
    stated = Stated().with_facts(id=first_text(holder, ("rollout_id", "id")))
    exchanges = [_calls_of_event(row, event, path) for event, path in events]
    # Of calls with the same prompt in one attempt, the last counts; it keeps the others.
    by_prompt: dict[object, list[list[LoggedCall]]] = {}
    for number, calls in enumerate(exchanges):
        prompt = calls[0].turn.prompt_ids if calls else None
        sent = None if prompt is None or not len(prompt) else (str(calls[0].stated.attempt), prompt.tobytes())
        by_prompt.setdefault(sent or number, []).append(calls)
    retries = {id(listed[-1]): tuple(calls[0] for calls in listed[:-1]) for listed in by_prompt.values()}
    calls_of_events = [
        [replace(call, retries=retries[id(calls)]) for call in calls]
        for calls in exchanges
        if id(calls) in retries
    ]
    parts = [build_thread(calls, place, FORMAT.name, stated) for calls in group_into_threads(calls_of_events)]
    return parts or [Thread(Rollout(place, FORMAT.name, stated=stated.without_ids()), ())]


def _is_event(row: object) -> bool:
    return (
        isinstance(row, Mapping)
        and isinstance(row.get("event_type"), str)
        and ("rollout_id" in row or "attempt_id" in row)
        and (row.get("data") is None or isinstance(row["data"], Mapping))
    )


def _calls_of_event(root: Row, event: object, path: Path) -> list[LoggedCall]:
    """The calls of an event, one for each choice of its answer; [] if it is not a call or failed."""
    if not isinstance(event, Mapping) or not _is_event(event):
        raise RecordError(
            f"{path[0]}[{path[1]}] is not an event: `event_type`, `rollout_id` and `data` are expected"
        )
    data, at = object_at(event, "data"), (*path, "data")
    status, response = data.get("http_status"), data.get("response")
    if event["event_type"] != "model_request" or (isinstance(status, int | float | np.number) and status >= 400):
        return []
    if nonempty_text(data.get("status")) == "error" or any(
        o.get("error") is not None for o in (data, object_at(response))
    ):
        return []
    request, where = data.get("request"), (*at, "response")
    sent = at if request is None else (*at, "request")
    if any(key in data for key in ("prompt_token_ids", "response_token_ids")):
        calls = [LoggedCall(read_turn(data, "data"), partial(CallSource, entry=at))]  # reduced to its ids
    elif request is not None and not isinstance(request, Mapping):
        raise RecordError("data.request is not an object")
    elif isinstance(response, list | tuple) and response and all(isinstance(chunk, Mapping) for chunk in response):
        joined, source = _join_chunks(response, where)
        calls = [replace(call, source=source) for call in chat_calls(root, request or {}, joined, sent, where)]
    elif not isinstance(response, Mapping):
        raise RecordError("data.response is neither an answer (an object) nor the chunks of a stream")
    else:
        calls = chat_calls(root, request or {}, response, sent, where) if "choices" in response else []
    server, attempt = object_at(data, "server"), event.get("attempt_id")
    version = server.get("version", data.get("model_version"))
    stated = []
    for call in calls:
        model = model_name(server.get("model")) or call.stated.model
        facts = replace(call.stated, model=model, attempt=attempt if isinstance(attempt, int | str) else None)
        turn = call.turn
        if isinstance(version, str | int) and not isinstance(version, bool) and not turn.weight_versions:
            turn = replace(turn, weight_versions=(str(version),))
        source = partial(_with_proxy_fields, call.source, data, at)
        stated.append(replace(call, turn=turn, source=source, stated=facts))
    return stated


def _with_proxy_fields(find: FindSource, data: Mapping[str, Any], path: Path) -> CallSource:
    """The source of a call, with the routing and counts that the proxy copied out of the answer."""
    source = find()
    routing = [(*path, "routed_experts")] if "routed_experts" in data else []
    counters = [Counter((*path, "usage"))] if isinstance(data.get("usage"), Mapping) else []
    return replace(source, routing=(*source.routing, *routing), counters=(*source.counters, *counters))


def _join_chunks(chunks: Sequence[Mapping[str, Any]], path: Path) -> tuple[Mapping[str, Any], FindSource]:
    """The whole response of a stream and its source; RecordError for several choices and for unknown deltas."""
    message: dict[str, Any] = {"role": "assistant"}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None}
    response: dict[str, Any] = {"choices": [choice]}
    calls: dict[int, dict[str, Any]] = {}
    prompts: list[Path] = []
    logprobs: list[Source] = []
    for number, chunk in enumerate(chunks):
        for key in ("id", "model", "created", "usage"):
            if chunk.get(key) is not None:
                response[key] = chunk[key]
        if has_entries(chunk.get("prompt_token_ids")):
            response.setdefault("prompt_token_ids", chunk["prompt_token_ids"])
            prompts.append((*path, number, "prompt_token_ids"))
        listed = chunk.get("choices")
        if listed is None or (is_list(listed) and not len(listed)):
            continue  # counts alone, as the last chunk may have them
        piece = listed[0] if isinstance(listed, list | tuple) and len(listed) == 1 else None
        index = piece.get("index") if isinstance(piece, Mapping) else None
        if not isinstance(piece, Mapping) or (index is not None and (type(index) is not int or index)):
            raise RecordError("a stream of several choices cannot be joined. Log the joined answer")
        if piece.get("finish_reason") is not None:
            choice["finish_reason"] = piece["finish_reason"]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(_require_list(piece["token_ids"], "token_ids"))
        if piece.get("logprobs") is not None:
            entries = object_at(piece, "logprobs").get("content")
            content = choice.setdefault("logprobs", {"content": []})["content"]
            start = len(content)
            content += [] if entries is None else _require_list(entries, "logprobs.content")
            if len(content) > start:
                where = (*path, number, "choices", 0, "logprobs", "content")
                logprobs.append(Source(where, Layout.ENTRIES, (start, len(content))))
        delta = piece.get("delta")
        if delta is None:
            continue
        if not isinstance(delta, Mapping):
            raise RecordError("a stream's `delta` is not an object")
        unknown = [key for key, value in delta.items() if key not in _DELTA_KEYS and value]
        if unknown:
            raise RecordError(f"a stream's delta holds {unknown[0]!r}, which is not joined. Log the joined answer")
        for key in _TEXT_KEYS:
            if isinstance(delta.get(key), str):
                message[key] = message.get(key, "") + delta[key]
        parts = delta.get("tool_calls")
        for part in () if parts is None else _require_list(parts, "tool_calls"):
            function = part.get("function") if isinstance(part, Mapping) else None
            if not isinstance(function, Mapping) or type(part.get("index", 0)) is not int:
                raise RecordError("a stream's delta holds a tool call without a function")
            call = calls.setdefault(
                part.get("index", 0),
                {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = nonempty_text(call["id"], part.get("id"))
            for key in ("name", "arguments"):
                call["function"][key] += function[key] if isinstance(function.get(key), str) else ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    whole = "a stream's chunks hold ids, logprobs and texts together, so none of them can be dropped"
    return response, partial(CallSource, sources_at(prompts), tuple(logprobs), whole=whole)


def _require_list(value: Any, name: str) -> list[Any]:
    if not is_list(value):
        raise RecordError(f"a stream's {name} is not a list")
    return to_list(value)


FORMAT = Format(
    name="agent_lightning_event",
    title="Agent Lightning events",
    signature=Signature("{event_type}, {rollout_id}, {data}; or {rollout} with {events} of them"),
    precedence=150,
    matches=matches,
    **thread_rows(read_threads),
    row_is_call=True,
    shows="One call each: prompt, completion, logprobs, weight version, and the request's messages and tools "
    "unless it was trimmed to a triplet. Rows of one rollout are read together.",
)
