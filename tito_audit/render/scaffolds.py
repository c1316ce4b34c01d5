"""What a template writes around the texts of a conversation, derived once for each shape of conversation.

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
from itertools import chain, count
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
"""Everything by which a template can tell values apart."""
_ROLE = "role"
_CALL_KEYS = frozenset(("tool_calls", "tool_call_id", "name", "id"))
_MAX_SHAPES, _MAX_AROUND = 1 << 16, 128
_MAX_BETWEEN = 1 << 12
"""How many markers, and characters around words, a text may have."""
_MAX_SCAFFOLDS = 1 << 12
"""How many shapes of conversations are remembered."""
_MAX_CHARACTERS = 1 << 24
"""How many characters a text, and all scaffolds together, may have."""
_CHECK_ONE_IN = 256
"""One in this many texts is also rendered."""
_TAG = "Zq7x"
_SIGNS = "\"\\'\n\t  <&>%s {{}} Aa \u00df\u00e9\u4e2d/"
"""What filters escape, change or read."""


class ReadMessage(NamedTuple):
    """What a template can tell about a message."""

    shape: int
    """A number for its shape."""
    around: int
    """A number for what a template sees of it while it writes another one: its shape without the details of its
    calls."""
    whole: int
    """A number for all of it but its words; -1 if a template may tell words from stand-ins."""
    words: tuple[str, ...]
    """Its texts between markers, without the white space around them."""


class MessageShapes:
    """Gives the shapes of messages for one template."""

    def __init__(self, conditions: TextConditions) -> None:
        whole, inside, sizes = conditions
        self._whole = frozenset(whole)
        self._inside = inside
        self._sizes = frozenset((*sizes, 0, 1))
        self._measured = sizes
        self._begin = common_beginning(inside[0], inside[-1]) if inside else ""
        """How every marker begins, to search for that first."""
        self._split = re.compile(f"({any_of(sorted(inside))})").split if inside else None
        cuts = [(marker[:size], marker[size:]) for marker in inside for size in range(1, len(marker))]
        self._parts = tuple({first for first, _ in cuts}), tuple({last for _, last in cuts})
        """With what a marker may begin and end without being whole."""
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
        """Whether the template may tell the words of the value that is read from stand-ins."""
        self._plain_messages: dict[tuple[Any, ...], ReadMessage] = {}
        """By keys and role, what was read of messages with only a role and words."""
        self._shapes: dict[Shape, int] = {}
        self._around: dict[Shape, int] = {}
        self._wholes: dict[Shape, int] = {}

    def read(self, messages: Sequence[Message], forms: ChatForms) -> list[ReadMessage] | None:
        """What the template can tell about each of these messages; None if there are too many shapes."""
        before, of_words = forms.read, {} if self._measured else self._plain_messages
        for message in messages:
            if id(message) in before:
                continue
            wire, alike = message.wire, None
            words = wire.get("content")
            plain = len(wire) == 2 and type(words) is str and type(wire) is dict and words.strip() == words
            if plain and words and words not in self._whole and not (self._inside and self._begin in words):
                alike = of_words.get((*wire, wire.get(_ROLE)))
            if alike is not None:  # as for most messages: only the words are new, and no Python makes the tuple
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
            except (TypeError, RecursionError):  # values that are not JSON, or too much of them
                return None
            if type(wire) is dict and wire.keys() == {_ROLE, "content"} and read.words == (wire["content"],):
                self._plain_messages[(*wire, wire[_ROLE])] = read
            before[id(message)] = read, message  # kept alive, so no other can get its id
        return [before[id(message)][0] for message in messages]

    def shape_of(self, value: Any) -> Shape:
        """The shape of a value of plain JSON types, such as a message; TypeError for any other."""
        read = self._readers.get(type(value))
        if read is None:
            raise TypeError(f"a {type(value).__name__} has no shape")
        return type(value), read(value)

    def with_stand_ins(self, value: Any, stand_in: Callable[[], str]) -> Any:
        """A value with its words replaced, in the order in which they are read."""
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
        if self._split is None or self._begin not in text or True not in [each in text for each in self._inside]:
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
            cut = [word.endswith(firsts) or word.startswith(lasts) for word in words]
            self._sees_words |= self._overlap or True in cut
        if self._measured:
            self._sees_words |= min(map(len, words), default=len(text)) <= max(self._measured)
        sizes = [(len(text) > size) - (len(text) < size) for size in self._measured]
        return tuple(sizes), tuple(marked) if isinstance(marked, list) else None, tuple(between)

    def _split_words(self, text: str) -> tuple[list[str], list[str]]:
        """What is before, between and after the words of a text, and the words."""
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
"""An engine: what it writes for messages, with a generation prompt or without."""


class Inputs(NamedTuple):
    """What a template gets besides messages."""

    number: int
    variables: Mapping[str, Any]

    def with_chat(self, chat: Chat, opens: bool) -> dict[str, Any]:
        """All variables of a rendering."""
        return {**self.variables, "messages": chat, "add_generation_prompt": opens}


@dataclass(slots=True, eq=False)
class Scaffold:
    """What a template writes around the words of conversations of one shape."""

    pieces: tuple[str, ...]
    """`[words written + 1]`"""
    word_order: tuple[int, ...]
    """The word after each piece; `~word` if it is written as part of a JSON text."""
    generation_prompt: str | None
    """What a generation prompt adds after any messages; None if this may depend on them."""
    is_exact: bool | None = None
    """Whether the reference environment writes it too; None: not known yet."""

    def fill(self, words: Sequence[str]) -> str:
        """The conversation with these words."""
        parts = [""] * (2 * len(self.word_order) + 1)
        parts[::2] = self.pieces
        parts[1::2] = [words[at] if at >= 0 else escape_json(words[~at]) for at in self.word_order]
        return "".join(parts)


def escape_json(text: str) -> str:
    """A text as JSON writes it, without quotes."""
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
        """How a stand-in goes on after its number."""
        self._stand_in_pattern = re.compile(
            f"\u00a4{_TAG}(\\d+)w(?:({re.escape(self._stand_in_end)})|{re.escape(escape_json(self._stand_in_end))})"
        )
        # A template that looks for one character may look at each of a text, and one may know the time.
        self._disabled = (
            True in [len(text) == 1 for text in whole]
            or True in [marker in self._stand_in(0) for marker in inside]
            or escape_json(self._stand_in_end) == self._stand_in_end
            or max(sizes, default=0) > _MAX_SCAFFOLDS
            or "strftime_now" in template.source
        )

    def inputs(self, variables: Mapping[str, Any]) -> Inputs | None:
        """All that a template gets besides messages; None if it cannot be compared, or there is too much."""
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
        """What the fast engine writes for these messages, and their scaffold; None if that is not known."""
        read = self.shapes.read(messages, forms) if not self._disabled else None
        key = (inputs.number, opens, *[each.whole for each in read]) if read else (-1,)
        if read is None or -1 in key:
            return None
        if key not in self._scaffolds and not self._derive_if_repeated(key, messages, inputs, opens, forms):
            return None
        scaffold = self._scaffolds[key]
        if scaffold is None:
            return None
        text = scaffold.fill([word for each in read for word in each.words])
        self._render_count += 1
        if self._render_count % _CHECK_ONE_IN == 0:
            rendered = None if scaffold.is_exact else self._render_fast(self._chat(messages, forms), inputs, opens)
            if text != (rendered or self._render_reference(self._chat(messages, forms), inputs, opens)):
                self._disabled = True
                return None
        # A lone surrogate, which no tokenizer keeps, or more than templates may write.
        if len(text) > _MAX_CHARACTERS or not (text.isascii() or well_formed(text) is text):
            return None
        return text, scaffold

    def _derive_if_repeated(
        self, key: tuple[int, ...], messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> bool:
        """Whether it is now known how conversations of this shape are written; only if there are several."""
        if len(self._scaffolds) >= _MAX_SCAFFOLDS or self._characters > _MAX_CHARACTERS:
            return False
        if hash(key) not in self._seen:
            if len(self._seen) < _MAX_SHAPES:
                self._seen.add(hash(key))
            return False
        scaffold = self._derive(self._render_fast, messages, inputs, opens, forms)
        self._scaffolds[key] = scaffold
        self._characters += sum(map(len, scaffold.pieces)) if scaffold is not None else 0
        return True

    def is_exact(
        self, scaffold: Scaffold, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> bool:
        """Whether the reference environment writes these messages, and all of their shape, with this scaffold."""
        if scaffold.is_exact is None:
            other = self._derive(self._render_reference, messages, inputs, opens, forms)
            scaffold.is_exact = (
                other is not None and other.pieces == scaffold.pieces and other.word_order == scaffold.word_order
            )
        return scaffold.is_exact

    def _derive(
        self, run: _RenderChat, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: ChatForms
    ) -> Scaffold | None:
        """The scaffold of these messages by one engine; None if there is none."""
        numbers = count()
        chat = self._chat(messages, forms)
        try:
            stand_ins = self.shapes.with_stand_ins(chat, lambda: self._stand_in(next(numbers)))
        except RecursionError:  # just not too deep to be read
            return None
        scaffold = self._split_at_stand_ins(run(stand_ins, inputs, opens), inputs)
        read = self.shapes.read(messages, forms) or ()
        words = [*chain.from_iterable(each.words for each in read)]
        return scaffold if scaffold is not None and scaffold.fill(words) == run(chat, inputs, opens) else None

    def _split_at_stand_ins(self, text: str | None, inputs: Inputs) -> Scaffold | None:
        """What stands around stand-ins; None if one of them was changed."""
        if text is None:
            return None
        parts = self._stand_in_pattern.split(text)
        pieces = tuple(parts[::3])
        if True in ["\u00a4" in piece or _TAG.lower() in piece.lower() for piece in pieces]:
            return None
        numbers = zip(map(int, parts[1::3]), parts[2::3], strict=True)
        order = tuple([at if verbatim else ~at for at, verbatim in numbers])
        return Scaffold(pieces, order, self._template.fixed_generation_prompt(inputs.variables))

    def _stand_in(self, number: int) -> str:
        return f"\u00a4{_TAG}{number}w{self._stand_in_end}"

    def _chat(self, messages: Sequence[Message], forms: ChatForms) -> Chat:
        return forms.chat(messages, parsed=True, no_content="absent")

    def _render_fast(self, chat: Chat, inputs: Inputs, opens: bool) -> str | None:
        """What the fast engine writes; None if the template refuses, or it does not know."""
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
    """The same for a template that gets parsed arguments of tools."""
    return None if template.text_conditions is None else Scaffolds(template, template.text_conditions)
