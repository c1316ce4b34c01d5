"""One ART trajectory as rollouts, the same in a JSONL group and inside a Parquet row.

A trajectory holds histories (`messages_and_choices`, where a sampled turn is a choice object) or, in later
versions, `exchanges` as they were sent over the wire. OpenPipe/ART `src/art/trajectories.py`, later
`src/art/trajectories/__init__.py`; checked with openpipe-art 0.5.18.

Exchanges are one list for each kind of endpoint, read as threads of calls. Chat completions and completions
hold ids as vLLM returns them; a Responses object holds them in `token_generations`, a Messages answer next to
its content. OpenPipe/ART `src/art/trajectories/_protocols.py` and `_tokenize.py` (unreleased after 0.5.18).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._answers import (
    FindSource,
    LoggedCall,
    Thread,
    build_thread,
    chat_calls,
    choice_source,
    group_into_threads,
    read_choice,
    stated_by_request,
    template_kwargs,
)
from tito_audit.formats._calls import read_turn
from tito_audit.formats._columns import as_object, as_objects
from tito_audit.formats._responses import (
    Exchange,
    chat_tools,
    drop_empty_fields,
    nonempty_text,
    parse_items,
    parse_request,
    unknown_item_types,
)
from tito_audit.formats._update import path_text, sources_at
from tito_audit.record.arrays import as_ids, empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, as_message, as_tools, without_arrays
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Layout, Source
from tito_audit.record.stated import Stated

KINDS = ("chat_completions", "completions", "responses", "messages")
"""The lists of exchanges, in the order ART reads them."""


def exchange_threads(root: Row, exchanges: object, path: Path) -> list[list[LoggedCall]]:
    """The threads of a trajectory's exchanges at `path`, each in the order of its requests."""
    lists = as_object(exchanges, "exchanges is not an object with one list for each kind of endpoint")
    lines: list[list[LoggedCall]] = []
    for kind in KINDS:
        listed = lists.get(kind)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple):
            raise RecordError(f"exchanges.{kind} is not a list")
        for number, exchange in enumerate(listed):
            if not isinstance(exchange, Mapping) or not all(
                isinstance(exchange.get(key), Mapping) for key in ("request", "response")
            ):
                raise RecordError(
                    f"exchanges.{kind}[{number}] is not an exchange: an object with a `request` and a `response` "
                    "is expected"
                )
        in_time = list(range(len(listed)))
        with suppress(KeyError, TypeError, ValueError):  # in log order if a time cannot be read
            times = [[datetime.fromisoformat(each[key]) for key in ("start_time", "end_time")] for each in listed]
            in_time = sorted(in_time, key=times.__getitem__)
        calls: list[list[LoggedCall]] = []
        for number in in_time:
            request, response, at = listed[number]["request"], listed[number]["response"], (*path, kind, number)
            if kind == "messages":
                calls.append([_message_call(request, response, (*at, "response"))])
            elif kind == "responses":
                calls += [[call] for call in _generation_calls(request, response, (*at, "response"))]
            else:
                calls.append(chat_calls(root, request, response, (*at, "request"), (*at, "response")))
        lines += group_into_threads(calls)
    return lines


def _message_call(request: Mapping[str, Any], response: Mapping[str, Any], path: Path) -> LoggedCall:
    # No messages are read if the request holds what they cannot express, such as a document.
    plain, wires = without_arrays(request), []
    if plain.get("system"):
        wires.append({"role": "system", "content": _joined_text(plain["system"])})
    complete = not wires or wires[0]["content"] is not None
    for message in as_objects(plain.get("messages"), "request.messages is not a list of messages (objects)"):
        chat_wires = _chat_wires(message)
        complete = complete and chat_wires is not None
        wires += chat_wires or []
    sent = tuple(as_message(wire, "request.messages") for wire in wires) if complete else ()
    tools, names = plain.get("tools"), {"name": "name", "description": "description", "input_schema": "parameters"}
    if tools is not None:
        tools = as_objects(tools, "request.tools is not a list of tool definitions (objects)")
    functions = [{ours: tool[key] for key, ours in names.items() if key in tool} for tool in tools or ()]
    # The answer is not a message if it holds anything but text, thinking and tool calls.
    wrote = _chat_wires({"role": "assistant", "content": without_arrays(response.get("content"))})
    answer = as_message(wrote[0], "response.content") if wrote is not None and len(wrote) == 1 else None
    turn = read_turn(response, "exchanges.messages[].response")
    return LoggedCall(
        turn,
        partial(CallSource, entry=path),
        prompt=sent if answer is not None else (),
        answer=answer,
        tools=tuple({"type": "function", "function": function} for function in functions),
        template_kwargs=template_kwargs(request),
        stated=stated_by_request(request, response),
        wants_ids=any(response.get(key) is not None for key in ("token_ids", "prompt_token_ids")),
    )


def _generation_calls(request: Mapping[str, Any], response: Mapping[str, Any], path: Path) -> Iterator[LoggedCall]:
    """The calls of a Responses exchange: one for each generation, which writes one or more items."""
    output = response.get("output")
    if not isinstance(output, list | tuple):
        raise RecordError("exchanges.responses[].response.output is not a list of items")
    before = tuple(
        s.message for s in parse_request({"instructions": response.get("instructions"), **request}, "request")
    )
    if unknown_item_types(output) or nonempty_text(request.get("previous_response_id")):
        before = ()
    tools = request.get("tools")
    fields: dict[str, Any] = {
        "tools": chat_tools(tools if isinstance(tools, list | tuple) else None, "request.tools"),
        "template_kwargs": template_kwargs(request),
        "stated": stated_by_request(request, response),
    }
    listed = response.get("token_generations")
    if listed is None:
        turn = Turn(prompt_ids=None, completion_ids=None)
        yield LoggedCall(turn, CallSource, before, _sole_assistant_message(output), wants_ids=False, **fields)
        return
    listed = as_objects(listed, "token_generations is not a list of generations (objects)")
    for number, generation in enumerate(listed):
        where, indices = f"token_generations[{number}]", generation.get("output_indices")
        own: list[int] = as_ids([] if indices is None else indices, f"{where}.output_indices").tolist()
        if any(not 0 <= index < len(output) for index in own) or own != sorted(set(own)):
            raise RecordError(f"{where}.output_indices is not an ascending list of output item indices")
        sent = before and (
            *before,
            *(s.message for s in parse_items(output[: own[0]] if own else output, "output")),
        )
        answer = _sole_assistant_message([output[i] for i in own])
        source = partial(_generation_source, response, generation, path, number, len(listed) == 1)
        prompt, entries = generation.get("prompt_token_ids"), generation.get("output_tokens")
        if entries is not None:
            entries = as_objects(entries, f"{where}.output_tokens is not a list of tokens (objects)")
        tokens = [entry.get("token_id") for entry in entries or ()]
        ids = None if entries is None else as_ids(tokens, f"{where}.output_tokens")
        logprobs = [entry.get("logprob") for entry in entries or ()]
        values, columns = build_call_columns(
            empty_ids() if ids is None else ids,
            logprobs=("output_tokens", logprobs) if any(value is not None for value in logprobs) else None,
        )
        turn = Turn(
            prompt_ids=None if prompt is None else as_ids(prompt, f"{where}.prompt_token_ids"),
            completion_ids=ids,
            completion_logprobs=None if ids is None else values,
            columns=columns,
        )
        yield LoggedCall(turn, source, sent if answer else (), answer, **fields)


def _sole_assistant_message(items: Sequence[Any]) -> Message | None:
    """The assistant message that items form; None if they form none or several messages."""
    written = [step.message for step in parse_items(items, "output")]
    return written[0] if len(written) == 1 and written[0].role == "assistant" else None


def _generation_source(
    response: Mapping[str, Any], generation: Mapping[str, Any], path: Path, number: int, alone: bool
) -> CallSource:
    """Where a generation is stored; if it is `alone`, the response's token counts are its own."""
    where = (*path, "token_generations", number)
    entries = generation.get("output_tokens")
    return CallSource(
        prompts=sources_at([(*where, "prompt_token_ids")] if "prompt_token_ids" in generation else []),
        logprobs=(Source((*where, "output_tokens"), Layout.ENTRIES, (0, len(entries))),) if entries else (),
        counters=(Counter((*path, "usage")),) if alone and isinstance(response.get("usage"), Mapping) else (),
        whole="output_tokens holds ids and logprobs together, so neither can be dropped",
    )


# The Messages API in chat form, as servers convert it before they apply a template: vllm-project/vllm
# `vllm/entrypoints/anthropic/serving_messages.py`, OpenPipe/ART `trajectories/_tokenize.py`


def _chat_wires(message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The chat messages of one message, each tool result as its own; None if it holds other blocks."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    blocks = as_objects(content, "a message's content is neither text nor a list of blocks (objects)")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = json.dumps(block.get("input") or {}, default=str)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and (result_text := _joined_text(block.get("content"))) is not None:
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result_text})
        else:
            return None
    body = [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else texts[0] if texts else None
    wire: dict[str, Any] = {"role": role, "content": body}
    if thoughts:
        wire["reasoning_content"] = "\n".join(thoughts)
    if calls:
        wire["tool_calls"] = calls
    return [*results, wire] if texts or thoughts or calls or not results else results


def _joined_text(content: object) -> str | None:
    """The text of a string, or of blocks that are all text; None for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return None
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def is_trajectory(value: object) -> bool:
    """Whether a value is an object with histories or exchanges as ART writes them."""
    if not isinstance(value, Mapping):
        return False
    exchanges = value.get("exchanges")
    return isinstance(value.get("messages_and_choices"), list | tuple) or (
        isinstance(exchanges, Mapping) and any(isinstance(exchanges.get(kind), list | tuple) for kind in KINDS)
    )


def trajectory_threads(
    root: Row, trajectory: Mapping[str, Any], path: Path, place: Place, name: str, stated: Stated
) -> list[Thread]:
    """The threads of the trajectory at `path` of the row: its histories, then those of its exchanges.

    A trajectory with neither is one thread without messages, which needs no ids.
    """
    versions = [trajectory.get(f"{end}_policy_version") for end in ("initial", "final")]
    policy_versions = tuple(version for version in versions if type(version) is int)
    facts = replace(stated, policy_versions=policy_versions if len(policy_versions) == len(versions) else ())
    parts = []
    if trajectory.get("messages_and_choices") is not None:
        parts.append(_history_thread(root, trajectory, path, place, name, facts))
    more, at = trajectory.get("additional_histories"), (*path, "additional_histories")
    if more is not None and not isinstance(more, list | tuple):
        raise RecordError(f"{path_text(at)} is not a list of histories")
    for number, history in enumerate(more or ()):
        history = as_object(history, f"{path_text(at)}[{number}] is not a history (an object)")
        parts.append(_history_thread(root, history, (*at, number), place, name, facts))
    exchanges = trajectory.get("exchanges")
    if exchanges is not None:
        for calls in exchange_threads(root, exchanges, (*path, "exchanges")):
            parts.append(build_thread(calls, place, name, facts))
    return parts or [Thread(Rollout(place, name, stated=facts.without_ids()), ())]


def _history_thread(
    root: Row, history: Mapping[str, Any], path: Path, place: Place, name: str, stated: Stated
) -> Thread:
    """The thread of one history; each of its choices is a call."""
    path = (*path, "messages_and_choices")
    entries = history.get("messages_and_choices", ())
    if not isinstance(entries, list | tuple):
        raise RecordError(f"{path_text(path)} is not a list of messages and choices")
    messages: list[Message] = []
    turns: list[Turn] = []
    sources: list[FindSource] = []
    copies = ""
    wanted = False
    for index, entry in enumerate(entries):
        if not (isinstance(entry, Mapping) and isinstance(entry.get("message"), Mapping) and "role" not in entry):
            wire = drop_empty_fields(entry) if isinstance(entry, Mapping) else entry
            messages.append(as_message(wire, f"{path_text(path)}[{index}]"))
            continue
        turn, conflict, wants_ids = read_choice({}, entry, entry)
        if turn.answer is None:
            raise RecordError(f"{path_text(path)}[{index}].message is not an assistant message")
        messages.append(turn.answer)
        # The weight version of the trajectory is that of its calls if it did not change on the way.
        versions = stated.policy_versions
        weight_versions = turn.weight_versions or ((str(versions[0]),) if len(set(versions)) == 1 else ())
        turns.append(replace(turn, message_index=index, weight_versions=weight_versions))
        at = (*path, index)
        alone = Exchange({}, (entry,), (), (at,))
        sources.append(partial(choice_source, root, alone, at, at, turn))
        wanted |= wants_ids
        copies = copies or conflict
    facts = replace(stated, copies_disagree=copies, ids_wanted=wanted)
    tools = as_tools(history.get("tools"), path_text((*path[:-1], "tools")))
    return Thread(
        Rollout(place, name, tuple(messages), tools, turns=tuple(turns if wanted else ()), stated=facts),
        tuple(sources if wanted else ()),
    )
