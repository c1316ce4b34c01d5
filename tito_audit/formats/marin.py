"""Marin rollouts: one call with its prompt, its response and a reward per token.

Marin itself writes pickles, which are not read; this is the dataclass written as JSON.
marin-community/marin `src/marin/rl/types.py` (`Rollout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import answer_indices, read_turn, stated_facts
from tito_audit.formats._columns import is_list, parsed_column
from tito_audit.formats._kit import single_calls
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout


def read(row: Row, place: Place) -> Rollout:
    messages = as_messages(parsed_column(row, "messages"), "messages")
    (index,) = answer_indices(messages, 1)
    turn = read_turn({**row, "messages": None}, message_index=index)
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("weight_step") is not None:
        turn = replace(turn, weight_versions=(str(metadata["weight_step"]),))
    tools = as_tools(parsed_column(row, "tools"), "tools")
    return Rollout(place, FORMAT.name, messages, tools, turns=(turn,), stated=stated_facts(row))


FORMAT = Format(
    name="marin",
    title="Marin rollouts, written as JSON",
    signature=Signature("{prompt_tokens} (a list), {response_tokens}, {response_logprobs}, {token_rewards}"),
    precedence=210,
    matches=lambda row: (
        {"prompt_tokens", "response_tokens"} <= row.keys()
        # As a number it is a usage count.
        and (is_list(row["prompt_tokens"]) or ("token_rewards" in row and row["prompt_tokens"] is None))
    ),
    **single_calls(read, "messages").functions,
    shows="One call with its logprobs and rewards. The framework may have looked these ids up from text, so "
    "they are no proof of what was sampled; no messages are kept.",
)
