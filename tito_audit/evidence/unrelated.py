"""Tells whether a training row, its calls and its messages belong to one rollout: they must share an answer."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.align.blocks import SAME_BYTES, Blocks
from tito_audit.align.pieces import Pieces
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.message import Message
from tito_audit.record.rollout import IdsFrom, Rollout
from tito_audit.record.runs import trained_runs

_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7af]|[^\W\u3040-\u9fff\uac00-\ud7af]+")
"""A word, or a character of a script that writes no spaces between words."""


TRAINING_ROW, MESSAGES = "training row", "messages"


@dataclass(frozen=True, slots=True)
class Unrelated:
    """A part of a rollout that belongs to another one and is therefore ignored."""

    part: str
    """TRAINING_ROW or MESSAGES."""
    cause: str
    what: str
    """What is wrong, as a sentence."""
    span: tuple[int, int] = (0, 0)
    """The tokens of the row that a finding points at."""


def share_an_answer(
    recorded: Pieces,
    answers: Sequence[tuple[int, int]],
    other: Pieces,
    runs: Sequence[tuple[int, int]],
    blocks: Blocks,
) -> bool:
    """Whether two aligned sequences have at least half of some answer in common.

    `answers` are token ranges of `recorded`; `runs` are the trained ranges of `other`, which may cut an answer.
    """
    size, other_size = len(recorded), len(other)
    in_answer, same, of_answer = np.zeros(size, np.bool_), np.zeros(size, np.bool_), np.zeros(other_size, np.bool_)
    for start, end in answers:
        in_answer[start:end] = True
    places, others = blocks.matched_positions()
    same[places] = True
    of_answer[others] = in_answer[places]
    for kind, start, end, first, last in blocks.differing_blocks():
        if kind in SAME_BYTES:
            same[start:end] = True
            of_answer[first:last] = in_answer[start:end].any()
    return _covers_half_of_any(answers, same, ~recorded.control) or _covers_half_of_any(
        runs, of_answer, ~other.control
    )


def content_bytes(pieces: Pieces, ranges: Sequence[tuple[int, int]]) -> bytes:
    """The bytes of these token ranges without control tokens, runs joined by spaces."""
    inside = np.zeros(len(pieces), np.bool_)
    for start, end in ranges:
        inside[start:end] = True
    return b" ".join(pieces.bytes_of(start, end) for start, end in trained_runs(inside & ~pieces.control))


def share_words(data: bytes, other: bytes) -> bool:
    """Whether half of the words of the shorter text are in the other one; True if either has no words."""
    texts = (unicodedata.normalize("NFKC", text.decode("utf-8", "replace")) for text in (data, other))
    words, others = (Counter(_WORD.findall(text.lower())) for text in texts)
    fewer = min(words.total(), others.total())
    return 2 * (words & others).total() >= fewer


def messages_are_unrelated(rollout: Rollout, decode: Callable[[Ids], str]) -> bool:
    """Whether the messages belong to other calls: no completion holds its answer, and the last prompt holds none
    of the questions.

    Both are required because an edited answer still follows its question.
    """
    pairs = [
        (rollout.messages[turn.message_index], turn)
        for turn in rollout.turns
        if turn.message_index is not None and turn.completion_ids is not None and turn.ids_from is IdsFrom.LOGGED
    ]
    compared = False
    for message, turn in pairs:
        answer = full_text(message)
        if not _WORD.search(answer):
            continue
        assert turn.completion_ids is not None
        compared, sampled = True, decode(turn.completion_ids)
        if answer.strip() in sampled or share_words(
            answer.encode("utf-8", "surrogatepass"), sampled.encode("utf-8", "replace")
        ):
            return False
    if not compared:
        return False
    questions = [message.text.strip() for message in rollout.messages if message.speaker in ("user", "tool")]
    prompts = [decode(turn.prompt_ids) for _, turn in pairs[-1:] if turn.prompt_ids is not None]
    asked_there = any(question in prompt for question in questions if question for prompt in prompts)
    return bool(prompts) and bool(questions) and not asked_there


def full_text(message: Message) -> str:
    """Reasoning, text and tool calls of a message as one text."""
    calls = [f"{call.name} {call.arguments or ''}" for call in message.tool_calls] if message.tool_calls else ()
    return " ".join((message.reasoning or "", message.text, *calls))


def constant_id_offset(ids: Ids, others: Ids) -> int:
    """The constant by which at least 90 % of `ids` exceed `others`; 0 if there is none."""
    size = min(len(ids), len(others))
    if not size:
        return 0
    offsets, counts = np.unique(ids[:size].astype(np.int64) - others[:size], return_counts=True)
    most = int(counts.argmax())
    return int(offsets[most]) if counts[most] >= 0.9 * size else 0


def _covers_half_of_any(ranges: Sequence[tuple[int, int]], mask: Mask, content: Mask) -> bool:
    """Whether `mask` covers half of the content tokens of at least one range."""
    if not len(ranges):
        return False
    before = np.zeros((2, len(mask) + 1), np.int64)
    np.cumsum((content, content & mask), axis=1, out=before[:, 1:])
    starts, ends = np.array(ranges, np.int64).T
    inside, covered = before[:, ends] - before[:, starts]
    return bool(((inside > 0) & (2 * covered >= inside)).any())
