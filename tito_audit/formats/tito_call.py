"""Calls of a token-in, token-out provider: ids in, ids out.

arb8020/research, the token provider's `GenerationResult`.
"""

from __future__ import annotations

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import answer_indices, read_turn, stated_facts
from tito_audit.formats._columns import lists_or_null, parsed_column
from tito_audit.formats._kit import single_calls
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout


def read(row: Row, place: Place) -> Rollout:
    messages = as_messages(parsed_column(row, "messages"), "messages")
    # Messages that do not end with an answer are the call's prompt.
    answered = bool(messages) and messages[-1].sampled
    turn = read_turn(
        {**row, "messages": None},
        message_index=answer_indices(messages, 1)[0] if answered else None,
        prompt_messages=None if answered or not messages else messages,
    )
    tools = as_tools(parsed_column(row, "tools"), "tools")
    return Rollout(place, FORMAT.name, messages, tools, turns=(turn,), stated=stated_facts(row))


FORMAT = Format(
    name="tito_call",
    title="Token-in, token-out provider, one call",
    signature=Signature("{input_ids}, {output_ids}, {logprobs}, {finish_reason}"),
    precedence=260,
    matches=lambda row: lists_or_null(row, "input_ids", "output_ids"),
    **single_calls(read, "messages").functions,
    row_is_call=True,
    shows="One call: its complete prompt, what was sampled, its logprobs. Messages if the caller added them.",
)
