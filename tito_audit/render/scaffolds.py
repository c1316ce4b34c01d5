"""Scaffolds: what a template writes around the texts of a conversation, derived once for each shape.

    messages   user: Hi                        assistant: Hello
    scaffold   <|im_start|>user\\n ·  <|im_end|>\\n<|im_start|>assistant\\n ·     <|im_end|>\\n

Many templates only search texts for a few markers and strip white space (see `fast/text_conditions.py`). They
write all conversations of one shape alike, except for the words between markers. So each shape is rendered once,
with stand-ins for the words. These have every character that a filter would change, so a template that changes
words has no scaffold. One text in 256 is rendered anyway, as a check. Like everything that the fast engine writes,
a text is a guess until recorded ids confirm it, or the reference environment is known to write the same scaffold.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from tito_audit.errors import RenderError
from tito_audit.record.memo import memoized
from tito_audit.record.message import Message
from tito_audit.render.facts import TextConditions
from tito_audit.render.renderer import Chat, ChatForms, Renderer, has_one_form
from tito_audit.render.template import Template
from tito_audit.tokens.encoders import well_formed
from tito_audit.tokens.segments import any_of, common_beginning

Shape = Hashable
"""All by which a template can tell two values apart."""
_ROLE = "role"
_CALL_KEYS = frozenset(("tool_calls", "tool_call_id", "name", "id"))
_MAX_SHAPES, _MAX_AROUND = 1 << 16, 128
_MAX_BETWEEN = 1 << 12
"""How many markers, and characters around words, a text may have."""
_MAX_SCAFFOLDS = 1 << 12
"""How many scaffolds are kept."""
_MAX_CHARACTERS = 1 << 24
"""The most characters of a text, and of all scaffolds together."""
_CHECK_ONE_IN = 256
"""One in this many texts is rendered as a check."""
_TAG = "Zq7x"
_SIGNS = "\"\\'\n\t  <&>%s {{}} Aa \u00df\u00e9\u4e2d/"
"""Characters that filters escape or change."""


class ReadMessage(NamedTuple):
    """What a template can tell about a message; equal numbers mean that it cannot tell two messages apart."""

    shape: int
    """The number of its shape."""
    around: int
    """The number of what a template sees of it while writing another message: its shape without its calls."""
    whole: int
    """The number of everything but its words; -1 if a template may tell words from stand-ins."""
    words: tuple[str, ...]
    """Its texts between markers, stripped."""


_WHOLE_OF, _WORDS_OF = attrgetter("whole"), attrgetter("words")


class MessageShapes:
    """Reads the shapes of messages for one template."""

    def __init__(self, conditions: TextConditions) -> None:
        whole, inside, sizes = conditions
        self._whole = frozenset(whole)
        self._inside = inside
        self._sizes = frozenset((*sizes, 0, 1))
        self._measured = sizes
        self._begin = common_beginning(inside[0], inside[-1]) if inside else ""
        """The common prefix of all markers, which is searched first."""
        self._split = re.compile(f"({any_of(sorted(inside))})").split if inside else None
        cuts = [(marker[:size], marker[size:]) for marker in inside for size in range(1, len(marker))]
        self._parts = tuple({first for first, _ in cuts}), tuple({last for _, last in cuts})
        """Proper prefixes and suffixes of markers."""
        self._overlap = not {*self._parts[0]}.isdisjoint(self._parts[1])
        self._readers: dict[type, Callable[[Any], Shape]] = {
            str: self._read_text,
            int: self._read_number,
            float: self._read_number,
            bool: lambda value: value,
            type(None): lambda value: value,
            dict: self._read_object,
            list: lambda value: tuple(map(self.shape_of, value)),
        }
        self._words: list[str] = []
        self._numbers: list[str] = []
        self._sees_words = False
        """Whether the template may tell the words of the current message from stand-ins."""
        self._plain_messages: dict[tuple[Any, ...], ReadMessage] = {}
        """By keys and role, what was read of messages with nothing but a role and words."""
        self._shapes: dict[Shape, int] = {}
        self._around: dict[Shape, int] = {}
        self._wholes: dict[Shape, int] = {}

    def read(self, messages: Sequence[Message], forms: ChatForms) -> list[ReadMessage] | None:
        """What the template can tell about each message; None if a message is odd or there are too many shapes."""
        before, of_words = forms.read, {} if self._measured else self._plain_messages
        for message in messages:
            if id(message) in before:
                continue
            wire, alike = message.wire, None
            words = wire.get("content")
            plain = len(wire) == 2 and type(words) is str and type(wire) is dict and words.strip() == words
            if plain and words and words not in self._whole and not (self._inside and self._begin in words):
                alike = of_words.get((*wire, wire.get(_ROLE)))
            if alike is not None:  # most messages: only the words are new; `__new__` saves a Python call
                before[id(message)] = tuple.__new__(ReadMessage, (*alike[:3], (words,))), message
                continue
            if len(self._shapes) > _MAX_SHAPES or len(self._around) > _MAX_AROUND:
                return None
            try:
                if not has_one_form(wire):
                    wire = forms.message_form(message, parsed=True, no_content="absent")
                self._words, self._numbers, self._sees_words = [], [], False
                shape = self._read_object(wire)
                if _CALL_KEYS.isdisjoint(wire):
                    around: tuple[object, ...] = (False, *shape)
                else:
                    around = bool(wire.get("tool_calls")), *[pair for pair in shape if pair[0] not in _CALL_KEYS]
                read = ReadMessage(
                    self._shapes.setdefault(shape, len(self._shapes)),
                    self._around.setdefault(around, len(self._around)),
                    -1
                    if self._sees_words or len(self._wholes) > _MAX_SHAPES
                    else self._wholes.setdefault((shape, *self._numbers), len(self._wholes)),
                    tuple(self._words),
                )
            except (TypeError, RecursionError):  # values that are not JSON or too large
                return None
            if type(wire) is dict and wire.keys() == {_ROLE, "content"} and read.words == (wire["content"],):
                self._plain_messages[(*wire, wire[_ROLE])] = read
            before[id(message)] = read, message  # kept alive, so no other can get its id
        return list(map(itemgetter(0), map(before.__getitem__, map(id, messages))))

    def shape_of(self, value: Any) -> Shape:
        """The shape of a value of plain JSON types; TypeError for any other."""
        read = self._readers.get(type(value))
        if read is None:
            raise TypeError(f"a {type(value).__name__} has no shape")
        return type(value), read(value)

    def with_stand_ins(self, value: Any, stand_in: Callable[[], str]) -> Any:
        """A value with each word replaced, in the order in which `read` finds them."""
        if type(value) is str:
            between, words = self._split_words(value)
            return between[0] + "".join([stand_in() + after for _, after in zip(words, between[1:], strict=True)])
        if type(value) is dict:
            return {
                key: inner if key == _ROLE and type(inner) is str else self.with_stand_ins(inner, stand_in)
                for key, inner in value.items()
            }
        return [self.with_stand_ins(inner, stand_in) for inner in value] if type(value) is list else value

    def _read_object(self, value: Mapping[str, Any]) -> tuple[tuple[str, Shape], ...]:
        pairs: list[tuple[str, Shape]] = []
        for key, inner in value.items():
            if type(inner) is not str:
                pairs.append((key, self.shape_of(inner)))
            else:
                pairs.append((key, inner if key == _ROLE else (str, self._read_text(inner))))
        return tuple(pairs)

    def _read_number(self, value: float) -> Shape:
        self._numbers.append(repr(value))
        return value if value in self._sizes else "number"

    def _read_text(self, text: str) -> Shape:
        if self._split is None or self._begin not in text or not any(map(text.__contains__, self._inside)):
            if not self._measured and text and text not in self._whole and text.strip() == text:
                self._words.append(text)
                return None
            marked: object = None
        else:
            marked = self._overlap and [*map(text.count, self._inside)]
        between, words = self._split_words(text)
        if len(between) + sum(map(len, between)) > _MAX_BETWEEN:
            raise TypeError("a text with more between its words than is remembered")
        self._words += words
        firsts, lasts = self._parts
        if marked is not None:
            begun, ended = map(str.endswith, words, repeat(firsts)), map(str.startswith, words, repeat(lasts))
            self._sees_words |= self._overlap or any(begun) or any(ended)
        if self._measured:
            self._sees_words |= min(map(len, words), default=len(text)) <= max(self._measured)
        sizes: tuple[int, ...] = ()
        if self._measured:
            sizes = tuple([(len(text) > size) - (len(text) < size) for size in self._measured])
        return sizes, tuple(marked) if isinstance(marked, list) else None, tuple(between)

    def _split_words(self, text: str) -> tuple[list[str], list[str]]:
        """The text before, between and after the words of a text, and the words."""
        between, words, before = [], [], ""
        for number, part in enumerate([text] if self._split is None else self._split(text)):
            word = "" if number & 1 else part.strip()
            if not word or word in self._whole:
                before += part
            else:
                at = part.index(word)
                between.append(before + part[:at])
                words.append(word)
                before = part[at + len(word) :]
        return [*between, before], words


_RenderChat = Callable[[Chat, "Inputs", bool], str | None]
"""Renders messages with one engine, with a generation prompt or without; None if it cannot."""


class Inputs(NamedTuple):
    """The variables of a template except the messages, and a number that identifies them."""

    number: int
    variables: Mapping[str, Any]

    def with_chat(self, chat: Chat, opens: bool) -> dict[str, Any]:
        """All variables of a rendering."""
        return {**self.variables, "messages": chat, "add_generation_prompt": opens}


@dataclass(slots=True, eq=False)
class Scaffold:
    """What a template writes around the words of all conversations of one shape."""

    pieces: tuple[str, ...]
    """`[words written + 1]`"""
    word_order: tuple[int, ...]
    """The index of the word after each piece; its complement `~index` if the word is written in JSON."""
    generation_prompt: str | None
    """The generation prompt after any messages; None if it may depend on them."""
    is_exact: bool | None = None
    """Whether the reference environment writes the same; None if not checked yet."""

    def fill(self, words: Sequence[str]) -> str:
        """The text of the conversation with these words."""
        parts = [""] * (2 * len(self.word_order) + 1)
        parts[::2] = self.pieces
        if min(self.word_order, default=0) >= 0:
            parts[1::2] = map(words.__getitem__, self.word_order)
        else:
            parts[1::2] = [words[at] if at >= 0 else escape_json(words[~at]) for at in self.word_order]
        return "".join(parts)


def escape_json(text: str) -> str:
    """A text escaped as in JSON, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Scaffolds:
    """The scaffolds of one template."""

    def __init__(self, template: Template, conditions: TextConditions) -> None:
        self.shapes = MessageShapes(conditions)
        self._template = template
        self._inputs: dict[bytes, int] = {}
        self._seen: set[int] = set()
        """Hashes of shapes of conversations."""
        self._scaffolds: dict[tuple[int, ...], Scaffold | None] = {}
        self._characters = 0
        self._render_count = 0
        whole, inside, sizes = conditions
        signs = _SIGNS * (1 + max(sizes, default=0) // len(_SIGNS))
        for marker in inside:
            signs = signs.replace(marker, "")
        self._stand_in_end = signs + "\u00a4"
        """What follows the number of a stand-in."""
        self._stand_in_pattern = re.compile(
            f"\u00a4{_TAG}(\\d+)w(?:({re.escape(self._stand_in_end)})|{re.escape(escape_json(self._stand_in_end))})"
        )
        # A template that compares single characters may read each one of a text, and one may print the time.
        self._disabled = (
            True in [len(text) == 1 for text in whole]
            or True in [marker in self._stand_in(0) for marker in inside]
            or escape_json(self._stand_in_end) == self._stand_in_end
            or max(sizes, default=0) > _MAX_SCAFFOLDS
            or "strftime_now" in template.source
        )

    def inputs(self, variables: Mapping[str, Any]) -> Inputs | None:
        """The variables with their number; None if they cannot be compared, or after 64 different ones."""
        try:
            key = marshal.dumps(dict(variables), 2)
        except ValueError:
            return None
        number = self._inputs.get(key)
        if number is None:
            if len(self._inputs) >= 64:
                return None
            number = self._inputs[key] = len(self._inputs)
        return Inputs(number, variables)

    def render(
        self, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> tuple[str, Scaffold] | None:
        """What the fast engine writes for these messages, and their scaffold; None if there is no scaffold."""
        read = self.shapes.read(messages, forms) if not self._disabled else None
        if not read:
            return None
        key = inputs.number, opens, *map(_WHOLE_OF, read)
        if -1 in key:
            return None
        scaffold = self._scaffolds.get(key)
        if scaffold is None:
            is_full = len(self._scaffolds) >= _MAX_SCAFFOLDS or self._characters > _MAX_CHARACTERS
            if key in self._scaffolds or is_full:
                return None
            if hash(key) not in self._seen:  # derived for shapes that are met twice
                if len(self._seen) < _MAX_SHAPES:
                    self._seen.add(hash(key))
                return None
            scaffold = self._scaffolds[key] = self._derive(self._render_fast, messages, inputs, opens, forms)
            if scaffold is None:
                return None
            self._characters += sum(map(len, scaffold.pieces))
        text = scaffold.fill([*chain.from_iterable(map(_WORDS_OF, read))])
        self._render_count += 1
        if self._render_count % _CHECK_ONE_IN == 0:
            rendered = None if scaffold.is_exact else self._render_fast(self._chat(messages, forms), inputs, opens)
            if text != (rendered or self._render_reference(self._chat(messages, forms), inputs, opens)):
                self._disabled = True
                return None
        # Not for lone surrogates, which no tokenizer keeps, nor for more than a template may write
        if len(text) > _MAX_CHARACTERS or not (text.isascii() or well_formed(text) is text):
            return None
        return text, scaffold

    def is_exact(
        self, scaffold: Scaffold, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> bool:
        """Whether the reference environment writes conversations of this shape with the same scaffold."""
        if scaffold.is_exact is None:
            other = self._derive(self._render_reference, messages, inputs, opens, forms)
            scaffold.is_exact = (
                other is not None and other.pieces == scaffold.pieces and other.word_order == scaffold.word_order
            )
        return scaffold.is_exact

    def _derive(
        self, run: _RenderChat, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> Scaffold | None:
        """The scaffold that one engine writes for these messages; None if filling it does not give their text."""
        numbers = count()
        chat = self._chat(messages, forms)
        try:
            stand_ins = self.shapes.with_stand_ins(chat, lambda: self._stand_in(next(numbers)))
        except RecursionError:  # it was barely not too deep to read
            return None
        text = run(stand_ins, inputs, opens)
        if text is None:
            return None
        parts = self._stand_in_pattern.split(text)
        pieces = tuple(parts[::3])
        if True in ["\u00a4" in piece or _TAG.lower() in piece.lower() for piece in pieces]:
            return None  # a stand-in was changed
        numbered = zip(map(int, parts[1::3]), parts[2::3], strict=True)
        order = tuple([at if verbatim else ~at for at, verbatim in numbered])
        scaffold = Scaffold(pieces, order, self._template.fixed_generation_prompt(inputs.variables))
        words = [word for each in self.shapes.read(messages, forms) or () for word in each.words]
        return scaffold if scaffold.fill(words) == run(chat, inputs, opens) else None

    def _stand_in(self, number: int) -> str:
        return f"\u00a4{_TAG}{number}w{self._stand_in_end}"

    def _chat(self, messages: Sequence[Message], forms: ChatForms) -> Chat:
        return forms.chat(messages, parsed=True, no_content="absent")

    def _render_fast(self, chat: Chat, inputs: Inputs, opens: bool) -> str | None:
        """What the fast engine writes; None if the template refuses or the engine cannot tell."""
        from tito_audit.render.fast.render import NeedsReference

        fast = self._template.fast
        try:
            return fast.run(inputs.with_chat(chat, opens)) if fast is not None else None
        except (RenderError, NeedsReference):
            return None

    def _render_reference(self, chat: Chat, inputs: Inputs, opens: bool) -> str | None:
        """What the reference environment writes; None if the template refuses."""
        try:
            return self._template.run(inputs.with_chat(chat, opens))
        except RenderError:
            return None


def find_scaffolds(renderer: Renderer, with_tools: bool) -> Scaffolds | None:
    """The scaffolds of a renderer's template; None if more than shapes may decide what it writes."""
    if renderer.tool_arguments == "string" or renderer.wraps_texts:
        return None
    return template_scaffolds(renderer.template(with_tools))


@memoized
def template_scaffolds(template: Template) -> Scaffolds | None:
    """The scaffolds of a template that gets parsed tool-call arguments."""
    return None if template.text_conditions is None else Scaffolds(template, template.text_conditions)
