"""OpenAI answers as a caller logs them: chat completions, completions and Responses objects.

There are no ids. If logprobs were requested there are token strings and bytes, from which ids are looked up
later; the result is a guess and marked as one. openai Python package, response types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import ONE_CALL_REFUSAL, choice_sources, read_choices, stated_by_request
from tito_audit.formats._calls import only_text
from tito_audit.formats._responses import (
    ITEMS_UNREAD,
    chat_tools,
    find_exchange,
    is_response_object,
    nonempty_list,
    nonempty_text,
    parse_items,
    parse_request,
    token_texts,
    unknown_item_types,
)
from tito_audit.formats._text_logs import text_log_notice
from tito_audit.formats._update import object_at, sources_of_calls
from tito_audit.formats._writer import listed_calls
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Layout, Source, Sources
from tito_audit.record.stated import Unread


def matches(row: Row) -> bool:
    logged = find_exchange(row)
    # `nemo_gym` reads a Responses object with ids on its items.
    return logged is not None and not any(
        isinstance(item, Mapping) and item.get("generation_token_ids") is not None
        for response in logged.responses
        for item in nonempty_list(response.get("output"))
    )


def read(row: Row, place: Place) -> Sequence[Rollout]:
    logged = find_exchange(row)
    if logged is None or not all(is_response_object(response) for response in logged.responses):
        choices, notice = read_choices(row, place, FORMAT.name), text_log_notice(row, FORMAT.name)
        return tuple([replace(r, stated=replace(r.stated, notice=notice)) for r in choices]) if notice else choices
    request, rollouts = logged.request, []
    for number, response in enumerate(logged.responses):
        # It has several calls if the service ran tools in between.
        before = parse_request({"instructions": response.get("instructions"), **request}, "request")
        whole = [*before, *parse_items(response["output"], "output")]
        stated = stated_by_request(request, response)
        messages = tuple(step.message for step in whole)
        unread = unknown_item_types(response["output"])
        if unread:
            stated = stated.with_facts(items_not_read=unread).not_read(Unread.MESSAGES, ITEMS_UNREAD)
        # Instructions alone are no request: the user's input is missing.
        has_request = any(step.items or step.message.role == "user" for step in before)
        if unread or not has_request or nonempty_text(request.get("previous_response_id")):
            messages = ()
        turns: tuple[Turn, ...] = ()
        for index, step in enumerate(whole):
            if index >= len(before) and step.is_call:
                text = only_text(step.message)
                # Reasoning and tool calls have no logprobs, so the tokens of such an answer would have gaps.
                parts = [
                    token_texts(object_at(part).get("logprobs"))
                    for item in (step.items if text is not None else ())
                    for part in nonempty_list(item.get("content"))
                ]
                turn = Turn(
                    prompt_ids=None,
                    completion_ids=None,
                    message_index=index if messages else None,
                    completion_text=text,
                    finish_reason="length"
                    if any(nonempty_text(i.get("status")) == "incomplete" for i in step.items)
                    else None,
                    token_texts=tuple(chain(*filter(None, parts))) or None if None not in parts else None,
                )
                turns = (*turns, turn)
        if not any(turn.token_texts for turn in turns):
            stated = stated.without_ids()
            turns = ()
        tools = chat_tools(nonempty_list(request.get("tools"), response.get("tools")), "request.tools")
        own = replace(place, item=number)
        rollouts.append(Rollout(own, FORMAT.name, messages, tools, turns=turns, stated=stated))
    return tuple(rollouts)


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    logged = find_exchange(row)
    if logged is None or not all(is_response_object(response) for response in logged.responses):
        return choice_sources(row, rollouts)
    calls: list[list[CallSource]] = []
    for path, response in zip(logged.response_paths, logged.responses, strict=True):
        # A call's logprobs are those of its content parts, in order.
        calls.append([])
        for call in (step for step in parse_items(response["output"], "output") if step.is_call):
            sources, start = [], 0
            for number, item in enumerate(response["output"]):
                if not any(item is own for own in call.items):
                    continue
                for place, part in enumerate(nonempty_list(item.get("content"))):
                    end = start + len(nonempty_list(object_at(part).get("logprobs")))
                    if end > start:
                        where = (*path, "output", number, "content", place, "logprobs")
                        sources.append(Source(where, Layout.ENTRIES, (start, end)))
                    start = end
            whole = "the tokens of this answer are known only from their logprobs, which cannot be dropped"
            calls[-1].append(CallSource(logprobs=tuple(sources), whole=whole))
    return sources_of_calls(calls)


FORMAT = Format(
    name="openai_chat",
    title="OpenAI responses",
    signature=Signature("{choices[].message|object: response}, without token ids"),
    precedence=250,
    matches=matches,
    **listed_calls(read, sources, drop_error=ONE_CALL_REFUSAL),
    row_is_call=True,
    shows="Token strings with logprobs when they were asked for: ids are looked up from their bytes and "
    "marked as a guess. Without logprobs there is text only and nothing to audit.",
)
