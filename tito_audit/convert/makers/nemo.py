"""NeMo-RL training dumps, NeMo-RL message logs and NeMo-Gym rollouts, made from other logs.

NVIDIA-NeMo/RL `nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`), `nemo_rl/environments/nemo_gym.py`, whose
message logs alternate user and assistant slices of tokens, without text; NVIDIA-NeMo/Gym
`nemo_gym/rollout_collection.py`, `openai_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from tito_audit.convert.maker import Holds, Maker, MakerInput
from tito_audit.convert.makers.shared import (
    other_lists,
    other_lists_of_call,
    plain_list,
    reward_slots,
    row_of,
    scores_as,
    weights_as,
)
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.record.message import Message
from tito_audit.record.rollout import Turn
from tito_audit.record.runs import trained_runs

_LOG_KEYS = ("role", "content", "token_ids", "token_loss_mask", "generation_logprobs", "tool_calls", "name")
"""The keys of a message log's entry that are not columns."""


def _nemo_rl(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    row, facts = row_of(sample), dict(sample.facts)
    new_row: dict[str, Any] = {"idx": facts.pop("idx")} if "idx" in facts else {}
    values: dict[str, Any] = {
        "content": facts.pop("content", [message.text for message in sample.rollout.messages]),
        **facts,
        "input_lengths": len(row.token_ids),
        "token_ids": row.token_ids.tolist(),
        "token_loss_mask": weights_as(row, int),
    }
    values.setdefault("sample_loss_mask", 1.0)
    if (scores := scores_as(row, 0.0)) is not None:
        values["generation_logprobs"] = scores
    for name, column in other_lists(row):
        values.setdefault(name, column)
    return new_row | {name: [value] for name, value in values.items()}


def _message_log(samples: Sequence[MakerInput]) -> Row:
    """Alternating slices of tokens without text: trained ones as the assistant's, all others as the user's."""
    (sample,) = samples
    row = row_of(sample)
    weights, scores = weights_as(row, int), scores_as(row, 0.0)
    columns = {name: values for name, values in other_lists(row) if name not in _LOG_KEYS}
    edges = {edge for run in trained_runs(np.array(weights, np.bool_)) for edge in run}
    log = []
    for start, end in pairwise(sorted({0, len(weights), *edges})):
        entry: dict[str, Any] = {"role": "assistant" if weights[start] else "user", "content": ""}
        entry["token_ids"] = row.token_ids[start:end].tolist()
        entry["token_loss_mask"] = weights[start:end]
        if scores is not None and (weights[start] or any(scores[start:end])):
            entry["generation_logprobs"] = scores[start:end]
        entry |= {name: values[start:end] for name, values in columns.items()}
        log.append(entry)
    new_row: dict[str, Any] = {**sample.facts, "message_log": log}
    if sample.rollout.tools:
        new_row["tools"] = list(sample.rollout.tools)
    return new_row


def _nemo_gym(samples: Sequence[MakerInput]) -> Row:
    (sample,) = samples
    rollout, facts = sample.rollout, dict(sample.facts)
    if not rollout.turns:
        raise RecordError("it holds no calls")
    # The messages before the first call's answer as input, the rest as output with the tokens of each call.
    turns = {turn.message_index: turn for turn in rollout.turns if turn.message_index is not None}
    if len(turns) < len(rollout.turns) or list(turns) != sorted(turns):
        raise RecordError("which messages its calls wrote is unknown, and the tokens belong on those messages")
    first = min(turns)
    before = [item for message in rollout.messages[:first] for item in _items_of(message, None)]
    output = [
        item
        for at, message in enumerate(rollout.messages[first:], first)
        for item in _items_of(message, turns.get(at))
    ]
    params: dict[str, Any] = {"input": before}
    if rollout.tools:
        functions = [tool.get("function") for tool in rollout.tools]
        params["tools"] = [
            {"type": "function", **function, "strict": None} if isinstance(function, Mapping) else tool
            for tool, function in zip(rollout.tools, functions, strict=True)
        ]
    response: dict[str, Any] = {"object": "response"}
    if isinstance(facts.get("model"), str):
        response["model"] = facts.pop("model")
    response["output"] = output
    return {"responses_create_params": params, "response": response, **facts}


def _items_of(message: Message, turn: Turn | None) -> Iterator[Mapping[str, Any]]:
    if message.role == "tool":
        yield {
            "type": "function_call_output",
            "call_id": message.wire.get("tool_call_id"),
            "output": message.wire.get("content"),
        }
        return
    if message.role != "assistant":
        yield {"type": "message", "role": message.role, "content": message.wire.get("content")}
        return
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
    if message.text or not (message.tool_calls or message.reasoning):
        part = {"type": "output_text", "text": message.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.tool_calls:
        arguments = (
            call.arguments if isinstance(call.arguments, str | None) else orjson.dumps(call.arguments).decode()
        )
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    if turn is not None:
        # The token fields that NeMo-Gym puts on the last item of a call; all three or none.
        if turn.completion_logprobs is None:
            raise RecordError(
                "a call has no logprobs, and the token fields of an item come together or not at all"
            )
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        fields: dict[str, Any] = {
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "generation_token_ids": turn.completion_ids.tolist(),
            "generation_log_probs": plain_list(turn.completion_logprobs),
        }
        for name, values in other_lists_of_call(turn):
            fields.setdefault(name, values)
        items[-1] |= fields
    yield from items


NEMO_RL = Maker(
    name="nemo_rl",
    format="nemo_rl",
    title="NeMo-RL training dumps, without padding",
    holds=Holds.ROWS,
    make=_nemo_rl,
    own=frozenset(("input_lengths", "token_ids", "token_loss_mask", "generation_logprobs")),
    slots=reward_slots("rewards"),
    wants=("rewards",),
)
MESSAGE_LOG = Maker(
    name="nemo_rl_message_log",
    format="nemo_rl_message_log",
    title="NeMo-RL message logs, alternating trained and other tokens",
    holds=Holds.ROWS,
    make=_message_log,
    own=frozenset(("message_log", "tools")),
)
NEMO_GYM = Maker(
    name="nemo_gym",
    format="nemo_gym",
    title="NeMo-Gym rollouts",
    holds=Holds.CALLS,
    make=_nemo_gym,
    own=frozenset(("responses_create_params", "response")),
    slots=reward_slots("reward"),
    wants=("reward",),
)
