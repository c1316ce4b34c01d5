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
    ThreadRows,
    build_thread,
    chat_calls,
    group_into_threads,
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
    # Of calls with the same prompt in one attempt, the last counts; it keeps the sources of the others.
    by_prompt: dict[object, list[list[LoggedCall]]] = {}
    for number, calls in enumerate(exchanges):
        prompt = calls[0].turn.prompt_ids if calls else None
        sent = None if prompt is None or not len(prompt) else (str(calls[0].stated.attempt), prompt.tobytes())
        by_prompt.setdefault(sent or number, []).append(calls)
    retries = {id(listed[-1]): [calls[0] for calls in listed[:-1]] for listed in by_prompt.values()}
    calls_of_events = [
        [replace(call, source=partial(_with_retries, call.source, retries[id(calls)])) for call in calls]
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
        calls = chat_calls(root, request or {}, _join_chunks(response), sent, where)
        calls = [replace(call, source=partial(_stream_source, response, where)) for call in calls]
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
    """The source of a call, with what the proxy copied out of the answer: routing and the counts."""
    source = find()
    routing = [(*path, "routed_experts")] if "routed_experts" in data else []
    counters = [Counter((*path, "usage"))] if isinstance(data.get("usage"), Mapping) else []
    return replace(source, routing=(*source.routing, *routing), counters=(*source.counters, *counters))


def _with_retries(find: FindSource, retries: Sequence[LoggedCall]) -> CallSource:
    """The source of a call, with those of earlier calls that sent the same prompt."""
    return replace(find(), retries=tuple((call.turn, call.source()) for call in retries))


def _stream_source(chunks: Sequence[Mapping[str, Any]], path: Path) -> CallSource:
    prompts = [
        (*path, number, "prompt_token_ids")
        for number, chunk in enumerate(chunks)
        if has_entries(chunk.get("prompt_token_ids"))
    ]
    logprobs = []
    start = 0
    for number, chunk in enumerate(chunks):
        end = start + len(_logprob_entries(chunk))
        if end > start:
            where = (*path, number, "choices", 0, "logprobs", "content")
            logprobs.append(Source(where, Layout.ENTRIES, (start, end)))
        start = end
    whole = "a stream's chunks hold ids, logprobs and texts together, so none of them can be dropped"
    return CallSource(sources_at(prompts), tuple(logprobs), whole=whole)


def _join_chunks(chunks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The answer that the chunks of one choice add up to; RecordError for several choices and unknown deltas."""
    message: dict[str, Any] = {"role": "assistant"}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None}
    response: dict[str, Any] = {"choices": [choice]}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key in ("id", "model", "created", "usage"):
            if chunk.get(key) is not None:
                response[key] = chunk[key]
        if has_entries(chunk.get("prompt_token_ids")):
            response.setdefault("prompt_token_ids", chunk["prompt_token_ids"])
        piece = _choice_of_chunk(chunk)
        if piece is None:
            continue
        if piece.get("finish_reason") is not None:
            choice["finish_reason"] = piece["finish_reason"]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(_require_list(piece["token_ids"], "token_ids"))
        if piece.get("logprobs") is not None:
            choice.setdefault("logprobs", {"content": []})["content"].extend(_logprob_entries(chunk))
        if piece.get("delta") is not None:
            delta = piece["delta"]
            if not isinstance(delta, Mapping):
                raise RecordError("a stream's `delta` is not an object")
            unknown = [key for key, value in delta.items() if key not in _DELTA_KEYS and value]
            if unknown:
                raise RecordError(
                    f"a stream's delta holds {unknown[0]!r}, which is not joined. Log the joined answer"
                )
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
    return response


def _choice_of_chunk(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice of a chunk; None for one that only has counts, like the last one of a stream."""
    listed = chunk.get("choices")
    if listed is None or (is_list(listed) and not len(listed)):
        return None
    piece = listed[0] if isinstance(listed, list | tuple) and len(listed) == 1 else None
    index = piece.get("index") if isinstance(piece, Mapping) else None
    if not isinstance(piece, Mapping) or (index is not None and (type(index) is not int or index)):
        raise RecordError("a stream of several choices cannot be joined. Log the joined answer")
    return piece


def _logprob_entries(chunk: Mapping[str, Any]) -> list[Any]:
    piece = _choice_of_chunk(chunk)
    logged = piece.get("logprobs") if piece is not None else None
    entries = logged.get("content") if isinstance(logged, Mapping) else None
    return _require_list(entries, "logprobs.content") if entries is not None else []


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
    **ThreadRows(read_threads).functions,
    row_is_call=True,
    shows="One call each: prompt, completion, logprobs, weight version, and the request's messages and tools "
    "unless it was trimmed to a triplet. Rows of one rollout are read together.",
)
