"""Prompts known to be the start of a later text, so that a conversation is rendered and encoded once.

    later    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n…
    prompt   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n

A prompt is the start of a later text if the template writes each of its messages the same way there. If the
template is known to look only at a message, its neighbours and which messages come before and after it (see
`render/fast/looked_for.py`), that depends only on their shapes. So a rendered prompt that is the start of a later
text proves it for each of its messages, and a prompt whose messages are all proven need not be rendered. It ends
where the answer after its messages begins, found by counting generation prompts: there must be as many as answers,
so no message spells one. One prompt in 256 is rendered anyway, as a check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import is_, or_
from typing import NamedTuple

import numpy as np

from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.memo import memoized
from tito_audit.record.message import Message
from tito_audit.record.prefix import starts_with
from tito_audit.render.renderer import Forms
from tito_audit.render.scaffolds import Inputs, Shapes, scaffolds
from tito_audit.render.template import Template
from tito_audit.tokens.segments import Cuts
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

_ONE_IN = 256
"""One in this many known prompts is rendered anyway."""
_MOST_KEYS = 1 << 12
_MOST = 1 << 16
"""How many places of messages are remembered."""
_FAR = 3
"""Beyond this distance from the end, the distance of a message no longer matters."""
_ANSWER = "assistant"
_Place = tuple[int, ...]
"""Everything that decides how a message is written in a prompt and in a later text."""


class Opener(NamedTuple):
    """A generation prompt that begins with a control token."""

    tail: str
    """Its text after its last control token."""
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class LaterText:
    """A text of the template that leads to recorded ids, and may start with earlier prompts."""

    messages: Sequence[Message]
    given: int
    """A number for everything else passed to the template."""
    shapes: Sequence[int]
    """`[messages]` A number for the shape of each."""
    around: Sequence[int]
    """`[messages]` A number for what the template sees of it while it writes another one."""
    before: Sequence[int]
    """`[messages + 1]` A bit for each of these numbers that comes before it."""
    answers: Sequence[int]
    """`[messages + 1]` How many of the first 0, 1, 2, … messages are answers."""
    opener: Opener
    openers: Sequence[int]
    """Where in the ids generation prompts begin."""
    opens: bool
    """Whether it is a prompt; if not, it may continue after its recorded ids."""
    ids: Ids
    key: int
    """A number for all of it but the texts of its messages and its ids."""

    def may_start_with(self, size: int, recorded: Ids) -> bool:
        """Whether recorded ids are its start, through the generation prompt after the first messages."""
        if len(self.openers) != self.answers[-1] + self.opens or self.answers[size] >= len(self.openers):
            return False
        end = self.openers[self.answers[size]] + len(self.opener.ids)
        return len(recorded) == end and starts_with(self.ids, recorded)

    def places(self, size: int) -> list[_Place]:
        """What decides how the template writes each of the first messages, and what precedes them, in their prompt
        and here."""
        around, before, every = self.around, self.before, len(self.messages)
        after, beyond = 0, 0
        for other in around[size:]:
            beyond |= 1 << other
        places: list[_Place] = []
        for i in range(size - 1, -1, -1):
            places.append(
                (
                    self.given,
                    self.opens,
                    beyond,
                    self.shapes[i],
                    around[i - 1] if i else -1,
                    around[i + 1] if i + 1 < every else -1,
                    min(size - i, _FAR),
                    min(every - i, _FAR),
                    before[i],
                    after,
                )
            )
            after |= 1 << around[i]
        places.append((self.given, self.opens, beyond, around[0], around[size - 1], around[-1], after))
        return places

    @property
    def says_nothing_twice(self) -> bool:
        """Whether no two messages have the same text and could be confused."""
        texts = [text for message in self.messages for text in (message.content, message.reasoning) if text]
        return all(isinstance(text, str) for text in texts) and len(set(texts)) == len(texts)


class PromptStarts:
    """What is known about the texts that one template writes, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: Template, shapes: Shapes) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._shapes = shapes
        self._openers: dict[int, Opener | None] = {}
        self._proven: set[_Place] = set()
        self._keys: dict[tuple[int, ...], int] = {}
        self._numbers = count()
        self._sure: set[tuple[int, int]] = set()
        """Keys of later texts, and how many of their messages are all proven."""
        self._alike: set[_Place] = set()
        """Places of messages that both engines write alike."""
        self._found = 0
        self._trusted = 0
        self._engines_differ = False
        self._off = False
        """Whether some prompt was not what the template writes although all of its messages were proven."""

    @property
    def cuts(self) -> Cuts:
        """The control tokens at which texts may be cut."""
        return self._tokenizer.cuts

    def later(
        self, messages: Sequence[Message], inputs: Inputs | None, opens: bool, ids: Ids, forms: Forms
    ) -> LaterText | None:
        """A text known to lead to these ids; None if it says nothing about prompts."""
        opener = self._opener(inputs) if inputs is not None and not self._off else None
        read = self._shapes.read(messages, forms) if opener is not None else None
        if inputs is None or opener is None or read is None:
            return None
        around = [each.around for each in read]
        return LaterText(
            messages,
            inputs.number,
            [each.shape for each in read],
            around,
            list(accumulate([1 << number for number in around], or_, initial=0)),
            list(accumulate([message.role == _ANSWER for message in messages], initial=0)),
            opener,
            _openers(ids, opener.ids, self.cuts).tolist(),
            opens,
            ids,
            self._key((inputs.number, opens, *[number for each in read for number in each[:2]])),
        )

    def start(self, later: LaterText, size: int, recorded: Ids) -> LaterText:
        """The prompt for the first messages of a later text, known to be these recorded ids, which it starts
        with."""
        return LaterText(
            later.messages[:size],
            later.given,
            later.shapes[:size],
            later.around[:size],
            later.before[: size + 1],
            later.answers[: size + 1],
            later.opener,
            later.openers[: later.answers[size] + 1],
            True,
            recorded,
            self._key((later.key, size)),
        )

    def _key(self, parts: tuple[int, ...]) -> int:
        if len(self._keys) >= _MOST_KEYS:
            self._keys.clear()
            self._sure.clear()
        return self._keys.setdefault(parts, next(self._numbers))

    def are_first(self, messages: Sequence[Message], later: LaterText, forms: Forms) -> bool:
        """Whether the messages of a later text start with these."""
        size = len(messages)
        first = later.messages[:size]
        if len(first) < size:
            return False
        if all(map(is_, messages, first)):
            return True
        if tuple(messages) != tuple(first):
            return False
        read = self._shapes.read(messages, forms)  # 1 and 1.0 are equal but differ in shape
        return read is not None and [each.shape for each in read] == list(later.shapes[:size])

    def is_known(self, later: LaterText, size: int, recorded: Ids) -> bool:
        """Whether the template is known to write these recorded ids for the first messages of a later text.

        Also False for a prompt that is to be rendered as a check.
        """
        if self._off or self._found % _ONE_IN == _ONE_IN - 1 or not later.may_start_with(size, recorded):
            return False
        if (later.key, size) not in self._sure:
            if not self._proven.issuperset(later.places(size)):
                return False
            self._sure.add((later.key, size))
        self._found += 1
        return True

    def learn(self, later: LaterText, later_text: str, size: int, recorded: Ids, text: str | None) -> None:
        """Record whether a later text starts with a rendered prompt.

        `text` is the prompt's, or None if it does not lead to its recorded ids.
        """
        if not later.may_start_with(size, recorded):
            return
        places = set(later.places(size))
        if text is None or not later_text.startswith(text):
            self._off |= self._proven.issuperset(places)
        elif self._proven.issuperset(places):
            self._found += 1
        elif later.says_nothing_twice and len(self._proven) < _MOST:
            self._proven |= places

    def places_alone(
        self, messages: Sequence[Message], inputs: Inputs | None, opens: bool, forms: Forms
    ) -> list[_Place] | None:
        """What decides how the template writes each of these messages in their own text; None if unknown."""
        read = self._shapes.read(messages, forms) if inputs is not None and not self._engines_differ else None
        if inputs is None or read is None:
            return None
        around = [each.around for each in read]
        size, before, after = len(messages), 0, 0
        later: list[int] = []
        for other in reversed(around):
            later.append(after)
            after |= 1 << other
        places: list[_Place] = []
        for i, after in enumerate(reversed(later)):
            neighbours = around[i - 1] if i else -1, around[i + 1] if i + 1 < size else -1
            places.append(
                (inputs.number, opens, around[0], read[i].shape, *neighbours, min(size - i, _FAR), before, after)
            )
            before |= 1 << around[i]
        return places

    def writes_alike(self, places: Sequence[_Place]) -> bool:
        """Whether both engines are known to write messages at these places alike.

        Also False for a text that is to be rendered by both as a check.
        """
        if self._engines_differ or not self._alike.issuperset(places):
            return False
        self._trusted += 1
        return self._trusted % _ONE_IN != 0

    def learn_alike(self, places: Sequence[_Place], alike: bool) -> None:
        """Record whether both engines wrote the messages at these places alike."""
        self._engines_differ |= not alike
        if alike and len(self._alike) < _MOST:
            self._alike.update(places)

    def _opener(self, inputs: Inputs) -> Opener | None:
        """The generation prompt; None if it shows nothing."""
        if inputs.number not in self._openers:
            text = self._template.opener_after_user(inputs.variables)
            begin, *pieces = self.cuts.split(text)
            shows = not begin and pieces
            self._openers[inputs.number] = (
                Opener(pieces[-1], self._tokenizer.encode_fast_batch([text])[0]) if shows else None
            )
        return self._openers[inputs.number]


def _openers(ids: Ids, opener: Ids, cuts: Cuts) -> Offsets:
    """Where in ids `[N]` a generation prompt begins."""
    at = cuts.positions(ids)
    at = at[ids[at] == opener[0]]
    at = at[at + len(opener) <= len(ids)]
    places: Offsets = at[(ids[at[:, None] + np.arange(len(opener))] == opener).all(axis=1)]
    return places


def prompt_starts(tokenizer: Tokenizer, template: Template) -> PromptStarts | None:
    """What is known about the texts of a template; None if more than shapes may decide, or nothing shows its
    turns."""
    every = scaffolds(template)
    if every is None or not tokenizer.cuts.tokens:
        return None
    parts = _known(template, tokenizer.vocabulary)
    if not parts:
        parts.append(PromptStarts(tokenizer, template, every.shapes))
    return parts[0]


@memoized
def _known(template: Template, vocabulary: Vocabulary) -> list[PromptStarts]:
    return []
