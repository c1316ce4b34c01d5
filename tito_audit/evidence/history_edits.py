"""Finds edits of the history: a later prompt holds other messages, as the log states or its text shows."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache, partial

import numpy as np

from tito_audit.align.pieces import Pieces
from tito_audit.evidence.differences import CompletionSpan, Stretch, completion_at
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, UNKNOWN, token_roles
from tito_audit.record.message import Message
from tito_audit.record.nesting import load_python_json
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import ASSISTANT
from tito_audit.ways.recorded_values import date_formats, differing_dates, find_tools

INSERTED = "message inserted"
_SCAFFOLD = frozenset((ASSISTANT, GENERATION_PROMPT, TURN_END, TEMPLATE))
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT_END = b"</think>"
_OPENER = 12
"""How many bytes before an answer identify the start of one; some templates mark it by no control token."""


def messages_changed(rollout: Rollout, parent: int, turn: int, seen: bytes, prompt: bytes) -> bool | None:
    """Whether a call was sent other messages than its parent; None if neither messages nor text show it.

    `seen` and `prompt` are the texts of the two prompts; stated messages only count if they occur there.
    """
    before, after = rollout.turns[parent], rollout.turns[turn]
    if before.prompt_messages is not None and after.prompt_messages is not None:
        stated, sent = before.prompt_messages, after.prompt_messages
        if len(sent) < len(stated) or any(
            not (message.wire == other.wire or _comparison_key(message) == _comparison_key(other))
            for message, other in zip(stated, sent, strict=False)
        ):
            return True
        return bool(_given_messages_lost(stated, seen, prompt)[0])
    if not write_one_conversation(rollout, parent, turn):
        return None
    assert before.message_index is not None
    lost, shown = _given_messages_lost(rollout.messages[: before.message_index], seen, prompt)
    return lost or (False if shown else None)


def write_one_conversation(rollout: Rollout, parent: int, turn: int) -> bool:
    """Whether the log says that both calls wrote messages of one conversation, the parent first."""
    before, after = rollout.turns[parent], rollout.turns[turn]
    if before.message_index is None or after.message_index is None:
        return False
    return before.prompt_messages is None and before.message_index < after.message_index


def _comparison_key(message: Message) -> tuple[object, ...]:
    """Role, text without reasoning and white space, and parsed tool calls."""
    text = "".join(_THOUGHT.sub("", message.text).split())
    calls: list[tuple[object, object]] = []
    for call in message.tool_calls:
        arguments: object = call.arguments or {}
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = load_python_json(arguments)
        calls.append((call.name, arguments))
    return message.role, text, calls


def _given_messages_lost(messages: Sequence[Message], seen: bytes, prompt: bytes) -> tuple[bool, bool]:
    """Whether `prompt` lacks a given message that `seen` holds, and whether both hold all of them."""
    texts = [message.text.strip().encode("utf-8", "surrogatepass") for message in messages if not message.sampled]
    texts = [text for text in texts if text]
    before = _texts_in_order(texts, seen)
    after = _texts_in_order(before, prompt)
    return len(after) < len(before), len(after) == len(texts)


def _texts_in_order(texts: Sequence[bytes], data: bytes) -> list[bytes]:
    """The texts that occur in `data` one after the other, not inside a longer word."""
    occurring, end = [], 0
    for text in texts:
        at = data.find(text, end)
        while at >= 0 and (data[at - 1 : at].isalnum() or data[at + len(text) : at + len(text) + 1].isalnum()):
            at = data.find(text, at + 1)
        if at >= 0:
            occurring.append(text)
            end = at + len(text)
    return occurring


def contains_answer(prompt: bytes, seen: Pieces, completion: CompletionSpan, ends: Collection[bytes]) -> bool:
    """Whether a prompt holds a completion of `seen` as a message of its own, with or without its reasoning.

    `ends` are the bytes of tokens that end a turn.
    """
    opener = seen.bytes_before(completion.start, _OPENER)
    answer = seen.bytes_of(completion.start, completion.end).rstrip()
    answer = next((answer.removesuffix(end) for end in ends if end and answer.endswith(end)), answer).strip()
    for answer_text in {answer, answer.rpartition(_THOUGHT_END)[2].lstrip()} - {b""}:
        at = prompt.find(opener + answer_text)
        while at >= 0:
            after = at + len(opener) + len(answer_text)
            rest = prompt[after : after + 64].lstrip()
            if any(rest.startswith(end) for end in ends):
                return True
            at = prompt.find(opener + answer_text, at + 1)
    return False


def opens_another_answer(prompt: Pieces, rest: bytes) -> bool:
    """Whether `rest`, the end of `prompt`, opens an answer besides the one at its very end."""
    opener = prompt.bytes_before(len(prompt), _OPENER)
    return rest.find(opener) < len(rest) - len(opener)


def repeats_question(rest: bytes, seen: Pieces, completion: CompletionSpan) -> bool:
    """Whether `rest`, the text after a shared history, repeats the prompt of a completion and answers it."""
    opener = seen.bytes_before(completion.start, _OPENER)
    question, at = seen.bytes_of(0, completion.start), rest.find(opener)
    while at >= 0 and not question.endswith(rest[: at + len(opener)]):
        at = rest.find(opener, at + 1)
    return 0 <= at < len(rest) - len(opener)


def describe_history_edit(
    differing: Sequence[Stretch],
    seen: Pieces,
    prompt: Pieces,
    completions: Sequence[CompletionSpan],
    rollout: Rollout,
    reference: Reference,
) -> str | None:
    """The first edit of given text among these stretches, in words such as `user text changed`; None without one.

    `seen` is what a call saw, with its `completions`; `prompt` is a later one. White space does not count, nor do
    tool definitions and the date: templates write them.
    """
    ends, headers = reference.end_ids(), reference.headers(rollout.template_kwargs)
    roles, later_roles = (cache(partial(token_roles, pieces, ends, headers)) for pieces in (seen, prompt))
    formats = date_formats(reference.renderer) if reference.renderer is not None else ()
    for stretch in differing:
        recorded, canonical = stretch.recorded.data, stretch.canonical.data
        if unspaced(recorded) == unspaced(canonical):
            continue
        answer = completion_at(stretch, completions)
        # The roles of the tokens that were given; next to an answer, only roles that are known count.
        answers = [each for each in completions if each.start < stretch.end and stretch.start < each.end]
        is_given = np.ones(stretch.end - stretch.start, np.bool_)
        for each in answers:
            is_given[max(each.start - stretch.start, 0) : each.end - stretch.start] = False
        own = roles().at(is_given.nonzero()[0] + stretch.start)
        edited = lost = [role for role in own if role not in _SCAFFOLD and not (answers and role == UNKNOWN)]
        # What a prompt holds in place of the end of the last answer is the next message.
        if not lost and (answer is None or (not recorded.strip() and answer is not completions[-1])):
            later = later_roles()[stretch.canonical_start : stretch.canonical_end]
            edited = [role for role in later if role not in _SCAFFOLD]
        if not edited or tools_differ(stretch) or differing_dates(stretch.recorded, stretch.canonical, formats):
            continue
        if lost and answer is not None and not canonical.strip():
            return "older turns dropped"
        what = "message dropped" if not canonical.strip() else INSERTED if not recorded.strip() else "text changed"
        return what if edited[0] == UNKNOWN else f"{edited[0]} {what}"
    return None


def tools_differ(stretch: Stretch) -> bool:
    """Whether the text around a stretch defines other tools than before."""
    recorded, canonical = (
        side.in_context.decode("utf-8", "replace") for side in (stretch.recorded, stretch.canonical)
    )
    return find_tools(recorded) != find_tools(canonical)


def unspaced(data: bytes) -> bytes:
    """Bytes without white space."""
    return re.sub(rb"\s+", b"", data)
