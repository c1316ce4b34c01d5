"""rLLM gateway traces: one record per model call, with its request and the server's answer.

rllm-org/rllm `rllm-model-gateway/src/rllm_model_gateway/models.py` (`TraceRecord`), from SQLite or over HTTP.
`raw_response` may repeat the ids. In cumulative token mode a stored record has only what its prompt adds to the
previous call (`prompt_delta_token_ids`); a reader of the store restores the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import read_usage
from tito_audit.formats._calls import TOOLS_MISSING, calls_unknown_tools, read_turn_at, stated_model
from tito_audit.formats._columns import first_text, has_entries, is_list
from tito_audit.formats._update import find_copies, object_at, sources_at, sources_of_calls
from tito_audit.formats._writer import listed_calls
from tito_audit.record.arrays import as_floats
from tito_audit.record.edits import Edit, Path
from tito_audit.record.message import as_message, as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import CallSource, Counter, Layout, Source, Sources
from tito_audit.record.stated import Unread

_PROMPT, _COMPLETION = "prompt_token_ids", "completion_token_ids"
_PROMPT_NAMES = ("prompt_token_ids", "prompt_ids", "prompt", "input_ids")
_COMPLETION_NAMES = ("token_ids", "completion_token_ids", "response_token_ids", "output_ids")
_ROUTING = ("routing_matrices", "routed_experts")
_TAKEN = (_PROMPT, _COMPLETION, "logprobs", "prompt_delta_token_ids", "messages")


def read(row: Row, place: Place) -> Sequence[Rollout]:
    request = object_at(row, "raw_request")
    answer = row["response_message"]
    sent = as_messages(row.get("messages"), "messages")
    sent = sent or as_messages(request.get("messages"), "raw_request.messages")
    # An answer without its request would render as if there had been no prompt.
    message = as_message(answer, "response_message") if sent and answer else None
    messages = (*sent, message) if message is not None and message.role == "assistant" else ()
    tools = as_tools(request.get("tools"), "raw_request.tools")
    response, choice = object_at(row, "raw_response"), object_at(row, "raw_response", "choices", 0)
    # The ids of the record and those of the server's raw response.
    copies_disagree = ""
    for name, keys, holders in (
        (_PROMPT, _PROMPT_NAMES[:2], (response, choice)),
        (_COMPLETION, _COMPLETION_NAMES, (choice,)),
    ):
        own: Any = row.get(name)
        copies = [holder[key] for holder in holders for key in keys if has_entries(holder.get(key))]
        if has_entries(own) and any(
            not np.array_equal(as_floats(copy, "raw_response"), as_floats(own, "")) for copy in copies
        ):
            copies_disagree = f"{name} and its copy in raw_response"
            break
    stated = replace(stated_model(row), copies_disagree=copies_disagree)
    if calls_unknown_tools(messages, tools):
        stated, messages = stated.not_read(Unread.MESSAGES, TOOLS_MISSING), ()
    turn = read_turn_at(row, _PROMPT, _COMPLETION, _TAKEN)
    parts = object_at(answer)
    beside = any(parts.get(name) is not None for name in ("tool_calls", "reasoning", "reasoning_content"))
    alone = bool(choice) and len(response["choices"]) == 1
    turn = replace(
        turn,
        message_index=len(messages) - 1 if messages else None,
        completion_text=None if beside else first_text(parts, ("content",)),
        usage=read_usage(request, response, choice, turn.completion_ids) if alone else None,
    )
    if row.get(_PROMPT) is None and row.get(_COMPLETION) is None and row.get("prompt_delta_token_ids") is None:
        stated = stated.without_ids()
    kwargs = object_at(request, "chat_template_kwargs")
    return (Rollout(place, FORMAT.name, messages, tools, kwargs, turns=(turn,), stated=stated),)


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    parts = {name: row[name] for name in ("raw_request", "raw_response") if isinstance(row.get(name), Mapping)}
    scored = [Source(("logprobs",))] if is_list(row.get("logprobs")) else []
    all_logprobs = [*scored]
    choice = object_at(row, "raw_response", "choices", 0)
    content = object_at(choice, "logprobs").get("content")
    if scored and isinstance(content, list | tuple) and all(isinstance(entry, Mapping) for entry in content):
        with suppress(RecordError):
            scores = as_floats([entry.get("logprob") for entry in content], "")
            if np.array_equal(scores, as_floats(row["logprobs"], ""), equal_nan=True):
                inside: Path = ("raw_response", "choices", 0, "logprobs")
                scored.append(Source((*inside, "content"), Layout.ENTRIES))
                all_logprobs.append(Source(inside))
    columns = {name: sources_at([(name,)]) for name, value in row.items() if is_list(value)}
    prompt = row[_PROMPT] if is_list(row.get(_PROMPT)) else None
    usage = object_at(row, "raw_response", "usage")
    call = CallSource(
        prompts=sources_at([] if prompt is None else [(_PROMPT,), *find_copies(parts, _PROMPT_NAMES, prompt)]),
        logprobs=tuple(scored),
        columns={**columns, "logprobs": tuple(all_logprobs)},
        routing=tuple(
            (*path, name)
            for path in ((), ("raw_response",), ("raw_response", "choices", 0))
            for name in _ROUTING
            if object_at(row, *path).get(name) is not None
        ),
        counters=(Counter(("raw_response", "usage")),) if usage else (),
    )
    return sources_of_calls([[call]])


def count_edits(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to `token_counts`, whose keys are the gateway's own."""
    counts = object_at(row, "token_counts")
    old, new = before[0].turns[0].prompt_ids, after[0].turns[0].prompt_ids
    sampled = before[0].turns[0].completion_ids
    if old is None or new is None or len(old) == len(new):
        return
    total = 0 if sampled is None else len(sampled)
    for names, was, now in (
        (("prompt", "prompt_tokens"), len(old), len(new)),
        (("total", "total_tokens"), len(old) + total, len(new) + total),
    ):
        for name in names:
            if type(counts.get(name)) is int and counts[name] == was:
                yield Edit(("token_counts", name), now)


FORMAT = Format(
    name="rllm_gateway",
    title="rLLM gateway traces",
    signature=Signature("{trace_id}, {prompt_token_ids}, {completion_token_ids}, {response_message}"),
    precedence=140,
    matches=lambda row: (
        {_COMPLETION, "response_message"} <= row.keys()
        and (row["response_message"] is None or isinstance(row["response_message"], Mapping))
    ),
    **listed_calls(read, sources, totals=count_edits),
    row_is_call=True,
    shows="One call with its messages, tools, logprobs and weight version. Records kept as deltas have no whole "
    "prompt. Calls of one session are read together.",
)
