"""Whether a training row, the calls beside it and its messages are of one rollout: they share an answer."""

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
    """A part of a rollout that is of another one, and so is used for nothing."""

    part: str
    """TRAINING_ROW or MESSAGES."""
    cause: str
    what: str
    """What is wrong, as a sentence."""
    span: tuple[int, int] = (0, 0)
    """The tokens of the row that it is about."""


def shares_answer(
    recorded: Pieces,
    answers: Sequence[tuple[int, int]],
    other: Pieces,
    runs: Sequence[tuple[int, int]],
    blocks: Blocks,
) -> bool:
    """Whether two aligned sequences hold most of an answer in common.

    `answers` are ranges of the recorded one; `runs`, those that the other trains, may hold a part of one.
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
    return _mostly(answers, same, ~recorded.control) or _mostly(runs, of_answer, ~other.control)


def spoken(pieces: Pieces, ranges: Sequence[tuple[int, int]]) -> bytes:
    """The text of these ranges without control tokens."""
    inside = np.zeros(len(pieces), np.bool_)
    for start, end in ranges:
        inside[start:end] = True
    return b" ".join(pieces.bytes_of(start, end) for start, end in trained_runs(inside & ~pieces.control))


def share_words(data: bytes, other: bytes) -> bool:
    """Whether the shorter of two texts has half of its words in the other; also True where one has no words."""
    texts = (unicodedata.normalize("NFKC", text.decode("utf-8", "replace")) for text in (data, other))
    words, others = (Counter(_WORD.findall(text.lower())) for text in texts)
    fewer = min(words.total(), others.total())
    return 2 * (words & others).total() >= fewer


def of_another_conversation(rollout: Rollout, text: Callable[[Ids], str]) -> bool:
    """Whether the messages of a rollout are of other calls: no call holds the answer that it should have written,
    nor the last prompt what was asked.

    An edited answer still follows its question. `text` decodes token ids.
    """
    pairs = [
        (rollout.messages[turn.message_index], turn)
        for turn in rollout.turns
        if turn.message_index is not None and turn.completion_ids is not None and turn.ids_from is IdsFrom.LOGGED
    ]
    compared = False
    for message, turn in pairs:
        answer = said(message)
        if not _WORD.search(answer):
            continue
        assert turn.completion_ids is not None
        compared, sampled = True, text(turn.completion_ids)
        if answer.strip() in sampled or share_words(
            answer.encode("utf-8", "surrogatepass"), sampled.encode("utf-8", "replace")
        ):
            return False
    if not compared:
        return False
    questions = [message.text.strip() for message in rollout.messages if message.speaker in ("user", "tool")]
    prompts = [text(turn.prompt_ids) for _, turn in pairs[-1:] if turn.prompt_ids is not None]
    asked_there = any(question in prompt for question in questions if question for prompt in prompts)
    return bool(prompts) and bool(questions) and not asked_there


def said(message: Message) -> str:
    """All that a message says, tool calls included, as one text."""
    calls = (f"{call.name} {call.arguments or ''}" for call in message.tool_calls)
    return " ".join((message.reasoning or "", message.text, *calls))


def common_offset(ids: Ids, others: Ids) -> int:
    """The number that has been added to nearly every one of these ids; 0 if there is none."""
    size = min(len(ids), len(others))
    if not size:
        return 0
    offsets, counts = np.unique(ids[:size].astype(np.int64) - others[:size], return_counts=True)
    most = int(counts.argmax())
    return int(offsets[most]) if counts[most] >= 0.9 * size else 0


def _mostly(ranges: Sequence[tuple[int, int]], mask: Mask, content: Mask) -> bool:
    """Whether the mask covers half of the content of any of these ranges."""
    if not len(ranges):
        return False
    before = np.zeros((2, len(mask) + 1), np.int64)
    np.cumsum((content, content & mask), axis=1, out=before[:, 1:])
    starts, ends = np.array(ranges, np.int64).T
    inside, covered = before[:, ends] - before[:, starts]
    return bool(((inside > 0) & (2 * covered >= inside)).any())
