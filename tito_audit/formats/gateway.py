"""The log of `tito-audit serve`: one line for each sampled answer.

A line states the thread of calls that its prompt continues (`thread_id`): calls of one thread are one
conversation, and every other answer to the same prompt, fork or retry starts a new thread. A line with `closed`
ends a session and holds no call.
"""

from __future__ import annotations

from dataclasses import replace

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import read_turn_at, stated_model
from tito_audit.formats._columns import first_text, parsed_column
from tito_audit.formats._kit import single_calls
from tito_audit.record.message import Message, as_message, as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout

VERSION = "tito_audit_gateway"
"""The key that every line has; its value is the version of the format."""
_PROMPT, _COMPLETION = "prompt_token_ids", "completion_token_ids"
_TAKEN = (_PROMPT, _COMPLETION, "logprobs", "messages", "template_messages", "tools")


def read(row: Row, place: Place) -> Rollout:
    # The messages are what the template got, and the answer; a completion of text or ids has none.
    name = "template_messages" if row.get("template_messages") is not None else "messages"
    sent, answer = as_messages(parsed_column(row, name), name), parsed_column(row, "response_message")
    messages: tuple[Message, ...] = ()
    if sent and answer is not None:
        # An answer without its request would render as if there had been no prompt.
        message = as_message(answer, "response_message")
        messages = (*sent, message) if message.sampled else ()
    tools = as_tools(parsed_column(row, "tools"), "tools")
    kwargs = parsed_column(row, "chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RecordError("chat_template_kwargs is not an object")
    turn = read_turn_at(row, _PROMPT, _COMPLETION, _TAKEN)
    turn = replace(turn, message_index=len(messages) - 1 if messages else None)
    # The id of a call; with the number of the answer if it has several, since equal answers are separate samples.
    call, count, choice = first_text(row, ("call_id",)), row.get("n"), row.get("choice")
    if call is not None and isinstance(count, int) and count != 1 and isinstance(choice, int):
        call = f"{call}-{choice}"
    facts = {name: first_text(row, (name,)) for name in ("session_id", "branch", "status")}
    stated_facts = stated_model(row).with_facts(id=call, **facts)
    return Rollout(
        place,
        FORMAT.name,
        messages,
        tools,
        kwargs or {},
        turns=(turn,),
        stated=replace(stated_facts, dummy_tokens=row.get("status") == "dummy"),
    )


_ROWS = single_calls(read, "messages", "prompt")
FORMAT = Format(
    name="gateway",
    title="Gateway of tito-audit",
    signature=Signature("{tito_audit_gateway}, {completion_token_ids|closed}"),
    precedence=5,
    matches=lambda row: VERSION in row and (_COMPLETION in row or "closed" in row),
    read=lambda row, place: () if "closed" in row and _COMPLETION not in row else _ROWS.read(row, place),
    sources=lambda row, rollouts: _ROWS.sources(row, rollouts) if rollouts else (),
    update=lambda row, repaired: _ROWS.update(row, repaired) if repaired else (row,),
    row_is_call=True,
    conversation="thread_id",
    shows="Every answer that `tito-audit serve` gave: its complete prompt, what was sampled, its logprobs, and "
    "what it continues. Calls of one thread are read together.",
)
