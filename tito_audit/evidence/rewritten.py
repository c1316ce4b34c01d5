"""Whether a later prompt holds other messages than the call before it: by what the log states, and by its text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from tito_audit.align.pieces import Pieces
from tito_audit.evidence.differences import Region, Stretch, region_of
from tito_audit.evidence.model import TextSide
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, UNKNOWN, token_roles
from tito_audit.record.message import Message, ToolCall
from tito_audit.record.nesting import parsed_by_python
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import ASSISTANT
from tito_audit.ways.reading import date_formats, other_date, tools_in

INSERTED = "message inserted"
_SCAFFOLD = frozenset((ASSISTANT, GENERATION_PROMPT, TURN_END, TEMPLATE))
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT_END = b"</think>"
_OPENER = 12
"""How many of the last bytes before an answer show that one begins; some templates mark it by no control token."""


def messages_changed(rollout: Rollout, parent: int, turn: int, seen: bytes, prompt: bytes) -> bool | None:
    """Whether a call was sent other messages than its parent; None if messages and text do not show it.

    `seen` and `prompt` are the texts of the two prompts; messages that the log states have to be in them.
    """
    before, after = rollout.turns[parent], rollout.turns[turn]
    if before.prompt_messages is not None and after.prompt_messages is not None:
        stated, sent = before.prompt_messages, after.prompt_messages
        if len(sent) < len(stated) or any(
            not (message.wire == other.wire or _said(message) == _said(other))
            for message, other in zip(stated, sent, strict=False)
        ):
            return True
        return bool(_lost(stated, seen, prompt)[0])
    if not of_one_list(rollout, parent, turn):
        return None
    assert before.message_index is not None
    lost, shown = _lost(rollout.messages[: before.message_index], seen, prompt)
    return True if lost else False if shown else None


def of_one_list(rollout: Rollout, parent: int, turn: int) -> bool:
    """Whether the log states that two calls wrote messages of one conversation, the parent's first."""
    before, after = rollout.turns[parent], rollout.turns[turn]
    if before.message_index is None or after.message_index is None:
        return False
    return before.prompt_messages is None and before.message_index < after.message_index


def _said(message: Message) -> tuple[object, ...]:
    text = "".join(_THOUGHT.sub("", message.text).split())
    return message.role, text, [(call.name, _arguments(call)) for call in message.tool_calls]


def _arguments(call: ToolCall) -> Any:
    if not isinstance(call.arguments, str):
        return call.arguments or {}
    try:
        return parsed_by_python(call.arguments or "{}")
    except ValueError:
        return call.arguments


def _lost(messages: Sequence[Message], seen: bytes, prompt: bytes) -> tuple[bool, bool]:
    """Whether a prompt lacks a given message that the one before it holds; whether both hold all of them."""
    texts = [message.text.strip().encode("utf-8", "surrogatepass") for message in messages if not message.sampled]
    texts = [text for text in texts if text]
    before = _held(texts, seen)
    after = _held(before, prompt)
    return len(after) < len(before), len(after) == len(texts)


def _held(texts: Sequence[bytes], data: bytes) -> list[bytes]:
    """Those of the texts that stand in `data` as words of their own, in order."""
    standing, end = [], 0
    for text in texts:
        at = data.find(text, end)
        while at >= 0 and (data[at - 1 : at].isalnum() or data[at + len(text) : at + len(text) + 1].isalnum()):
            at = data.find(text, at + 1)
        if at >= 0:
            standing.append(text)
            end = at + len(text)
    return standing


def holds_answer(prompt: bytes, seen: Pieces, region: Region, ends: Collection[bytes]) -> bool:
    """Whether a text holds an answer as a message of its own; without its reasoning counts too.

    `seen` holds the answer at `region`; `ends` are the bytes of tokens that end a turn.
    """
    opener, answer = seen.bytes_before(region.start, _OPENER), seen.bytes_of(region.start, region.end).rstrip()
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


def opens_twice(prompt: Pieces, rest: bytes) -> bool:
    """Whether `rest`, the end of a prompt, opens an answer before the one that the prompt opens."""
    opener = prompt.bytes_before(len(prompt), _OPENER)
    return rest.find(opener) < len(rest) - len(opener)


def answers_again(rest: bytes, seen: Pieces, region: Region) -> bool:
    """Whether text behind a shared history puts the question of the answer at `region`, and holds an answer."""
    opener = seen.bytes_before(region.start, _OPENER)
    question, at = seen.bytes_of(0, region.start), rest.find(opener)
    while at >= 0 and not question.endswith(rest[: at + len(opener)]):
        at = rest.find(opener, at + 1)
    return 0 <= at < len(rest) - len(opener)


def given_change(
    differing: Sequence[Stretch],
    seen: Pieces,
    prompt: Pieces,
    regions: Sequence[Region],
    rollout: Rollout,
    reference: Reference,
) -> str | None:
    """How the first of these stretches that changes given text in more than white space does so, in words.

    `seen` is what a call saw, with its answers at `regions`; `prompt` is a later one. Tool definitions and the
    date do not count: templates write them.
    """
    ends, headers = reference.end_ids(), reference.headers(rollout.template_kwargs)
    roles, later_roles = (cache(partial(token_roles, pieces, ends, headers)) for pieces in (seen, prompt))
    formats = date_formats(reference.renderer) if reference.renderer is not None else ()
    for stretch in differing:
        recorded, canonical = stretch.recorded.data, stretch.canonical.data
        if bare(recorded) == bare(canonical):
            continue
        answer = region_of(stretch, regions)
        # The roles of the given tokens of a stretch: beside an answer, those that are known.
        answers = [region for region in regions if region.start < stretch.end and stretch.start < region.end]
        outside = np.ones(stretch.end - stretch.start, np.bool_)
        for region in answers:
            outside[max(region.start - stretch.start, 0) : region.end - stretch.start] = False
        own = roles().at(outside.nonzero()[0] + stretch.start)
        others = gone = [role for role in own if role not in _SCAFFOLD and not (answers and role == UNKNOWN)]
        # What a prompt holds in place of the end of the last answer is the next message.
        if not gone and (answer is None or (not recorded.strip() and answer is not regions[-1])):
            later = later_roles()[stretch.canonical_start : stretch.canonical_end]
            others = [role for role in later if role not in _SCAFFOLD]
        if not others or other_tools(stretch) or other_date(stretch.recorded, stretch.canonical, formats):
            continue
        if gone and answer is not None and not canonical.strip():
            return "older turns dropped"
        what = "message dropped" if not canonical.strip() else INSERTED if not recorded.strip() else "text changed"
        return what if others[0] == UNKNOWN else f"{others[0]} {what}"
    return None


def other_tools(stretch: Stretch) -> bool:
    """Whether the text around a stretch defines other tools than before."""
    return tools_in(_around(stretch.recorded)) != tools_in(_around(stretch.canonical))


def _around(side: TextSide) -> str:
    return (side.before + side.data + side.after).decode("utf-8", "replace")


def bare(data: bytes) -> bytes:
    """Bytes without white space."""
    return re.sub(rb"\s+", b"", data)
