"""The model's turns in the ids that a template wrote, found by control tokens alone.

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n
                                           [ generation prompt    ][    sampled     ]

This saves the second rendering that marks need (`render/sentinels.py`). It is used only if no message spells a
control token, there are as many generation prompts as answers, and every answer ends with an end token. For the
first conversation of each kind, and for a sample of the rest, marks must show the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tito_audit.evidence.roles import COMMON_ROLES
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import ASSISTANT
from tito_audit.render.template import Template
from tito_audit.tokens.segments import pattern_of, shared_start
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

Turns = tuple[tuple[int, int], ...]
"""For each answer, the places of its first token and of its end token."""
_Kind = tuple[object, ...]

_ONE_IN = 256
"""One in this many conversations of a kind is compared with what marks show."""


class TurnReader:
    """Finds the turns of one template with one generation prompt in the ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, prompt: Ids, end_ids: frozenset[int]) -> None:
        vocabulary = tokenizer.vocabulary
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._ends = np.zeros(max(end_ids) + 2, np.bool_)  # the last one for all higher ids
        self._ends[list(end_ids)] = True
        contents = sorted(vocabulary.piece(token) for token in vocabulary.special_ids)
        self._opening = shared_start(contents[0], contents[-1])
        """How every control token begins, to search for that first."""
        self._spelled = re.compile(pattern_of(contents))
        self._seen: dict[_Kind, int] = {}
        """How many conversations of each kind were read; -1 once marks showed something else."""

    def turns(self, rollout: Rollout, ids: Ids, proof: Callable[[Turns], bool]) -> Turns | None:
        """The turns in the ids `[N]` of a rendered conversation; None if control tokens do not show them.

        `proof` compares them with what marks show; it is called for the first conversation of a kind and for one
        in 256 of the rest.
        """
        # What lets templates tell conversations apart: who speaks, and what there is besides plain text.
        shapes = frozenset(
            (
                one.role,
                bool(one.tool_calls),
                one.reasoning is None,
                type(one.content),
                "</think>" in one.text if one.role == ASSISTANT else None,
            )
            for one in rollout.messages
        )
        kind = (shapes, rollout.messages[0].role, bool(rollout.tools), repr(rollout.template_kwargs))
        seen = self._seen.get(kind, 0)
        found = self._found(rollout.messages, ids) if seen >= 0 else None
        if found is None:
            return None
        if seen % _ONE_IN == 0 and not proof(found):
            self._seen[kind] = -1
            return None
        self._seen[kind] = seen + 1
        return found

    def _found(self, messages: Sequence[Message], ids: Ids) -> Turns | None:
        answers = _answers(messages)
        if not answers:
            return None
        at = self._vocabulary.control(ids).nonzero()[0]
        control, size = ids[at], len(self._prompt)
        starts = at[control == self._prompt[0]]
        starts = starts[starts + size <= len(ids)]
        opens = (ids[starts[:, None] + np.arange(size)] == self._prompt).all(axis=1)
        starts = starts[opens] + size
        if len(starts) != answers:
            return None
        stops = at.searchsorted(starts)  # the first control token from the start of the answer on
        if (
            stops[-1] >= len(at)
            or not bool(self._ends.take(control[stops], mode="clip").all())
            or self._spells(messages)
        ):
            return None
        closers = at[stops]
        before = ids[closers[closers > starts] - 1]
        if (closers[:-1] >= starts[1:]).any() or (len(before) and self._ends.take(before, mode="clip").any()):
            return None
        return tuple(zip(starts.tolist(), closers.tolist(), strict=True))

    def _spells(self, messages: Sequence[Message]) -> bool:
        """Whether a text in these messages spells a control token."""
        said = "\n".join(_texts([message.wire for message in messages]))
        return self._opening in said and self._spelled.search(said) is not None


def _answers(messages: Sequence[Message]) -> int:
    """How many of these messages were sampled; 0 unless each was sampled or given as its role says and every
    answer is a single text."""
    answers = 0
    for message in messages:
        if message.role not in COMMON_ROLES:
            return 0
        mine = message.role == ASSISTANT
        if (message.stated_speaker is not None and message.sampled != mine) or (
            mine and isinstance(message.content, tuple)
        ):
            return 0
        answers += mine
    return answers


def _texts(wires: Iterable[Mapping[str, Any]]) -> list[str]:
    """All texts in messages, including the keys and texts of objects in them."""
    found: list[str] = []
    pending: list[Iterable[Any]] = [wire.values() for wire in wires]
    for values in pending:
        for value in values:
            if type(value) is str:
                found.append(value)
            elif isinstance(value, Mapping):
                pending += value.keys(), value.values()
            elif isinstance(value, list | tuple):
                pending.append(value)
    return found


def turn_reader(
    tokenizer: Tokenizer, template: Template, prompt: str | None, end_ids: frozenset[int]
) -> TurnReader | None:
    """The reader for what a template writes; None if its generation prompt does not show turns."""
    if not prompt or not tokenizer.vocabulary.special_ids or not end_ids:
        return None
    readers = _readers(tokenizer.vocabulary, template)
    if prompt not in readers:
        readers[prompt] = _made(tokenizer, prompt, end_ids)
    return readers[prompt]


@lru_cache(maxsize=16)
def _readers(vocabulary: Vocabulary, template: Template) -> dict[str, TurnReader | None]:
    return {}


def _made(tokenizer: Tokenizer, prompt: str, end_ids: frozenset[int]) -> TurnReader | None:
    (ids,) = tokenizer.encode_fast_batch([prompt])
    vocabulary = tokenizer.vocabulary
    control = vocabulary.control(ids)
    # It opens with a control token, and its tokens spell it.
    if not len(ids) or not control[0] or vocabulary.text(ids) != prompt:
        return None
    return TurnReader(tokenizer, ids, end_ids)
