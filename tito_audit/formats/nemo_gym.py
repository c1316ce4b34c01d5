"""NeMo-Gym rollouts: a request, a Responses object with ids on its output items, and a reward.

The same three token fields are read from assistant messages in chat form, which is what NeMo-Gym sends to
its model servers, and from a Responses object logged without its request.
NVIDIA-NeMo/Gym `nemo_gym/rollout_collection.py`, `openai_utils.py`, `responses_converter.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tito_audit.format import Format, Row
from tito_audit.formats._calls import real_name, same_messages, written_once
from tito_audit.formats._columns import filled
from tito_audit.formats._gym import (
    GymCall,
    call_sources,
    cut_by_length,
    is_chat,
    layout_of,
    request_of,
    starts_conversation,
    updated_rows,
)
from tito_audit.formats._responses import (
    ITEMS_UNREAD,
    TOKEN_KEYS,
    Item,
    chat_tools,
    filled_list,
    is_response_object,
    text_of,
    unread_types,
)
from tito_audit.record.arrays import as_ids, empty_ids
from tito_audit.record.build import call_columns
from tito_audit.record.column import MovePolicy
from tito_audit.record.message import Message, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.stated import Stated, Unread, as_group
from tito_audit.signature import Signature, keys, way


def _matches(row: Row) -> bool:
    response = row.get("response", row)
    if "responses_create_params" in row:
        return isinstance(response, dict | Mapping) and isinstance(response.get("output"), Sequence)
    if _any_holds_ids(row.get("messages")):
        return True
    return is_response_object(row) and _any_holds_ids(row["output"])


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    layout = layout_of(row)
    messages, turns = layout.messages, _turns(layout.calls, layout.messages)
    params, response = (row, row) if is_chat(row) else request_of(row)
    stated = Stated(model=real_name(response.get("model")), group=as_group(row.get("_ng_task_index")))
    stated = replace(stated.with_facts(mask_sample=row.get("mask_sample")), ids_wanted=_wants_ids(layout.calls))
    stated = replace(stated, converted_tools=True)
    if is_chat(row):
        tools = as_tools(row.get("tools"), "tools")
        return (Rollout(place, FORMAT.name, messages, tools, turns=turns, stated=stated),)
    if turns and cut_by_length(response):
        turns = (*turns[:-1], replace(turns[-1], finish_reason="length"))
    output = response["output"]
    inner = output if len(output) and isinstance(output[0], list | tuple) else [output]
    unread = tuple(sorted({kind for items in inner for kind in unread_types(items)}))
    if unread:
        stated = stated.with_facts(items_not_read=unread).not_read(Unread.MESSAGES, ITEMS_UNREAD)
    if unread or not (layout.has_request or starts_conversation(messages)):
        # Messages with gaps, or without their request, would render as if nothing were missing.
        messages = ()
        turns = tuple(replace(turn, message_index=None, prompt_messages=None) for turn in turns)
    tools = chat_tools(filled_list(params.get("tools"), response.get("tools")), "responses_create_params.tools")
    return (Rollout(place, FORMAT.name, messages, tools, turns=turns, stated=stated),)


def _turns(calls: Sequence[GymCall], messages: Sequence[Message]) -> tuple[Turn, ...]:
    """One turn per call; none if the log holds neither ids nor decoded tokens."""
    if all(call.token_item is None for call in calls):
        return ()
    return written_once([_turn(call, messages) for call in calls], messages)


def _wants_ids(calls: Sequence[GymCall]) -> bool:
    """Whether the log has a place for ids."""
    items = [call.token_item for call in calls if call.token_item is not None]
    return any(item.get(key) is not None for item in items for key in TOKEN_KEYS)


def _turn(call: GymCall, messages: Sequence[Message]) -> Turn:
    token_item = call.token_item or {}
    index = len(call.prompt)
    in_place = index < len(messages) and same_messages(messages[: index + 1], (*call.prompt, call.answer))
    text = text_of(token_item.get("generation_str"))
    if text is None and not call.answer.tool_calls and call.answer.reasoning is None:
        text = call.answer.text
    turn = Turn(
        prompt_ids=None,
        completion_ids=None,
        message_index=index if in_place else None,
        prompt_messages=None if in_place else call.prompt,
        prompt_text=text_of(token_item.get("prompt_str")),
        completion_text=text,
        finish_reason="length" if text_of(token_item.get("status")) == "incomplete" else None,
    )
    prompt, generated = token_item.get("prompt_token_ids"), token_item.get("generation_token_ids")
    if not filled(prompt) and not filled(generated):
        return turn
    completion_ids = None if generated is None else as_ids(generated, "generation_token_ids")
    logprobs = token_item.get("generation_log_probs")
    values, columns = call_columns(
        empty_ids() if completion_ids is None else completion_ids,
        logprobs=None if logprobs is None else ("generation_log_probs", logprobs),
        other=_other_columns(token_item),
    )
    return replace(
        turn,
        prompt_ids=None if prompt is None else as_ids(prompt, "prompt_token_ids"),
        completion_ids=completion_ids,
        completion_logprobs=values,
        columns=columns,
    )


def _other_columns(token_item: Item) -> dict[str, tuple[Any, MovePolicy]]:
    """Every other list that may have one entry per token."""
    found: dict[str, tuple[Any, MovePolicy]] = {}
    for name, value in token_item.items():
        if name == "routed_experts" and isinstance(value, list):
            found[name] = (value, MovePolicy.DROP)
        elif name not in TOKEN_KEYS and _is_numbers(value):
            found[name] = (value, MovePolicy.MOVE)
    return found


def _is_numbers(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iufb"
    return isinstance(value, list) and len(value) > 1 and all(isinstance(x, int | float) for x in value)


def _any_holds_ids(values: object) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    for value in values:
        if isinstance(value, dict | Mapping) and value.get("generation_token_ids") is not None:
            return True
    return False


FORMAT = Format(
    name="nemo_gym",
    title="NeMo-Gym rollouts",
    signature=Signature.of(
        way("responses_create_params", keys("response.output", before=" + ")),
        way(keys("generation_token_ids", before="messages with ")),
    ),
    precedence=50,
    matches=_matches,
    read=_read,
    sources=call_sources,
    update=partial(updated_rows, read=_read),
    shows="Messages, tools and every call: its complete prompt, what was sampled, its logprobs. No tokenizer "
    "is named and no loss mask is written: what was generated is trained.",
)
