"""Generic rows made from other logs: each holds a training row or a list of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tito_audit.convert.maker import Holds, Maker, MakerInput
from tito_audit.convert.makers.shared import (
    messages_as_logged,
    other_lists,
    other_lists_of_call,
    plain_list,
    row_of,
    scores_as,
    weights_as,
)
from tito_audit.convert.rows_and_calls import loss_weights
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.record.rollout import Rollout, Turn

_OF_CALLS = frozenset(
    (
        *("messages", "prompt_ids", "completion_ids", "logprobs", "prompt_text"),
        *("text", "finish_reason", "stop_reason", "weight_versions"),
    )
)
"""Keys of a call."""
_COMMON = ("messages", "tools", "chat_template_kwargs")


def _rows(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    row = row_of(sample)
    new_row: dict[str, Any] = {**sample.facts, **_conversation(sample.rollout)}
    if row.prompt_length is not None:
        new_row["prompt_length"] = row.prompt_length
    new_row["token_ids"] = row.token_ids.tolist()
    weights = loss_weights(row)
    if weights is not None:
        new_row["loss_mask"] = weights_as(row, int if ((weights == 0) | (weights == 1)).all() else float)
    if (scores := scores_as(row, None)) is not None:
        new_row["logprobs"] = scores
    for name, values in other_lists(row):
        new_row.setdefault(name, values)
    return new_row


def _calls(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    rollout = sample.rollout
    if not rollout.turns:
        raise RecordError("it holds no calls")
    calls = [_call(turn) for turn in rollout.turns]
    if sample.of_calls:
        calls = [{**own, **call} for own, call in zip(sample.of_calls, calls, strict=True)]
    return {**sample.facts, **_conversation(rollout), "calls": calls}


def _conversation(rollout: Rollout) -> dict[str, Any]:
    """The messages, tools and template arguments that the log has."""
    columns: dict[str, Any] = {}
    if rollout.messages:
        columns["messages"] = messages_as_logged(rollout.messages)
    if rollout.tools:
        columns["tools"] = list(rollout.tools)
    if rollout.template_kwargs:
        columns["chat_template_kwargs"] = dict(rollout.template_kwargs)
    return columns


def _call(turn: Turn) -> dict[str, Any]:
    assert turn.prompt_ids is not None
    assert turn.completion_ids is not None
    call: dict[str, Any] = {}
    if turn.prompt_messages is not None:
        call["messages"] = messages_as_logged(turn.prompt_messages)
    call["prompt_ids"] = turn.prompt_ids.tolist()
    call["completion_ids"] = turn.completion_ids.tolist()
    if turn.completion_logprobs is not None:
        call["logprobs"] = plain_list(turn.completion_logprobs)
    for name, values in other_lists_of_call(turn):
        call.setdefault(name, values)
    if turn.prompt_text is not None:
        call["prompt_text"] = turn.prompt_text
    if turn.completion_text is not None:
        call["text"] = turn.completion_text
    if turn.finish_reason is not None:
        call["finish_reason"] = turn.finish_reason
    if turn.stop_string is not None:
        call["stop_reason"] = turn.stop_string
    if turn.weight_versions:
        spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in turn.weight_spans]
        call["weight_versions"] = spans or list(turn.weight_versions)
    return call


ROWS = Maker(
    name="rows",
    format="generic",
    title="Training rows: token_ids, loss_mask, logprobs and every other column; messages and tools",
    holds=Holds.ROWS,
    make=_rows,
    own=frozenset((*_COMMON, "prompt_length", "token_ids", "loss_mask", "logprobs")),
    tables=True,
)
CALLS = Maker(
    name="calls",
    format="generic",
    title="Calls: a list of prompt_ids, completion_ids and logprobs; messages and tools",
    holds=Holds.CALLS,
    make=_calls,
    own=frozenset((*_COMMON, "calls")),
    own_of_calls=_OF_CALLS,
    tables=True,
)
