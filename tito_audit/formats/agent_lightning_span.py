"""Agent Lightning spans, and the triplets that its adapters make from them.

A span of a model call has its ids in `attributes`, under the names of the tracer that wrote it: as lists, or as
text if the proxy wrote it. Other spans hold no tokens. A triplet is one call; earlier releases list them.
microsoft/agent-lightning `types/tracer.py`, `adapter/triplet.py`; checked with agentlightning 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import LoggedCall, Thread, build_thread, thread_rows
from tito_audit.formats._calls import build_turn, model_name
from tito_audit.formats._columns import (
    Raw,
    as_objects,
    first_present_name,
    first_text,
    has_entries,
    ids_or_none,
    is_given,
    is_list,
    parse_literal,
)
from tito_audit.formats._responses import drop_empty_fields, nonempty_text
from tito_audit.formats._update import equals_numbers, object_at, sources_at
from tito_audit.record.arrays import Ids
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, ToolSpec, as_message
from tito_audit.record.nesting import load_python_json
from tito_audit.record.rollout import Place, Turn
from tito_audit.record.sources import CallSource, Counter, Layout, Source
from tito_audit.record.stated import Stated

_WEAVE_PREFIX = "agentlightning.operation.output"
_RAW_PREFIX = "llm.hosted_vllm"
_PROMPTS = ("prompt_token_ids", f"{_WEAVE_PREFIX}.prompt_token_ids", f"{_RAW_PREFIX}.prompt_token_ids")
_COMPLETIONS = (
    "response_token_ids",
    f"{_WEAVE_PREFIX}.response_token_ids.0",
    f"{_WEAVE_PREFIX}.choices.0.token_ids",
    f"{_WEAVE_PREFIX}.choices.0.provider_specific_fields.token_ids",
    f"{_RAW_PREFIX}.response_token_ids",
    f"{_RAW_PREFIX}.choices",
)
_LOGPROBS = "logprobs.content"
_PART_TYPES = ("text", "image_url", "input_audio", "file")


@dataclass(frozen=True, slots=True)
class _TokenFields:
    """Where an object holds ids and logprobs, as lists or as text."""

    holder: Mapping[str, Any]
    path: Path
    prompts: tuple[str, ...]
    completion: Any
    """The list of ids, already unwrapped."""
    logprobs: str


def matches(row: Row) -> bool:
    if isinstance(row.get("attributes"), Mapping):
        return "span_id" in row and "trace_id" in row and ("rollout_id" in row or "sequence_id" in row)
    if _is_triplet(row):
        return True
    listed = row.get("triplets")
    return isinstance(listed, list | tuple) and bool(listed) and _is_triplet(listed[0])


def read_threads(row: Row, place: Place) -> Sequence[Thread]:
    stated = Stated().with_facts(id=first_text(row, ("rollout_id",)))
    if isinstance(row.get("attributes"), Mapping):
        # A span that is not a model call needs no ids.
        attributes = row["attributes"]
        column = first_present_name(attributes, _COMPLETIONS)
        completion = None if column is None else parse_literal(attributes[column])
        if column == f"{_RAW_PREFIX}.choices":
            completion = object_at(completion, 0).get("token_ids")
        elif has_entries(completion) and is_list(completion[0]):
            completion = completion[0]  # that of the first choice
        fields = _TokenFields(attributes, ("attributes",), _PROMPTS, completion, _LOGPROBS)
        prompt = _chat_messages(_unflatten(attributes, "gen_ai.prompt"), "gen_ai.prompt")
        answer = _chat_messages(_unflatten(attributes, "gen_ai.completion"), "gen_ai.completion", of_prompt=False)
        turn = _read_turn(fields, first_text(attributes, ("gen_ai.completion.0.finish_reason",)))
        calls = [
            LoggedCall(
                turn,
                partial(_call_source, fields, turn.prompt_ids),
                prompt,
                answer[0] if answer else None,
                _span_tools(_unflatten(attributes, "gen_ai.request.functions")),
                stated=_stated_model(
                    attributes.get("gen_ai.response.model"), attributes.get("gen_ai.request.model")
                ),
                wants_ids=any(name in attributes for name in (*_PROMPTS, *_COMPLETIONS)),
            )
        ]
    elif _is_triplet(row):
        calls = [_triplet_call(row, ())]
    else:
        calls = []
        for number, triplet in enumerate(row["triplets"]):
            if not _is_triplet(triplet):
                raise RecordError(f"triplets[{number}] is not a triplet: `prompt` and `response` with `token_ids`")
            calls.append(_triplet_call(triplet, ("triplets", number)))
    return [build_thread(calls, place, FORMAT.name, stated)]


def _is_triplet(value: object) -> bool:
    return all("token_ids" in object_at(value, side) for side in ("prompt", "response"))


def _triplet_call(triplet: Mapping[str, Any], path: Path) -> LoggedCall:
    prompt, response = triplet["prompt"], triplet["response"]
    prompted = _TokenFields(prompt, (*path, "prompt"), ("token_ids",), None, "")
    answered = _TokenFields(response, (*path, "response"), (), response.get("token_ids"), "logprobs")
    request, response_facts = (object_at(triplet, "metadata", name) for name in ("request", "response"))
    answer = _chat_messages(response.get("raw_content"), "response.raw_content", of_prompt=False)
    first = object_at(response, "raw_content", 0)
    turn = replace(_read_turn(answered, first_text(first, ("finish_reason",))), prompt_ids=_prompt_ids(prompted))

    def source() -> CallSource:
        return replace(
            _call_source(answered, None), prompts=_call_source(prompted, turn.prompt_ids).prompts, counters=()
        )

    return LoggedCall(
        turn,
        source,
        _chat_messages(prompt.get("raw_content"), "prompt.raw_content"),
        answer[0] if answer else None,
        _span_tools(request.get("functions")),
        stated=_stated_model(response_facts.get("model"), request.get("model")),
    )


def _read_turn(fields: _TokenFields, finish_reason: str | None) -> Turn:
    """The turn of an object; adapters write empty lists for missing ids and logprobs."""

    def logprobs() -> tuple[str, Raw] | None:
        values = [entry.get("logprob") for entry in _logprob_entries(fields) or ()]
        return (fields.logprobs, values) if values else None

    completion = fields.completion if is_given(fields.completion) else None
    turn = build_turn(("", None), ("response token ids", completion), logprobs, {}, finish_reason=finish_reason)
    return replace(turn, prompt_ids=_prompt_ids(fields))


def _prompt_ids(fields: _TokenFields) -> Any:
    name = first_present_name(fields.holder, fields.prompts)
    return None if name is None else ids_or_none(parse_literal(fields.holder[name]), name)


def _logprob_entries(fields: _TokenFields) -> Sequence[Mapping[str, Any]] | None:
    """The objects with a `logprob` per token; None if there are none."""
    value = parse_literal(fields.holder.get(fields.logprobs))
    refusal = f"{fields.logprobs} is not a list of tokens (objects with a `logprob`)"
    return None if value is None else as_objects(value, refusal)


def _call_source(fields: _TokenFields, prompt_ids: Ids | None) -> CallSource:
    """Where an object stores its call: the prompt under each name that repeats it, the logprobs, the counts."""
    prompts = [
        name for name in fields.prompts if equals_numbers(parse_literal(fields.holder.get(name)), prompt_ids)
    ]
    logprobs = (Source((*fields.path, fields.logprobs), Layout.ENTRIES),) if _logprob_entries(fields) else ()
    return CallSource(
        sources_at([(*fields.path, name) for name in prompts]),
        logprobs,
        counters=(Counter(fields.path, "gen_ai.usage."),),
        whole="{name} holds texts along with the logprobs and cannot be left out",
    )


def _stated_model(*names: object) -> Stated:
    return Stated(model=next((real for name in names if (real := model_name(name)) is not None), None))


# Attributes: dotted keys, and values as text. microsoft/agent-lightning 0.3.0 `adapter/triplet.py`,
# `adapter/messages.py`, `instrumentation/agentops.py`


def _unflatten(attributes: Mapping[str, Any], prefix: str) -> Any:
    """The nested value below a prefix, with numbered keys as lists; None if there is none."""
    start = f"{prefix}."
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if not isinstance(key, str) or not key.startswith(start) or value is None:
            continue
        steps = key[len(start) :].split(".", 16)
        inner = nested
        for step in steps[:-1]:
            deeper = inner.setdefault(step, {})
            if not isinstance(deeper, dict):
                raise RecordError(f"attributes: {key!r} continues the key of a value")
            inner = deeper
        inner[steps[-1]] = value
    return _lists_from_numbered_keys(nested) if nested else None


def _chat_messages(raw: Any, where: str, *, of_prompt: bool = True) -> tuple[Message, ...]:
    """The messages in the contents of a span; () if some are missing.

    Spans store tool calls of an answer elsewhere, so contents without them are no conversation.
    """
    entries = list(raw) if isinstance(raw, list | tuple) else [raw] if isinstance(raw, Mapping) else []
    messages: list[Message] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            return ()
        # Tool calls of spans have name and arguments at the top level.
        wire = drop_empty_fields(entry, ("finish_reason", "index"))
        content = wire.get("content")
        if isinstance(content, str) and content.startswith('[{"'):
            # Content parts that the tracer wrote as a JSON string.
            with suppress(ValueError):
                parts = load_python_json(content)
                if isinstance(parts, list) and all(
                    isinstance(part, dict) and part.get("type") in _PART_TYPES for part in parts
                ):
                    wire["content"] = parts
        calls = wire.get("tool_calls")
        if isinstance(calls, list | tuple):
            wire["tool_calls"] = [
                call
                if not isinstance(call, Mapping) or "function" in call
                else {
                    "id": call.get("id"),
                    "type": "function",
                    "function": {"name": call.get("name"), "arguments": call.get("arguments")},
                }
                for call in calls
            ]
        messages.append(as_message(wire, where))
        called = bool(messages[-1].tool_calls)
        if nonempty_text(entry.get("finish_reason")) in ("tool_calls", "function_call") and not called:
            return ()
    answered = False
    for message in messages:
        if message.role == "assistant":
            answered = bool(message.tool_calls)
        elif message.role == "tool" and not answered:
            return ()
    whole = of_prompt or (len(messages) == 1 and messages[0].role == "assistant")
    return tuple(messages) if whole else ()


def _span_tools(functions: Any) -> tuple[ToolSpec, ...]:
    """The tools of a request, whose parameters are JSON strings."""
    if not isinstance(functions, list | tuple):
        return ()
    return tuple(
        {"type": "function", "function": {**function, "parameters": parse_literal(function.get("parameters"))}}
        for function in functions
        if isinstance(function, Mapping)
    )


def _lists_from_numbered_keys(value: Any) -> Any:
    """The value with every object whose keys count from 0 as a list, at any depth."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists_from_numbered_keys(entry) for key, entry in value.items()}
    numbers: Sequence[str] = sorted((key for key in inner if key.isdecimal()), key=int)
    if numbers and [int(key) for key in numbers] == list(range(len(numbers))):
        # A tracer may keep facts about all entries beside them (`prompt_filter_results`).
        return [inner[key] for key in numbers]
    return inner


FORMAT = Format(
    name="agent_lightning_span",
    title="Agent Lightning spans and triplets",
    signature=Signature(
        "{span_id}, {trace_id}, {attributes}; or {prompt.token_ids} + {response.token_ids}; or {triplets}"
    ),
    precedence=151,
    matches=matches,
    **thread_rows(read_threads),
    row_is_call=True,
    shows="One call each: prompt, completion and logprobs, messages where the tracer kept all of them (an "
    "answer's tool calls are in other spans). Spans of one rollout are read together.",
)
